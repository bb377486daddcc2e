//! One message where there are many.

use super::{Copy, Message, Place, Plan, Span, Step};

impl Plan {
    /// The same plan with at most one message from one rank to another in a phase, for what
    /// carries single messages alone: what lies apart is copied together before it is
    /// sent, and apart after it has come. All ranks do so, or none.
    #[must_use]
    pub fn packed(self) -> Plan {
        let base = self.scratch;
        let mut packing = Packing {
            base,
            used: base,
            most: base,
        };
        let steps = self.steps.into_iter();
        let steps = steps.flat_map(|step| packing.step(step)).collect();
        Plan {
            scratch: packing.most,
            steps,
        }
    }
}

/// The memory behind the plan's own, which every phase has for itself.
struct Packing {
    base: usize,
    used: usize,
    most: usize,
}

impl Packing {
    fn step(&mut self, step: Step) -> Vec<Step> {
        let Step::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        } = step
        else {
            return vec![step];
        };
        self.used = self.base;
        let (sends, before) = self.together(&sends, |part, at| Copy {
            from: part,
            to: Place::Scratch,
            offset: at,
        });
        let (receives, after) = self.together(&receives, |part, at| Copy {
            from: Span::new(Place::Scratch, at..at + part.bytes),
            to: part.place,
            offset: part.offset,
        });
        self.most = self.most.max(self.used);
        let exchange = Step::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        };
        let repack = |copies: Vec<Copy>| (!copies.is_empty()).then_some(Step::Repack(copies));
        let steps = repack(before).into_iter().chain([exchange]);
        steps.chain(repack(after)).collect()
    }

    /// A message for each peer, in the order of peers, and the copies between its place in
    /// scratch and where its parts are.
    fn together(
        &mut self,
        messages: &[Message],
        copy: impl Fn(Span, usize) -> Copy,
    ) -> (Vec<Message>, Vec<Copy>) {
        let mut messages = messages.to_vec();
        messages.sort_by_key(|message| message.peer);
        let (mut list, mut copies) = (Vec::new(), Vec::new());
        for parts in messages.chunk_by(|a, b| a.peer == b.peer) {
            let peer = parts[0].peer;
            let span = joined(parts).unwrap_or_else(|| {
                let first = self.used;
                for part in parts {
                    copies.push(copy(part.span, self.used));
                    self.used += part.span.bytes;
                }
                Span::new(Place::Scratch, first..self.used)
            });
            list.push(Message { peer, span });
        }
        (list, copies)
    }
}

/// All of them, if they follow each other.
fn joined(parts: &[Message]) -> Option<Span> {
    let mut spans = parts.iter().map(|part| part.span);
    let first = spans.next()?;
    spans.try_fold(first, |all, next| {
        let follows = next.place == all.place && next.offset == all.offset + all.bytes;
        follows.then(|| Span {
            bytes: all.bytes + next.bytes,
            ..all
        })
    })
}
