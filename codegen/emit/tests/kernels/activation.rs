//! Activations and their derivatives as kernels have them, called one by one
//! on this CPU and held against f64.

use moesaic_cpu::load_shared_object;
use moesaic_emit::{emit_layer, part};
use moesaic_harness::plans::planned;
use moesaic_harness::{cpu, fibers};
use moesaic_kernel::CpuIsa;
use moesaic_plan::PlanOptions;
use moesaic_reference::activate;
use moesaic_spec::*;

/// A plain expert with this activation.
fn spec(activation: &str) -> LayerSpec {
    let text = format!(
        "shape = {{ model_dim = 4, hidden_dim = 4, experts = 1, top_k = 1 }}\n\
         experts = {{ form = \"plain\", activation = {activation} }}"
    );
    LayerSpec::from_toml(&text).unwrap_or_else(|e| panic!("{e}"))
}

/// φ and its derivative.
type Pair = (Box<dyn Fn(f64) -> f64>, Box<dyn Fn(f64) -> f64>);

/// As the CPU computes them, in every lane of a vector.
fn on_cpu(spec: &LayerSpec, isa: CpuIsa) -> Pair {
    let target = moesaic_kernel::Target::Cpu(isa);
    let plan = planned(spec, target, &PlanOptions::default());
    let at = plan
        .kernels
        .iter()
        .position(|k| k.name == "grouped_gemm_up");
    let mut source = emit_layer(&plan).unwrap().remove(at.unwrap());
    let op = &plan.kernels[at.unwrap()].op;
    source.text += &part("prelude/cpu_activation_slope.h", op, target).unwrap();
    for (probe, function) in [
        ("probe_value", "activation"),
        ("probe_slope", "activation_slope"),
    ] {
        source.text += &format!(
            "EXPORT f32 {probe}(f32 x)\n{{\n    vec y = {function}(broadcast(x));\n    return y[LANES - 1];\n}}\n"
        );
    }
    probes(&cpu::compiled(&source).binary)
}

/// As a GPU computes them, on the simulator's prelude.
fn on_gpu(spec: &LayerSpec) -> Pair {
    let target = "rocm:gfx1100".parse().unwrap();
    let plan = planned(spec, target, &PlanOptions::default());
    let kernel = plan
        .kernels
        .iter()
        .find(|k| k.name == "grouped_gemm_up")
        .unwrap();
    let mut source = fibers::emitted(kernel, plan.target);
    source.text += &part("prelude/activation_slope.hpp", &kernel.op, plan.target).unwrap();
    for (probe, function) in [
        ("probe_value", "activation"),
        ("probe_slope", "activation_slope"),
    ] {
        source.text += &format!(
            "extern \"C\" __attribute__((visibility(\"default\"))) f32 {probe}(f32 x) {{ return {function}(x); }}\n"
        );
    }
    probes(&fibers::compiled(&source).binary)
}

fn probes(binary: &[u8]) -> Pair {
    let loaded = std::rc::Rc::new(load_shared_object(binary).unwrap());
    let probe = |name: &str| -> Box<dyn Fn(f64) -> f64> {
        let loaded = std::rc::Rc::clone(&loaded);
        // SAFETY: the probe is declared so above; it touches no memory.
        let function: unsafe extern "C" fn(f32) -> f32 =
            unsafe { loaded.library.symbol(name).unwrap() };
        Box::new(move |x| {
            let _open = &loaded;
            // SAFETY: any float will do, and the library is open.
            f64::from(unsafe { function(x as f32) })
        })
    };
    (probe("probe_value"), probe("probe_slope"))
}

/// Values of every size up to `most`, of both signs.
fn range(most: f64) -> Vec<f64> {
    let sizes = (0..1500).map(|i| f64::from((most * 0.985f64.powi(i)) as f32));
    sizes.flat_map(|v| [v, -v]).chain([0.0]).collect()
}

/// The step of a difference around x.
fn difference(x: f64) -> f64 {
    (1e-5 * x.abs()).max(1e-7)
}

/// The derivative of the reference's φ by central differences.
fn reference_slope(spec: &LayerSpec, x: f64) -> f64 {
    let step = difference(x);
    let value = |x| activate(&spec.experts, None, x);
    (value(x + step) - value(x - step)) / (2.0 * step)
}

fn check(name: &str, spec: &LayerSpec, (value, slope): &Pair) {
    for x in range(60.0) {
        let (got, want) = (value(x), activate(&spec.experts, None, x));
        // Terms of an expression may cancel.
        let size = if name.contains("expr") { 1.0 } else { 0.1 };
        let allowed = 1e-6 * want.abs().max(size);
        assert!(
            (got - want).abs() <= allowed,
            "{name}({x}): {got} is not {want}"
        );
        // Kinks of the built-in forms are at zero, where all say 0 or 1/2.
        if x.abs() <= difference(x) {
            continue;
        }
        let (got, want) = (slope(x), reference_slope(spec, x));
        let allowed = 2e-6 * want.abs().max(1.0);
        assert!(
            (got - want).abs() <= allowed,
            "{name}'({x}): {got} is not {want}"
        );
    }
}

/// Every function and operator at least once.
fn expressions() -> impl Iterator<Item = String> {
    let texts = [
        "x * sigmoid(1.7 * x)",
        "x / (1 + exp(-x))",
        "x * tanh(log(1 + exp(x)))",
        "0.5 * x * (1 + erf(x / sqrt(2)))",
        "where(x <= 0, exp(min(x, 0)) - 1, x)",
        "max(x, 0.1 * x)",
        "min(relu(x + 3), 6) * x / 6",
        "log(1 + x^2) - x / sqrt(x^2 + 1)",
        "log(abs(x) + 0.25) + step(x) * x",
        "x^5 / (1 + x^4) + 1 / (2 + x^2)^3",
        "2 * x + 1",
        "x - erf(0.5)",
        "tanh(x)^3 - softplus(-x) + 3 * (1 + x^2)^-2 * exp(-x^2)",
    ];
    texts
        .into_iter()
        .map(|text| format!("{{ expr = \"{text}\" }}"))
}

#[test]
fn values_and_slopes_agree_with_f64() {
    let cases = [
        "\"silu\"",
        "\"silu\", alpha = 1.702",
        "\"gelu\"",
        "\"gelu-tanh\"",
        "\"relu\"",
        "\"relu2\"",
    ];
    for activation in cases.map(String::from).into_iter().chain(expressions()) {
        let spec = spec(&activation);
        let host = moesaic_cpu::host_isa();
        let isas = [host, CpuIsa::Portable];
        let count = if activation.contains("expr") { 1 } else { 2 };
        for &isa in &isas[..count] {
            check(&format!("{isa:?} {activation}"), &spec, &on_cpu(&spec, isa));
        }
        check(&format!("gpu {activation}"), &spec, &on_gpu(&spec));
    }
}

#[test]
fn slopes_at_the_ends() {
    for (activation, at_zero) in [
        ("\"silu\"", 0.5),
        ("\"gelu\"", 0.5),
        ("\"gelu-tanh\"", 0.5),
        ("\"relu\"", 0.0),
        ("\"relu2\"", 0.0),
    ] {
        let spec = spec(activation);
        for (_, slope) in [on_cpu(&spec, moesaic_cpu::host_isa()), on_gpu(&spec)] {
            assert!(
                (slope(0.0) - at_zero).abs() < 1e-7,
                "{activation}'(0) = {}",
                slope(0.0)
            );
            assert_eq!(slope(-1e30), 0.0, "{activation}'(-1e30)");
            let far = if activation == "\"relu2\"" {
                2e30f32.into()
            } else {
                1.0
            };
            assert!(
                (slope(1e30) - far).abs() <= 1e-6 * far,
                "{activation}'(1e30)"
            );
        }
    }
}
