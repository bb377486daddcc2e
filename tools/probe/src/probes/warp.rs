//! Collectives of a warp.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use tera::Context;

/// One kernel.
pub const PROBES: &[Probe] = &[Probe::new("warp collectives", 80, run)];

const CASES: usize = 32;
const NAMES: [&str; 4] = ["shfl.idx", "match.any", "vote.ballot", "redux.max.u32"];

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let program = bench.load(File {
        name: "warp.cu",
        activations: "bf16",
        context: Context::new(),
        kernels: vec![Kernel {
            symbol: "warps".into(),
            threads: 32,
            shared_bytes: 0,
            cluster: 1,
            takes: vec![Takes::Words; 3],
        }],
    })?;
    let values = random.words(CASES * 32);
    let lanes: Vec<u32> = (0..CASES * 32).map(|_| random.bits() % 32).collect();
    let mut out = vec![0; CASES * 4 * 32];
    let arguments = &mut [
        Value::Read(&values),
        Value::Read(&lanes),
        Value::Words(&mut out),
    ];
    bench.run(&program, "warps", CASES, arguments)?;
    let expected: Vec<[Vec<u32>; 4]> = values
        .chunks_exact(32)
        .zip(lanes.chunks_exact(32))
        .map(|(values, lanes)| by_table(values, lanes))
        .collect();
    let row = |(index, name): (usize, &&str)| {
        let got = out
            .chunks_exact(128)
            .map(|block| &block[32 * index..][..32]);
        let all = got.zip(&expected);
        let result = all.map(|(got, table)| same(name, got, &table[index]));
        Row::compared(*name, CASES, result.collect::<Result<_, _>>())
    };
    Ok(NAMES.iter().enumerate().map(row).collect())
}

fn by_table(values: &[u32], lanes: &[u32]) -> [Vec<u32>; 4] {
    let mask = |wanted: &dyn Fn(u32) -> bool| {
        let set = (0..32).filter(|lane| wanted(values[*lane as usize]));
        set.fold(0u32, |mask, lane| mask | 1 << lane)
    };
    let most = values.iter().copied().max().unwrap_or_default();
    [
        lanes.iter().map(|lane| values[*lane as usize]).collect(),
        values
            .iter()
            .map(|own| mask(&|v| v % 5 == own % 5))
            .collect(),
        vec![mask(&|v| v % 3 == 0); 32],
        vec![most; 32],
    ]
}
