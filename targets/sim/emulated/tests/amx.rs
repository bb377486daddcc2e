//! Small kernels with tiles on a CPU that lacks them: the effect of each
//! instruction, the forms of its operands, and the errors of wrong kernels. The
//! tests need AVX-512 and a CPU without tiles; elsewhere they print a line and
//! pass.

mod common;

use common::Harness;
use moesaic_emulated::{EmulatedCompiler, EmulatedDevice};
use moesaic_kernel::*;
use moesaic_target::Compiler;

const HEAD: &str = r#"
typedef struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
} shapes_t;
typedef unsigned short bf16;
static const shapes_t whole = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
#define BEGIN(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#define END() __asm__ volatile("tilerelease")
#define ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((i64)(stride)) : "memory")
#define STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((i64)(stride)) : "memory")
#define MULTIPLY(sums, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sums ::)
static bf16 bf16_of(float value)
{
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits >> 16;
}
"#;

/// Returns a harness on this CPU, or `None` where it cannot run.
fn harness(body: &str) -> Option<Harness> {
    if let Err(error) = EmulatedDevice::new(CpuIsa::Amx) {
        eprintln!("not tested: {error}");
        return None;
    }
    Some(Harness::with(CpuIsa::Amx, HEAD, body))
}

fn run(body: &str, count: usize, by: f32) -> Option<Vec<f32>> {
    let results = harness(body)?.run([1, 1], count, by);
    Some(results.unwrap_or_else(|e| panic!("{e}")))
}

fn fails(body: &str, parts: &[&str]) {
    if let Some(harness) = harness(body) {
        harness.fails(parts);
    }
}

/// Left `[16, 32]`, right in pairs `[16, 16, 2]`: small integers, whose sums
/// are exact in any order.
#[test]
fn a_product_adds_sixteen_by_sixteen_sums() {
    let body = "
    bf16 left[16][32], right[16][16][2];
    float sums[16][16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 32; j++) {
            left[i][j] = bf16_of((float)(i - j % 7));
            right[j / 2][i][j % 2] = bf16_of((float)(j % 5 - i % 3));
            sums[i][j / 2] = by;
        }
    BEGIN(whole);
    LOAD(2, sums, 64);
    LOAD(6, left, 64);
    LOAD(7, right, 64);
    MULTIPLY(2, 6, 7);
    MULTIPLY(2, 6, 7);
    STORE(2, y, 64);
    END();";
    let Some(y) = run(body, 256, 0.5) else { return };
    for i in 0..16_i32 {
        for j in 0..16_i32 {
            let products = (0..32).map(|k| (i - k % 7) * (k % 5 - j % 3));
            let expected = 0.5 + 2.0 * products.sum::<i32>() as f32;
            assert_eq!(y[(16 * i + j) as usize], expected, "row {i}, column {j}");
        }
    }
}

/// One product of `left` with `right` added to `sums`, all as bits.
fn one_product(left: [u16; 2], right: [u16; 2], sum: u32) -> Option<u32> {
    let [a, b] = left;
    let [c, d] = right;
    let body = format!(
        "
    shapes_t one = {{.palette = 1, .row_bytes = {{4, 4, 4}}, .rows = {{1, 1, 1}}}};
    bf16 left[2] = {{{a}, {b}}}, right[2] = {{{c}, {d}}};
    unsigned sum = {sum}u;
    BEGIN(one);
    LOAD(0, &sum, 4);
    LOAD(1, left, 4);
    LOAD(2, right, 4);
    MULTIPLY(0, 1, 2);
    STORE(0, y, 4);
    END();"
    );
    run(&body, 1, 0.0).map(|y| y[0].to_bits())
}

#[test]
fn subnormals_are_zeros_and_nan_stays() {
    let (one, least, tiny) = (0x3f80, 0x0080, 0x0001);
    let cases = [
        ([one, 0], [one, 0], 0, 0x3f80_0000),
        ([tiny, 0], [one, 0], 0, 0),
        ([least, 0], [one, 0], 0, 0x0080_0000),
        ([one, 0], [0, 0], 0x0000_0001, 0),
        ([least, 0], [0x3f00, 0], 0, 0),
        ([0x7f80, 0], [0x3f80, 0], 0, 0x7f80_0000),
    ];
    for (left, right, sum, expected) in cases {
        if let Some(found) = one_product(left, right, sum) {
            assert_eq!(found, expected, "{left:x?} {right:x?} {sum:x}");
        }
    }
    if let Some(found) = one_product([0x7f80, 0], [0, 0], 0) {
        assert!(f32::from_bits(found).is_nan(), "infinity times zero");
    }
}

/// Even and odd places are summed apart: 2^30 + 1 - 2^30 is 1 when the 1 is
/// in the one sum and both others are in the other.
#[test]
fn even_and_odd_places_are_summed_apart() {
    let body = "
    shapes_t two = {.palette = 1, .row_bytes = {4, 8, 4}, .rows = {1, 1, 2}};
    bf16 left[4] = {bf16_of(1073741824.0f), bf16_of(1.0f), bf16_of(-1073741824.0f), 0};
    bf16 right[4] = {bf16_of(1.0f), bf16_of(1.0f), bf16_of(1.0f), 0};
    BEGIN(two);
    ZERO(0);
    LOAD(1, left, 64);
    LOAD(2, right, 4);
    MULTIPLY(0, 1, 2);
    STORE(0, y, 64);
    END();";
    let Some(y) = run(body, 1, 0.0) else { return };
    assert_eq!(y, [1.0]);
}

/// Base and stride in registers of both halves, with and without a
/// displacement or a stride, through the stack pointer, and relative to the
/// instruction.
#[test]
fn operands_come_in_every_form() {
    let copy = |load: &str| {
        format!(
            "
    {{
        float rows[16][32];
        for (int i = 0; i < 16 * 32; i++)
            (&rows[0][0])[i] = (float)i;
        register char *from __asm__(\"FROM\") = (char *)rows;
        register i64 stride __asm__(\"STRIDE\") = 128;
        __asm__ volatile(\"{load}\" ::\"r\"(from), \"r\"(stride) : \"memory\");
        STORE(3, sums, 64);
        *y++ = sums[0][0];
        *y++ = sums[2][1];
    }}"
        )
    };
    let forms = [
        ("rax", "rcx", "tileloadd (%0,%1,1), %%tmm3"),
        ("r13", "r9", "tileloadd (%0,%1,1), %%tmm3"),
        ("r12", "rdi", "tileloaddt1 64(%0,%1,1), %%tmm3"),
        ("rsi", "r12", "tileloadd -512+1024(%0,%1,1), %%tmm3"),
        ("rbx", "r10", "tileloadd 4(%0), %%tmm3"),
        ("rdx", "r8", "tileloadd (%0,%1,2), %%tmm3"),
    ];
    let expected = [
        [0.0, 65.0],
        [0.0, 65.0],
        [16.0, 81.0],
        [128.0, 193.0],
        [1.0, 2.0],
        [0.0, 129.0],
    ];
    let copies = forms
        .map(|(from, stride, load)| copy(load).replace("FROM", from).replace("STRIDE", stride));
    let body = format!(
        "
    float sums[16][16];
    BEGIN(whole);
    {}
    END();
    shapes_t own = whole;
    own.rows[5] = 1;
    BEGIN(own);
    __asm__ volatile(\"sub $64, %%rsp\\n movss %0, (%%rsp)\\n tileloadd (%%rsp), %%tmm5\\n add $64, %%rsp\" ::\"x\"(by) : \"memory\");
    STORE(5, sums, 64);
    *y++ = sums[0][0];
    END();",
        copies.concat()
    );
    let Some(y) = run(&body, 13, 3.5) else { return };
    assert_eq!(y[..12], *expected.as_flattened());
    assert_eq!(y[12], 3.5);
}

/// `tdpbf16ps %tmm1, %tmm0, %tmm0`, which assemblers refuse.
const ITSELF: &str = ".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc0";

#[test]
fn misused_tiles_are_errors_of_the_launch() {
    let small = "shapes_t own = {.palette = 1, .row_bytes = {64, 64, 32}, .rows = {16, 16, 16}}; BEGIN(own);";
    let cases = [
        (
            "ZERO(0);".to_string(),
            "a tile is used that ldtilecfg did not give",
        ),
        (
            format!("{small} ZERO(3);"),
            "a tile is used that ldtilecfg did not give",
        ),
        (format!("{small} MULTIPLY(0, 1, 2);"), "shapes do not fit"),
        (
            format!("{small} __asm__ volatile(\"{ITSELF}\");"),
            "of a tile with itself",
        ),
        (
            "shapes_t own = {.palette = 2}; BEGIN(own);".to_string(),
            "another palette",
        ),
        (
            "shapes_t own = whole; own.reserved[3] = 1; BEGIN(own);".to_string(),
            "of more than shapes",
        ),
        (
            "shapes_t own = {.palette = 1, .row_bytes = {128}, .rows = {16}}; BEGIN(own);"
                .to_string(),
            "of a shape that no tile has",
        ),
        ("BEGIN(whole);".to_string(), "ended without tilerelease"),
    ];
    for (body, words) in cases {
        fails(&body, &["`k`", "AMX: ", words]);
    }
}

#[test]
fn other_instructions_that_the_cpu_lacks_end_the_program() {
    fails("__asm__ volatile(\"ud2\");", &["`k`", "signal: 4"]);
}

#[test]
fn tiles_do_not_write_behind_the_end_unseen() {
    let body = "BEGIN(whole); ZERO(0); STORE(0, y, 64); END();";
    fails(body, &["`k`", "behind the end of the 20 bytes"]);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_compiler_of_this_machine_makes_them() {
    let compiler = EmulatedCompiler::find(CpuIsa::Amx, None).unwrap();
    let amx = "sim:amx".parse().unwrap();
    assert!(compiler.targets().contains(&amx));
    let fingerprint = compiler.fingerprint(amx);
    assert!(fingerprint.contains("launcher"), "{fingerprint}");
}
