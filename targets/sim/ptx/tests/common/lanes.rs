//! One operation on many values.

use super::Run;

/// Values at the edges of every type, and random ones.
pub fn values(count: usize, mut seed: u64) -> Vec<u32> {
    let edges = [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7f,
        0x80,
        0xff,
        0x7fff,
        0x8000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x3f80_0000,
        0xbf80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0xffc0_0001,
        0x0000_0001,
        0x8000_0001,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0x4f00_0000,
        0xcf00_0000,
        0x4f80_0000,
        0x3f00_0000,
        0x4020_0000,
        0x3c00_4200,
        0x7c01_fbff,
    ];
    let mut next = || {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (seed >> 32) as u32
    };
    (0..count)
        .map(|_| match next() % 3 {
            0 => edges[next() as usize % edges.len()],
            // Floats of ordinary size.
            1 => (next() & 0x807f_ffff) | (120 + next() % 16) << 23,
            _ => next(),
        })
        .collect()
}

/// Triples of a run.
pub const THREADS: usize = 256;

/// Runs `op` on 256 triples in `%r11-13` and, as pairs, `%rd11-13`; the result
/// is `%rd20`.
pub fn run(op: &str, inputs: &[[u32; 6]]) -> Vec<u64> {
    let mut input: Vec<u32> = inputs.iter().flatten().copied().collect();
    input.resize(8 * THREADS, 0);
    let body = format!(
        "mul.lo.u32 %r2, %r1, 24;\ncvt.u64.u32 %rd2, %r2;\nadd.u64 %rd3, %rd1, %rd2;\n\
         ld.global.u32 %r11, [%rd3];\nld.global.u32 %r14, [%rd3+4];\n\
         ld.global.u32 %r12, [%rd3+8];\nld.global.u32 %r15, [%rd3+12];\n\
         ld.global.u32 %r13, [%rd3+16];\nld.global.u32 %r16, [%rd3+20];\n\
         mov.b64 %rd11, {{%r11, %r14}};\nmov.b64 %rd12, {{%r12, %r15}};\nmov.b64 %rd13, {{%r13, %r16}};\n\
         mov.b32 %f11, %r11;\nmov.b32 %f12, %r12;\nmov.b32 %f13, %r13;\n\
         mov.b64 %fd11, %rd11;\nmov.b64 %fd12, %rd12;\nmov.b64 %fd13, %rd13;\n\
         cvt.u16.u32 %h11, %r11;\ncvt.u16.u32 %h12, %r12;\ncvt.u16.u32 %h13, %r13;\n\
         mov.u64 %rd20, 0;\n{op}\n\
         mul.wide.u32 %rd5, %r1, 8;\nadd.u64 %rd6, %rd1, %rd5;\nst.global.u64 [%rd6+8192], %rd20;"
    );
    let run = Run {
        threads: THREADS as u32,
        input,
        words: 4096,
        ..Run::default()
    };
    let left = run
        .run(&body)
        .unwrap_or_else(|finding| panic!("{finding}\n{op}"));
    let words = &left.words[2048..][..2 * THREADS];
    words
        .chunks(2)
        .map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32)
        .collect()
}

pub fn inputs(seed: u64) -> Vec<[u32; 6]> {
    let list = values(6 * THREADS, seed);
    list.chunks(6)
        .map(|part| part.try_into().unwrap())
        .collect()
}

/// Checks a 32-bit operation of up to three operands: `op` writes `%r20`.
pub fn check(op: &str, want: impl Fn(u32, u32, u32) -> u32) {
    let inputs = inputs(op.len() as u64 + 99);
    let got = run(&format!("{op}\ncvt.u64.u32 %rd20, %r20;"), &inputs);
    for (input, got) in inputs.iter().zip(got) {
        let [a, _, b, _, c, _] = *input;
        let want = want(a, b, c);
        assert_eq!(
            got as u32, want,
            "{op} of {a:#x}, {b:#x}, {c:#x}: {:#x}, not {want:#x}",
            got as u32
        );
    }
}

/// Checks a 64-bit operation: `op` writes `%rd20`.
pub fn check64(op: &str, want: impl Fn(u64, u64, u64) -> u64) {
    let inputs = inputs(op.len() as u64 + 7);
    let got = run(op, &inputs);
    for (input, got) in inputs.iter().zip(got) {
        let wide = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [a, b, c] = [0, 2, 4].map(|at| wide(input[at], input[at + 1]));
        let want = want(a, b, c);
        assert_eq!(
            got, want,
            "{op} of {a:#x}, {b:#x}, {c:#x}: {got:#x}, not {want:#x}"
        );
    }
}
