//! The functions of the GPU prelude, called one by one on this CPU.

use half::{bf16, f16};
use moesaic_cpu::load_shared_object;
use moesaic_harness::fibers::{compiled, emitted};
use moesaic_harness::plans::planned;
use moesaic_plan::PlanOptions;
use moesaic_reference::{Random, erf};
use moesaic_spec::*;

/// A layer whose gate has every function but the error function.
fn gate_spec() -> LayerSpec {
    let text = r#"{"shape":{"model_dim":4,"hidden_dim":4,"experts":4,"top_k":2},
        "router":{"score":"sqrt-softplus","renormalize":"p-norm","norm_order":3.0},
        "experts":{"activation":"gelu"}}"#;
    serde_json::from_str(text).unwrap()
}

type MathFunction = unsafe extern "C" fn(f32) -> f32;

/// A function of the prelude in `kernel`, or an expression of `x`.
fn function(kernel: &str, expression: &str) -> impl Fn(f64) -> f64 {
    let target = "cuda:sm_75".parse().unwrap();
    let plan = planned(&gate_spec(), target, &PlanOptions::default());
    let kernel = plan.kernels.iter().find(|k| k.name == kernel).unwrap();
    let mut source = emitted(kernel, plan.target);
    source.text += &format!(
        "extern \"C\" __attribute__((visibility(\"default\"))) f32 probe(f32 x) {{ return {expression}; }}\n"
    );
    let loaded = load_shared_object(&compiled(&source).binary).unwrap();
    // SAFETY: the probe is declared so above; it touches no memory.
    let probe: MathFunction = unsafe { loaded.library.symbol("probe").unwrap() };
    move |x| {
        let _open = &loaded;
        // SAFETY: any float will do, and the library is open.
        f64::from(unsafe { probe(x as f32) })
    }
}

/// Uniform in a range, as the nearest f32.
fn values(from: f64, to: f64) -> impl Iterator<Item = f64> {
    let mut random = Random::new(11);
    std::iter::repeat_with(move || {
        let unit = 0.5 + 0.5 * random.signed();
        f64::from((from + (to - from) * unit) as f32)
    })
    .take(200_000)
}

#[test]
fn exponential_is_good_to_two_units() {
    let exponential = function("gate_topk", "exponential(x)");
    for x in values(-87.0, 88.7) {
        let (got, want) = (exponential(x), x.exp());
        assert!((got - want).abs() <= 2.0 * 6e-8 * want, "exp({x}) = {got}");
    }
    for x in values(-110.0, -87.0) {
        let (got, want) = (exponential(x), x.exp());
        assert!((got - want).abs() <= 3e-45, "exp({x}) = {got}");
    }
    let ends = [
        (89.0, f64::INFINITY),
        (1e30, f64::INFINITY),
        (f64::INFINITY, f64::INFINITY),
    ];
    for (x, want) in ends {
        assert_eq!(exponential(x), want, "{x}");
        assert_eq!(exponential(-x - 16.0), 0.0, "{x}");
    }
    assert_eq!(exponential(0.0), 1.0);
    assert!(exponential(f64::NAN).is_nan());
}

#[test]
fn error_function_is_good_to_1e_7() {
    let error_function = function("grouped_gemm_up", "error_function(x)");
    for x in values(-6.0, 6.0) {
        let (got, want) = (error_function(x), erf(x));
        assert!((got - want).abs() <= 1.2e-7, "erf({x}) = {got}, not {want}");
    }
    for x in values(-1e-3, 1e-3) {
        let (got, want) = (error_function(x), erf(x));
        assert!(
            (got - want).abs() <= 2e-7 * want.abs(),
            "erf({x}) = {got}, not {want}"
        );
    }
    assert_eq!(error_function(f64::INFINITY), 1.0);
    assert_eq!(error_function(-30.0), -1.0);
    assert!(error_function(f64::NAN).is_nan());
}

#[test]
fn logarithm_and_power() {
    let logarithm = function("gate_topk", "logarithm(x)");
    for x in values(1e-6, 100.0) {
        let (got, want) = (logarithm(x), x.ln());
        assert!(
            (got - want).abs() <= 2e-7 * want.abs().max(0.3),
            "ln({x}) = {got}"
        );
    }
    let cube = function("gate_topk", "power(x, 3.0f)");
    for x in values(0.0, 4.0) {
        let tolerance = 2e-7 * (1.0 + 3.0 * x.ln().abs());
        let (got, want) = (cube(x), x.powi(3));
        assert!((got - want).abs() <= tolerance * want, "{x}^3 = {got}");
    }
    assert_eq!(cube(0.0), 0.0);
    assert!(cube(f64::NAN).is_nan());
    let softplus = function(
        "gate_topk",
        "twice_artanh(exponential(-x) / (2.0f + exponential(-x)))",
    );
    for x in values(0.0, 40.0) {
        let want = (-x).exp().ln_1p();
        assert!(
            (softplus(x) - want).abs() <= 4e-7 * want,
            "{x}: {}",
            softplus(x)
        );
    }
}

#[test]
fn storage_types_round_to_nearest_even() {
    let to_bf16 = function("gate_topk", "to_f32(to_bf16(x))");
    let to_f16 = function("gate_topk", "to_f32(to_f16(x))");
    let mut random = Random::new(3);
    for _ in 0..500_000 {
        let x = f32::from_bits(random.bits() as u32);
        let want = (bf16::from_f32(x).to_f64(), f16::from_f32(x).to_f64());
        let got = (to_bf16(f64::from(x)), to_f16(f64::from(x)));
        let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan());
        assert!(
            same(got.0, want.0),
            "bf16({x:e}) = {}, not {}",
            got.0,
            want.0
        );
        assert!(
            same(got.1, want.1),
            "f16({x:e}) = {}, not {}",
            got.1,
            want.1
        );
    }
    // Between neighbouring f16, where random bits seldom fall.
    for bits in 0..0x7c00u16 {
        let (low, high) = (
            f16::from_bits(bits).to_f64(),
            f16::from_bits(bits + 1).to_f64(),
        );
        let middle = if high.is_finite() {
            (low + high) / 2.0
        } else {
            65520.0
        };
        assert_eq!(to_f16(middle), f16::from_f64(middle).to_f64(), "{middle:e}");
        assert_eq!(to_f16(-low), -low);
    }
}

/// Keys keep the order of scores, with NaN below and both zeros equal.
#[test]
fn keys_keep_the_order() {
    let high = function("gate_topk", "(f32)(order_key(x) >> 16)");
    let low = function("gate_topk", "(f32)(order_key(x) & 0xffffu)");
    let key = |x: f64| high(x) * 65536.0 + low(x);
    let mut list: Vec<f64> = values(-3.0, 3.0).take(5000).collect();
    list.extend([f64::NEG_INFINITY, f64::INFINITY, 1e-30, -1e-30, 0.0]);
    list.sort_by(f64::total_cmp);
    list.dedup();
    assert!(list.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
    assert_eq!(key(0.0), key(-0.0));
    assert!(key(f64::NAN) < key(f64::NEG_INFINITY) && key(-f64::NAN) == key(f64::NAN));
    assert!(key(f64::NAN) > 0.0);
    let back = function("gate_topk", "score_of_key(order_key(x))");
    assert!(list.iter().all(|&x| back(x) == f64::from(x as f32)));
}
