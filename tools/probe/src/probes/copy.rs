//! `cp.async` with its zero fill and its groups.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use tera::Context;

/// Copies of 16, 8 and 4 bytes.
pub const PROBES: &[Probe] = &[Probe::new("cp.async", 80, run)];

const CASES: usize = 4;

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let sizes = [16, 8, 4];
    let program = bench.load(File {
        name: "copy.cu",
        activations: "bf16",
        context: Context::new(),
        kernels: sizes.map(kernel).into(),
    })?;
    let mut rows = Vec::new();
    for bytes in sizes {
        let words = bytes / 4;
        let input = random.words(CASES * 128 * words);
        let wanted: Vec<u32> = (0..CASES * 128).map(|_| random.bits() % 2).collect();
        let mut out = vec![0; input.len()];
        let values = &mut [
            Value::Read(&input),
            Value::Read(&wanted),
            Value::Words(&mut out),
        ];
        bench.run(&program, &kernel(bytes).symbol, CASES, values)?;
        let table = input
            .iter()
            .enumerate()
            .map(|(index, word)| word * wanted[index / words]);
        let result = same("copies", &out, &table.collect::<Vec<_>>());
        let name = format!("cp.async of {bytes} bytes, zero fill, groups");
        rows.push(Row::compared(name, CASES * 128, result));
    }
    Ok(rows)
}

fn kernel(bytes: usize) -> Kernel {
    Kernel {
        symbol: format!("copy_{bytes}"),
        threads: 64,
        shared_bytes: 0,
        cluster: 1,
        takes: vec![Takes::Words; 3],
    }
}
