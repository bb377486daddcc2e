//! The parts of the Hopper GEMM together: boxes under the 128-byte swizzle,
//! descriptors, steps along a row, and places of sums. The expected result is a
//! plain product of matrices that uses none of the tables.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::float::{bf16_from_f32, f16_from_f32};
use moesaic_kernel::{Access, DType, Swizzle, TensorMap};
use tera::Context;

/// Narrow, odd and wide products.
pub const PROBES: &[Probe] = &[Probe::new("tile product", 90, run)];

const DEPTH: usize = 128;
const ROWS: usize = 64;

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for dtype in [DType::F16, DType::Bf16] {
        for columns in [8, 88, 256] {
            // Rows beyond these are zeros.
            let given = random.range(33, 64) as usize;
            let result = product(bench, random, dtype, [given, columns])?;
            let name = format!("tile product {dtype} 64x{columns}x{DEPTH}, boxes into wgmma");
            rows.push(Row::compared(name, 1, result));
        }
    }
    Ok(rows)
}

fn product(
    bench: &Bench,
    random: &mut Random,
    dtype: DType,
    [rows, columns]: [usize; 2],
) -> Result<Result<(), String>, Trouble> {
    let mut context = Context::new();
    context.insert("columns", &columns);
    let program = bench.load(File {
        name: "tile.cu",
        activations: if dtype == DType::F16 { "f16" } else { "bf16" },
        context,
        kernels: vec![Kernel {
            symbol: "tile_product".into(),
            threads: 128,
            shared_bytes: ((ROWS + columns) * 2 * DEPTH + 1024) as u32,
            cluster: 1,
            takes: vec![
                Takes::Map(map(dtype, ROWS)),
                Takes::Map(map(dtype, columns)),
                Takes::Words,
            ],
        }],
    })?;
    let left = numbers(random, rows * DEPTH);
    let right = numbers(random, columns * DEPTH);
    let mut product = vec![0; ROWS * columns];
    let dims = |rows: usize| [DEPTH as u64, rows as u64, 1, 1, 1];
    let values = &mut [
        Value::Tensor(&mut packed(dtype, &left), dims(rows)),
        Value::Tensor(&mut packed(dtype, &right), dims(columns)),
        Value::Words(&mut product),
    ];
    bench.run(&program, "tile_product", 1, values)?;
    Ok(same("product", &product, &plain(&left, &right)))
}

fn map(dtype: DType, rows: usize) -> TensorMap {
    TensorMap {
        dtype,
        access: Access::Read,
        rank: 2,
        tile: [64, rows as u32, 1, 1, 1],
        swizzle: Swizzle::B128,
    }
}

/// Returns whole numbers from -8 to 8, whose sums are exact.
fn numbers(random: &mut Random, count: usize) -> Vec<i32> {
    (0..count).map(|_| random.range(-8, 8) as i32).collect()
}

fn packed(dtype: DType, numbers: &[i32]) -> Vec<u32> {
    let bits = |number: i32| match dtype {
        DType::F16 => u32::from(f16_from_f32(number as f32)),
        _ => u32::from(bf16_from_f32(number as f32)),
    };
    let pairs = numbers.chunks_exact(2);
    pairs
        .map(|pair| bits(pair[0]) | bits(pair[1]) << 16)
        .collect()
}

/// Returns left · rightᵀ as f32, with zeros for the rows missing to 64.
fn plain(left: &[i32], right: &[i32]) -> Vec<u32> {
    let columns = right.len() / DEPTH;
    let mut product = vec![0f32.to_bits(); ROWS * columns];
    for (row, left) in left.chunks_exact(DEPTH).enumerate() {
        for (column, right) in right.chunks_exact(DEPTH).enumerate() {
            let sum: i32 = left.iter().zip(right).map(|(a, b)| a * b).sum();
            product[row * columns + column] = (sum as f32).to_bits();
        }
    }
    product
}
