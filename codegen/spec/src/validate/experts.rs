//! Experts and shared experts.

use super::{Conflict, Range, Real, quoted};
use crate::{
    Activation, ClampSite, ExpertForm, GateLayout, LayerSpec, MAX_SHARED, Problem, SharedGate,
    WeightSite,
};

pub(super) fn check(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    numbers(spec, problems);
    plain(spec, problems);
    identity(spec, problems);
    output_norm(spec, problems);
    shared(spec, problems);
}

fn numbers(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let experts = &spec.experts;
    if let Some(clamp) = experts.clamp {
        Real::Positive.check("experts.clamp", clamp, problems);
    }
    if let Some(cap) = experts.up_softcap {
        Real::Positive.check("experts.up_softcap", cap, problems);
    }
    Real::Positive.check("experts.alpha", experts.alpha, problems);
    Real::Any.check("experts.up_offset", experts.up_offset, problems);
    if experts.alpha != 1.0 && experts.activation != Activation::Silu {
        let conflict = Conflict {
            key: "experts.alpha",
            value: format!("{:?}", experts.alpha),
            with: "experts.activation",
            with_value: match &experts.activation {
                Activation::Custom(expression) => format!("{{ expr = {expression:?} }}"),
                named => quoted(named),
            },
            because: "the slope inside silu",
            change: "remove `alpha`, or use activation = \"silu\"".to_string(),
        };
        problems.push(conflict.problem());
    }
    clamp_site(spec, problems);
}

/// Refuses a side for the clamp where nothing is clamped.
fn clamp_site(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let experts = &spec.experts;
    let clamps = |index: usize| spec.shared_experts(index).clamp.is_some();
    let clamped = experts.clamp.is_some() || (0..spec.shared.len()).any(clamps);
    if experts.clamp_on == ClampSite::Input || clamped || experts.form == ExpertForm::Plain {
        return;
    }
    let message = "`experts.clamp_on` = \"output\" without a clamp";
    let problem = Problem::new("experts.clamp_on", message).label("nothing is clamped");
    problems.push(problem.help("add `clamp` to [experts] or [[shared]], or remove `clamp_on`"));
}

/// Refuses options of gated experts on plain ones.
fn plain(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let experts = &spec.experts;
    if experts.form == ExpertForm::Gated {
        return;
    }
    let mut clash = |key: &str, value, because| {
        let name = key.trim_start_matches("experts.");
        let conflict = Conflict {
            key,
            value,
            with: "experts.form",
            with_value: quoted(&experts.form),
            because,
            change: format!("remove `{name}`, or use form = \"gated\""),
        };
        problems.push(conflict.problem());
    };
    if let Some(clamp) = experts.clamp {
        let because = "bounds the gate and up branches";
        clash("experts.clamp", format!("{clamp:?}"), because);
    }
    if experts.clamp_on != ClampSite::Input {
        let because = "says where the gate is bounded";
        clash("experts.clamp_on", quoted(&experts.clamp_on), because);
    }
    if let Some(cap) = experts.up_softcap {
        let because = "bounds the up branch before it meets the gate";
        clash("experts.up_softcap", format!("{cap:?}"), because);
    }
    if experts.up_offset != 0.0 {
        let because = "added to the up branch before it meets the gate";
        clash(
            "experts.up_offset",
            format!("{:?}", experts.up_offset),
            because,
        );
    }
    if experts.layout != GateLayout::Split {
        let because = "says where the gate lies";
        clash("experts.layout", quoted(&experts.layout), because);
    }
}

fn identity(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let (count, model) = (spec.experts.identity, spec.shape.model_dim);
    if count == 0 {
        return;
    }
    let output = spec.output_dim();
    if output != model && spec.latent.is_none() {
        let message = format!("identity experts cannot turn width {model} into {output}");
        let problem = Problem::new("experts.identity", message)
            .label("return their input")
            .with("shape.model_dim", format!("{model} in"))
            .with("shape.output_dim", format!("{output} out"));
        problems.push(problem.help("remove `output_dim` or `identity`"));
    }
    if spec.router.weight_on != WeightSite::Output {
        let conflict = Conflict {
            key: "router.weight_on",
            value: quoted(&spec.router.weight_on),
            with: "experts.identity",
            with_value: count.to_string(),
            because: "an identity expert has only an output",
            change: "use weight_on = \"output\", or remove `identity`".to_string(),
        };
        problems.push(conflict.problem());
    }
}

/// Refuses a norm of outputs behind the router's weight, which it would divide away.
fn output_norm(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let Some(eps) = spec.experts.output_norm_eps else {
        return;
    };
    Real::Positive.check("experts.output_norm_eps", eps, problems);
    if spec.router.weight_on != WeightSite::Output {
        let conflict = Conflict {
            key: "router.weight_on",
            value: quoted(&spec.router.weight_on),
            with: "experts.output_norm_eps",
            with_value: format!("{eps:?}"),
            because: "the weight multiplies the normalised output",
            change: "use weight_on = \"output\", or remove `output_norm_eps`".to_string(),
        };
        problems.push(conflict.problem());
    }
}

fn shared(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    for (index, expert) in spec.shared.iter().enumerate() {
        let key = format!("shared[{index}].hidden_dim");
        Range::dim(&key, expert.hidden_dim).check(problems);
        shared_clamp(spec, index, problems);
        let wide = spec.shape.model_dim.max(spec.output_dim());
        let sane = wide <= crate::MAX_DIM && expert.hidden_dim <= crate::MAX_DIM;
        if sane && expert.hidden_dim.saturating_mul(wide) > crate::MAX_MATRIX {
            let message = format!(
                "a weight matrix of {} x {wide} elements is too large",
                expert.hidden_dim
            );
            let problem = Problem::new(key, message)
                .label("rows")
                .with("shape.model_dim", "columns")
                .with("shape.output_dim", "columns");
            let help = format!(
                "keep an expert's matrix at {} elements or below",
                crate::MAX_MATRIX
            );
            problems.push(problem.help(help));
        }
    }
    one_residual(spec, problems);
    let count = spec.shared.len();
    if count > MAX_SHARED {
        let message = format!("{count} shared experts are too many");
        let problem = Problem::new("shared", message).label(format!("at most {MAX_SHARED}"));
        problems.push(problem.help("equal experts without a gate can be merged into a wider one"));
    }
}

fn shared_clamp(spec: &LayerSpec, index: usize, problems: &mut Vec<Problem>) {
    let Some(clamp) = spec.shared[index].clamp else {
        return;
    };
    let key = format!("shared[{index}].clamp");
    Real::NotNegative.check(&key, clamp, problems);
    if spec.experts.form == ExpertForm::Plain {
        let conflict = Conflict {
            key: &key,
            value: format!("{clamp:?}"),
            with: "experts.form",
            with_value: quoted(&spec.experts.form),
            because: "bounds the gate and up branches",
            change: "remove `clamp`, or use form = \"gated\"".to_string(),
        };
        problems.push(conflict.problem());
    }
}

/// Allows one residual shared expert, because one pair of logits weights the routed experts.
fn one_residual(spec: &LayerSpec, problems: &mut Vec<Problem>) {
    let gates = spec.shared.iter().map(|shared| shared.gate).enumerate();
    let mut residual = gates.filter(|(_, gate)| *gate == SharedGate::Residual);
    let Some((first, _)) = residual.next() else {
        return;
    };
    for (index, _) in residual {
        let message = format!("`shared[{index}]` is a second shared expert with a residual gate");
        let problem = Problem::new(format!("shared[{index}].gate"), message)
            .label("the routed experts have one weight")
            .with(format!("shared[{first}].gate"), "which this one gives");
        problems.push(problem.help("use gate = \"sigmoid\" or \"none\" for the others"));
    }
}
