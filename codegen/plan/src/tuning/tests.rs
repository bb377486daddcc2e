use super::*;
use crate::{LayerPlan, PlanError, PlanOptions, TensorRole, Training, plan};
use moesaic_kernel::{DType, Target};
use moesaic_spec::LayerSpec;

const TARGETS: [&str; 5] = [
    "cpu:portable",
    "cpu:avx2",
    "cpu:avx512bf16",
    "cpu:amx",
    "sim:neon",
];

fn spec(dtype: DType) -> LayerSpec {
    let text = r#"{"shape":{"model_dim":700,"hidden_dim":900,"experts":4,"top_k":2}}"#;
    let mut spec: LayerSpec = serde_json::from_str(text).unwrap();
    spec.precision.weights = dtype;
    spec.precision.activations = dtype;
    spec
}

fn plan_tuned(
    spec: &LayerSpec,
    target: Target,
    training: Option<Training>,
    tuning: &Tuning,
) -> Result<LayerPlan, PlanError> {
    let options = PlanOptions {
        training,
        tuning: tuning.clone(),
        ..PlanOptions::default()
    };
    plan(spec, target, &options)
}

fn gemm(plan: &LayerPlan, name: &str) -> GroupedGemmConfig {
    let kernel = plan.kernels.iter().find(|kernel| kernel.name == name);
    kernel.and_then(|kernel| kernel.op.gemm()).unwrap().clone()
}

/// Every plan of a CPU with every candidate by itself.
fn each(check: impl Fn(&LayerPlan, &LayerPlan, &KnobCandidates, usize)) {
    for target in TARGETS {
        let target: Target = target.parse().unwrap();
        for training in [None, Some(Training::default())] {
            for dtype in [DType::F32, DType::Bf16] {
                let spec = spec(dtype);
                let plain = plan(&spec, target, &PlanOptions::training(training)).unwrap();
                for choice in Tuning::choices(&plain) {
                    for &size in &choice.others {
                        let tuning = Tuning::default().with(choice.knob, size);
                        assert!(tuning.fits(&plain));
                        let tuned = plan_tuned(&spec, target, training, &tuning).unwrap();
                        check(&plain, &tuned, &choice, size);
                    }
                }
            }
        }
    }
}

#[test]
fn a_size_changes_tiles_and_nothing_else() {
    each(|plain, tuned, choice, size| {
        let what = format!("{:?} {size} on {}", choice.knob, plain.target);
        let mut changed = 0;
        for (a, b) in plain.kernels.iter().zip(&tuned.kernels) {
            assert_eq!(a.stem(), b.stem(), "{what}");
            changed += usize::from(a.op != b.op);
            let params = |kernel: &crate::KernelPlan| {
                let entries = kernel.entries.iter();
                entries
                    .map(|e| (e.symbol.clone(), e.params.clone()))
                    .collect::<Vec<_>>()
            };
            assert_eq!(params(a), params(b), "{what}");
        }
        assert!(changed > 0, "{what}");
        assert_eq!(plain.steps, tuned.steps, "{what}");
        assert_eq!(plain.backward, tuned.backward, "{what}");
        let kept = |plan: &LayerPlan| {
            let mut tensors = plan.tensors.clone();
            tensors.retain(|t| t.role != TensorRole::Scratch);
            tensors
        };
        assert_eq!(kept(plain), kept(tuned), "{what}");
    });
}

#[test]
fn all_that_walk_the_row_tiles_agree() {
    each(|_, tuned, choice, size| {
        if choice.knob != Knob::TileRows {
            return;
        }
        for kernel in &tuned.kernels {
            let rows = match &kernel.op {
                Op::GroupedGemm { config, .. } | Op::GroupedGemmDgrad { config, .. } => {
                    config.tile_rows
                }
                Op::ExpertScan { config, .. } => config.tile_rows,
                _ => size,
            };
            assert_eq!(rows, size, "{}", kernel.name);
        }
    });
}

#[test]
fn no_size_cuts_a_sum() {
    each(|plain, tuned, choice, _| {
        for (a, b) in plain.kernels.iter().zip(&tuned.kernels) {
            if let (Some(a), Some(b)) = (a.op.gemm(), b.op.gemm()) {
                let sums =
                    |c: &GroupedGemmConfig| (c.tile_depth, c.thread_columns, c.family.name());
                assert_eq!(sums(a), sums(b), "{:?}", choice.knob);
            }
        }
        if plain.training.is_some() {
            let down = "grouped_gemm_dgrad_down";
            let columns = |plan| gemm(plan, down).tile_columns;
            assert_eq!(columns(plain), columns(tuned), "{:?}", choice.knob);
        }
    });
}

#[test]
fn memory_of_a_thread_grows_with_its_tiles() {
    let amx = "cpu:amx".parse().unwrap();
    let plain = plan(&spec(DType::Bf16), amx, &PlanOptions::default()).unwrap();
    let choices = Tuning::choices(&plain);
    let rows = choices[0].others.iter().max().unwrap();
    let tuning = Tuning::default().with(Knob::TileRows, *rows);
    let tuned = plan_tuned(&plain.spec, amx, None, &tuning).unwrap();
    let [a, b] = [&plain, &tuned].map(|plan| gemm(plan, "grouped_gemm_up"));
    let more = (b.tile_rows - a.tile_rows) * a.tile_depth * 4;
    assert!(b.shared_bytes() as usize >= a.shared_bytes() as usize + more);
}

#[test]
fn other_sizes_do_not_fit_and_gpus_have_none() {
    let spec = spec(DType::F32);
    let plain = plan(&spec, "cpu:avx2".parse().unwrap(), &PlanOptions::default()).unwrap();
    let tile_rows = |size| Tuning::default().with(Knob::TileRows, size);
    for size in [0, 1, 191, 384, usize::MAX] {
        assert!(!tile_rows(size).fits(&plain), "{size}");
    }
    assert!(!Tuning::default().with(Knob::WgradRows, 96).fits(&plain));
    let gpu: Target = "cuda:sm_80".parse().unwrap();
    let plan = plan(&spec, gpu, &PlanOptions::default()).unwrap();
    assert_eq!(Tuning::choices(&plan), []);
    assert_eq!(plan_tuned(&spec, gpu, None, &tile_rows(96)).unwrap(), plan);
}

#[test]
fn names_read_back() {
    for knob in Knob::ALL {
        let tuning = Tuning::default().with(knob, 3);
        assert_eq!(Tuning::named(knob.name(), 3), Some(tuning.clone()));
        let text = serde_json::to_string(&tuning).unwrap();
        assert_eq!(text, format!("{{\"{}\":3}}", knob.name()));
    }
    assert_eq!(Tuning::named("elephants", 3), None);
}
