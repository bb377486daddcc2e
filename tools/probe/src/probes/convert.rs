//! Conversions, and the approximations of the special-function unit.

use super::Probe;
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::float;
use tera::Context;

/// One kernel, seven results.
pub const PROBES: &[Probe] = &[Probe::new("conversions", 80, run)];

const COUNT: usize = 1 << 16;

fn run(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let program = bench.load(File {
        name: "convert.cu",
        activations: "f32",
        context: Context::new(),
        kernels: vec![Kernel {
            symbol: "convert".into(),
            threads: 256,
            shared_bytes: 0,
            cluster: 1,
            takes: vec![Takes::Words, Takes::Words, Takes::I64],
        }],
    })?;
    let input = inputs(random);
    let count = input.len();
    let mut out = vec![0; 7 * count];
    let values = &mut [
        Value::Read(&input),
        Value::Words(&mut out),
        Value::I64(count as i64),
    ];
    bench.run(&program, "convert", count.div_ceil(256), values)?;
    let results: Vec<&[u32]> = out.chunks_exact(count).collect();
    let exact = |name: &str, index: usize, table: fn(u32) -> u32| {
        let expected: Vec<u32> = input.iter().map(|bits| table(*bits)).collect();
        Row::compared(name, count, same(name, results[index], &expected))
    };
    let near = |name: &str, index: usize, check: fn(f32, f32) -> bool| {
        Row::compared(name, count, within(&input, results[index], check))
    };
    Ok(vec![
        exact("cvt.rn.bf16.f32", 0, |bits| {
            float::bf16_from_f32(f32::from_bits(bits)).into()
        }),
        exact("cvt.rn.f16.f32", 1, |bits| {
            float::f16_from_f32(f32::from_bits(bits)).into()
        }),
        Row::compared("cvt.f32.f16", count, widened(&input, results[2])),
        exact("cvt.rna.tf32.f32", 3, |bits| {
            float::tf32_from_f32_rna(f32::from_bits(bits))
        }),
        near("ex2.approx.ftz, relative error 2^-22", 4, exp2_is_near),
        near(
            "rcp.approx.ftz, relative error 2^-23",
            5,
            reciprocal_is_near,
        ),
        near("tanh.approx, relative error 2^-11", 6, tanh_is_near),
    ])
}

/// Returns every f16 pattern in the low half under random upper halves, and the
/// special values.
fn inputs(random: &mut Random) -> Vec<u32> {
    let mut list: Vec<u32> = (0..COUNT as u32)
        .map(|low| match low % 4 {
            // Values where the approximations are not flat.
            0 => (random.range(-8_000_000, 8_000_000) as f32 / 1e6).to_bits() & !0xffff | low,
            _ => random.bits() << 16 | low,
        })
        .collect();
    list.extend([
        0,
        1 << 31,
        0x7f80_0000,
        0xff80_0000,
        0x7f7f_ffff,
        // NaNs with all bits set, with high or low bits alone, and negative.
        0x7fff_ffff,
        0x7fc0_0000,
        0x7fa0_1fff,
        0x7f80_0001,
        0xff80_1fff,
    ]);
    list
}

/// Compares bit for bit, but takes any NaN for a NaN, because its payload is
/// not documented.
fn widened(input: &[u32], got: &[u32]) -> Result<(), String> {
    for (bits, got) in input.iter().zip(got) {
        let table = float::f32_from_f16(*bits as u16);
        let both_nan = table.is_nan() && f32::from_bits(*got).is_nan();
        if table.to_bits() != *got && !both_nan {
            return Err(format!(
                "of {:#06x}: {got:#010x}, the table says {:#010x}",
                bits & 0xffff,
                table.to_bits()
            ));
        }
    }
    Ok(())
}

fn within(input: &[u32], got: &[u32], check: fn(f32, f32) -> bool) -> Result<(), String> {
    for (bits, got) in input.iter().zip(got) {
        let (x, y) = (f32::from_bits(*bits), f32::from_bits(*got));
        if !check(x, y) {
            return Err(format!("of {x:e} is {y:e}, beyond the stated error"));
        }
    }
    Ok(())
}

/// Flushes subnormals to zero, as `.ftz` does.
fn flushed(x: f32) -> f64 {
    if x.is_subnormal() { 0.0 } else { x.into() }
}

fn relative(got: f32, exact: f64, error: f64) -> bool {
    let tiny = f64::from(f32::MIN_POSITIVE);
    match exact.abs() {
        magnitude if exact.is_nan() || got.is_nan() => magnitude.is_nan() && got.is_nan(),
        magnitude if magnitude < 1.001 * tiny => f64::from(got).abs() < 1.002 * tiny,
        magnitude if magnitude > 0.999_999 * f64::from(f32::MAX) => {
            got.is_infinite() || f64::from(got.abs()) > 0.999_998 * f64::from(f32::MAX)
        }
        magnitude => (f64::from(got) - exact).abs() <= error * magnitude,
    }
}

fn exp2_is_near(x: f32, y: f32) -> bool {
    relative(y, flushed(x).exp2(), 2f64.powi(-22))
}

fn reciprocal_is_near(x: f32, y: f32) -> bool {
    relative(y, 1.0 / flushed(x), 2f64.powi(-23))
}

/// Skips subnormals, whose results are not documented.
fn tanh_is_near(x: f32, y: f32) -> bool {
    x.is_subnormal() || relative(y, f64::from(x).tanh(), 2f64.powi(-11))
}
