//! Shuffles, votes, matches, reductions, warp barriers.

use super::ClusterRunner;
use super::lanes::reduce2;
use super::warp::{Flow, Wait, Warp, Words, lanes_of};
use crate::code::op::{NONE, RowIndex, Shuffle, ShuffleMode, VoteKind, WarpOp};
use crate::finding::{Fault, FindingKind, Step, threads};

impl ClusterRunner<'_> {
    pub fn collective(&mut self, warp: &mut Warp, op: &WarpOp, mask: u32) -> Step<Flow> {
        let named = match op {
            WarpOp::ActiveMask { d } => {
                warp.put(*d, &[mask; 32], mask);
                return Ok(Flow::Next);
            }
            WarpOp::Shuffle(shuffle) => shuffle.mask,
            WarpOp::Vote { mask, .. }
            | WarpOp::MatchAny { mask, .. }
            | WarpOp::MatchAll { mask, .. }
            | WarpOp::Reduce { mask, .. }
            | WarpOp::Elect { mask, .. }
            | WarpOp::Barrier { mask } => *mask,
        };
        let named = *warp.word(named);
        if let Some(wait) = self.lanes_here(warp, op, &named, mask)? {
            return Ok(Flow::Again(wait));
        }
        match op {
            WarpOp::Shuffle(op) => self.shuffle(warp, op, &named, mask)?,
            WarpOp::Vote {
                kind, d, a, negate, ..
            } => {
                let yes = warp.predicate(*a, *negate);
                vote(warp, *kind, *d, yes, &named, mask);
            }
            WarpOp::MatchAny { d, a, wide, .. } => match_any(warp, *d, *a, *wide, &named, mask),
            WarpOp::MatchAll { d, p, a, wide, .. } => {
                match_all(warp, (*d, *p), *a, *wide, &named, mask);
            }
            WarpOp::Reduce { op, d, a, .. } => {
                let values = *warp.word(*a);
                let mut out: Words = [0; 32];
                for lane in lanes_of(mask) {
                    let all = lanes_of(named[lane] & warp.alive()).map(|other| values[other]);
                    out[lane] = all.reduce(|a, b| reduce2(*op, a, b)).unwrap_or(0);
                }
                warp.put(*d, &out, mask);
            }
            WarpOp::Elect { d, p, .. } => {
                // PTX ISA, "elect.sync", leaves the choice of the leader open
                // and only promises the same one for the same mask; this
                // machine takes the lowest lane.
                let leader = named[mask.trailing_zeros() as usize].trailing_zeros();
                warp.put(*d, &[leader; 32], mask);
                warp.put_predicate(*p, 1 << leader, mask);
            }
            WarpOp::Barrier { .. } => self.warp_barrier(warp, mask, &named),
            WarpOp::ActiveMask { .. } => {}
        }
        Ok(Flow::Next)
    }

    /// Returns the lanes to wait for, or `None` if all that the masks name are
    /// here.
    fn lanes_here(
        &mut self,
        warp: &mut Warp,
        op: &WarpOp,
        named: &Words,
        mask: u32,
    ) -> Step<Option<Wait>> {
        let mut missing = 0;
        for lane in lanes_of(mask) {
            // PTX ISA, "shfl.sync" and its kin: behaviour is undefined if the
            // executing thread is not in the membermask.
            if named[lane] >> lane & 1 == 0 {
                let text = format!(
                    "thread {} uses the lane mask {:#010x}, which it is not part of",
                    warp.first_thread + lane as u32,
                    named[lane]
                );
                return Err(Fault::new(FindingKind::LaneMask, 1 << lane, text));
            }
            // A lane that has ended never comes, so the wait ends as a
            // deadlock.
            missing |= named[lane] & warp.lanes & !mask;
        }
        if missing == 0 {
            return Ok(None);
        }
        if let WarpOp::Barrier { .. } = op
            && self.meet_elsewhere(warp, named, mask)
        {
            return Ok(None);
        }
        let waiting = missing | mask;
        Ok(Some(Wait::Lanes(waiting)))
    }

    /// Lets lanes go on that wait for the same warp barrier at different
    /// instructions, once all lanes of the mask do.
    fn meet_elsewhere(&self, warp: &mut Warp, named: &Words, mask: u32) -> bool {
        // `bar.warp.sync` may converge at different addresses (PTX ISA,
        // "bar.warp.sync": compilers duplicate it into both arms of a branch).
        // All other collectives need one instruction, since their operands
        // belong together.
        let want = named[mask.trailing_zeros() as usize] & warp.lanes;
        let code = &self.kernel.code;
        let at_barrier = |pc: u32| match &code[pc as usize].op {
            crate::code::op::PtxOp::Warp(op) => matches!(**op, WarpOp::Barrier { .. }),
            _ => false,
        };
        let waits = |wait: &Wait| matches!(wait, Wait::Lanes(of) if *of == want);
        let others = warp
            .groups
            .iter()
            .filter(|group| waits(&group.wait) && at_barrier(group.pc));
        let here = others.fold(mask, |here, group| here | group.lanes);
        if here & want != want {
            return false;
        }
        for group in &mut warp.groups {
            if waits(&group.wait) && at_barrier(group.pc) {
                group.wait = Wait::No;
                group.pc += 1;
            }
        }
        true
    }

    fn shuffle(&mut self, warp: &mut Warp, op: &Shuffle, named: &Words, mask: u32) -> Step<()> {
        let (values, by, clamp) = (*warp.word(op.a), *warp.word(op.b), *warp.word(op.c));
        let (mut out, mut inside) = (values, 0);
        for lane in lanes_of(mask) {
            let (source, valid) = shuffle_source(op.mode, lane as u32, by[lane], clamp[lane]);
            inside |= u32::from(valid) << lane;
            let there = mask & named[lane] & warp.alive();
            // PTX ISA, "shfl.sync": a value read from an inactive thread is
            // undefined.
            if there >> source & 1 == 0 {
                let text = format!(
                    "{} reads the register of lane {source}, which does not take part",
                    threads(&[warp.first_thread + lane as u32])
                );
                return Err(Fault::new(FindingKind::LaneMask, 1 << lane, text));
            }
            out[lane] = values[source as usize];
        }
        warp.put(op.d, &out, mask);
        warp.put_predicate(op.p, inside, mask);
        Ok(())
    }
}

/// Returns the lane that a shuffle reads, and whether it lies inside the
/// segment.
fn shuffle_source(mode: ShuffleMode, lane: u32, by: u32, clamp: u32) -> (u32, bool) {
    // Operand c packs the clamp in bits 0 to 4 and the segment mask in bits 8
    // to 12; the pseudo code of PTX ISA, "shfl.sync", computes the bounds in
    // the same way.
    let (bound, segment) = (clamp & 31, clamp >> 8 & 31);
    let by = by & 31;
    let most = (lane & segment) | (bound & !segment);
    let least = lane & segment;
    let (source, inside) = match mode {
        ShuffleMode::Up => (
            lane.wrapping_sub(by),
            // `up` compares with the lower bound and the others with the upper
            // one: its clamp is 0, and the comparison has to be signed.
            lane as i32 - by as i32 >= most as i32,
        ),
        ShuffleMode::Down => (lane + by, lane + by <= most),
        ShuffleMode::Butterfly => (lane ^ by, lane ^ by <= most),
        ShuffleMode::Index => {
            let source = least | (by & !segment);
            (source, source <= most)
        }
    };
    if inside {
        (source & 31, true)
    } else {
        (lane, false)
    }
}

fn vote(warp: &mut Warp, kind: VoteKind, d: RowIndex, yes: u32, named: &Words, mask: u32) {
    let alive = warp.alive();
    let (mut words, mut answer) = ([0; 32], 0);
    for lane in lanes_of(mask) {
        let all = named[lane] & alive;
        let votes = yes & all;
        words[lane] = votes;
        let holds = match kind {
            VoteKind::All => votes == all,
            VoteKind::Any => votes != 0,
            VoteKind::Uniform => votes == all || votes == 0,
            VoteKind::Ballot => false,
        };
        answer |= u32::from(holds) << lane;
    }
    match kind {
        VoteKind::Ballot => warp.put(d, &words, mask),
        _ => warp.put_predicate(d, answer, mask),
    }
}

fn match_any(warp: &mut Warp, d: RowIndex, a: RowIndex, wide: bool, named: &Words, mask: u32) {
    let values = wide_values(warp, a, wide);
    let alive = warp.alive();
    let mut out = [0; 32];
    for lane in lanes_of(mask) {
        let same = lanes_of(named[lane] & alive).filter(|other| values[*other] == values[lane]);
        out[lane] = same.fold(0, |all, other| all | 1 << other);
    }
    warp.put(d, &out, mask);
}

fn match_all(
    warp: &mut Warp,
    (d, p): (RowIndex, RowIndex),
    a: RowIndex,
    wide: bool,
    named: &Words,
    mask: u32,
) {
    let values = wide_values(warp, a, wide);
    let alive = warp.alive();
    let (mut out, mut equal) = ([0; 32], 0);
    for lane in lanes_of(mask) {
        let all = named[lane] & alive;
        let same = lanes_of(all).all(|other| values[other] == values[lane]);
        out[lane] = if same { all } else { 0 };
        equal |= u32::from(same) << lane;
    }
    warp.put(d, &out, mask);
    if p != NONE {
        warp.put_predicate(p, equal, mask);
    }
}

fn wide_values(warp: &Warp, a: RowIndex, wide: bool) -> [u64; 32] {
    if wide {
        *warp.double(a)
    } else {
        warp.word(a).map(u64::from)
    }
}
