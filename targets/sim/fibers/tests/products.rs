//! Matrix products lane by lane, against the layouts of AMD's instruction set
//! manuals, written down here once more.

mod common;

use common::*;
use moesaic_kernel::*;

/// A layout: from a lane and the number of an element to the row or column and
/// k of an operand, and to row and column of the sums.
struct Layout {
    edge: usize,
    k: usize,
    /// Elements of an operand in a lane, and sums.
    held: usize,
    sums: usize,
    operand: fn(lane: usize, i: usize) -> (usize, usize),
    sum: fn(lane: usize, i: usize) -> (usize, usize),
}

const MFMA_32: Layout = Layout {
    edge: 32,
    k: 8,
    held: 4,
    sums: 16,
    operand: |lane, i| (lane % 32, lane / 32 * 4 + i),
    sum: |lane, i| (i / 4 * 8 + lane / 32 * 4 + i % 4, lane % 32),
};

const MFMA_16: Layout = Layout {
    edge: 16,
    k: 16,
    held: 4,
    sums: 4,
    operand: |lane, i| (lane % 16, lane / 16 * 4 + i),
    sum: |lane, i| (lane / 16 * 4 + i, lane % 16),
};

const WIDE_32: Layout = Layout {
    k: 16,
    held: 8,
    operand: |lane, i| (lane % 32, lane / 32 * 8 + i),
    ..MFMA_32
};

const WIDE_16: Layout = Layout {
    k: 32,
    held: 8,
    operand: |lane, i| (lane % 16, lane / 16 * 8 + i),
    ..MFMA_16
};

const FLOAT_32: Layout = Layout {
    k: 2,
    held: 1,
    operand: |lane, _| (lane % 32, lane / 32),
    ..MFMA_32
};

const FLOAT_16: Layout = Layout {
    k: 4,
    held: 1,
    operand: |lane, _| (lane % 16, lane / 16),
    ..MFMA_16
};

const WMMA: Layout = Layout {
    edge: 16,
    k: 16,
    held: 16,
    sums: 8,
    operand: |lane, i| (lane % 16, i),
    sum: |lane, i| (i * 2 + lane / 16, lane % 16),
};

/// Small integers, exact in every type.
fn digits(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 28) as f32 - 7.0
    };
    (0..count).map(|_| next()).collect()
}

/// Runs `product` of a GPU's prelude on random matrices.
fn check(gpu: &str, product: &str, dtype: &str, layout: &Layout) {
    let lanes = arch(gpu).caps().wave as usize;
    let Layout {
        edge,
        k,
        held,
        sums,
        operand,
        sum,
    } = *layout;
    let (a, b) = (digits(edge * k, 1), digits(edge * k, 2));
    let c = digits(edge * edge, 3);
    let gather = |matrix: &[f32]| -> Vec<f32> {
        let at = |lane: usize, i: usize| {
            let (row, depth) = operand(lane, i);
            matrix[row * k + depth]
        };
        (0..lanes * held).map(|n| at(n / held, n % held)).collect()
    };
    let places: Vec<usize> = (0..lanes * sums)
        .map(|n| sum(n / sums, n % sums))
        .map(|(row, column)| row * edge + column)
        .collect();
    let read = |name| Param::read(name, DType::F32, "[n]");
    let out = Param::tensor("sums", DType::F32, Access::ReadWrite, "[n]");
    let element = match dtype {
        "f32" => "a[t * 1]".to_string(),
        _ => String::new(),
    };
    let operand = |name: &str| match dtype {
        "f32" => element.replace('a', name),
        _ => format!("pack({name} + t * {held})"),
    };
    let body = format!(
        "{}\ntemplate <class T> T pack_of(const f32 *from)\n{{\n    T pack;\n    for (int i = 0; i < {held}; i++)\n        pack.at[i] = round_to<{dtype}>(from[i]);\n    return pack;\n}}\n\
         #define pack(from) pack_of<Pack<{dtype}, {held}>>(from)\n\
         KERNEL({lanes}) k(const f32 *a, const f32 *b, f32 *sums)\n{{\n    const i32 t = thread_index();\n    f32x{sums} own;\n\
         \x20   for (int i = 0; i < {sums}; i++)\n        own.at[i] = sums[t * {sums} + i];\n    own = {product}({}, {}, own);\n\
         \x20   for (int i = 0; i < {sums}; i++)\n        sums[t * {sums} + i] = own.at[i];\n}}",
        products(gpu, dtype),
        operand("a"),
        operand("b"),
    );
    let kernel = Kernel::new(gpu, lanes as u32, vec![read("a"), read("b"), out], &body);
    let initial: Vec<f32> = places.iter().map(|&at| c[at]).collect();
    let mut buffers = [gather(&a), gather(&b), initial].map(|values| Data::floats(&values));
    kernel.run(1, &mut buffers).unwrap();
    for (got, &at) in buffers[2].words().iter().zip(&places) {
        let (row, column) = (at / edge, at % edge);
        let terms = (0..k).map(|i| a[row * k + i] * b[column * k + i]);
        let want = c[at] + terms.sum::<f32>();
        assert_eq!(
            f32::from_bits(*got),
            want,
            "{gpu} {product}: row {row}, column {column}"
        );
    }
}

#[test]
fn products_follow_the_manuals() {
    for dtype in ["bf16", "f16"] {
        check("gfx942", "mfma_32x32x8", dtype, &MFMA_32);
        check("gfx90a", "mfma_16x16x16", dtype, &MFMA_16);
        check("gfx950", "mfma_32x32x16", dtype, &WIDE_32);
        check("gfx950", "mfma_16x16x32", dtype, &WIDE_16);
        check("gfx1100", "wmma_16x16x16", dtype, &WMMA);
    }
    check("gfx942", "mfma_32x32x2", "f32", &FLOAT_32);
    check("gfx942", "mfma_16x16x4", "f32", &FLOAT_16);
}

/// Lanes of a WMMA hold their operands twice; a wave of gfx942 has no WMMA.
#[test]
fn products_that_cannot_be() {
    let fails = |gpu: &str, bf16: &str, call: &str, expected: &str| {
        let lanes = arch(gpu).caps().wave;
        let body = format!(
            "{}\nPLAIN void wide(const void *a, f32 *y)\n{{\n    sim_image.machine->matrix_product({{32, 16, sim::BF16}}, a, a, y, 7);\n}}\n\
             KERNEL({lanes}) k(f32 *y)\n{{\n    const i32 t = thread_index();\n    {call}\n    y[t] = 0;\n}}",
            products(gpu, bf16)
        );
        let kernel = Kernel::new(
            gpu,
            lanes,
            vec![Param::write("y", DType::F32, "[n]")],
            &body,
        );
        let error = kernel.run(1, &mut [Data::room(64)]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    fails(
        "gfx1100",
        "bf16",
        "Pack<bf16, 16> a = {}; a.at[0].bits = (u16)(t / 16); wmma_16x16x16(a, a, f32x8{});",
        "lanes l and l + 16 bring different operands to a matrix product",
    );
    fails(
        "gfx942",
        "bf16",
        "wide(&t, y);",
        "asks for a matrix product 32x32x16 of bf16 (line 7), which gfx942 does not have",
    );
}
