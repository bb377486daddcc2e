//! Layers to test: small ones of given sizes, and what makes one unlike another.

use moesaic_kernel::DType;
use moesaic_spec::{
    Activation, CapacityMode, CapacityOrder, ClampSite, ExpertForm, Expression, LayerSpec,
    RouterKind, SharedExpert, SharedGate, WeightSite,
};

/// A layer of these widths (model and hidden), experts and top-k.
pub fn spec(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    let text =
        format!(r#"{{"shape":{{"model_dim":{d},"hidden_dim":{h},"experts":{e},"top_k":{k}}}}}"#);
    serde_json::from_str(&text).unwrap()
}

/// A layer whose routing comes from outside, so that no gate is needed.
pub fn external(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    with(spec(d, h, e, k), |s| s.router.kind = RouterKind::External)
}

/// A layer with a change.
pub fn with(mut spec: LayerSpec, change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    change(&mut spec);
    spec
}

/// A layer whose weights and activations have these types.
pub fn typed(spec: LayerSpec, weights: DType, activations: DType) -> LayerSpec {
    with(spec, |s| {
        s.precision.weights = weights;
        s.precision.activations = activations;
    })
}

/// A layer with biases in its experts.
pub fn biased(spec: LayerSpec) -> LayerSpec {
    with(spec, |s| s.experts.bias = true.into())
}

/// A layer of these widths (model, hidden, output), experts and top-k, in one type.
pub fn layer([d, h, out]: [usize; 3], [e, k]: [usize; 2], dtype: DType) -> LayerSpec {
    with(typed(spec(d, h, e, k), dtype, dtype), |s| {
        s.shape.output_dim = (out != d).then_some(out);
    })
}

/// Gives experts SiTU-GLU, limits behind the activation, and shared experts with clamps of their
/// own.
pub fn limited(spec: &mut LayerSpec, clamp: Option<f64>) {
    let gate = Expression::parse("1.5 * tanh(x / 1.5) * sigmoid(x)");
    spec.experts.activation = Activation::Custom(gate.expect("a formula of x"));
    spec.experts.clamp = clamp;
    spec.experts.clamp_on = ClampSite::Output;
    spec.experts.up_softcap = Some(0.8);
    spec.experts.up_offset = 0.5;
    let shared = |clamp| SharedExpert {
        hidden_dim: 9,
        gate: SharedGate::None,
        bias: None,
        clamp,
        activation: None,
    };
    spec.shared = vec![shared(Some(0.2)), shared(Some(0.0))];
}

/// A change of a layer.
pub type Change = fn(&mut LayerSpec);

/// Experts that compute in every way, each once.
pub const EXPERTS: [Change; 8] = [
    |s| {
        s.experts.bias = true.into();
        s.experts.clamp = Some(0.4);
        s.experts.alpha = 1.702;
        s.experts.up_offset = 1.0;
    },
    |s| limited(s, None),
    |s| limited(s, Some(0.3)),
    |s| {
        s.experts.form = ExpertForm::Plain;
        s.experts.activation = Activation::Gelu;
        s.experts.bias = true.into();
        s.shape.output_dim = Some(40);
    },
    |s| {
        s.experts.form = ExpertForm::Plain;
        s.experts.activation = Activation::Relu2;
    },
    |s| s.experts.activation = Activation::GeluTanh,
    |s| {
        s.experts.activation = Activation::Relu;
        s.experts.bias = true.into();
        s.router.weight_on = WeightSite::Activation;
    },
    |s| {
        s.router.weight_on = WeightSite::Input;
        s.precision.activations = DType::Bf16;
        s.experts.bias = true.into();
    },
];

/// The ways in which a capacity drops tokens, as far as a backward pass sees them.
pub const DROPS: [Change; 3] = [
    |s| {
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.factor = 0.7;
        s.experts.bias = true.into();
    },
    |s| {
        s.capacity.mode = CapacityMode::Factor;
        s.capacity.factor = -0.9;
        s.capacity.order = CapacityOrder::Probability;
        s.capacity.renormalize_after_drop = true;
        s.experts.identity = 1;
    },
    |s| {
        s.capacity.mode = CapacityMode::Fixed;
        s.capacity.rows = Some(1);
        s.capacity.renormalize_after_drop = true;
        s.router.weight_on = WeightSite::Input;
    },
];

/// A shared expert of some width, with nothing of its own but a gate.
pub fn shared(hidden_dim: usize, gate: SharedGate) -> SharedExpert {
    SharedExpert {
        hidden_dim,
        gate,
        bias: None,
        clamp: None,
        activation: None,
    }
}

/// A layer with a capacity, shared experts and narrow numbers.
pub fn busy() -> LayerSpec {
    with(
        biased(typed(external(45, 70, 5, 3), DType::Bf16, DType::Bf16)),
        |s| {
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = 0.9;
            s.shared = vec![shared(40, SharedGate::Sigmoid)];
        },
    )
}

/// What may become of a sum, and in which type.
pub type Ending = (Activation, ExpertForm, WeightSite, DType);

/// One layer for each ending; `experts` has experts and top-k of a case. Biases and limits
/// differ with the number of the case.
pub fn endings(
    shape: [usize; 3],
    experts: impl Fn(usize) -> [usize; 2],
    endings: impl IntoIterator<Item = Ending>,
) -> Vec<LayerSpec> {
    let cases = endings.into_iter().enumerate();
    let layer = |(case, (activation, form, site, dtype))| {
        with(layer(shape, experts(case), dtype), |s| {
            if activation == Activation::Silu {
                s.experts.alpha = 1.702;
            }
            s.experts.activation = activation;
            s.experts.form = form;
            s.experts.bias = (case != 4).into();
            s.router.weight_on = site;
            if case.is_multiple_of(2) {
                s.experts.clamp = Some(0.4);
                s.experts.up_offset = 1.0;
            }
            if case % 4 == 2 && form == ExpertForm::Gated {
                s.experts.clamp_on = ClampSite::Output;
                s.experts.up_softcap = Some(0.8);
            }
        })
    };
    cases.map(layer).collect()
}
