//! Compares an all-to-all exchange with its carrier: between processes with
//! `MPI_Alltoallv` of the same bytes, between threads with copying them.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench exchange
//! ```
//!
//! It starts itself under the `mpiexec` of `moesaic toolchain install mpi`, with 2 and 4
//! ranks. Kinds take turns in every round, and each round's time is that of its slowest rank.

use moesaic::collectives::{
    Algorithm, Call, CollectiveError, Collectives, CommElement, Communicator, Slice, mpi, threads,
};
use moesaic::cpu::CpuDevice;
use moesaic::target::Device;
use moesaic::toolchain::{Registry, mpi as installed_mpi};
use moesaic_dl::Library;
use std::error::Error;
use std::ffi::{c_int, c_void};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Bytes that a rank sends in all, also to itself.
const SIZES: [usize; 9] = [
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// The measured kinds, and the reference that they are compared with.
const KINDS: [&str; 3] = ["equal", "by counts", "beside"];

fn main() -> Result {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    match args.next().as_deref() {
        Some("--list") => return Ok(()),
        Some("rank") => return of_process(),
        _ => {}
    }
    for ranks in [2, 4] {
        println!("# {ranks} processes, beside MPI_Alltoallv");
        under_mpi(ranks)?;
    }
    for ranks in [2, 4] {
        println!("# {ranks} threads, beside copies of the same bytes");
        let device = |_| -> std::result::Result<Arc<dyn Device>, _> {
            Ok(Arc::new(CpuDevice::with_threads(1)?))
        };
        let results = threads::run(ranks, device, |world| measure(world, &copies))?;
        for result in results {
            result.map_err(|_| "a rank has panicked")??;
        }
    }
    Ok(())
}

fn under_mpi(ranks: usize) -> Result {
    let found = installed_mpi(&Registry::open()?);
    let found = found.ok_or("no MPI: moesaic toolchain install mpi")?;
    let status = Command::new(found.launcher)
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe()?)
        .arg("rank")
        .env("MOESAIC_MPI", &found.library)
        .status()?;
    status
        .success()
        .then_some(())
        .ok_or_else(|| "mpiexec failed".into())
}

/// A reference that the exchange is timed with: from, to, bytes per pair.
type Beside<'a> = dyn Fn(&Communicator, &Slice, &Slice, usize) -> Result + Sync + 'a;

fn of_process() -> Result {
    let options = mpi::MpiOptions::default();
    let device: Arc<dyn Device> = Arc::new(CpuDevice::with_threads(1)?);
    let world = mpi::start(&options, device)?;
    let found = mpi::probe(&options)?;
    let library = Library::open("an MPI library", &[found.library])?;
    // SAFETY: the function has this type in the standard's ABI, in which handles are pointers.
    let function = unsafe { library.symbol::<Alltoallv>("MPI_Alltoallv")? };
    measure(world, &|world, from, to, bytes| {
        plain(function, world, from, to, bytes)
    })
}

type Alltoallv = unsafe extern "C" fn(
    *const c_void,
    *const c_int,
    *const c_int,
    usize,
    *mut c_void,
    *const c_int,
    *const c_int,
    usize,
    usize,
) -> c_int;

const COMM_WORLD: usize = 0x101;
const BYTE: usize = 0x247;

fn plain(
    function: Alltoallv,
    world: &Communicator,
    from: &Slice,
    to: &Slice,
    bytes: usize,
) -> Result {
    let counts = vec![c_int::try_from(bytes)?; world.size()];
    let places: Vec<c_int> = (0..counts.len()).map(|i| counts[0] * i as c_int).collect();
    let address = |slice: &Slice| slice.buffer().ptr().0 as *mut c_void;
    let (counts, places) = (counts.as_ptr(), places.as_ptr());
    // SAFETY: MPI is initialised, both buffers are a CPU's and have a part for every rank.
    let code = unsafe {
        function(
            address(from),
            counts,
            places,
            BYTE,
            address(to),
            counts,
            places,
            BYTE,
            COMM_WORLD,
        )
    };
    (code == 0)
        .then_some(())
        .ok_or_else(|| format!("MPI_Alltoallv: {code}").into())
}

/// As many bytes as this rank receives, each copied once.
fn copies(world: &Communicator, from: &Slice, to: &Slice, bytes: usize) -> Result {
    let address = |slice: &Slice| slice.buffer().ptr().0 as *mut u8;
    for part in 0..world.size() {
        let offset = part * bytes;
        // SAFETY: both buffers are a CPU's, have a part for every rank and do not overlap.
        unsafe {
            let (from, to) = (address(from).add(offset), address(to).add(offset));
            std::ptr::copy_nonoverlapping(from, to, bytes);
        }
    }
    Ok(())
}

fn measure(mut world: Communicator, beside: &Beside<'_>) -> Result {
    if world.rank() == 0 {
        println!(
            "{:>12} {:>6} {:>10} {:>10} {:>10} {:>7} {:>7} {:>10} {:>10} {:>10}",
            "bytes a rank",
            "rounds",
            "equal us",
            "counts us",
            "beside us",
            "equal",
            "counts",
            "least: eq.",
            "counts",
            "beside"
        );
    }
    for bytes in SIZES {
        let rounds = (256 << 20) / bytes.max(1 << 20);
        line(&mut world, beside, bytes, rounds.clamp(15, 150))?;
    }
    Ok(world.finish(&Call::default())?)
}

/// Ratios are medians over the rounds: above 1 ours is the faster.
fn line(world: &mut Communicator, beside: &Beside<'_>, bytes: usize, rounds: usize) -> Result {
    let part = bytes / world.size();
    let device = Arc::clone(world.device());
    let fill = |byte: u8| -> Result<Slice> {
        let buffer = device.alloc(bytes)?;
        device.upload(&vec![byte; bytes], &buffer, 0)?;
        Ok(Slice::whole(&Arc::new(buffer), CommElement::U8))
    };
    let (from, to) = (fill(world.rank() as u8 + 1)?, fill(0xEE)?);
    let mut times: Vec<[Duration; 3]> = Vec::new();
    for round in 0..rounds + 2 {
        let mut row = [Duration::ZERO; 3];
        // Whoever comes first finds other caches than those after.
        for turn in 0..KINDS.len() {
            let kind = (round + turn) % KINDS.len();
            world.barrier(&Call::default())?.wait()?;
            let start = Instant::now();
            match kind {
                0 => equal(world, &from, &to)?,
                1 => by_counts(world, &from, &to, part)?,
                _ => beside(world, &from, &to, part)?,
            }
            row[kind] = start.elapsed();
        }
        times.push(row);
    }
    check(world, &device, &to, part)?;
    report(world, bytes, &times[2..])
}

fn equal(
    world: &mut Communicator,
    from: &Slice,
    to: &Slice,
) -> std::result::Result<(), CollectiveError> {
    let call = Call::default();
    world.all_to_all(from, to, Algorithm::Direct, &call)?.wait()
}

fn by_counts(
    world: &mut Communicator,
    from: &Slice,
    to: &Slice,
    part: usize,
) -> std::result::Result<(), CollectiveError> {
    let counts = vec![part; world.size()];
    let call = Call::default();
    let direct = Algorithm::Direct;
    world
        .all_to_all_v(from, &counts, to, &counts, direct, &call)?
        .wait()
}

/// The last of the turns may be a copy of the rank's own bytes; ours is done once more.
fn check(world: &mut Communicator, device: &Arc<dyn Device>, to: &Slice, part: usize) -> Result {
    let mut bytes = vec![0; part * world.size()];
    let from = {
        let buffer = device.alloc(bytes.len())?;
        let own = vec![world.rank() as u8 + 1; bytes.len()];
        device.upload(&own, &buffer, 0)?;
        Slice::whole(&Arc::new(buffer), CommElement::U8)
    };
    equal(world, &from, to)?;
    device.download(to.buffer(), 0, &mut bytes)?;
    let parts = bytes.chunks(part.max(1)).enumerate();
    for (peer, bytes) in parts {
        if bytes.iter().any(|byte| *byte != peer as u8 + 1) {
            return Err(format!("wrong bytes from rank {peer}").into());
        }
    }
    Ok(())
}

fn report(world: &mut Communicator, bytes: usize, own: &[[Duration; 3]]) -> Result {
    let numbers: Vec<u8> = own
        .iter()
        .flatten()
        .flat_map(|time| (time.as_nanos() as u64).to_le_bytes())
        .collect();
    let all = world.gather_bytes(&numbers, &Call::default())?;
    if world.rank() > 0 {
        return Ok(());
    }
    let rounds = own.len();
    // The slowest rank of each round and kind.
    let time = |round: usize, kind: usize| -> f64 {
        let at = (3 * round + kind) * 8;
        let nanos = all.iter().map(|times| {
            let number = times[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(number)
        });
        nanos.max().unwrap_or_default() as f64 / 1e3
    };
    let median = |value: &dyn Fn(usize) -> f64| {
        let mut list: Vec<f64> = (0..rounds).map(value).collect();
        list.sort_by(f64::total_cmp);
        list[rounds / 2]
    };
    let least = |kind: usize| (0..rounds).map(|r| time(r, kind)).fold(f64::MAX, f64::min);
    println!(
        "{bytes:>12} {rounds:>6} {:>10.1} {:>10.1} {:>10.1} {:>7.2} {:>7.2} {:>10.1} {:>10.1} {:>10.1}",
        median(&|round| time(round, 0)),
        median(&|round| time(round, 1)),
        median(&|round| time(round, 2)),
        median(&|round| time(round, 2) / time(round, 0)),
        median(&|round| time(round, 2) / time(round, 1)),
        least(0),
        least(1),
        least(2),
    );
    Ok(())
}
