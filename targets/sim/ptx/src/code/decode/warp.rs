//! Decodes the instructions of a whole warp.

use super::{Decoder, Result};
use crate::code::op::{Int2, NONE, PtxOp, Shuffle, ShuffleMode, VoteKind, WarpOp};

impl Decoder<'_> {
    pub(super) fn warp(&mut self) -> Result<PtxOp> {
        let sync = self.parts.flag("sync");
        let op = match self.statement.part(0) {
            "activemask" => {
                self.number()?;
                WarpOp::ActiveMask { d: self.word(0)? }
            }
            _ if !sync => return Err(self.unsupported("the form without `.sync`")),
            "shfl" => self.shuffle()?,
            "vote" => self.vote()?,
            "match" => self.matching()?,
            "redux" => self.reduce()?,
            _ => self.elect()?,
        };
        Ok(PtxOp::Warp(Box::new(op)))
    }

    fn shuffle(&mut self) -> Result<WarpOp> {
        let modes = [
            ("up", ShuffleMode::Up),
            ("down", ShuffleMode::Down),
            ("bfly", ShuffleMode::Butterfly),
            ("idx", ShuffleMode::Index),
        ];
        let mode = self.parts.one_of(&modes);
        let mode = mode.ok_or_else(|| self.unsupported("the mode"))?;
        self.number()?;
        let (d, p) = self.pair(0)?;
        Ok(WarpOp::Shuffle(Shuffle {
            mode,
            d: self.word_of(d)?,
            p: self.predicate_of(p)?.0,
            a: self.word(1)?,
            b: self.word(2)?,
            c: self.word(3)?,
            mask: self.word(4)?,
        }))
    }

    fn vote_kind(&mut self) -> Result<VoteKind> {
        let kinds = [
            ("all", VoteKind::All),
            ("any", VoteKind::Any),
            ("uni", VoteKind::Uniform),
            ("ballot", VoteKind::Ballot),
        ];
        let kind = self.parts.one_of(&kinds);
        kind.ok_or_else(|| self.unsupported("the question"))
    }

    fn vote(&mut self) -> Result<WarpOp> {
        let kind = self.vote_kind()?;
        self.parts.flag("pred");
        self.parts.flag("b32");
        let (a, negate) = self.predicate(1)?;
        Ok(WarpOp::Vote {
            kind,
            d: match kind {
                VoteKind::Ballot => self.word(0)?,
                _ => self.predicate(0)?.0,
            },
            a,
            negate,
            mask: self.word(2)?,
        })
    }

    fn matching(&mut self) -> Result<WarpOp> {
        let all = self.parts.one_of(&[("all", true), ("any", false)]);
        let ty = self.number()?;
        let wide = ty.bits() == 64;
        let a = self.value(1, ty)?;
        let mask = self.word(2)?;
        let (d, p) = self.pair(0)?;
        let d = self.word_of(d)?;
        Ok(match all {
            Some(true) => WarpOp::MatchAll {
                d,
                p: self.predicate_of(p)?.0,
                a,
                wide,
                mask,
            },
            _ => WarpOp::MatchAny { d, a, wide, mask },
        })
    }

    fn reduce(&mut self) -> Result<WarpOp> {
        let ty = self.parts.number();
        let ty = ty.ok_or_else(|| self.unsupported("its type"))?;
        if ty.is_float() {
            return Err(self.unsupported("its type"));
        }
        let pick = |a, b| if ty.is_signed() { a } else { b };
        let names = [
            ("add", Int2::Add),
            ("min", pick(Int2::MinSigned, Int2::MinUnsigned)),
            ("max", pick(Int2::MaxSigned, Int2::MaxUnsigned)),
            ("and", Int2::And),
            ("or", Int2::Or),
            ("xor", Int2::Xor),
        ];
        let op = self.parts.one_of(&names);
        Ok(WarpOp::Reduce {
            op: op.ok_or_else(|| self.unsupported("the operation"))?,
            d: self.word(0)?,
            a: self.word(1)?,
            mask: self.word(2)?,
        })
    }

    fn elect(&mut self) -> Result<WarpOp> {
        let (d, p) = self.pair(0)?;
        let d = match d {
            crate::text::Operand::Sink => NONE,
            d => self.word_of(d)?,
        };
        Ok(WarpOp::Elect {
            d,
            p: self.predicate_of(p)?.0,
            mask: self.word(1)?,
        })
    }
}
