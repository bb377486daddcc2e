use super::memory::RankParameters;
use super::scenario::LayerParameters;
use super::stages::StageLayers;
use super::*;
use crate::published;
use moesaic_plan::Training;
use moesaic_spec::LayerSpec;
use moesaic_spec::hf::{AttentionShape, ModelShape};

/// A small model of eight layers, of which the first is dense.
fn model(machine: &str, world: usize) -> ModelScenario {
    let layer = LayerSpec::from_toml(
        "shape = { model_dim = 4096, hidden_dim = 2048, experts = 64, top_k = 4 }
         precision = { weights = \"bf16\", activations = \"bf16\" }",
    );
    ModelScenario {
        layer: layer.unwrap(),
        shape: ModelShape {
            width: 4096,
            moe_layers: 7,
            dense_layers: 1,
            dense_width: 12288,
            attention: AttentionShape {
                parameters: 4096.0 * 4.0 * 4096.0,
                queries: 4096,
                keys: 4096,
                values: 4096,
                outputs: 4096,
                ..AttentionShape::default()
            },
            vocabulary: 64_000,
            tied: false,
        },
        machine: published(machine).unwrap(),
        world,
        training: Some(Training::default()),
        batch: Batch {
            sequence: 4096,
            sequences: 256,
        },
        skew: 0.0,
        fp8: false,
        state: StateBytes::default(),
        reserve: 0.0,
    }
}

const MESH: ModelMesh = ModelMesh {
    pp: 2,
    tp: 1,
    ep: 8,
    expert_tp: 1,
};

const PLAIN: StepOrder = StepOrder {
    micro_batch: 1,
    virtual_stages: 1,
    recompute: RecomputeLevel::None,
    overlap_batches: false,
};

#[test]
fn phases_add_up_and_the_timeline_takes_as_long() {
    let model = model("h100-ib", 32);
    let found = predict_model(&model, MESH, PLAIN, None).unwrap();
    let exposed: f64 = found.phases.iter().map(|phase| phase.exposed).sum();
    assert!((exposed / found.seconds - 1.0).abs() < 1e-9);
    assert_eq!(found.micro_batches, 16);
    let names: Vec<&str> = found.phases.iter().map(|phase| phase.name).collect();
    for name in [
        "experts' layers: exchanges",
        "waiting for other stages",
        "sums of gradients",
    ] {
        assert!(names.contains(&name), "{names:?}");
    }
    let timeline = model_timeline(&model, &found);
    let end = timeline.iter().map(|event| event.end).fold(0.0, f64::max);
    // The timeline has neither messages between stages nor the slowdown by what runs beside.
    let messages = found
        .phases
        .iter()
        .find(|phase| phase.name.starts_with("messages"));
    let without = found.seconds - messages.map_or(0.0, |phase| phase.exposed);
    assert!((0.95..=1.0).contains(&(end / without)), "{end} {found:?}");
    let passes = timeline.iter().filter(|event| event.stream == "compute");
    assert_eq!(passes.count(), 2 * (2 * 16 + 1));
}

#[test]
fn interleaved_stages_run_every_pass_once_and_wait_less() {
    let model = model("h100-ib", 32);
    let schedule = StepOrder {
        virtual_stages: 2,
        ..PLAIN
    };
    let plain = predict_model(&model, MESH, PLAIN, None).unwrap();
    let found = predict_model(&model, MESH, schedule, None).unwrap();
    assert!(found.seconds < plain.seconds);
    assert!(found.memory.activations > plain.memory.activations);
    let timeline = model_timeline(&model, &found);
    let forward = timeline
        .iter()
        .filter(|event| event.name.starts_with("forward"));
    assert_eq!(forward.count(), 2 * 2 * 16);
}

#[test]
fn what_backward_computes_again_is_not_kept() {
    let model = model("h100-ib", 32);
    let with = |recompute| {
        let schedule = StepOrder { recompute, ..PLAIN };
        predict_model(&model, MESH, schedule, None).unwrap()
    };
    let all = [
        RecomputeLevel::None,
        RecomputeLevel::Attention,
        RecomputeLevel::Layer,
    ]
    .map(with);
    assert!(all.windows(2).all(|pair| pair[0].seconds < pair[1].seconds));
    let kept = all.map(|found| found.memory.activations);
    assert!(kept.windows(2).all(|pair| pair[0] > pair[1]), "{kept:?}");
}

/// Latent attention keeps its narrow vectors, and scores are not computed again.
#[test]
fn projections_alone_are_computed_again() {
    let mut model = model("h100-ib", 32);
    model.shape.attention.latent = 512;
    model.shape.attention.latent_parameters = 512.0 * 3.0 * 4096.0;
    let with = |recompute| {
        let schedule = StepOrder { recompute, ..PLAIN };
        let mesh = ModelMesh { pp: 1, ..MESH };
        predict_model(&model, mesh, schedule, None).unwrap()
    };
    let [none, projections, attention] = [
        RecomputeLevel::None,
        RecomputeLevel::Projections,
        RecomputeLevel::Attention,
    ]
    .map(with);
    let kept = none.memory.activations - projections.memory.activations;
    assert_eq!(kept, 8.0 * 4096.0 * 2.0 * 3.0 * 4096.0);
    assert!(none.seconds < projections.seconds && projections.seconds < attention.seconds);
    assert!(projections.memory.activations > attention.memory.activations);
    let tried = |model: &ModelScenario| {
        let space = ModelSpace {
            mesh: Some(ModelMesh { pp: 1, ..MESH }),
            micro_batches: vec![1],
            ..ModelSpace::default()
        };
        search_model(model, &space).predicted
    };
    let before = tried(&model);
    model.shape.attention.latent = 0;
    assert_eq!([before, tried(&model)], [4, 3]);
}

#[test]
fn gemms_in_fp8_take_less_time_and_casts_some() {
    let model = model("h100-ib", 32);
    let with = |scenario: &ModelScenario| predict_model(scenario, MESH, PLAIN, None).unwrap();
    let fp8 = ModelScenario {
        fp8: true,
        ..model.clone()
    };
    let (wide, narrow) = (with(&model), with(&fp8));
    assert!(narrow.seconds < wide.seconds && narrow.mfu < wide.mfu);
    assert_eq!(narrow.memory.weights, wide.memory.weights);
    // Casts take memory traffic: at the rate of 16 bits nothing but them would be left.
    let mut slow = fp8;
    let rates = &mut slow.machine.compute.gemm_tflops;
    rates.insert("fp8".to_string(), rates["bf16"]);
    assert!(with(&slow).seconds > wide.seconds);
}

/// Transformer Engine keeps the inputs of GEMMs in FP8, with a byte of scales for 32 values.
#[test]
fn inputs_of_gemms_are_kept_in_fp8() {
    let model = model("gb300-nvl72", 32);
    let fp8 = ModelScenario {
        fp8: true,
        ..model.clone()
    };
    let mesh = ModelMesh { pp: 1, ..MESH };
    let kept = |scenario: &ModelScenario, recompute| {
        let schedule = StepOrder { recompute, ..PLAIN };
        let found = predict_model(scenario, mesh, schedule, None).unwrap();
        found.memory.activations
    };
    let saved = |recompute| kept(&model, recompute) - kept(&fp8, recompute);
    // Of each token: the input of attention's first GEMM, 4 rows of experts in 7 layers, and the input
    // of the down projection in one layer without experts.
    let inputs = 4096.0 * (7.0 * 4.0 * 4096.0 + 12288.0);
    let attention = 8.0 * 4096.0 * 4096.0;
    let less = 2.0 - 33.0 / 32.0;
    assert_eq!(saved(RecomputeLevel::None), less * (inputs + attention));
    assert_eq!(saved(RecomputeLevel::Attention), less * inputs);
    assert_eq!(saved(RecomputeLevel::Layer), 0.0);
}

#[test]
fn a_mesh_that_ranks_cannot_make_says_what_they_can() {
    let model = model("h100-ib", 32);
    let said = |[pp, tp, ep, expert_tp]: [usize; 4], micro_batch| {
        let mesh = ModelMesh {
            pp,
            tp,
            ep,
            expert_tp,
        };
        let checked = check_mesh(&model, mesh, micro_batch);
        assert_eq!(
            checked.is_ok(),
            predict_model(
                &model,
                mesh,
                StepOrder {
                    micro_batch,
                    ..PLAIN
                },
                None
            )
            .is_some()
        );
        checked.map_or_else(|error| error.to_string(), |()| String::new())
    };
    let big = 1 << 63;
    for (mesh, micro_batch, part) in [
        ([2, 1, 8, 1], 1, ""),
        ([3, 1, 1, 1], 1, "pp is a divisor"),
        ([0, 1, 1, 1], 1, "pp is a divisor"),
        ([big, big, big, big], 1, "pp is a divisor"),
        (
            [16, 1, 1, 1],
            1,
            "pp=16 stages need a layer each, and the model has 8",
        ),
        (
            [2, 3, 1, 1],
            1,
            "tp=3 does not divide the 16 ranks of a stage",
        ),
        (
            [2, 1, big, 2],
            1,
            "x expert_tp=2 does not divide the 16 ranks",
        ),
        (
            [1, 1, 32, 1],
            3,
            "256 sequences a step are no multiple of 32 copies",
        ),
        (
            [1, 1, 1, 1],
            usize::MAX,
            "256 sequences a step are no multiple",
        ),
    ] {
        let said = said(mesh, micro_batch);
        assert!(
            said.contains(part) && said.is_empty() == part.is_empty(),
            "{mesh:?}: {said}"
        );
    }
}

#[test]
fn another_micro_batch_hides_exchanges() {
    let model = model("h100-ib", 32);
    let mesh = ModelMesh { ep: 16, ..MESH };
    let hidden = StepOrder {
        overlap_batches: true,
        ..PLAIN
    };
    let plain = predict_model(&model, mesh, PLAIN, None).unwrap();
    let hidden = predict_model(&model, mesh, hidden, None).unwrap();
    assert!(hidden.seconds < plain.seconds);
    assert!(hidden.memory.bytes() > plain.memory.bytes());
}

#[test]
fn parameters_are_those_of_all_stages() {
    let model = model("h100-ib", 32);
    let layer = LayerParameters::of(&model.layer);
    assert_eq!(layer.experts, 64.0 * 3.0 * 4096.0 * 2048.0);
    let stages = [(1, 3, true, false), (0, 4, false, true)];
    let sum = stages.map(|(dense, moe, first, last)| {
        let stage = StageLayers {
            dense,
            moe,
            first,
            last,
        };
        let own = RankParameters::of(&model, MESH, stage);
        own.around + 8.0 * own.experts
    });
    assert_eq!(sum.iter().sum::<f64>(), model.parameters());
}

#[test]
fn what_does_not_fit_is_not_proposed() {
    let mut model = model("h100-ib", 16);
    model.batch.sequences = 32;
    let space = ModelSpace {
        micro_batches: vec![1],
        virtual_stages: vec![1],
        ties: None,
        ..ModelSpace::default()
    };
    let ranked = search_model(&model, &space);
    let limit = model.machine.compute.memory_gib * f64::from(1u32 << 30);
    assert!(ranked.best.len() > 3 && ranked.too_large > 0);
    assert!(
        ranked
            .best
            .iter()
            .all(|found| found.memory.bytes() <= limit)
    );
    let ordered = |pair: &[ModelPrediction]| pair[0].seconds <= pair[1].seconds;
    assert!(ranked.best.windows(2).all(ordered));
    let [best, second] = [&ranked.best[0], &ranked.best[1]];
    for part in faster(&model, best, second) {
        assert!(
            part.by.is_none_or(|by| (1.0..=16.0).contains(&by)),
            "{part:?}"
        );
    }
    model.machine.compute.memory_gib = 8.0;
    let none = search_model(&model, &space);
    assert!(none.best.is_empty());
}
