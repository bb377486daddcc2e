//! Activations of a user's own near the length from which products of `wmma` are left to
//! SIMT: shorter ones have registers enough, whatever they are made of.

use moesaic_emit::emit;
use moesaic_harness::kept::Kept;
use moesaic_kernel::{DType, Target};
use moesaic_plan::{Op, PlanOptions, Training, plan};
use moesaic_spec::testing::SampleRng;
use moesaic_spec::*;
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::testing;

/// The number of compiled expressions; more by `MOESAIC_EXPRESSIONS`.
const FEW: u64 = 2;

const FACTORS: [&str; 12] = [
    "tanh(x)",
    "exp(-x)",
    "sigmoid(1.7 * x)",
    "softplus(x)",
    "erf(0.5 * x)",
    "sqrt(1 + x^2)",
    "log(1 + x^2)",
    "x / (1 + abs(x))",
    "max(x, 0.1 * x)",
    "where(x < 0, exp(x) - 1, x)",
    "min(relu(x), 6)",
    "tanh(softplus(x))",
];

/// Parts are added until one more would be too long. Products need the most registers, in gated
/// experts above all: the slope of each part wants the values of all others.
fn longest(seed: u64, most: usize) -> Expression {
    let rng = &mut SampleRng::new(seed);
    let operators: &[&str] = match seed % 4 {
        1 => &[" + "],
        3 => &[" * ", " + ", " - "],
        _ => &[" * "],
    };
    let mut text = rng.pick(&FACTORS).to_string();
    let mut kept = Expression::parse(&text).expect("a part is an expression");
    for _ in 0..40 {
        let longer = format!("{text}{}{}", rng.pick(operators), rng.pick(&FACTORS));
        let Ok(expression) = Expression::parse(&longer) else {
            continue;
        };
        if expression.nodes().len() <= most {
            (text, kept) = (longer, expression);
        }
    }
    kept
}

fn layer(seed: u64, expression: Expression) -> LayerSpec {
    let shape = "shape = { model_dim = 2048, hidden_dim = 768, experts = 8, top_k = 2 }";
    let mut spec = LayerSpec::from_toml(shape).expect("a valid spec");
    spec.precision.weights = DType::Bf16;
    spec.precision.activations = DType::Bf16;
    spec.experts.form = match seed % 2 {
        0 => ExpertForm::Gated,
        _ => ExpertForm::Plain,
    };
    spec.experts.activation = Activation::Custom(expression);
    spec.validate().expect("still valid");
    spec
}

#[test]
fn expressions_within_the_limit_of_wmma_do_not_spill() {
    let number = std::env::var("MOESAIC_EXPRESSIONS").ok();
    let number = number.and_then(|number| number.parse().ok()).unwrap_or(FEW);
    let compiler = Kept::new(testing::rocm());
    let target: Target = "rocm:gfx1100".parse().unwrap();
    let options = PlanOptions::training(Training::default());
    for seed in 0..number {
        let expression = longest(seed, 64);
        let (text, nodes) = (expression.text().to_string(), expression.nodes().len());
        let plan = plan(&layer(seed, expression), target, &options).unwrap();
        let kernel = plan.kernels.iter().find(|kernel| {
            let is = |op: &Op| matches!(op, Op::GroupedGemmDgrad { config, .. } if config.family.name() == "wmma");
            is(&kernel.op) && kernel.name == "grouped_gemm_dgrad_down"
        });
        let source = emit(kernel.expect("wmma multiplies"), target).unwrap();
        let artifact = compiler.compile(&source, &CompileOptions::default());
        let artifact = artifact.unwrap_or_else(|error| panic!("{nodes} values, {text}: {error}"));
        for kernel in &artifact.report.kernels {
            println!(
                "{seed}: {nodes} values, {:?} registers: {text}",
                kernel.registers
            );
            let stack = kernel.stack_bytes.unwrap_or(0);
            assert!(
                !kernel.spills() && stack == 0,
                "{nodes} values, {text}: {kernel:?}"
            );
        }
    }
}
