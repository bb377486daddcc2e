//! Compiles generated layers under the strictest lints, and uses the promises of their types, so
//! that a change of those does not compile.

#![deny(missing_docs, warnings)]
#![forbid(unsafe_code)]

mod small {
    include!("golden/small.rs");
}

moesaic::layer! {
    /// A published layer.
    pub struct Mixtral = "../../examples/specs/mixtral-8x7b.toml";

    /// Every kind of tensor.
    pub struct Awkward = "tests/awkward.toml";
}

use moesaic::half::{bf16, f16};
use moesaic::typed::{In, Out};
use moesaic::{Engine, EngineError, Mesh, Training};
use small::{Small, SmallWeights};

#[test]
fn the_golden_layer_has_three_tensors() {
    fn _weights<'a>(w: &SmallWeights<'a>) -> [usize; 3] {
        let SmallWeights {
            router_weight,
            experts_up_weight,
            experts_down_weight,
        } = w;
        [
            router_weight.len(),
            experts_up_weight.len(),
            experts_down_weight.len(),
        ]
    }
    assert_eq!(Small::EXPERTS, 4);
}

#[test]
fn constants_are_those_of_the_spec() {
    assert_eq!(Mixtral::HIDDEN_DIM, 14336);
    assert_eq!(Mixtral::spec().name, "mixtral-8x7b");
    assert_eq!(Awkward::ROUTED_EXPERTS, 5);
    assert_eq!(Awkward::SHARED_EXPERTS, 2);
    assert_eq!(Awkward::spec().shape.output_dim, Some(7));
}

#[test]
fn tensors_have_their_shape_and_dtype_as_type() {
    fn _weights<'a>(w: &MixtralWeights<'a>) -> &'a [[f32; 4096]; 8] {
        let _: &[[[bf16; 14336]; 4096]; 8] = w.experts_down_weight;
        w.router_weight
    }
    fn _awkward<'a>(w: &AwkwardWeights<'a>) -> &'a [[i32; 3]; 11] {
        let _: &[[f16; 20]; 6] = w.shared_0_gate_weight;
        let _: &[[f32; 20]; 1] = w.shared_0_router_weight;
        w.router_table
    }
    fn _new(engine: &Engine, w: &MixtralWeights<'_>) -> Result<Mixtral, EngineError> {
        Mixtral::new(engine, w)
    }
    fn _over(engine: &Engine, mesh: &Mesh, w: &MixtralWeights<'_>) -> Result<Mixtral, EngineError> {
        let layer = Mixtral::training_over(engine, mesh, w, Training::default())?;
        layer.reduce_gradients()?;
        Mixtral::new_over(engine, mesh, w)
    }
    fn _forward(
        layer: &Awkward,
        x: &[[f16; 20]],
        ids: &[i32],
    ) -> Result<Vec<[f16; 7]>, EngineError> {
        let AwkwardOutput {
            counts, overflow, ..
        } = layer.forward_all(x, ids)?;
        let _: ([i64; 5], i64) = (counts, overflow);
        layer.forward(x, ids)
    }
}

#[test]
fn kernel_arguments_have_direction_and_dtype() {
    use awkward_kernels::grouped_gemm_up_shared_1::GroupedGemmUp;
    use moesaic::target::{Arg, Ptr};
    use moesaic::typed::KernelArgs;
    let args = GroupedGemmUp {
        rows: In::<f16>::new(Ptr(1)),
        packed: In::<f16>::new(Ptr(2)),
        gate_bias: In::<f16>::new(Ptr(4)),
        up_bias: In::<f16>::new(Ptr(5)),
        hidden: Out::<f16>::new(Ptr(6)),
        tokens: 7,
    };
    let list = args.args();
    assert_eq!(list[4], Arg::Ptr(Ptr(6)));
    assert_eq!(list[5], Arg::I64(7));
    assert_eq!(GroupedGemmUp::PARAMS.len(), list.len());
}
