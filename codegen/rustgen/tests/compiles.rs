//! Compiles the golden files under the strictest lints, and uses the promises of their types, so
//! that a change of those does not compile.

#![deny(missing_docs, warnings)]
#![forbid(unsafe_code)]

mod mixtral {
    include!("golden/mixtral_8x7b.rs");
}

mod awkward {
    include!("golden/9_awkward_experts.rs");
}

use awkward::{Layer9AwkwardExperts, Layer9AwkwardExpertsOutput, Layer9AwkwardExpertsWeights};
use mixtral::{Mixtral8x7b, Mixtral8x7bWeights};
use moesaic::half::{bf16, f16};
use moesaic::typed::{In, Out};
use moesaic::{Engine, EngineError, Mesh, Training};

#[test]
fn constants_are_those_of_the_spec() {
    assert_eq!(Mixtral8x7b::HIDDEN_DIM, 14336);
    assert_eq!(Mixtral8x7b::spec().name, "mixtral-8x7b");
    assert_eq!(Layer9AwkwardExperts::ROUTED_EXPERTS, 5);
    assert_eq!(Layer9AwkwardExperts::SHARED_EXPERTS, 2);
    assert_eq!(Layer9AwkwardExperts::spec().shape.output_dim, Some(7));
}

#[test]
fn tensors_have_their_shape_and_dtype_as_type() {
    fn _weights<'a>(w: &Mixtral8x7bWeights<'a>) -> &'a [[f32; 4096]; 8] {
        let _: &[[[bf16; 14336]; 4096]; 8] = w.experts_down_weight;
        w.router_weight
    }
    fn _awkward<'a>(w: &Layer9AwkwardExpertsWeights<'a>) -> &'a [[i32; 3]; 11] {
        let _: &[[f16; 20]; 6] = w.shared_0_gate_weight;
        let _: &[[f32; 20]; 1] = w.shared_0_router_weight;
        w.router_table
    }
    fn _new(engine: &Engine, w: &Mixtral8x7bWeights<'_>) -> Result<Mixtral8x7b, EngineError> {
        Mixtral8x7b::new(engine, w)
    }
    fn _over(
        engine: &Engine,
        mesh: &Mesh,
        w: &Mixtral8x7bWeights<'_>,
    ) -> Result<Mixtral8x7b, EngineError> {
        let layer = Mixtral8x7b::training_over(engine, mesh, w, Training::default())?;
        layer.reduce_gradients()?;
        Mixtral8x7b::new_over(engine, mesh, w)
    }
    fn _forward(
        layer: &Layer9AwkwardExperts,
        x: &[[f16; 20]],
        ids: &[i32],
    ) -> Result<Vec<[f16; 7]>, EngineError> {
        let Layer9AwkwardExpertsOutput {
            counts, overflow, ..
        } = layer.forward_all(x, ids)?;
        let _: ([i64; 5], i64) = (counts, overflow);
        layer.forward(x, ids)
    }
}

#[test]
fn kernel_arguments_have_direction_and_dtype() {
    use awkward::layer9_awkward_experts_kernels::grouped_gemm_up_shared_1::GroupedGemmUp;
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
