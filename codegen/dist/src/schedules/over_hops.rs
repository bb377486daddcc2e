//! Exchanges over intermediate ranks, with the result of the direct exchange. Forwarded data lie
//! in scratch; all other data move directly from the input or to the output.

use super::hop_message::HopMessage;
use super::{BufferRef, CollectivePlan, Copy, HopSchedule, Message, ScheduleStep, Span};
use std::fmt;

/// The memory of each part's blocks. Each block is a span of the schedule's size; an empty block
/// may lie anywhere.
pub struct Endpoints<'a> {
    /// Returns the blocks to a rank.
    pub from: &'a dyn Fn(usize) -> Vec<Span>,
    /// Returns the blocks from a rank.
    pub to: &'a dyn Fn(usize) -> Vec<Span>,
}

impl fmt::Debug for Endpoints<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints").finish_non_exhaustive()
    }
}

/// Plans the exchange; its phases are numbered from `phase` on.
pub fn exchange_over_hops(
    schedule: &HopSchedule,
    ends: &Endpoints<'_>,
    phase: u32,
) -> CollectivePlan {
    let mut scratch = 0;
    let hops = schedule.hops.count();
    let mut steps: Vec<Transfers> = (0..hops).map(|_| Transfers::default()).collect();
    for order in 0..schedule.hops.orders.len() {
        let mut path = Path {
            schedule,
            ends,
            order,
            scratch,
            held: Vec::new(),
        };
        path.begin(&mut steps[0]);
        for (hop, step) in steps.iter_mut().enumerate() {
            path.hop(hop, step);
        }
        // Orders run at the same time, so each one's scratch lies behind that of the one before.
        scratch = path.scratch;
    }
    let exchange = |(hop, step): (usize, Transfers)| ScheduleStep::Exchange {
        phase: phase + hop as u32,
        name: schedule.hops.name(hop),
        sends: step.sends,
        receives: step.receives,
        copies: step.copies,
    };
    CollectivePlan {
        scratch,
        steps: steps.into_iter().enumerate().map(exchange).collect(),
    }
}

/// The work of one hop, over all orders.
#[derive(Default)]
struct Transfers {
    sends: Vec<Message>,
    receives: Vec<Message>,
    copies: Vec<Copy>,
}

/// One order, as far as it has been planned.
struct Path<'a> {
    schedule: &'a HopSchedule,
    ends: &'a Endpoints<'a>,
    order: usize,
    /// The scratch bytes in use.
    scratch: usize,
    /// The memory of the blocks that this rank holds, by place.
    held: Vec<Vec<Span>>,
}

impl Path<'_> {
    /// Takes up what this rank holds before the first hop.
    fn begin(&mut self, step: &mut Transfers) {
        let (rank, ranks) = (self.schedule.rank, self.schedule.hops.ranks());
        let own = |to: usize| self.own_shares((rank, to), (self.ends.from)(to));
        self.held = (0..ranks).map(own).collect();
        let to = self.own_shares((rank, rank), (self.ends.to)(rank));
        let copies = self.held[rank].iter().zip(to).map(|(from, to)| Copy {
            from: *from,
            to: to.buffer,
            offset: to.offset,
        });
        step.copies.extend(copies);
    }

    /// Returns the shares of these blocks that take this order.
    fn own_shares(&self, pair: (usize, usize), blocks: Vec<Span>) -> Vec<Span> {
        let hops = &self.schedule.hops;
        let share = |span: Span| {
            let range = hops.share(self.order, pair, span.bytes);
            let (first, bytes) = (range.start, range.len());
            Span {
                offset: span.offset + first,
                bytes,
                ..span
            }
        };
        let blocks = blocks.into_iter().map(share);
        blocks.filter(|span| span.bytes > 0).collect()
    }

    fn hop(&mut self, hop: usize, step: &mut Transfers) {
        let (hops, rank) = (&self.schedule.hops, self.schedule.rank);
        // Collect what leaves before anything arrives: arriving blocks take over the same places.
        for HopMessage { peer, places } in hops.sends(self.order, hop, rank) {
            let leave = places.into_iter().flatten();
            let leave = leave.flat_map(|place| &self.held[place]);
            extend(&mut step.sends, peer, leave.copied());
        }
        let receives = hops.receives(self.order, hop, rank);
        let places = receives.iter().flat_map(|message| &message.places);
        let mut arriving: Vec<usize> = places.cloned().flatten().collect();
        // A later hop over a slower digit sends places in ascending order; allocating scratch in
        // that order keeps its messages contiguous.
        arriving.sort_unstable();
        for place in arriving {
            self.held[place] = self.arrive(hop + 1, place);
        }
        for HopMessage { peer, places } in receives {
            let arrive = places.into_iter().flatten();
            let arrive = arrive.flat_map(|place| &self.held[place]);
            extend(&mut step.receives, peer, arrive.copied());
        }
    }

    /// Returns the destination of a place's blocks after `hops` hops.
    fn arrive(&mut self, hops: usize, place: usize) -> Vec<Span> {
        let schedule = self.schedule;
        let pair = schedule.hops.pair(self.order, hops, schedule.rank, place);
        // Data for this rank go straight to the output, which saves a copy from scratch.
        if pair.1 == schedule.rank {
            return self.own_shares(pair, (self.ends.to)(pair.0));
        }
        let mut spans = Vec::new();
        for &bytes in schedule.of(self.order, hops, place) {
            let bytes = schedule.hops.share(self.order, pair, bytes).len();
            if bytes > 0 {
                spans.push(Span::new(
                    BufferRef::Scratch,
                    self.scratch..self.scratch + bytes,
                ));
                self.scratch += bytes;
            }
        }
        spans
    }
}

/// Adds messages of these spans, or one empty message: every rank of a hop hears from every
/// other, so a missing rank is noticed.
fn extend(list: &mut Vec<Message>, peer: usize, spans: impl Iterator<Item = Span>) {
    let before = list.len();
    list.extend(spans.map(|span| Message { peer, span }));
    if list.len() == before {
        let span = Span::new(BufferRef::Scratch, 0..0);
        list.push(Message { peer, span });
    }
}

/// Plans an all-to-all of one block per pair; blocks are consecutive in input 0 and in output 0.
pub fn all_to_all_with(
    schedule: &HopSchedule,
    sends: &[usize],
    receives: &[usize],
    phase: u32,
) -> CollectivePlan {
    let (from, to) = (HopSchedule::starts(sends), HopSchedule::starts(receives));
    let part = |place, starts: &[usize], peer: usize| {
        vec![Span::new(place, starts[peer]..starts[peer + 1])]
    };
    let ends = Endpoints {
        from: &|peer| part(BufferRef::Input(0), &from, peer),
        to: &|peer| part(BufferRef::Output(0), &to, peer),
    };
    exchange_over_hops(schedule, &ends, phase)
}

/// Plans an [`exchange`](super::exchange()) over intermediate ranks: input `i` goes to rank
/// `sends[i].0`, output `j` comes from rank `receives[j].0`. For each pair of ranks the messages
/// are the schedule's blocks that are not empty, in order.
pub fn exchange_with(
    schedule: &HopSchedule,
    sends: &[(usize, usize)],
    receives: &[(usize, usize)],
) -> CollectivePlan {
    let ranks = schedule.hops.ranks();
    let by_peer = |list: &[(usize, usize)], place: fn(usize) -> BufferRef| {
        let mut spans = vec![Vec::new(); ranks];
        for (i, (peer, bytes)) in list.iter().enumerate() {
            spans[*peer].push(Span::new(place(i), 0..*bytes));
        }
        spans
    };
    let (from, to) = (
        by_peer(sends, BufferRef::Input),
        by_peer(receives, BufferRef::Output),
    );
    let ends = Endpoints {
        from: &|peer| from[peer].clone(),
        to: &|peer| to[peer].clone(),
    };
    exchange_over_hops(schedule, &ends, 0)
}
