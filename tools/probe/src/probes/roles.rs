//! Warp specialisation and dependent launches. The probes check that the
//! instructions run and do no harm, because their gain cannot be observed.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use tera::Context;

/// Both kernels of the file.
pub const PROBES: &[Probe] = &[Probe::new("roles of warps", 90, run)];

const DEPENDENT_BLOCKS: usize = 4;

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let kernel = |symbol: &str, threads| Kernel {
        symbol: symbol.into(),
        threads,
        shared_bytes: 0,
        cluster: 1,
        takes: vec![Takes::Words; 2],
    };
    let program = bench.load(File {
        name: "roles.cu",
        activations: "bf16",
        context: Context::new(),
        kernels: vec![kernel("roles", 384), kernel("dependents", 128)],
    })?;
    let input = random.words(128 * DEPENDENT_BLOCKS);
    let mut out = vec![0; 256 + 12];
    let values = &mut [Value::Read(&input), Value::Words(&mut out)];
    bench.run(&program, "roles", 1, values)?;
    let (tile, elected) = out.split_at(256);
    let halves = input[..256].chunks_exact(128);
    let mirrored: Vec<u32> = halves
        .flat_map(|half| half.iter().rev().map(|w| !w))
        .collect();
    let mut copied = vec![0; input.len()];
    let values = &mut [Value::Read(&input), Value::Words(&mut copied)];
    bench.run(&program, "dependents", DEPENDENT_BLOCKS, values)?;
    let inverted: Vec<u32> = input.iter().map(|word| !word).collect();
    Ok(vec![
        Row::compared(
            "setmaxnreg, named barriers",
            1,
            same("tile", tile, &mirrored),
        ),
        Row::compared("elect.sync", 12, same("elected", elected, &[1; 12])),
        Row::compared("griddepcontrol", 1, same("words", &copied, &inverted)),
    ])
}
