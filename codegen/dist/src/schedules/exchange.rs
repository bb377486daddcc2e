//! Operations with one exchange, in which every rank sends to every other.

use super::{BufferRef, CollectivePlan, Copy, Message, ScheduleStep, Span, offsets, others};

/// Sends part `q` of the input, `sends[q]` bytes, to rank `q`; what rank `p` sends here becomes
/// part `p` of the output, `receives[p]` bytes. Parts lie in rank order.
pub fn all_to_all(rank: usize, sends: &[usize], receives: &[usize]) -> CollectivePlan {
    let (from, to) = (offsets(sends), offsets(receives));
    let part = |peer: usize, place, starts: &[usize]| Message {
        peer,
        span: Span::new(place, starts[peer]..starts[peer + 1]),
    };
    let peers = || others(rank, sends.len());
    CollectivePlan {
        scratch: 0,
        steps: vec![ScheduleStep::Exchange {
            phase: 0,
            name: "exchange",
            sends: peers()
                .map(|p| part(p, BufferRef::Input(0), &from))
                .collect(),
            receives: peers()
                .map(|p| part(p, BufferRef::Output(0), &to))
                .collect(),
            copies: vec![Copy {
                from: part(rank, BufferRef::Input(0), &from).span,
                to: BufferRef::Output(0),
                offset: to[rank],
            }],
        }],
    }
}

/// Copies the input of rank `p`, `sizes[p]` bytes, into part `p` of every rank's output.
pub fn all_gather(rank: usize, sizes: &[usize]) -> CollectivePlan {
    let starts = offsets(sizes);
    let own = Span::new(BufferRef::Input(0), 0..sizes[rank]);
    let part = |peer: usize| Message {
        peer,
        span: Span::new(BufferRef::Output(0), starts[peer]..starts[peer + 1]),
    };
    let send = |peer| Message { peer, span: own };
    CollectivePlan {
        scratch: 0,
        steps: vec![ScheduleStep::Exchange {
            phase: 0,
            name: "exchange",
            sends: others(rank, sizes.len()).map(send).collect(),
            receives: others(rank, sizes.len()).map(part).collect(),
            copies: vec![Copy {
                from: own,
                to: BufferRef::Output(0),
                offset: starts[rank],
            }],
        }],
    }
}

/// Sends input `i` to rank `sends[i].0` and receives output `j` from rank `receives[j].0`; the
/// second numbers are bytes. Messages between two ranks keep their order, including those to
/// oneself.
pub fn exchange(
    rank: usize,
    sends: &[(usize, usize)],
    receives: &[(usize, usize)],
) -> CollectivePlan {
    let (to_self, sends) = split(rank, sends, BufferRef::Input);
    let (from_self, receives) = split(rank, receives, BufferRef::Output);
    let copy = |(from, to): (&Message, &Message)| Copy {
        from: from.span,
        to: to.span.buffer,
        offset: 0,
    };
    CollectivePlan {
        scratch: 0,
        steps: vec![ScheduleStep::Exchange {
            phase: 0,
            name: "exchange",
            sends,
            receives,
            copies: to_self.iter().zip(&from_self).map(copy).collect(),
        }],
    }
}

/// Returns the messages of a list: those to oneself, and those to others.
fn split(
    rank: usize,
    list: &[(usize, usize)],
    place: fn(usize) -> BufferRef,
) -> (Vec<Message>, Vec<Message>) {
    let own = list.iter().filter(|(peer, _)| *peer == rank).count();
    let mut to_self = Vec::with_capacity(own);
    let mut others = Vec::with_capacity(list.len() - own);
    for (i, &(peer, bytes)) in list.iter().enumerate() {
        let span = Span::new(place(i), 0..bytes);
        let messages = if peer == rank {
            &mut to_self
        } else {
            &mut others
        };
        messages.push(Message { peer, span });
    }
    (to_self, others)
}
