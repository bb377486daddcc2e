//! An exchange over other ranks, with the result of the direct one. What only passes
//! through lies in scratch; all else goes from the input, or to the output, itself.

use super::{Copy, HopSchedule, Message, Place, Plan, Span, Step};

/// Where the pieces of each part are. Each piece is a span of the size that the schedule
/// says; a piece of no bytes may be anywhere.
pub struct Endpoints<'a> {
    /// Those that go to a rank.
    pub from: &'a dyn Fn(usize) -> Vec<Span>,
    /// Those that come from a rank.
    pub to: &'a dyn Fn(usize) -> Vec<Span>,
}

/// The exchange, whose phases have numbers from `phase` on.
pub fn routed(schedule: &HopSchedule, ends: &Endpoints<'_>, phase: u32) -> Plan {
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
        scratch = path.scratch;
    }
    let exchange = |(hop, step): (usize, Transfers)| Step::Exchange {
        phase: phase + hop as u32,
        name: schedule.hops.name(hop),
        sends: step.sends,
        receives: step.receives,
        copies: step.copies,
    };
    Plan {
        scratch,
        steps: steps.into_iter().enumerate().map(exchange).collect(),
    }
}

/// What happens in one hop, on all ways.
#[derive(Default)]
struct Transfers {
    sends: Vec<Message>,
    receives: Vec<Message>,
    copies: Vec<Copy>,
}

/// One of the ways, as far as it was planned.
struct Path<'a> {
    schedule: &'a HopSchedule,
    ends: &'a Endpoints<'a>,
    order: usize,
    /// Bytes of it that are taken.
    scratch: usize,
    /// Where the pieces are that this rank holds, by place.
    held: Vec<Vec<Span>>,
}

impl Path<'_> {
    /// What this rank has before the first hop.
    fn begin(&mut self, step: &mut Transfers) {
        let (rank, ranks) = (self.schedule.rank, self.schedule.hops.levels.ranks());
        let own = |to: usize| self.cut((rank, to), (self.ends.from)(to));
        self.held = (0..ranks).map(own).collect();
        let to = self.cut((rank, rank), (self.ends.to)(rank));
        let copies = self.held[rank].iter().zip(to).map(|(from, to)| Copy {
            from: *from,
            to: to.place,
            offset: to.offset,
        });
        step.copies.extend(copies);
    }

    /// What of these pieces takes this path.
    fn cut(&self, pair: (usize, usize), pieces: Vec<Span>) -> Vec<Span> {
        let hops = &self.schedule.hops;
        let cut = |span: Span| {
            let range = hops.share(self.order, pair, span.bytes);
            let (first, bytes) = (range.start, range.len());
            Span {
                offset: span.offset + first,
                bytes,
                ..span
            }
        };
        let pieces = pieces.into_iter().map(cut);
        pieces.filter(|span| span.bytes > 0).collect()
    }

    fn hop(&mut self, hop: usize, step: &mut Transfers) {
        let (hops, rank) = (&self.schedule.hops, self.schedule.rank);
        let mut changed = Vec::new();
        for (peer, places) in hops.peers(self.order, hop, rank) {
            let places: Vec<usize> = places.into_iter().flatten().collect();
            let leave = places.iter().flat_map(|place| &self.held[*place]);
            extend(&mut step.sends, peer, leave.copied());
            changed.push((peer, places));
        }
        let mut arriving: Vec<usize> = changed
            .iter()
            .flat_map(|(_, places)| places)
            .copied()
            .collect();
        // In the order in which a later hop to a slower digit sends them on.
        arriving.sort_unstable();
        for place in arriving {
            self.held[place] = self.arrive(hop + 1, place);
        }
        for (peer, places) in changed {
            let arrive = places.iter().flat_map(|place| &self.held[*place]);
            extend(&mut step.receives, peer, arrive.copied());
        }
    }

    /// Where the pieces of a place go that have made so many hops.
    fn arrive(&mut self, hops: usize, place: usize) -> Vec<Span> {
        let schedule = self.schedule;
        let pair = schedule.hops.pair(self.order, hops, schedule.rank, place);
        if pair.1 == schedule.rank {
            return self.cut(pair, (self.ends.to)(pair.0));
        }
        let mut spans = Vec::new();
        for &bytes in schedule.of(self.order, hops, place) {
            let bytes = schedule.hops.share(self.order, pair, bytes).len();
            if bytes > 0 {
                spans.push(Span::new(
                    Place::Scratch,
                    self.scratch..self.scratch + bytes,
                ));
                self.scratch += bytes;
            }
        }
        spans
    }
}

/// Messages of these bytes, or one of none: every rank of a hop hears of every other.
fn extend(list: &mut Vec<Message>, peer: usize, spans: impl Iterator<Item = Span>) {
    let before = list.len();
    list.extend(spans.map(|span| Message { peer, span }));
    if list.len() == before {
        let span = Span::new(Place::Scratch, 0..0);
        list.push(Message { peer, span });
    }
}

/// Parts of one piece each, one after the other in input 0 and in output 0.
pub fn all_to_all_with(
    schedule: &HopSchedule,
    sends: &[usize],
    receives: &[usize],
    phase: u32,
) -> Plan {
    let (from, to) = (HopSchedule::starts(sends), HopSchedule::starts(receives));
    let part = |place, starts: &[usize], peer: usize| {
        vec![Span::new(place, starts[peer]..starts[peer + 1])]
    };
    let ends = Endpoints {
        from: &|peer| part(Place::Input(0), &from, peer),
        to: &|peer| part(Place::Output(0), &to, peer),
    };
    routed(schedule, &ends, phase)
}

/// As [`exchange`](super::exchange): input `i` goes to rank `sends[i].0`, output `j` comes
/// from rank `receives[j].0`. Of each pair of ranks they are the schedule's pieces that have
/// bytes, in order.
pub fn exchange_with(
    schedule: &HopSchedule,
    sends: &[(usize, usize)],
    receives: &[(usize, usize)],
) -> Plan {
    let ranks = schedule.hops.levels.ranks();
    let by_peer = |list: &[(usize, usize)], place: fn(usize) -> Place| {
        let mut spans = vec![Vec::new(); ranks];
        for (i, (peer, bytes)) in list.iter().enumerate() {
            spans[*peer].push(Span::new(place(i), 0..*bytes));
        }
        spans
    };
    let (from, to) = (
        by_peer(sends, Place::Input),
        by_peer(receives, Place::Output),
    );
    let ends = Endpoints {
        from: &|peer| from[peer].clone(),
        to: &|peer| to[peer].clone(),
    };
    routed(schedule, &ends, 0)
}
