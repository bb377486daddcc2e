//! TMA: boxes of 1 to 5 dimensions under each swizzle, loaded, stored and
//! reduced, across the edges of their tensors.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Program, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::float::{bf16_from_f32, f16_from_f32};
use moesaic_hardware::tma::{BulkReduction, box_moves, fill, reduce};
use moesaic_hardware::{swizzle, tensor_map};
use moesaic_kernel::{Access, DType, Swizzle, TensorMap};
use tera::Context;

/// Both directions, and reductions.
pub const PROBES: &[Probe] = &[
    Probe::new("box loads", 90, loads),
    Probe::new("box stores", 90, stores),
    Probe::new("box reductions", 90, reductions),
];

/// Words of shared memory that are compared: the largest box, and as much
/// behind it.
pub(super) const WORDS: usize = 4096;
pub(super) const BYTES: usize = 4 * WORDS;
const LOADS: usize = 8;
const STORES: usize = 15;
const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64];
const REDUCTIONS: [(&str, BulkReduction); 6] = [
    ("add", BulkReduction::Add),
    ("min", BulkReduction::Min),
    ("max", BulkReduction::Max),
    ("and", BulkReduction::And),
    ("or", BulkReduction::Or),
    ("xor", BulkReduction::Xor),
];
const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// A tensor with a box.
pub(super) struct Case {
    pub(super) map: TensorMap,
    pub(super) table: tensor_map::TensorMap,
    pub(super) dims: [u64; 5],
    rank: usize,
}

fn loads(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    each(|rank, swizzle| load_row(bench, random, rank, swizzle))
}

fn stores(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    each(|rank, swizzle| store_row(bench, random, rank, swizzle))
}

fn each(mut row: impl FnMut(usize, Swizzle) -> Result<Row, Trouble>) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for rank in 1..=5 {
        for swizzle in SWIZZLES {
            rows.push(row(rank, swizzle)?);
        }
    }
    Ok(rows)
}

fn load_row(
    bench: &Bench,
    random: &mut Random,
    rank: usize,
    swizzle: Swizzle,
) -> Result<Row, Trouble> {
    let mut result = Ok(());
    for dtype in TYPES {
        let case = case(random, dtype, rank, swizzle);
        let mut memory = random.words(words_of(&case));
        let at: Vec<i32> = (0..LOADS)
            .flat_map(|_| coordinates(random, &case))
            .collect();
        let mut image = vec![0; LOADS * WORDS];
        let program = program(bench, &case)?;
        let kept = memory.clone();
        let values = &mut [
            Value::Tensor(&mut memory, case.dims),
            Value::Read(&at.iter().map(|c| c.cast_unsigned()).collect::<Vec<_>>()),
            Value::Words(&mut image),
            Value::I64(case.table.box_bytes().into()),
        ];
        bench.run(&program, &format!("box_load_{rank}"), LOADS, values)?;
        for (index, got) in image.chunks_exact(WORDS).enumerate() {
            let at = &at[5 * index..][..rank];
            let expected = words(&loaded(&case, at, &bytes(&kept)));
            let what = format!("{dtype} of {:?} at {at:?}", &case.dims[..rank]);
            result = result.and_then(|()| same(&what, got, &expected));
        }
    }
    let name = format!("box load {rank}-D, swizzle {swizzle:?}");
    Ok(Row::compared(name, LOADS * TYPES.len(), result))
}

fn store_row(
    bench: &Bench,
    random: &mut Random,
    rank: usize,
    swizzle: Swizzle,
) -> Result<Row, Trouble> {
    let mut result = Ok(());
    for dtype in TYPES.into_iter().cycle().take(STORES) {
        let case = case(random, dtype, rank, swizzle);
        let before = random.words(words_of(&case));
        let image = random.words(WORDS);
        let write = |old: &mut [u8], new: &[u8]| old.copy_from_slice(new);
        let outcome = write_box(bench, random, &case, "store", (before, image), write)?;
        result = result.and(outcome);
    }
    let name = format!("box store {rank}-D, swizzle {swizzle:?}");
    Ok(Row::compared(name, STORES, result))
}

/// Probes reductions of whole numbers, so that each sum has one correct result.
fn reductions(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::I32] {
        for (name, op) in REDUCTIONS {
            if has(dtype, op) {
                rows.push(reduction_row(bench, random, dtype, (name, op))?);
            }
        }
    }
    Ok(rows)
}

/// Returns true if TMA has the reduction for the type.
fn has(dtype: DType, op: BulkReduction) -> bool {
    let element = table_element(dtype);
    let (mut old, new) = ([0; 8], [0; 8]);
    reduce(op, element, &mut old, &new).is_ok()
}

fn reduction_row(
    bench: &Bench,
    random: &mut Random,
    dtype: DType,
    (name, op): (&str, BulkReduction),
) -> Result<Row, Trouble> {
    let mut result = Ok(());
    for rank in 1..=5 {
        let swizzle = random.pick(&SWIZZLES);
        let case = case(random, dtype, rank, swizzle);
        let before = numbers(random, dtype, words_of(&case));
        let image = numbers(random, dtype, WORDS);
        let element = case.table.element;
        let apply = |old: &mut [u8], new: &[u8]| {
            reduce(op, element, old, new).expect("the engine has it for this type");
        };
        let outcome = write_box(bench, random, &case, name, (before, image), apply)?;
        result = result.and(outcome);
    }
    let name = format!("box reduction {name} of {dtype}, 1-D to 5-D");
    Ok(Row::compared(name, 5, result))
}

/// Runs a kernel that writes a box into a tensor, and compares the whole
/// tensor.
fn write_box(
    bench: &Bench,
    random: &mut Random,
    case: &Case,
    way: &str,
    (before, image): (Vec<u32>, Vec<u32>),
    write: impl Fn(&mut [u8], &[u8]),
) -> Result<Result<(), String>, Trouble> {
    let program = program(bench, case)?;
    let at = coordinates(random, case);
    let mut memory = before.clone();
    let values = &mut [
        Value::Tensor(&mut memory, case.dims),
        Value::Read(&at.map(|c| c.cast_unsigned())),
        Value::Read(&image),
    ];
    bench.run(&program, &format!("box_{way}_{}", case.rank), 1, values)?;
    let (mut expected, from) = (bytes(&before), bytes(&image));
    moves(case, &at[..case.rank], |shared, global, count| {
        if let Some(to) = global {
            write(&mut expected[to..to + count], &from[shared..shared + count]);
        }
    });
    let rank = case.rank;
    let what = format!("{} of {:?} at {at:?}", case.map.dtype, &case.dims[..rank]);
    Ok(same(&what, &memory, &words(&expected)))
}

fn program(bench: &Bench, case: &Case) -> Result<Program, Trouble> {
    let rank = case.rank;
    let kernel = |way: &str, takes: &[Takes]| Kernel {
        symbol: format!("box_{way}_{rank}"),
        threads: 128,
        shared_bytes: BYTES as u32 + 16,
        cluster: 1,
        takes: [&[Takes::Map(case.map), Takes::Words], takes].concat(),
    };
    bench.load(File {
        name: "tma.cu",
        activations: "bf16",
        context: context(rank),
        kernels: [kernel("load", &[Takes::Words, Takes::I64])]
            .into_iter()
            .chain(ways().map(|way| kernel(way, &[Takes::Words])))
            .collect(),
    })
}

/// Iterates over the ways to write a box.
fn ways() -> impl Iterator<Item = &'static str> {
    std::iter::once("store").chain(REDUCTIONS.map(|(name, _)| name))
}

/// Returns the coordinates of a box, as the instructions name them.
fn context(rank: usize) -> Context {
    let list = |item: &dyn Fn(usize) -> String| (0..rank).map(item).collect::<Vec<_>>().join(", ");
    let operands = |first: usize| format!("{{{}}}", list(&|i| format!("%{}", first + i)));
    let mut context = Context::new();
    context.insert("words", &WORDS);
    context.insert("rank", &rank);
    context.insert("ways", &ways().collect::<Vec<_>>());
    context.insert("load_at", &operands(3));
    context.insert("store_at", &operands(2));
    context.insert(
        "bound",
        &format!(", {}", list(&|i| format!("\"r\"(at[{i}])"))),
    );
    context.insert("given", &format!(", {}", list(&|i| format!("at[{i}]"))));
    context
}

/// Draws a dense tensor whose rows are multiples of 16 bytes, and a box of at
/// most 8 KB.
pub(super) fn case(random: &mut Random, dtype: DType, rank: usize, swizzle: Swizzle) -> Case {
    let size = dtype.size() as i64;
    let pattern = table_swizzle(swizzle);
    let row = match swizzle {
        Swizzle::None => 16 * random.range(1, 8),
        _ => i64::from(pattern.span()),
    };
    let (mut tile, mut dims) = ([1; 5], [1; 5]);
    tile[0] = (row / size) as u32;
    dims[0] = (16 * random.range(1, 12) / size) as u64;
    for dim in 1..rank {
        tile[dim] = random.range(1, if dim == 1 { 12 } else { 2 }) as u32;
        dims[dim] = random.range(1, 7) as u64;
    }
    if rank == 1 {
        // A single row may end anywhere.
        dims[0] = random.range(1, 100) as u64;
    }
    let map = TensorMap {
        dtype,
        access: Access::ReadWrite,
        rank: rank as u8,
        tile,
        swizzle,
    };
    let element = table_element(dtype);
    let table = tensor_map::TensorMap::dense(element, 0, &dims[..rank], &tile[..rank], pattern);
    Case {
        map,
        table,
        dims,
        rank,
    }
}

fn table_element(dtype: DType) -> tensor_map::ElementType {
    match dtype {
        DType::F32 => tensor_map::ElementType::F32,
        DType::F16 => tensor_map::ElementType::F16,
        DType::Bf16 => tensor_map::ElementType::Bf16,
        DType::I32 => tensor_map::ElementType::S32,
        DType::I64 => tensor_map::ElementType::S64,
    }
}

fn table_swizzle(swizzle: Swizzle) -> swizzle::Swizzle {
    match swizzle {
        Swizzle::None => swizzle::Swizzle::None,
        Swizzle::B32 => swizzle::Swizzle::B32,
        Swizzle::B64 => swizzle::Swizzle::B64,
        Swizzle::B128 => swizzle::Swizzle::B128,
    }
}

/// Returns the words of the whole tensor.
pub(super) fn words_of(case: &Case) -> usize {
    let elements: u64 = case.dims.iter().product();
    (elements as usize * case.map.dtype.size()).div_ceil(4)
}

/// Draws five coordinates of a box that meets the tensor, often at its edge;
/// one in four may miss it.
pub(super) fn coordinates(random: &mut Random, case: &Case) -> [i32; 5] {
    let miss = i64::from(random.range(0, 3) == 0);
    std::array::from_fn(|dim| {
        let (size, tile) = (case.dims[dim] as i64, i64::from(case.map.tile[dim]));
        if dim < case.rank {
            random.range(1 - tile - miss, size - 1 + miss) as i32
        } else {
            0
        }
    })
}

/// Calls `visit` for every move with its place in shared memory, its place in
/// the tensor, and its bytes.
fn moves(case: &Case, at: &[i32], mut visit: impl FnMut(usize, Option<usize>, usize)) {
    box_moves(&case.table, at, 0, |piece| {
        let global = piece.global.map(|address| address as usize);
        visit(piece.shared as usize, global, piece.bytes as usize);
    })
    .unwrap_or_else(|error| panic!("the probe asks for a wrong box: {error}"));
}

/// Returns the shared memory after a load, by the table.
pub(super) fn loaded(case: &Case, at: &[i32], memory: &[u8]) -> Vec<u8> {
    let mut image = vec![0xcc; BYTES];
    let outside = fill(&case.table);
    moves(case, at, |shared, global, count| {
        let from = global.map_or(&outside[..count], |from| &memory[from..from + count]);
        image[shared..shared + count].copy_from_slice(from);
    });
    image
}

pub(super) fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn words(bytes: &[u8]) -> Vec<u32> {
    let four = bytes.chunks_exact(4);
    four.map(|four| u32::from_le_bytes(std::array::from_fn(|i| four[i])))
        .collect()
}

fn numbers(random: &mut Random, dtype: DType, words: usize) -> Vec<u32> {
    let mut value = || random.range(-100, 100) as f32;
    let word = |_| {
        let (one, two) = (value(), value());
        let pair = |bits: fn(f32) -> u16| u32::from(bits(one)) | u32::from(bits(two)) << 16;
        match dtype {
            DType::F16 => pair(f16_from_f32),
            DType::Bf16 => pair(bf16_from_f32),
            DType::F32 => one.to_bits(),
            DType::I32 | DType::I64 => (one as i32).cast_unsigned(),
        }
    };
    (0..words).map(word).collect()
}
