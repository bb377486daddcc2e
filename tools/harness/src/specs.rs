//! Layers to test: small ones of given sizes, and what makes one unlike another.

use moesaic_kernel::DType;
use moesaic_spec::{
    Activation, ClampSite, ExpertForm, Expression, LayerSpec, RouterKind, SharedExpert, SharedGate,
    WeightSite,
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
