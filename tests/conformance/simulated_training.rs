//! Whole layers forward and backward on simulated GPUs, against the gradients
//! of the reference.

use super::Case;
use super::compare::{close, equal};
use super::simulated::{SIMULATORS, of_type, open, small};
use moesaic::spec::{
    Activation, CapacityMode, CapacityOrder, ExpertForm, LayerSpec, Renormalize, RouterKind,
    SharedExpert, SharedGate, WeightSite,
};
use moesaic::{DType, Engine, Layer, Recompute};

impl Case {
    /// Trains once and holds every gradient against the reference.
    pub fn check_training(&self, engine: &Engine, recompute: Recompute) {
        self.check_gradients(&self.training_layer(engine, recompute));
    }

    /// The same with a layer that was made of this case.
    pub fn check_gradients(&self, layer: &Layer) {
        let dy = self.dy(0xd7);
        let (found, ids) = self.train(layer, &dy, &[false]);
        // Gradients of two different choices cannot be compared.
        equal(&self.what("ids"), &ids, &self.chosen());
        let expected = self.trained(&dy);
        for (name, found) in found.iter().filter(|(name, _)| *name != "y") {
            let what = match layer.gradient(name) {
                Ok(_) => self.what(&format!("grad.{name}")),
                Err(_) => self.what(name),
            };
            close(&what, found, &expected[name], self.rounding());
        }
    }

    /// Pre-activations, hidden, their gradients, rows and dx are rounded once
    /// each; sums of products in f32 add a little.
    fn rounding(&self) -> f64 {
        4e-5 + 16.0 * self.spec.precision.activations.unit_roundoff()
    }
}

fn with(mut spec: LayerSpec, change: impl FnOnce(&mut LayerSpec)) -> LayerSpec {
    change(&mut spec);
    spec
}

fn external(d: usize, h: usize, e: usize, k: usize) -> LayerSpec {
    with(small(d, h, e, k), |s| s.router.kind = RouterKind::External)
}

/// Sizes that fit no tile, and sizes that matrix units take, in every type.
pub fn shapes(target: &str) {
    let engine = open(target);
    let shapes = [(1, 1, 1, 1), (37, 21, 5, 5), (64, 72, 7, 2)];
    for (d, h, e, k) in shapes {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let spec = of_type(dtype, external(d, h, e, k));
            for tokens in [0, 33] {
                Case::random(&spec, tokens, 3).check_training(&engine, Recompute::None);
            }
        }
    }
}

/// Everything that changes what flows back, in every recompute mode.
pub fn options(target: &str) {
    let engine = open(target);
    let modes = [Recompute::None, Recompute::Hidden, Recompute::All];
    for (i, spec) in changes().into_iter().enumerate() {
        if let Err(problems) = spec.validate() {
            panic!("{problems:?}");
        }
        Case::random(&spec, 33, i as u64).check_training(&engine, modes[i % 3]);
    }
}

/// Layers that differ in what flows back through them.
pub fn changes() -> Vec<LayerSpec> {
    vec![
        with(of_type(DType::Bf16, small(40, 24, 6, 2)), |s| {
            s.router.renormalize = Renormalize::Sum;
            s.shared = vec![SharedExpert {
                hidden_dim: 16,
                gate: SharedGate::None,
                bias: None,
            }];
        }),
        // In f32 no rounding crosses the clamp.
        with(external(40, 24, 6, 2), |s| {
            s.precision.weights = DType::Bf16;
            s.experts.bias = true.into();
            s.experts.clamp = Some(0.4);
            s.experts.up_offset = 1.0;
        }),
        with(external(33, 21, 6, 2), |s| {
            s.experts.form = ExpertForm::Plain;
            s.experts.activation = Activation::Gelu;
            s.experts.bias = true.into();
            s.router.weight_on = WeightSite::Input;
            s.shape.output_dim = Some(17);
        }),
        with(of_type(DType::F16, external(24, 16, 5, 3)), |s| {
            s.experts.identity = 2;
            s.capacity.mode = CapacityMode::Factor;
            s.capacity.factor = 0.8;
            s.capacity.order = CapacityOrder::Probability;
            s.shared = vec![SharedExpert {
                hidden_dim: 9,
                gate: SharedGate::Sigmoid,
                bias: None,
            }];
        }),
        with(external(16, 24, 6, 2), |s| {
            s.capacity.mode = CapacityMode::Fixed;
            s.capacity.rows = Some(1);
            s.capacity.renormalize_after_drop = true;
            s.experts.activation = Activation::GeluTanh;
        }),
    ]
}

#[test]
fn sm_80_trains_shapes() {
    shapes(SIMULATORS[0]);
}

#[test]
fn sm_90a_trains_shapes() {
    shapes(SIMULATORS[1]);
}

#[test]
fn gfx942_trains_shapes() {
    shapes(SIMULATORS[2]);
}

#[test]
fn sm_80_trains_options() {
    options(SIMULATORS[0]);
}

#[test]
fn sm_90a_trains_options() {
    options(SIMULATORS[1]);
}

#[test]
fn gfx942_trains_options() {
    options(SIMULATORS[2]);
}
