//! One launch: arguments, blocks spread over the cores of the host, the result.

use crate::code::layout::SHARED_START;
use crate::finding::{Finding, FindingKind};
use crate::machine::{BlockFailure, ClusterRunner, LaunchContext, Tally, block_index};
use crate::memory::{Conflict, LaunchLog, Regions};
use crate::report::count;
use crate::state::{CheckSet, DeviceState, ModuleKernel, lock};
use moesaic_target::{Arg, ArgBlock, DeviceError, LaunchDims, LaunchReason, SharedError, gpu_grid};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Runs a launch to its end.
pub fn launch(
    shared: &DeviceState,
    loaded: &ModuleKernel,
    dims: LaunchDims,
    args: &[Arg],
) -> Result<(), DeviceError> {
    let symbol = &loaded.kernel.name;
    let Some(grid) = gpu_grid(symbol, &dims)? else {
        return Ok(());
    };
    let params = params(loaded, args)?;
    let refuse = |error: SharedError| refused(symbol, error);
    let cluster = cluster(loaded, &dims, grid).map_err(|error| refuse(SharedError::new(error)))?;
    let finding = match size_finding(shared, loaded, &dims) {
        Some(finding) => Some(finding),
        None => run(shared, loaded, &dims, grid, cluster, &params),
    };
    match finding {
        None => Ok(()),
        Some(finding) => {
            lock(&shared.findings).push(finding.clone());
            Err(refuse(SharedError::new(finding)))
        }
    }
}

fn refused(symbol: &str, error: SharedError) -> DeviceError {
    DeviceError::Launch {
        kernel: symbol.to_string(),
        reason: LaunchReason::Simulator(error),
    }
}

/// A launch that the simulator refuses.
#[derive(Debug, thiserror::Error)]
enum RefusedLaunch {
    #[error("its signature was not given when it was loaded")]
    NoSignature,
    #[error("clusters of {asked} blocks, where the kernel is compiled for {fixed}")]
    OtherCluster { asked: u32, fixed: u32 },
    #[error("{blocks} blocks in x do not divide into clusters of {cluster} (of 16 at most)")]
    PartOfCluster { blocks: u32, cluster: u32 },
}

/// Returns the parameter block that the kernel reads.
fn params(loaded: &ModuleKernel, args: &[Arg]) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; loaded.kernel.param_bytes as usize];
    let Some(entry) = &loaded.entry else {
        let error = SharedError::new(RefusedLaunch::NoSignature);
        return Err(refused(&loaded.kernel.name, error));
    };
    let encode = |map: &moesaic_kernel::TensorMap, base, dims| {
        crate::tensor_map::encode(&entry.symbol, map, base, dims)
    };
    let mut block = ArgBlock::with_maps(entry, args, encode)?;
    // The layout of the parameter block is the text's, not the caller's: PTX
    // places each `.param` at its natural alignment, and ld.param addresses it
    // by that offset.
    for (param, pointer) in loaded.kernel.params.iter().zip(block.pointers()) {
        let (start, count) = (param.offset as usize, param.bytes as usize);
        // SAFETY: every argument has room for the largest, 128 bytes, and
        // loading has compared the sizes of the parameters.
        let from = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), count) };
        bytes[start..start + count].copy_from_slice(from);
    }
    Ok(bytes)
}

/// Returns the blocks per cluster, which the text fixes or the launch asks for.
fn cluster(loaded: &ModuleKernel, dims: &LaunchDims, grid: [u32; 2]) -> Result<u32, RefusedLaunch> {
    let asked = dims.cluster.max(1);
    let cluster = match loaded.kernel.cluster {
        Some(fixed) if asked != 1 && asked != fixed => {
            return Err(RefusedLaunch::OtherCluster { asked, fixed });
        }
        Some(fixed) => fixed.max(1),
        None => asked,
    };
    // PTX ISA, "Cluster of Cooperative Thread Arrays": 8 blocks are portable,
    // and 16 is the most that any architecture grants a kernel that opts in.
    if grid[0].is_multiple_of(cluster) && cluster <= 16 {
        Ok(cluster)
    } else {
        Err(RefusedLaunch::PartOfCluster {
            blocks: grid[0],
            cluster,
        })
    }
}

/// Returns a finding if the launch asks for more shared memory or threads than
/// there are.
fn size_finding(shared: &DeviceState, loaded: &ModuleKernel, dims: &LaunchDims) -> Option<Finding> {
    let kernel = &loaded.kernel;
    let at_start = |kind, message| BlockFailure {
        kind,
        block: [0; 3],
        threads: vec![0],
        pc: 0,
        other: None,
        message,
    };
    // The first kilobyte below SHARED_START does not count: the system reserves
    // it on real devices as well, and a launch cannot ask for it.
    let used = kernel.dynamic_shared - SHARED_START + dims.shared_bytes;
    if used > shared.shared_limit {
        let text = format!(
            "a block asks for {used} bytes of shared memory; there are {}",
            shared.shared_limit
        );
        return Some(loaded.finding(at_start(FindingKind::SharedSize, text)));
    }
    let most = kernel.max_threads.unwrap_or(1024).min(1024);
    if dims.threads == 0 || dims.threads > most {
        let text = format!(
            "a block of {} threads; the kernel takes 1 to {most}",
            dims.threads
        );
        return Some(loaded.finding(at_start(FindingKind::Operand, text)));
    }
    None
}

/// The result of the blocks that one host thread ran.
struct Part {
    executed: Vec<u64>,
    tally: Tally,
    failure: Option<(u64, BlockFailure)>,
}

fn run(
    shared: &DeviceState,
    loaded: &ModuleKernel,
    dims: &LaunchDims,
    grid: [u32; 2],
    cluster: u32,
    params: &[u8],
) -> Option<Finding> {
    let kernel = &loaded.kernel;
    let regions = lock(&shared.heap).regions();
    let log = LaunchLog::new(&regions);
    let launch = LaunchContext {
        kernel,
        params,
        regions: &regions,
        log: &log,
        grid: [grid[0], grid[1], 1],
        threads: dims.threads,
        cluster,
        shared_bytes: dims.shared_bytes,
        seed: shared.options.seed,
        in_order: kernel.in_order,
        dependent: loaded.entry.as_ref().is_some_and(|e| e.launch.dependent),
        full: shared.options.checks == CheckSet::Full,
    };
    let clusters = u64::from(grid[0]) * u64::from(grid[1]) / u64::from(cluster);
    // Results of such a kernel depend on the order of its blocks (float
    // atomics, waits for other blocks). One worker makes the order that of the
    // block numbers, on every host.
    let workers = if kernel.in_order {
        1
    } else {
        (shared.threads as u64).min(clusters).max(1)
    };
    let sum = Part::sum(spread(&launch, clusters, workers), kernel.code.len());
    // Blocks log their accesses apart and are compared here, once for the
    // launch. A race between blocks does not depend on the schedule then: it
    // shows even if the two blocks never ran at the same time.
    let conflict = log.finish(&regions, kernel.synchronises);
    let blocks = clusters * u64::from(cluster);
    let mut counters = lock(&shared.counters);
    count(&mut counters, kernel, blocks, &sum.executed, &sum.tally);
    // A block's own finding comes first. A conflict between blocks may only
    // follow from it, as with an address that went wrong.
    match sum.failure {
        Some((_, failure)) => Some(loaded.finding(failure)),
        None => conflict
            .filter(|_| launch.full)
            .map(|conflict| loaded.finding(race(loaded, &regions, launch.grid, conflict))),
    }
}

impl Part {
    /// Sums all parts, keeping the failure of the first block that has one.
    fn sum(parts: Vec<Part>, instructions: usize) -> Part {
        let mut sum = Part {
            executed: vec![0; instructions],
            tally: Tally::default(),
            failure: None,
        };
        for part in parts {
            let pairs = sum.executed.iter_mut().zip(&part.executed);
            pairs.for_each(|(sum, own)| *sum += own);
            sum.tally.add(&part.tally);
            sum.failure = match (sum.failure, part.failure) {
                (Some(a), Some(b)) => Some(if a.0 <= b.0 { a } else { b }),
                (a, b) => a.or(b),
            };
        }
        sum
    }
}

/// Runs the clusters on `workers` threads; each takes the next in order. A
/// failure stops the clusters behind it, so the first failing cluster is always
/// found.
fn spread(launch: &LaunchContext<'_>, clusters: u64, workers: u64) -> Vec<Part> {
    let (next, stop) = (AtomicU64::new(0), AtomicU64::new(clusters));
    let work = || {
        let mut machine = ClusterRunner::new(launch);
        let mut failure = None;
        loop {
            // Relaxed is enough: the counter hands out numbers alone. All
            // results travel through `join`, which orders them.
            let number = next.fetch_add(1, Relaxed);
            if number >= stop.load(Relaxed) {
                break;
            }
            if let Err(found) = machine.run(number) {
                // Clusters with lower numbers are all taken already and run to
                // their end, so the lowest failure wins however many threads
                // there are.
                stop.fetch_min(number, Relaxed);
                failure = Some((number, found));
                break;
            }
        }
        Part {
            executed: std::mem::take(&mut machine.executed),
            tally: std::mem::take(&mut machine.tally),
            failure,
        }
    };
    if workers == 1 {
        return vec![work()];
    }
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
        let mut parts = vec![work()];
        for helper in helpers {
            match helper.join() {
                Ok(part) => parts.push(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        parts
    })
}

/// Returns the failure for two blocks that touch the same byte.
fn race(
    loaded: &ModuleKernel,
    regions: &Regions,
    grid: [u32; 3],
    conflict: Conflict,
) -> BlockFailure {
    let line = |pc: u32| loaded.kernel.code[pc as usize].line;
    let name = |block: u64| {
        let [x, y, z] = block_index(grid, block);
        format!("block ({x}, {y}, {z})")
    };
    let other = match (conflict.both_write, conflict.atomic) {
        (true, _) => "writes",
        (_, true) => "updates or reads",
        _ => "reads",
    };
    let bytes = regions.list[conflict.region].bytes;
    let writer = conflict.writer;
    let second = match conflict.other {
        Some(block) => format!("{} {other} (PTX line {})", name(block.0), line(block.1)),
        None => "an ld.global.nc, which promises that nobody writes there, reads".to_string(),
    };
    BlockFailure {
        kind: FindingKind::GlobalRace,
        block: block_index(grid, writer.0),
        threads: Vec::new(),
        pc: writer.1,
        other: None,
        message: format!(
            "{} writes (PTX line {}) and {second} byte {} of an allocation of {bytes} bytes, \
             and nothing orders the two",
            name(writer.0),
            line(writer.1),
            conflict.offset
        ),
    }
}
