//! mbarriers: phases, and the bytes that they wait for.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::mbarrier::{Mbarrier, MbarrierError};
use tera::Context;

/// One kernel.
pub const PROBES: &[Probe] = &[Probe::new("mbarrier", 90, run)];

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let program = bench.load(File {
        name: "mbarrier.cu",
        activations: "bf16",
        context: Context::new(),
        kernels: vec![Kernel {
            symbol: "barrier_states".into(),
            threads: 32,
            shared_bytes: 0,
            cluster: 1,
            takes: vec![Takes::Words; 2],
        }],
    })?;
    let input = random.words(64);
    let states = by_table().unwrap_or_else(|error| panic!("the probe misuses a barrier: {error}"));
    let mut out = vec![0; states.len() + 64];
    let values = &mut [Value::Read(&input), Value::Words(&mut out)];
    bench.run(&program, "barrier_states", 1, values)?;
    let (got, copied) = out.split_at(states.len());
    Ok(vec![
        Row::compared("mbarrier phases and bytes", 8, same("states", got, &states)),
        Row::compared("cp.async.bulk", 3, same("bytes", copied, &input)),
    ])
}

/// Runs the kernel's steps on the state machine.
fn by_table() -> Result<Vec<u32>, MbarrierError> {
    let mut barrier = Mbarrier::load(Mbarrier::init(0, 3)?)?;
    let mut states = Vec::new();
    let mut note = |barrier: &Mbarrier| {
        states.extend([false, true].map(|parity| u32::from(barrier.test_parity(parity))));
    };
    note(&barrier);
    for _ in 0..3 {
        barrier.arrive(1)?;
        note(&barrier);
    }
    barrier.arrive_expect_tx(160)?;
    barrier.arrive(2)?;
    note(&barrier);
    barrier.complete_tx(160)?;
    note(&barrier);
    barrier.arrive(1)?;
    barrier.arrive_expect_tx(96)?;
    note(&barrier);
    barrier.complete_tx(64)?;
    barrier.complete_tx(32)?;
    barrier.arrive(1)?;
    note(&barrier);
    Ok(states)
}
