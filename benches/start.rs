//! The time until a layer is ready: from nothing, and from the cache.
//!
//! Each sample is a process of its own that opens the CPU engine and builds a
//! layer without weights to speak of, so that kernels are all that counts.
//! CPU time includes the compilers that the process started.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench start
//! ```

use moesaic::{Engine, EngineOptions, LayerSpec, Store};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of Qwen3-30B-A3B: what is compiled does not depend on the weights.
const SPEC: &str = include_str!("../examples/specs/qwen3-30b-a3b.toml");
const CHILD: &str = "MOESAIC_BENCH_START";

/// One start: wall and CPU time, and kernels compiled.
#[derive(Clone, Copy)]
struct Sample {
    wall: Duration,
    cpu: Duration,
    compiled: u64,
}

fn main() {
    if let Some(cache) = std::env::var_os(CHILD) {
        return child(Path::new(&cache));
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let cold: Vec<Sample> = (0..5)
        .map(|i| start(&folder.path().join(i.to_string())))
        .collect();
    let warm: Vec<Sample> = (0..40).map(|_| start(&folder.path().join("0"))).collect();
    println!("start of a layer, a process each (medians)");
    report("cold", &cold);
    report("warm", &warm);
}

fn start(cache: &Path) -> Sample {
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program)
        .env(CHILD, cache)
        .output()
        .expect("it can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<u64> = text
        .split_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect();
    let [wall, cpu, compiled] = numbers[..] else {
        panic!("{text}{}", String::from_utf8_lossy(&output.stderr))
    };
    Sample {
        wall: Duration::from_nanos(wall),
        cpu: Duration::from_nanos(cpu),
        compiled,
    }
}

fn child(cache: &Path) {
    let spec = LayerSpec::from_toml(SPEC).expect("the example is valid");
    let begin = (Instant::now(), cpu_time());
    let store = Some(Arc::new(Store::open(cache)));
    let options = EngineOptions {
        store,
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    engine.warm_up(&spec).expect("the kernels compile");
    let (wall, cpu) = (begin.0.elapsed(), cpu_time() - begin.1);
    println!(
        "{} {} {}",
        wall.as_nanos(),
        cpu.as_nanos(),
        engine.stats().compiled
    );
}

/// CPU time of this process and of the children it has waited for.
fn cpu_time() -> Duration {
    [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN]
        .into_iter()
        .map(usage)
        .sum()
}

fn usage(who: libc::c_int) -> Duration {
    // SAFETY: all-zero bytes are a valid rusage, which is plain integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live rusage that is written and not kept.
    unsafe { libc::getrusage(who, &mut usage) };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn report(name: &str, samples: &[Sample]) {
    let ms = |pick: fn(&Sample) -> Duration| {
        let mut times: Vec<f64> = samples
            .iter()
            .map(|s| pick(s).as_secs_f64() * 1e3)
            .collect();
        times.sort_by(f64::total_cmp);
        (times[0], times[times.len() / 2], times[times.len() - 1])
    };
    let (wall, cpu) = (ms(|s| s.wall), ms(|s| s.cpu));
    println!(
        "  {name}: CPU {:.2} ms (min {:.2}, max {:.2}), wall {:.2} ms, {} kernels compiled, {} runs",
        cpu.1,
        cpu.0,
        cpu.2,
        wall.1,
        samples[0].compiled,
        samples.len(),
    );
}
