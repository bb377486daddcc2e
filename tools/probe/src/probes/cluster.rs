//! Clusters: shared memory of neighbour blocks, and boxes multicast to two.

use super::{Probe, tma};
use crate::bench::{Bench, File, Kernel, Program, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_kernel::{DType, Swizzle};
use tera::Context;

/// Shared memory of neighbours, and multicast.
pub const PROBES: &[Probe] = &[
    Probe::new("shared memory of a cluster", 90, neighbours),
    Probe::new("box loads, multicast", 90, multicast),
];

const THREADS: usize = 64;
const CLUSTERS: usize = 4;

fn program(bench: &Bench, kernels: Vec<Kernel>) -> Result<Program, Trouble> {
    let mut context = Context::new();
    context.insert("words", &tma::WORDS);
    bench.load(File {
        name: "cluster.cu",
        activations: "bf16",
        context,
        kernels,
    })
}

fn neighbours(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for (symbol, what) in [
        ("neighbour_read", "barrier.cluster, mapa, ld"),
        ("neighbour_signal", "mbarrier.arrive, mapa, ld"),
    ] {
        for cluster in [1, 2, 4] {
            let kernel = Kernel {
                symbol: symbol.into(),
                threads: THREADS as u32,
                shared_bytes: 0,
                cluster: cluster as u32,
                takes: vec![Takes::Words, Takes::Words, Takes::I64],
            };
            let program = program(bench, vec![kernel])?;
            let blocks = CLUSTERS * cluster;
            let input = random.words(blocks * THREADS);
            let mut out = vec![0; blocks * (1 + THREADS)];
            let values = &mut [
                Value::Read(&input),
                Value::Words(&mut out),
                Value::I64(cluster as i64),
            ];
            bench.run(&program, symbol, blocks, values)?;
            let result = same("ranks and tiles", &out, &of_neighbours(&input, cluster));
            let name = format!("cluster of {cluster}: {what}");
            rows.push(Row::compared(name, CLUSTERS, result));
        }
    }
    Ok(rows)
}

/// Returns, for each block, its rank and then the words of the next block of
/// its cluster.
fn of_neighbours(input: &[u32], cluster: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for tiles in input.chunks_exact(cluster * THREADS) {
        for rank in 0..cluster {
            let next = (rank + 1) % cluster;
            all.push(rank as u32);
            all.extend(&tiles[next * THREADS..][..THREADS]);
        }
    }
    all
}

fn multicast(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for swizzle in [Swizzle::None, Swizzle::B128] {
        let mut result = Ok(());
        for dtype in [DType::Bf16, DType::F32] {
            let case = tma::case(random, dtype, 2, swizzle);
            let outcome = multicast_of(bench, random, &case)?;
            result = result.and(outcome);
        }
        let name = format!("box load 2-D, swizzle {swizzle:?}, to 2 blocks");
        rows.push(Row::compared(name, 2 * CLUSTERS, result));
    }
    Ok(rows)
}

fn multicast_of(
    bench: &Bench,
    random: &mut Random,
    case: &tma::Case,
) -> Result<Result<(), String>, Trouble> {
    let kernel = Kernel {
        symbol: "multicast".into(),
        threads: 128,
        shared_bytes: 2 * tma::BYTES as u32 + 16,
        cluster: 2,
        takes: vec![Takes::Map(case.map), Takes::Words, Takes::Words, Takes::I64],
    };
    let program = program(bench, vec![kernel])?;
    let at: Vec<[i32; 5]> = (0..2 * CLUSTERS)
        .map(|_| tma::coordinates(random, case))
        .collect();
    let mut memory = random.words(tma::words_of(case));
    let expected = to_both(case, &at, &tma::bytes(&memory));
    let pairs: Vec<u32> = at
        .iter()
        .flat_map(|at| [at[0], at[1]])
        .map(i32::cast_unsigned)
        .collect();
    let mut image = vec![0; 4 * CLUSTERS * tma::WORDS];
    let values = &mut [
        Value::Tensor(&mut memory, case.dims),
        Value::Read(&pairs),
        Value::Words(&mut image),
        Value::I64(case.table.box_bytes().into()),
    ];
    bench.run(&program, "multicast", 2 * CLUSTERS, values)?;
    Ok(same("both blocks", &image, &expected))
}

/// Returns the boxes of a cluster's two blocks, in each of the two.
fn to_both(case: &tma::Case, at: &[[i32; 5]], memory: &[u8]) -> Vec<u32> {
    let boxes = |pair: &[[i32; 5]]| {
        let each = pair.iter().map(|at| tma::loaded(case, &at[..2], memory));
        tma::words(&each.collect::<Vec<_>>().concat()).repeat(2)
    };
    at.chunks_exact(2).flat_map(boxes).collect()
}
