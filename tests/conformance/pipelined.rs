//! Overlap: rows in chunks give the same results, and exchanges run while experts multiply.

use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{
    Grid, compare, evaluated, layer_on, mesh, part, sharded, shares, spec, specs, trained,
};
use super::simulated::open;
use moesaic::collectives::transport::{MemoryRange, Request, Transport, TransportError};
use moesaic::collectives::{Call, Communicator, threads};
use moesaic::mesh::OverlapBy;
use moesaic::trace::{Activity, Chunk, Lane, Recorded, Recorder, Trace, chrome_trace};
use moesaic::{Mesh, Parallel, Recompute, Strategy, Training};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

fn by(degree: &str) -> Strategy {
    format!("overlap_degree={degree}").parse().unwrap()
}

/// A mesh with rows in so many chunks.
fn cut(parallel: Parallel, degree: &str) -> Grid {
    let strategy = by(degree);
    Grid { parallel, strategy }
}

#[test]
fn outputs_in_chunks_are_the_bytes_of_one_process() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        let whole = case.layer(&engine).forward(&case.input()).unwrap();
        for (parallel, degree) in [
            (mesh(2, 1, 1), "2"),
            (mesh(3, 1, 1), "5"),
            (mesh(2, 1, 2), "4/2"),
            (mesh(3, 1, 1), "3,overlap_by=peers"),
            (mesh(4, 1, 1), "3/2,overlap_by=peers"),
        ] {
            let found = evaluated(&engine, cut(parallel, degree), &case);
            let what = || format!("{parallel:?} in {degree}: {}", case.describe());
            assert!(found == *whole.y().data, "{}", what());
        }
    }
}

#[test]
fn gradients_in_chunks_are_those_of_one_process() {
    let engine = cpu();
    let by_rows = ["2", "4/2", "1/3", "3/1", "2/3"];
    let by_ranks = [
        "2,overlap_by=peers",
        "3/2,overlap_by=peers",
        "1/2,overlap_by=peers",
    ];
    let degrees = [&by_rows[..], &by_ranks].concat();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        for (at, parallel) in [mesh(2, 1, 1), mesh(2, 2, 1)].into_iter().enumerate() {
            let grid = cut(parallel, degrees[(2 * seed + at) % degrees.len()]);
            let recompute = [Recompute::None, Recompute::Hidden, Recompute::All][(seed + at) % 3];
            compare(&engine, grid, &case, recompute);
        }
    }
}

/// Fewer rows than chunks, ranks without tokens, nothing at all, and all to one expert.
#[test]
fn chunks_without_rows_change_nothing() {
    let engine = cpu();
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 5, top_k = 1 }
         router = { bias = true }
         experts = { bias = true }
         shared = [{ hidden_dim = 8, gate = 'sigmoid' }]";
    for (tokens, seed) in [(0, 0), (1, 1), (3, 2), (33, 3)] {
        let mut case = Case::random(&spec(text), tokens, seed);
        if seed == 3 {
            let bias = case.weights.0.get_mut("router.bias").unwrap();
            bias.data[2] = 100.0;
        }
        for (parallel, degree) in [
            (mesh(3, 1, 1), "8"),
            (sharded(1, 2, 1), "4/8"),
            (mesh(3, 1, 1), "5/4,overlap_by=peers"),
        ] {
            let recompute = Recompute::None;
            compare(&engine, cut(parallel, degree), &case, recompute);
        }
    }
}

/// Capacity and its order are decided before rows are divided into chunks.
#[test]
fn capacity_and_its_order_do_not_see_chunks() {
    let engine = cpu();
    let text = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }
         capacity = { mode = 'factor', factor = 0.6, order = 'batch-prioritized' }";
    let case = Case::random(&spec(text), 40, 4);
    let whole = evaluated(&engine, mesh(2, 1, 1), &case);
    assert!(evaluated(&engine, cut(mesh(2, 1, 1), "4"), &case) == whole);
}

#[test]
fn gradients_in_chunks_are_the_same_bytes_in_every_run() {
    let engine = cpu();
    let case = Case::random(&specs()[0], 41, 0);
    let dy = case.dy(5);
    let run = || {
        let (grid, training) = (cut(mesh(2, 1, 1), "4/2"), Training::default());
        trained(&engine, grid, &case, training, &["y"], &dy)
    };
    assert!(run() == run());
}

#[test]
fn simulated_gpus_have_rows_in_chunks() {
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }";
    let case = Case::random(&spec(text), 19, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let engine = open(target);
        let recompute = Recompute::None;
        for degree in ["2/4", "2,overlap_by=peers"] {
            compare(&engine, cut(mesh(2, 1, 1), degree), &case, recompute);
        }
    }
}

/// Two things that wait for each other: launches of the first chunk do not end before the
/// second chunk has come, and the second chunk does not come before they have begun. So that
/// it ends, exchanges have to go on beside launches.
#[derive(Default)]
struct Meeting {
    launched: AtomicBool,
    came: Mutex<bool>,
    changed: Condvar,
    trace: Trace,
}

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

impl Recorder for Meeting {
    fn begins(&self, activity: &Activity) {
        let first = Some(Chunk {
            number: 0,
            of: 2,
            by: OverlapBy::Rows,
        });
        if activity.lane == Lane::Compute && activity.chunk == first {
            self.launched.store(true, Ordering::SeqCst);
        }
    }

    fn ended(&self, activity: &Activity, begin: Instant, end: Instant) {
        let first = activity.chunk.is_some_and(|chunk| chunk.number == 0);
        if activity.lane != Lane::Compute || !first {
            return self.trace.ended(activity, begin, end);
        }
        let came = self.came.lock().unwrap();
        let waited = self
            .changed
            .wait_timeout_while(came, PATIENCE, |came| !*came);
        drop(waited);
        self.trace.ended(activity, begin, Instant::now());
    }
}

/// Carries messages as it is told by a meeting.
struct Slow {
    threads: threads::Threads,
    meeting: Arc<Meeting>,
    received: Vec<Request>,
}

impl Transport for Slow {
    fn name(&self) -> String {
        self.threads.name()
    }

    fn rank(&self) -> usize {
        self.threads.rank()
    }

    fn size(&self) -> usize {
        self.threads.size()
    }

    fn last_tag(&self) -> u32 {
        self.threads.last_tag()
    }

    fn send_eager(&mut self, to: usize, message: &[u8]) -> Result<(), TransportError> {
        self.threads.send_eager(to, message)
    }

    fn receive_eager(&mut self) -> Result<Option<Vec<u8>>, TransportError> {
        self.threads.receive_eager()
    }

    unsafe fn send(
        &mut self,
        to: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        // SAFETY: as the caller says.
        unsafe { self.threads.send(to, tag, parts) }
    }

    unsafe fn receive(
        &mut self,
        from: usize,
        tag: u32,
        parts: &[MemoryRange],
    ) -> Result<Request, TransportError> {
        // SAFETY: as the caller says.
        let request = unsafe { self.threads.receive(from, tag, parts) }?;
        self.received.push(request);
        Ok(request)
    }

    fn finished(&mut self, request: Request) -> Result<bool, TransportError> {
        let second = self.received.get(1) == Some(&request);
        if second && !self.meeting.launched.load(Ordering::SeqCst) {
            return Ok(false);
        }
        let finished = self.threads.finished(request)?;
        if second && finished {
            *self.meeting.came.lock().unwrap() = true;
            self.meeting.changed.notify_all();
        }
        Ok(finished)
    }

    fn gone(&self, rank: usize) -> Option<&'static str> {
        self.threads.gone(rank)
    }

    fn revoke(&mut self) -> bool {
        self.threads.revoke()
    }
}

/// Finds the exchange of a chunk, or a launch for it.
fn of_chunk<'r>(recorded: &'r [Recorded], lane: Lane, name: &str, number: usize) -> &'r Recorded {
    let found = recorded.iter().find(|recorded| {
        let activity = &recorded.activity;
        let chunk = activity.chunk.is_some_and(|chunk| chunk.number == number);
        activity.lane == lane && activity.name == name && chunk
    });
    found.unwrap_or_else(|| panic!("no {name} of chunk {number}: {recorded:?}"))
}

#[test]
fn the_second_chunk_travels_while_the_first_is_multiplied() {
    let engine = cpu();
    let text = "shape = { model_dim = 64, hidden_dim = 32, experts = 4, top_k = 2 }";
    let case = Case::random(&spec(text), 512, 3);
    let want = evaluated(&engine, mesh(2, 1, 1), &case);
    let carriers = threads::world(2);
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let (engine, case) = (&engine, &case);
        let ranks = carriers.into_iter().map(|threads| {
            scope.spawn(move || {
                let meeting = Arc::new(Meeting::default());
                let carrier = Slow {
                    threads,
                    meeting: Arc::clone(&meeting),
                    received: Vec::new(),
                };
                let device = engine.device().clone();
                let mut world = Communicator::new(Box::new(carrier), device);
                let mesh = Mesh::new(&mut world, mesh(2, 1, 1)).unwrap();
                let mut layer = layer_on(engine, &mesh, case, None);
                layer.set_strategy(by("2")).unwrap();
                layer.record(Some(meeting.clone()));
                let own = part(case, &shares(512, 2)[mesh.rank()]);
                let y = layer.forward(&own.input()).unwrap().y().data.to_vec();
                assert!(
                    *meeting.came.lock().unwrap(),
                    "nothing travels beside launches"
                );
                drop((layer, mesh));
                world.finish(&Call::new("end")).unwrap();
                (y, meeting)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let found: Vec<u8> = ranks.iter().flat_map(|(y, _)| y.clone()).collect();
    assert!(found == want);
    for (rank, (_, meeting)) in ranks.iter().enumerate() {
        check_timeline(&meeting.trace, rank);
    }
}

/// Rows of the second chunk come while the first is multiplied, and answers go after.
fn check_timeline(trace: &Trace, rank: usize) {
    let recorded = trace.recorded();
    let rows = |number| of_chunk(&recorded, Lane::Exchange, "rows", number);
    let answer = |number| of_chunk(&recorded, Lane::Exchange, "out", number);
    let up = |number| of_chunk(&recorded, Lane::Compute, "grouped_gemm_up", number);
    let down = |number| of_chunk(&recorded, Lane::Compute, "grouped_gemm_down", number);
    assert!(rows(1).begin < up(0).begin && up(0).begin < rows(1).end);
    assert!(up(0).begin < up(0).end && up(0).end <= down(0).begin);
    assert!(answer(0).begin >= down(0).end && answer(0).begin <= up(1).begin);
    assert!(answer(1).begin >= down(1).end);
    assert!(rows(0).activity.bytes > 0 && up(0).activity.bytes > 0);
    let file = chrome_trace(trace.events(rank));
    let events = file["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).count();
    assert!(of("X") > 6 && of("b") == of("e") && of("b") >= 4, "{file}");
    let times = events.iter().filter_map(|event| event["ts"].as_f64());
    assert!(times.clone().all(|ts| ts >= 0.0) && times.count() > 14);
}
