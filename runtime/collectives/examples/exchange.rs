//! How long an all-to-all exchange takes, by bytes per pair of ranks: under MPI, started by
//! `mpiexec -n N`, or on threads with the number of ranks as the argument.

use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, Communicator, Element, Slice, mpi, threads,
};
use moesaic_cpu::CpuDevice;
use moesaic_target::Device;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZES: [usize; 8] = [
    1 << 10,
    1 << 12,
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
    1 << 24,
];

fn main() -> Result<(), CollectiveError> {
    let device = || -> Arc<dyn Device> { Arc::new(CpuDevice::new()) };
    match std::env::args().nth(1).and_then(|text| text.parse().ok()) {
        None => measure(mpi::start(&mpi::Options::default(), device())?),
        Some(ranks) => {
            let results = threads::run(ranks, |_| Ok(device()), measure)?;
            results.into_iter().flatten().collect()
        }
    }
}

fn measure(mut world: Communicator) -> Result<(), CollectiveError> {
    let device = Arc::clone(world.device());
    for bytes in SIZES {
        let all = bytes * world.size();
        let room = || -> Result<Slice, CollectiveError> {
            let buffer = device.alloc(all).map_err(|error| CollectiveError::Setup {
                reason: error.to_string(),
            })?;
            // Memory that was never written has no pages yet.
            let filled = device.upload(&vec![1; all], &buffer, 0);
            filled.map_err(|error| CollectiveError::Setup {
                reason: error.to_string(),
            })?;
            Ok(Slice::whole(&Arc::new(buffer), Element::U8))
        };
        let (from, to) = (room()?, room()?);
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..if bytes > 1 << 20 { 15 } else { 60 } {
            world.barrier(&Call::default())?.wait()?;
            let start = Instant::now();
            let handle = world.all_to_all(&from, &to, Algorithm::Direct, &Call::default())?;
            handle.wait()?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        if world.rank() == 0 {
            let micro = |time: Duration| time.as_secs_f64() * 1e6;
            let (median, least) = (micro(times[times.len() / 2]), micro(times[0]));
            println!("{bytes:>9} bytes per pair: median {median:.1} us, least {least:.1} us");
        }
    }
    world.finish(&Call::default())
}
