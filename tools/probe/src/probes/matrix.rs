//! `ldmatrix` and `stmatrix`.

use super::{Probe, lanes};
use crate::bench::{Bench, File, Kernel, Program, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::matrix::{address_lane, load, store};
use tera::Context;

/// Loads on every GPU, stores from Hopper on.
pub const PROBES: &[Probe] = &[
    Probe::new("ldmatrix", 80, loads),
    Probe::new("stmatrix", 90, stores),
];

const CASES: usize = 8;
const COUNTS: [usize; 3] = [1, 2, 4];

fn program(bench: &Bench, functions: [&str; 2]) -> Result<Program, Trouble> {
    let kernel = |function: &str, count: usize| Kernel {
        symbol: format!("{function}_x{count}"),
        threads: 32,
        shared_bytes: 0,
        cluster: 1,
        takes: vec![Takes::Words; 3],
    };
    let of = |function| COUNTS.map(|count| kernel(function, count));
    bench.load(File {
        name: "matrix.cu",
        activations: "bf16",
        context: Context::new(),
        kernels: functions.into_iter().flat_map(of).collect(),
    })
}

fn loads(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let functions = ["load_matrices", "load_transposed"];
    let program = program(bench, functions)?;
    let mut rows = Vec::new();
    for (function, transposed) in functions.into_iter().zip([false, true]) {
        for count in COUNTS {
            let symbol = format!("{function}_x{count}");
            let image = random.words(CASES * 128);
            let order = orders(random);
            let mut out = vec![0; CASES * count * 32];
            let values = &mut [
                Value::Read(&image),
                Value::Read(&order),
                Value::Words(&mut out),
            ];
            bench.run(&program, &symbol, CASES, values)?;
            let table = |case: usize| {
                let (image, order) = (&image[128 * case..], &order[32 * case..]);
                let matrices = 0..count;
                let read = matrices.map(|m| load(&matrix(image, order, m), transposed));
                read.collect::<Vec<_>>().concat()
            };
            let expected: Vec<u32> = (0..CASES).flat_map(table).collect();
            let name = format!("ldmatrix.x{count}{}", trans(transposed));
            rows.push(Row::compared(
                name,
                CASES,
                same("registers", &out, &expected),
            ));
        }
    }
    Ok(rows)
}

fn stores(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let functions = ["store_matrices", "store_transposed"];
    let program = program(bench, functions)?;
    let mut rows = Vec::new();
    for (function, transposed) in functions.into_iter().zip([false, true]) {
        for count in COUNTS {
            let symbol = format!("{function}_x{count}");
            let registers = random.words(CASES * count * 32);
            let order = orders(random);
            let before = random.words(CASES * 128);
            let mut out = before.clone();
            let values = &mut [
                Value::Read(&registers),
                Value::Read(&order),
                Value::Words(&mut out),
            ];
            bench.run(&program, &symbol, CASES, values)?;
            let mut expected = before;
            for (index, register) in lanes(&registers).iter().enumerate() {
                let (case, m) = (index / count, index % count);
                let written = store(register, transposed);
                for (r, row) in written.iter().enumerate() {
                    let at = order[32 * case + address_lane(m, r)] as usize;
                    let place = &mut expected[128 * case + 4 * at..][..4];
                    for (word, four) in place.iter_mut().zip(row.chunks_exact(4)) {
                        *word = u32::from_le_bytes(std::array::from_fn(|i| four[i]));
                    }
                }
            }
            let name = format!("stmatrix.x{count}{}", trans(transposed));
            rows.push(Row::compared(name, CASES, same("rows", &out, &expected)));
        }
    }
    Ok(rows)
}

const fn trans(transposed: bool) -> &'static str {
    if transposed { ".trans" } else { "" }
}

/// Returns, for each case, the row that each lane names.
fn orders(random: &mut Random) -> Vec<u32> {
    (0..CASES).flat_map(|_| random.permutation(32)).collect()
}

/// Returns the rows that the lanes of matrix `m` name.
fn matrix(image: &[u32], order: &[u32], m: usize) -> [[u8; 16]; 8] {
    std::array::from_fn(|r| {
        let at = 4 * order[address_lane(m, r)] as usize;
        std::array::from_fn(|byte| image[at + byte / 4].to_le_bytes()[byte % 4])
    })
}
