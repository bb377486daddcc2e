//! Name, sizes and element types.

use super::{Range, Real, quoted};
use crate::{LayerSpec, MAX_EXPERTS, MAX_MATRIX, MAX_NAME, Problem};
use moesaic_kernel::DType;

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    name(&spec.name, problems);
    sizes(spec, problems);
    matrix(spec, problems);
    counts(spec, problems);
    precision(spec, problems);
}

/// Checks the name, which ends up in file names, comments of kernels and identifiers.
fn name(name: &str, problems: &mut Vec<Problem>) {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let complaint = if name.is_empty() {
        "must not be empty"
    } else if name.len() > MAX_NAME {
        "is too long"
    } else if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        "must begin with a letter or a digit"
    } else if !name.chars().all(allowed) {
        "has a character that names cannot have"
    } else {
        return;
    };
    let help = format!(
        "use 1 to {MAX_NAME} letters, digits, dots, dashes and underscores: it names files and kernels"
    );
    let message = format!("`name` = \"{}\" cannot be a name", shortened(name));
    problems.push(Problem::new("name", message).label(complaint).help(help));
}

fn shortened(name: &str) -> String {
    let start: String = name.chars().take(40).collect();
    let rest = if start.len() < name.len() { "..." } else { "" };
    format!("{}{rest}", start.escape_debug())
}

fn sizes(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    Range::dim("shape.model_dim", spec.shape.model_dim).check(problems);
    Range::dim("shape.hidden_dim", spec.shape.hidden_dim).check(problems);
    if let Some(output) = spec.shape.output_dim {
        Range::dim("shape.output_dim", output).check(problems);
    }
}

fn matrix(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (model, output) = (spec.expert_input_dim(), spec.expert_output_dim());
    let (wide, key) = if spec.latent.is_some() {
        (model, "latent.dim")
    } else if output > model {
        (output, "shape.output_dim")
    } else {
        (model, "shape.model_dim")
    };
    let hidden = spec.shape.hidden_dim;
    let sane = wide <= crate::MAX_DIM && hidden <= crate::MAX_DIM;
    if sane && wide.saturating_mul(hidden) > MAX_MATRIX {
        let message = format!("a weight matrix of {hidden} x {wide} elements is too large");
        let help = format!(
            "offsets inside an expert's matrix are 32-bit: keep `hidden_dim` times `{}` at {MAX_MATRIX} or below",
            key.trim_start_matches("shape.")
        );
        let problem = Problem::new("shape.hidden_dim", message).label("rows");
        problems.push(problem.with(key, "columns").help(help));
    }
    latent(spec, problems);
}

/// Checks both projections around the routed experts.
fn latent(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let Some(latent) = &spec.latent else { return };
    Range::dim("latent.dim", latent.dim).check(problems);
    if let Some(eps) = latent.norm_eps {
        Real::Positive.check("latent.norm_eps", eps, problems);
    }
    if let Some(eps) = latent.input_norm_eps {
        Real::Positive.check("latent.input_norm_eps", eps, problems);
    }
    let wide = spec.shape.model_dim.max(spec.output_dim());
    let sane = wide <= crate::MAX_DIM && latent.dim <= crate::MAX_DIM;
    if sane && latent.dim.saturating_mul(wide) > MAX_MATRIX {
        let dim = latent.dim;
        let message = format!("a projection of {dim} x {wide} elements is too large");
        let help = format!(
            "offsets inside a matrix are 32-bit: keep it at {MAX_MATRIX} elements or below"
        );
        let problem = Problem::new("latent.dim", message).label("one side");
        let problem = problem.with("shape.model_dim", "the other");
        problems.push(problem.with("shape.output_dim", "the other").help(help));
    }
}

fn counts(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let experts = spec.shape.experts;
    let all = spec.scored_experts();
    Range {
        key: "shape.experts",
        value: experts,
        least: 1,
        most: MAX_EXPERTS,
        because: "the most experts a router kernel ranks",
    }
    .check(problems);
    if experts <= MAX_EXPERTS && all > MAX_EXPERTS {
        let (key, kind) = match spec.experts.identity {
            0 => ("experts.zero", "zero"),
            _ => ("experts.identity", "identity"),
        };
        let others = all - experts;
        let message = format!("{experts} experts and {others} {kind} experts are too many");
        let help = format!("a router kernel ranks at most {MAX_EXPERTS} in all");
        let problem = Problem::new(key, message).label(format!("{kind} experts count too"));
        problems.push(problem.with("shape.experts", "experts").help(help));
    }
    top_k(spec, all, problems);
}

fn top_k(spec: &LayerSpec, all: usize, problems: &mut Vec<Problem>) {
    let k = spec.shape.top_k;
    let problem = if k == 0 {
        Problem::new("shape.top_k", "`shape.top_k` = 0 sends tokens to no expert")
            .label("must be at least 1")
            .help("use 1 or more experts per token")
    } else if k > all && spec.shape.experts > 0 {
        let message = format!("`shape.top_k` = {k} asks for more experts than the layer has");
        let help = format!("lower `top_k` to {all} or less, or raise `experts`");
        Problem::new("shape.top_k", message)
            .label(format!("must be at most {all}"))
            .help(help)
    } else {
        return;
    };
    problems.push(super::experts_behind(spec, problem));
}

fn precision(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let precision = &spec.precision;
    float("precision.weights", precision.weights, problems);
    float("precision.activations", precision.activations, problems);
    mixed(spec, problems);
    tf32(spec, problems);
    gradients(spec, problems);
    if precision.experts.is_none() && precision.experts_down.is_some() {
        let message = "`precision.experts_down` without `precision.experts`";
        let problem = Problem::new("precision.experts_down", message.to_string())
            .label("it is the format of the down projection alone");
        problems.push(problem.help("name the format of the others in `precision.experts`"));
    }
    if let (None, Some(format)) = (precision.experts, precision.expert_activations) {
        let message =
            format!("`precision.expert_activations` = {format} without `precision.experts`");
        let problem = Problem::new("precision.expert_activations", message)
            .label("its groups are those of the weights' scales");
        problems.push(problem.help("name the format of the weights in `precision.experts`"));
    }
}

fn tf32(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (weights, activations) = (spec.precision.weights, spec.precision.activations);
    let single = weights == DType::F32 && activations == DType::F32;
    if spec.precision.tf32 && !single {
        let message =
            format!("`precision.tf32` with {weights} weights and {activations} activations");
        let problem = Problem::new("precision.tf32", message).label("it rounds f32 factors");
        problems.push(problem.help("leave it out, or make both types \"f32\""));
    }
}

fn gradients(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    const KEY: &str = "precision.expert_gradients";
    let precision = &spec.precision;
    let (weights, gradients) = (precision.weights, precision.expert_gradients);
    float(KEY, gradients, problems);
    if gradients == DType::F32 || !gradients.is_float() {
        return;
    }
    if gradients != weights {
        let message = format!("`{KEY}` = {} with {weights} weights", quoted(&gradients));
        let help = match weights {
            DType::F32 => "leave it out".to_string(),
            _ => format!("leave it out for f32, or use {}", quoted(&weights)),
        };
        let problem = Problem::new(KEY, message)
            .label("must be f32 or the dtype of the weights")
            .with("precision.weights", format!("{weights} here"));
        problems.push(problem.help(help));
    } else if let Some(format) = precision.experts {
        let message = format!("`{KEY}` = {} with experts of {format}", quoted(&gradients));
        let problem = Problem::new(KEY, message)
            .label("quantized experts have no gradients")
            .with("precision.experts", "they are quantized here");
        problems.push(problem.help("leave it out"));
    }
}

fn float(key: &str, dtype: DType, problems: &mut Vec<Problem>) {
    if !dtype.is_float() {
        let message = format!("`{key}` = {} is not a floating-point type", quoted(&dtype));
        let problem = Problem::new(key, message).label("integers cannot hold it");
        problems.push(problem.help("use \"f32\", \"f16\" or \"bf16\""));
    }
}

fn mixed(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (weights, activations) = (spec.precision.weights, spec.precision.activations);
    let mixed = matches!(
        (weights, activations),
        (DType::F16, DType::Bf16) | (DType::Bf16, DType::F16)
    );
    if mixed {
        let message = format!("{weights} weights cannot meet {activations} activations");
        let help =
            "use the same 16-bit type for `weights` and `activations`, or \"f32\" for one of them";
        let problem = Problem::new("precision.weights", message)
            .label("no tensor core multiplies f16 by bf16")
            .with("precision.activations", format!("{activations} here"));
        problems.push(problem.help(help));
    }
}
