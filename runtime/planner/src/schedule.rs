//! The pipeline of chunks: one chunk is processed while the next is in flight.

/// The work of one rank for one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Chunk {
    /// The seconds of the dispatch.
    pub there: f64,
    /// The seconds of GEMMs without overlap.
    pub product: f64,
    /// The seconds of GEMMs while rows are in flight.
    pub hindered: f64,
    /// The seconds of the combine.
    pub back: f64,
    /// The seconds of dispatch and combine that a back-to-back exchange saves.
    pub skipped: [f64; 2],
    /// The seconds of the combine that a later chunk's dispatch hides.
    pub overlapped: f64,
}

/// The start and end of one piece of work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Span {
    pub start: f64,
    pub end: f64,
}

impl Span {
    fn shared(&self, other: &Span) -> f64 {
        (self.end.min(other.end) - self.start.max(other.start)).max(0.0)
    }

    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }
}

/// The times of a rank's chunks: dispatch, GEMMs and combine.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Timeline {
    pub there: Vec<Span>,
    pub product: Vec<Span>,
    pub back: Vec<Span>,
}

impl Timeline {
    pub fn end(&self) -> f64 {
        self.back.last().map_or(0.0, |span| span.end)
    }
}

/// The iterations in which durations adapt to what they overlap with.
const ROUNDS: usize = 3;

/// Simulates the chunks of each rank; all ranks have equally many. One stream carries all
/// dispatches, then all combines. GEMMs run on another, which is free from `free` on. An exchange
/// begins when all ranks of its group have arrived. Both streams slow down while both are busy.
pub(crate) fn pipeline(
    (now, free): (&[f64], &[f64]),
    group: &[usize],
    chunks: &[Vec<Chunk>],
    transfer_slowdown: f64,
) -> Vec<Timeline> {
    let overlap_degree = chunks.first().map_or(0, Vec::len);
    // By rank and chunk, the fraction of dispatch, GEMMs and combine that is overlapped.
    let mut overlapped = vec![vec![[0.0f64; 3]; overlap_degree]; now.len()];
    let mut lines = Vec::new();
    for round in 0..ROUNDS {
        let slowed = |rank: usize, at: usize| {
            let (chunk, part) = (&chunks[rank][at], &overlapped[rank][at]);
            Chunk {
                there: chunk.there * (1.0 + transfer_slowdown * part[0]),
                product: chunk.product + (chunk.hindered - chunk.product) * part[1],
                hindered: 0.0,
                back: chunk.back * (1.0 + transfer_slowdown * part[2]),
                skipped: chunk.skipped,
                overlapped: chunk.overlapped,
            }
        };
        lines = listed((now, free), group, overlap_degree, slowed);
        // A single chunk has nothing in flight while it is multiplied.
        if overlap_degree > 1 && round + 1 < ROUNDS {
            overlapped = lines.iter().map(parts).collect();
        }
    }
    lines
}

/// Returns the overlapped fraction of each piece of work of a rank.
fn parts(line: &Timeline) -> Vec<[f64; 3]> {
    let part = |span: &Span, others: &[&[Span]]| {
        let shared: f64 = others
            .iter()
            .flat_map(|list| *list)
            .map(|o| span.shared(o))
            .sum();
        if span.seconds() > 0.0 {
            (shared / span.seconds()).min(1.0)
        } else {
            0.0
        }
    };
    // Exchanges share a stream and never overlap each other, so only GEMMs slow them down.
    let exchanges: [&[Span]; 2] = [&line.there, &line.back];
    let of = |at: usize| {
        [
            part(&line.there[at], &[&line.product]),
            part(&line.product[at], &exchanges),
            part(&line.back[at], &[&line.product]),
        ]
    };
    (0..line.there.len()).map(of).collect()
}

fn listed(
    (now, free): (&[f64], &[f64]),
    group: &[usize],
    overlap_degree: usize,
    chunk: impl Fn(usize, usize) -> Chunk,
) -> Vec<Timeline> {
    let ranks = now.len();
    let mut lines = vec![Timeline::default(); ranks];
    let (mut stream, mut products) = (now.to_vec(), free.to_vec());
    for at in 0..overlap_degree {
        // All dispatches run before the first combine, in the order in which ranks issue them on
        // their stream.
        let ready = stream.clone();
        meet(&mut stream, group, &ready);
        for rank in 0..ranks {
            let chunk = chunk(rank, at);
            let skipped = if at > 0 { chunk.skipped[0] } else { 0.0 };
            let end = stream[rank] + chunk.there - skipped;
            lines[rank].there.push(Span {
                start: stream[rank],
                end,
            });
            stream[rank] = end;
        }
    }
    for rank in 0..ranks {
        for at in 0..overlap_degree {
            // A chunk's GEMMs wait for its rows and for the GEMMs of the chunk before.
            let start = products[rank].max(lines[rank].there[at].end);
            let end = start + chunk(rank, at).product;
            lines[rank].product.push(Span { start, end });
            products[rank] = end;
        }
    }
    for at in 0..overlap_degree {
        let ready: Vec<f64> = (0..ranks)
            .map(|rank| stream[rank].max(lines[rank].product[at].end))
            .collect();
        // `busy` is the time at which the exchange could begin if nobody waited for GEMMs.
        let mut busy = stream.clone();
        meet(&mut busy, group, &stream);
        meet(&mut stream, group, &ready);
        for rank in 0..ranks {
            let chunk = chunk(rank, at);
            // No rank waits for GEMMs here, so an exchange follows at once only if the stream was
            // never idle.
            let at_once = stream[rank] == busy[rank];
            let overlapped = if at + 1 < overlap_degree {
                chunk.overlapped
            } else {
                0.0
            };
            let skipped = if at_once {
                chunk.skipped[1] + overlapped
            } else {
                0.0
            };
            let end = stream[rank] + chunk.back - skipped;
            lines[rank].back.push(Span {
                start: stream[rank],
                end,
            });
            stream[rank] = end;
        }
    }
    lines
}

/// Makes every rank of a group continue when the last of it is ready.
pub(crate) fn meet(times: &mut [f64], group: &[usize], ready: &[f64]) {
    let groups = group.iter().max().map_or(0, |most| most + 1);
    let mut last = vec![0.0f64; groups];
    for (of, ready) in group.iter().zip(ready) {
        last[*of] = last[*of].max(*ready);
    }
    for (time, of) in times.iter_mut().zip(group) {
        *time = last[*of];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(there: f64, product: f64, back: f64) -> Chunk {
        Chunk {
            there,
            product,
            hindered: product,
            back,
            skipped: [0.0; 2],
            overlapped: 0.0,
        }
    }

    #[test]
    fn one_chunk_is_one_thing_after_another() {
        let lines = pipeline((&[1.0], &[1.0]), &[0], &[vec![of(2.0, 3.0, 4.0)]], 0.5);
        assert_eq!(lines[0].end(), 10.0);
    }

    #[test]
    fn products_hide_behind_exchanges_as_the_closed_form_says() {
        // Exchanges are the bottleneck: only two transfers and one GEMM remain visible.
        let lines = pipeline((&[0.0], &[0.0]), &[0], &[vec![of(2.0, 1.0, 2.0); 4]], 0.0);
        assert_eq!(lines[0].end(), 16.0);
        let lines = pipeline((&[0.0], &[0.0]), &[0], &[vec![of(1.0, 5.0, 1.0); 4]], 0.0);
        assert_eq!(lines[0].end(), 1.0 + 20.0 + 1.0);
    }

    #[test]
    fn chunks_that_follow_at_once_skip_what_is_fixed() {
        let chunk = Chunk {
            skipped: [0.5, 0.25],
            overlapped: 0.5,
            ..of(2.0, 1.0, 2.0)
        };
        // Two dispatches follow each other; the first GEMM is done meanwhile, the second waits
        // for its rows.
        let lines = pipeline((&[0.0], &[0.0]), &[0], &[vec![chunk; 2]], 0.0);
        assert_eq!(lines[0].there[1].end, 3.5);
        let back: Vec<f64> = lines[0].back.iter().map(|span| span.end).collect();
        assert_eq!(back, [4.75, 6.5]);
    }

    /// A reference simulation in small time steps, with the rules and no formula.
    fn stepped(times: Chunk, overlap_degree: usize) -> f64 {
        const EACH: f64 = 1e-2;
        let ticks = |seconds: f64| (seconds / EACH).round() as usize;
        let (there, product) = (ticks(times.there), ticks(times.product));
        let back = ticks(times.back);
        let (mut sent, mut multiplied, mut answered) = (0, 0, 0);
        let (mut stream, mut cores, mut now) = (None, None, 0);
        while answered < overlap_degree {
            if stream.is_none() && sent < overlap_degree {
                stream = Some((now + there, true));
            } else if stream.is_none() && answered < multiplied {
                stream = Some((now + back, false));
            }
            if cores.is_none() && multiplied < sent {
                cores = Some(now + product);
            }
            now += 1;
            if let Some((_, goes)) = stream.filter(|(end, _)| *end <= now) {
                sent += usize::from(goes);
                answered += usize::from(!goes);
                stream = None;
            }
            if cores.is_some_and(|end| end <= now) {
                multiplied += 1;
                cores = None;
            }
        }
        now as f64 * EACH
    }

    #[test]
    fn chunks_end_when_those_of_a_twin_in_small_steps_do() {
        for (there, product, back) in [
            (8.1, 16.1, 8.1),
            (16.5, 8.1, 4.0),
            (13.0, 13.0, 13.0),
            (0.6, 24.1, 0.6),
            (24.3, 0.7, 30.0),
        ] {
            for overlap_degree in [1, 2, 4, 5, 8] {
                let each = 1.0 / overlap_degree as f64;
                let chunk = of(there * each, product * each, back * each);
                let found =
                    pipeline((&[0.0], &[0.0]), &[0], &[vec![chunk; overlap_degree]], 0.0)[0].end();
                let want = stepped(chunk, overlap_degree);
                // A fraction of a tick for each of 3 d parts, and a tick for the order of starts.
                let off = (found - want).abs();
                assert!(
                    off < 0.03 * (overlap_degree + 1) as f64,
                    "{chunk:?}: {found}, {want}"
                );
            }
        }
    }

    /// A rank's own rows wait for nothing, and their GEMMs hide the exchange of the others.
    #[test]
    fn chunks_may_differ() {
        let chunks = vec![of(0.0, 2.0, 0.0), of(2.0, 6.0, 2.0)];
        let lines = pipeline((&[0.0], &[0.0]), &[0], &[chunks], 0.0);
        assert_eq!(lines[0].product[0].start, 0.0);
        assert_eq!(lines[0].end(), 2.0 + 6.0 + 2.0);
    }

    #[test]
    fn the_slowest_rank_holds_up_its_group_alone() {
        let chunks = [1.0, 7.0, 1.0].map(|product| vec![of(1.0, product, 1.0)]);
        let lines = pipeline((&[0.0; 3], &[0.0; 3]), &[0, 0, 1], &chunks, 0.0);
        assert_eq!(lines[0].end(), 9.0);
        assert_eq!(lines[2].end(), 3.0);
    }

    #[test]
    fn what_runs_side_by_side_is_slower() {
        let free = pipeline((&[0.0], &[0.0]), &[0], &[vec![of(2.0, 2.0, 2.0); 4]], 0.0);
        let chunk = Chunk {
            hindered: 2.4,
            ..of(2.0, 2.0, 2.0)
        };
        let held = pipeline((&[0.0], &[0.0]), &[0], &[vec![chunk; 4]], 0.1);
        assert!(held[0].end() > free[0].end());
        assert!(held[0].end() < free[0].end() * 1.2);
    }

    /// Launches before the first rows, such as the GEMMs of shadows, overlap the first exchanges.
    #[test]
    fn products_begin_when_their_stream_is_free() {
        let chunks = vec![of(2.0, 1.0, 1.0); 2];
        let end = |free: f64| {
            pipeline((&[0.0], &[free]), &[0], std::slice::from_ref(&chunks), 0.0)[0].end()
        };
        assert_eq!(end(2.0), end(0.0));
        assert_eq!(end(5.0), 5.0 + 2.0 + 1.0);
    }
}
