//! Plans with one message per peer and phase.

use super::{BufferRef, CollectivePlan, Copy, Message, ScheduleStep, Span};

impl CollectivePlan {
    /// Returns the same plan with at most one message to each rank in a phase, for executors that
    /// send contiguous ranges alone. Separate spans are copied together before sending and apart
    /// after receiving. All ranks must pack, or none.
    #[must_use]
    pub fn packed(self) -> CollectivePlan {
        let base = self.scratch;
        let mut packing = Packing {
            base,
            used: base,
            most: base,
        };
        let steps = self.steps.into_iter();
        let steps = steps.flat_map(|step| packing.step(step)).collect();
        CollectivePlan {
            scratch: packing.most,
            steps,
        }
    }
}

/// The allocator of packed messages, in scratch behind the plan's own. Each phase reuses the same
/// memory.
struct Packing {
    base: usize,
    used: usize,
    most: usize,
}

impl Packing {
    fn step(&mut self, step: ScheduleStep) -> Vec<ScheduleStep> {
        let ScheduleStep::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        } = step
        else {
            return vec![step];
        };
        // A phase is complete before the next begins, so every phase may reuse the memory.
        self.used = self.base;
        let (sends, before) = self.together(&sends, |part, at| Copy {
            from: part,
            to: BufferRef::Scratch,
            offset: at,
        });
        let (receives, after) = self.together(&receives, |part, at| Copy {
            from: Span::new(BufferRef::Scratch, at..at + part.bytes),
            to: part.buffer,
            offset: part.offset,
        });
        self.most = self.most.max(self.used);
        let exchange = ScheduleStep::Exchange {
            phase,
            name,
            sends,
            receives,
            copies,
        };
        let repack =
            |copies: Vec<Copy>| (!copies.is_empty()).then_some(ScheduleStep::Repack(copies));
        let steps = repack(before).into_iter().chain([exchange]);
        steps.chain(repack(after)).collect()
    }

    /// Returns one message per peer, in peer order, and the copies between it and its spans.
    fn together(
        &mut self,
        messages: &[Message],
        copy: impl Fn(Span, usize) -> Copy,
    ) -> (Vec<Message>, Vec<Copy>) {
        let mut messages = messages.to_vec();
        // The sort is stable, so messages to one peer keep the order in which the receiver
        // expects them.
        messages.sort_by_key(|message| message.peer);
        let (mut list, mut copies) = (Vec::new(), Vec::new());
        for parts in messages.chunk_by(|a, b| a.peer == b.peer) {
            let peer = parts[0].peer;
            // Adjacent parts are sent from where they lie, without a copy.
            let span = joined(parts).unwrap_or_else(|| {
                let first = self.used;
                for part in parts {
                    copies.push(copy(part.span, self.used));
                    self.used += part.span.bytes;
                }
                Span::new(BufferRef::Scratch, first..self.used)
            });
            list.push(Message { peer, span });
        }
        (list, copies)
    }
}

/// Returns all spans as one, if they are consecutive.
fn joined(parts: &[Message]) -> Option<Span> {
    let mut spans = parts.iter().map(|part| part.span);
    let first = spans.next()?;
    spans.try_fold(first, |all, next| {
        let follows = next.buffer == all.buffer && next.offset == all.offset + all.bytes;
        follows.then(|| Span {
            bytes: all.bytes + next.bytes,
            ..all
        })
    })
}
