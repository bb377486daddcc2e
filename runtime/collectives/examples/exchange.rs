//! Measures all-to-all exchanges by bytes per pair of ranks. Start it under MPI by `mpiexec -n
//! N`, or on threads with the number of ranks as the argument.
//!
//! With `nodes` as the first argument, followed by the sizes to measure, it alternates between
//! all algorithms that the nodes allow, including three levels on four nodes or more.
//! `benches/nodes/links.sh` does so on nodes with slow links between them.

use moesaic_collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, Communicator, Levels, NodeShape,
    SetupError, Slice, Topology, mpi, threads,
};
use moesaic_cpu::CpuDevice;
use moesaic_target::{Device, DeviceError, SharedError};
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

/// The time limit of the rounds of one size.
const BUDGET: Duration = Duration::from_millis(1200);
/// The fewest and the most rounds of one size.
const ROUNDS: std::ops::RangeInclusive<usize> = 9..=40;

fn main() -> Result<(), CollectiveError> {
    let device = || -> Arc<dyn Device> { Arc::new(CpuDevice::new()) };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        None => direct(mpi::start(&mpi::MpiOptions::default(), device())?),
        Some("nodes") => {
            let sizes = arguments[1..].iter().filter_map(|size| size.parse().ok());
            let world = mpi::start(&mpi::MpiOptions::default(), device())?;
            over_nodes(world, &sizes.collect::<Vec<usize>>())
        }
        Some(ranks) => {
            let ranks = ranks.parse().unwrap_or(2);
            let results = threads::run(ranks, |_| Ok(device()), direct)?;
            results.into_iter().flatten().collect()
        }
    }
}

fn direct(mut world: Communicator) -> Result<(), CollectiveError> {
    for bytes in SIZES {
        let (from, to) = (unset(&world, bytes, 1)?, unset(&world, bytes, 1)?);
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..if bytes > 1 << 20 { 15 } else { 60 } {
            times.push(timed(&mut world, &from, &to, Algorithm::Direct)?);
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

/// Returns memory for every rank. It is written once, because memory that was never written has
/// no pages yet.
fn unset(world: &Communicator, bytes: usize, value: u8) -> Result<Slice, CollectiveError> {
    let (device, all) = (world.device(), bytes * world.size());
    let setup = |error: DeviceError| CollectiveError::setup(error);
    let buffer = device.alloc(all).map_err(setup)?;
    device
        .upload(&vec![value; all], &buffer, 0)
        .map_err(setup)?;
    Ok(Slice::whole(&Arc::new(buffer), CommElement::U8))
}

fn timed(
    world: &mut Communicator,
    from: &Slice,
    to: &Slice,
    algorithm: Algorithm,
) -> Result<Duration, CollectiveError> {
    world.barrier(&Call::default())?.wait()?;
    let start = Instant::now();
    let handle = world.all_to_all(from, to, algorithm, &Call::default())?;
    handle.wait()?;
    Ok(start.elapsed())
}

/// Returns the algorithms to alternate; where nodes form two pods, one has three levels.
fn algorithms(shape: NodeShape) -> Vec<(&'static str, Algorithm)> {
    let mut list = vec![
        ("direct", Algorithm::Direct),
        ("2dh", Algorithm::Hierarchical(shape)),
        ("2dh-inter-first", Algorithm::InterFirst(shape)),
        ("2dh-concurrent", Algorithm::Concurrent(shape)),
    ];
    let pods = Levels::new(&[2, shape.nodes / 2, shape.per_node]);
    if let Some(levels) = pods.filter(|_| shape.nodes >= 4 && shape.nodes.is_multiple_of(2)) {
        list.push(("levels", Algorithm::Levels(levels)));
    }
    list
}

fn over_nodes(mut world: Communicator, sizes: &[usize]) -> Result<(), CollectiveError> {
    let topology = Topology::gather(&mut world, &Call::new("hosts"))?;
    let shape = topology.shape.ok_or_else(|| {
        failed(format!(
            "ranks are not evenly on nodes: {:?}",
            topology.hosts
        ))
    })?;
    let algorithms = algorithms(shape);
    if world.rank() == 0 {
        let (nodes, each) = (shape.nodes, shape.per_node);
        println!("# {nodes} nodes of {each} ranks, {}", world.transport());
        println!("# medians in us, each round that of its slowest rank; then direct / other");
        let name = |(name, _): &(&str, Algorithm)| format!("{name:>12}");
        let names: Vec<String> = algorithms.iter().map(name).collect();
        println!(
            "# bytes per pair, rounds{}{}",
            names.concat(),
            names[1..].concat()
        );
    }
    for &bytes in sizes {
        let (from, to) = (
            unset(&world, bytes, world.rank() as u8 + 1)?,
            unset(&world, bytes, 0)?,
        );
        let (begun, mut rounds, mut own) = (Instant::now(), 0, Vec::new());
        loop {
            // Start with another algorithm each round, because the first one finds other queues
            // than those after it.
            let mut times = vec![0u64; algorithms.len()];
            for turn in 0..algorithms.len() {
                let kind = (rounds + turn) % algorithms.len();
                let time = timed(&mut world, &from, &to, algorithms[kind].1)?;
                times[kind] = time.as_nanos() as u64;
            }
            if rounds > 0 {
                own.push(times); // the first one finds no connections
            }
            rounds += 1;
            let enough = begun.elapsed() > BUDGET && rounds > *ROUNDS.start();
            let mine = [u8::from(enough || rounds > *ROUNDS.end())];
            if world.gather_bytes(&mine, &Call::default())?[0] == [1] {
                break;
            }
        }
        check(&world, &to, bytes)?;
        report(&mut world, bytes, &own)?;
    }
    world.finish(&Call::default())
}

fn failed(reason: String) -> CollectiveError {
    let error = SharedError::new(std::io::Error::other(reason));
    CollectiveError::setup(SetupError::Other(error))
}

/// Checks what the last exchange has received.
fn check(world: &Communicator, to: &Slice, bytes: usize) -> Result<(), CollectiveError> {
    let mut got = vec![0; to.bytes()];
    let read = world.device().download(to.buffer(), 0, &mut got);
    let parts = || got.chunks(bytes.max(1)).enumerate();
    let right = parts().all(|(peer, part)| part.iter().all(|byte| *byte == peer as u8 + 1));
    match read {
        Ok(()) if right => Ok(()),
        _ => Err(failed(format!("wrong bytes with {bytes} bytes per pair"))),
    }
}

fn report(world: &mut Communicator, bytes: usize, own: &[Vec<u64>]) -> Result<(), CollectiveError> {
    let numbers: Vec<u8> = own.iter().flatten().flat_map(|n| n.to_le_bytes()).collect();
    let all = world.gather_bytes(&numbers, &Call::default())?;
    if world.rank() > 0 {
        return Ok(());
    }
    let kinds = own.first().map_or(0, Vec::len);
    let slowest = |round: usize, kind: usize| -> f64 {
        let number = |times: &Vec<u8>| times.as_chunks::<8>().0[kinds * round + kind];
        let nanos = all.iter().map(|times| u64::from_le_bytes(number(times)));
        nanos.max().unwrap_or_default() as f64 / 1e3
    };
    let median = |value: &dyn Fn(usize) -> f64| {
        let mut list: Vec<f64> = (0..own.len()).map(value).collect();
        list.sort_by(f64::total_cmp);
        list[list.len() / 2]
    };
    let time = |kind: usize| format!("{:>12.0}", median(&|round| slowest(round, kind)));
    let ratio = |kind: usize| {
        let ratio = median(&|round| slowest(round, 0) / slowest(round, kind));
        format!("{ratio:>12.2}")
    };
    let times: String = (0..kinds).map(time).collect();
    let ratios: String = (1..kinds).map(ratio).collect();
    println!("{bytes:>16} {:>7}{times}{ratios}", own.len());
    Ok(())
}
