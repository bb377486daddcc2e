//! Small kernels of aarch64 under the emulator: the effects of a launch, and
//! the errors of wrong kernels.

mod common;

use common::{Harness, SCRATCH};
use moesaic_emulated::{EmulatedCompiler, EmulatedDevice};
use moesaic_kernel::*;
use moesaic_target::*;

#[test]
fn every_block_of_a_grid_runs_once() {
    let body = "
    for (i64 b = first; b < last; b++)
        y[b] = (float)(100 * (b / grid_x) + b % grid_x) * by;";
    let harness = Harness::new(CpuIsa::Neon, body);
    let y = harness.run([3, 2], 7, 0.5).unwrap();
    assert_eq!(y[..6], [0.0, 0.5, 1.0, 50.0, 50.5, 51.0]);
    assert!(y[6].is_nan(), "new memory is poisoned");
    assert!(
        harness.run([0, 2], 1, 0.5).unwrap()[0].is_nan(),
        "no block, no launch"
    );
}

#[test]
fn scratch_memory_starts_with_zeros_and_ends_where_it_should() {
    let body = "
    float *own = scratch;
    y[0] = own[0] + own[15];
    y[1] = own[16];
    own[by > 1 ? SCRATCH / 4 : 0] = by;"
        .replace("SCRATCH", &SCRATCH.to_string());
    let harness = Harness::new(CpuIsa::Neon, &body);
    for _ in 0..2 {
        let y = harness.run([1, 1], 2, 1.0).unwrap();
        assert!(y[0] == 0.0 && y[1].is_nan(), "{y:?}");
    }
    let error = harness.run([1, 1], 2, 2.0).unwrap_err().to_string();
    assert!(error.contains("behind the end of the 128 bytes"), "{error}");
}

/// Compilers call these functions although the text does not.
#[test]
fn copies_need_no_library() {
    let body = "
    struct { float part[16]; } from, to;
    __builtin_memset(y, 0, (unsigned long)count * 4);
    for (int i = 0; i < 16; i++)
        from.part[i] = (float)i * by;
    __builtin_memcpy(&to, &from, (unsigned long)count);
    __builtin_memcpy(y, &to, (unsigned long)count);
    __builtin_memmove(y + 1, y, (unsigned long)count / 2);
    __builtin_memmove(y + 8, y + 9, (unsigned long)count / 2);";
    let y = Harness::new(CpuIsa::Neon, body)
        .run([1, 1], 24, 1.0)
        .unwrap();
    let expected = [0, 0, 1, 2, 4, 5, 0, 0, 0].map(|v| v as f32);
    assert_eq!(y[..9], expected);
}

#[test]
fn writing_behind_the_end_is_an_error_of_the_launch() {
    let harness = Harness::new(CpuIsa::Neon, "y[count] = by;");
    harness.fails(&["`k`", "0 bytes behind the end of the 20 bytes"]);
}

#[test]
fn a_wild_pointer_is_an_error_and_the_next_launch_runs() {
    let harness = Harness::new(CpuIsa::Neon, "*(count > 4 ? (float *)8 : y) = by;");
    harness.fails(&["`k`", "the emulated program ended", "signal 11"]);
    assert_eq!(harness.run([1, 1], 1, 2.5).unwrap(), [2.5]);
}

const DOT: &str = "
    halves a, b;
    for (int i = 0; i < 8; i++) {
        a[i] = i % 2 ? 0x4000 : 0x3f80; // 2 and 1
        b[i] = i % 2 ? 0x4080 : 0x4040; // 4 and 3
    }
    vec sum = {by, by, by, by};
    __asm__ volatile(\".arch armv8.2-a+bf16\\n bfdot %0.4s, %1.8h, %2.8h\" : \"+w\"(sum) : \"w\"(a), \"w\"(b));
    *(vec *)y = sum;";

/// The kernels of `neon` run on a CPU without what `neonbf16` adds.
#[test]
fn only_one_of_the_sets_has_dot_products() {
    let y = Harness::new(CpuIsa::NeonBf16, DOT)
        .run([1, 1], 4, 0.5)
        .unwrap();
    assert_eq!(y, [11.5; 4]);
    Harness::new(CpuIsa::Neon, DOT).fails(&["the emulated program ended", "signal 4"]);
}

/// `bf16_of_f32` of `prelude/cpu_bf16.h` is one instruction on `neonbf16`: to
/// nearest, ties to even, subnormals kept, NaN quiet.
#[test]
fn the_conversion_to_bf16_is_that_of_the_other_sets() {
    let body = "
    static const unsigned bits[8] = {0x3f808000, 0x3f818000, 0x3f808001, 0x7f7fffff,
                                     0x7f800001, 0xff800000, 0x00008001, 0x80018000};
    for (int i = 0; i < 8; i += 4) {
        vec wide;
        unsigned short narrow[8];
        halves rounded;
        __builtin_memcpy(&wide, bits + i, 16);
        __asm__(\"bfcvtn %0.4h, %1.4s\" : \"=w\"(rounded) : \"w\"(wide));
        __builtin_memcpy(narrow, &rounded, 16);
        for (int j = 0; j < 4; j++)
            y[i + j] = (float)narrow[j];
    }";
    let y = Harness::new(CpuIsa::NeonBf16, body)
        .run([1, 1], 8, 1.0)
        .unwrap();
    let expected = [
        0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x7fc0, 0xff80, 0x0001, 0x8002,
    ];
    assert_eq!(y, expected.map(|bits: u16| f32::from(bits)));
}

#[test]
fn wrong_calls_are_refused() {
    let harness = Harness::new(CpuIsa::Neon, "y[0] = by;");
    let dims = LaunchDims {
        grid: [1, 1],
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
    };
    let call = |symbol: &str, args: &[Arg]| {
        // SAFETY: nothing is launched.
        unsafe { harness.module.launch(symbol, dims, args) }
            .unwrap_err()
            .to_string()
    };
    assert!(call("other", &[]).contains("loaded are: k"));
    assert!(call("k", &[]).contains("it takes 3 arguments and got 0"));
    assert!(EmulatedDevice::new(CpuIsa::Avx2).is_err());
}

#[test]
fn the_targets_of_aarch64_are_among_those_of_the_compiler() {
    let compiler = EmulatedCompiler::find(CpuIsa::Neon, None).unwrap();
    let names: Vec<String> = compiler.targets().iter().map(Target::to_string).collect();
    for name in ["sim:neon", "sim:neonbf16"] {
        assert!(names.iter().any(|known| known == name), "{names:?}");
    }
    let [neon, bf16] =
        ["sim:neon", "sim:neonbf16"].map(|t| compiler.fingerprint(t.parse().unwrap()));
    assert!(bf16.contains("+bf16") && !neon.contains("+bf16") && neon.contains("launcher"));
}
