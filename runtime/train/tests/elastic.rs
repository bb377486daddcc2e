//! Checkpoints whose number of experts changes, against the reference.

use moesaic_kernel::DType;
use moesaic_plan::{Parallel, SharedExperts};
use moesaic_reference::rng::Draw;
use moesaic_reference::{Input, Random, Weights, forward};
use moesaic_spec::testing::{SampleRng, sample};
use moesaic_spec::*;
use moesaic_tensor::{Tensor, Tensors};
use moesaic_train::TrainError;
use moesaic_train::elastic::*;

/// Returns values in the form in which a checkpoint holds them.
fn stored(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor<'static> {
    let bytes = values.iter().flat_map(|&v| match dtype {
        DType::F32 => (v as f32).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(v).to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f64(v).to_le_bytes().to_vec(),
        DType::I32 => (v as i32).to_le_bytes().to_vec(),
        DType::I64 => (v as i64).to_le_bytes().to_vec(),
    });
    Tensor {
        dtype,
        shape: shape.to_vec(),
        data: bytes.collect::<Vec<u8>>().into(),
    }
}

/// Returns a layer's random weights, each with two optimizer moments.
fn checkpoint(spec: &LayerSpec, seed: u64) -> Tensors<'static> {
    let weights = Weights::random(spec, seed);
    let mut random = Random::new(seed + 1);
    let mut set = Tensors::new();
    for tensor in canonical_tensors(spec) {
        let (name, shape) = (&tensor.name, &tensor.shape);
        let values = &weights.get(name).data;
        set.insert(name.clone(), stored(tensor.dtype, shape, values));
        if tensor.dtype != DType::I32 {
            for kind in ["first", "second"] {
                let state = stored(DType::F32, shape, &random.vec(values.len()));
                set.insert(format!("optimizer.{kind}.{name}"), state);
            }
        }
    }
    set.insert("optimizer.step".to_string(), Tensor::copied(&[1], &[17i64]));
    set
}

fn reference(set: &Tensors<'_>) -> Weights {
    let weights = set
        .iter()
        .filter(|(name, _)| !name.starts_with("optimizer."));
    Weights(weights.map(|(name, t)| (name.clone(), t.into())).collect())
}

/// Returns a call that every router accepts.
fn input(spec: &LayerSpec, tokens: usize, seed: u64) -> Input {
    let mut random = Random::new(seed);
    let (routed, k) = (spec.routed_experts(), spec.shape.top_k);
    let mut pick = SampleRng::new(seed);
    let rows = spec.router.table_rows.unwrap_or(1);
    Input {
        tokens,
        x: random.vec(tokens * spec.shape.model_dim),
        token_ids: Some(
            (0..tokens)
                .map(|_| pick.between(0, rows - 1) as i32)
                .collect(),
        ),
        routing: Some((
            (0..tokens * k)
                .map(|i| ((i * 7 + i / k) % routed) as i32)
                .collect(),
            random.vec(tokens * k),
        )),
        token_mask: spec
            .router
            .token_mask
            .then(|| (0..tokens as i32).map(|t| t % 3).collect()),
        active_k: spec.router.active_k.then_some(k),
        ..Input::default()
    }
}

/// Moves the ids of identity experts, as the caller of an external router must.
fn moved(input: &Input, from: usize, new: usize) -> Input {
    let mut input = input.clone();
    if let Some((ids, _)) = &mut input.routing {
        for id in ids.iter_mut().filter(|id| **id >= from as i32) {
            *id += new as i32;
        }
    }
    input
}

#[test]
fn added_experts_change_nothing() {
    let (mut done, mut gated) = (0, 0);
    for seed in 0..400 {
        let spec = sample(seed);
        let set = checkpoint(&spec, seed);
        let experts = spec.shape.experts;
        let group = spec.router.groups.as_ref().map_or(1, |g| experts / g.count);
        let sources: Vec<usize> = (0..2 * group.max(1)).map(|i| (i * 5) % experts).collect();
        let growth = Growth {
            sources: &sources,
            zero_down: seed % 2 == 0,
            margin: None,
            tokens: Some(13),
        };
        let grown = match add_experts(&spec, &set, &growth) {
            Ok(grown) => grown,
            Err(TrainError::NotPreserved(_)) => continue,
            Err(other) => panic!("seed {seed}: {other}"),
        };
        assert!(grown.exact);
        assert_eq!(grown.spec.shape.experts, experts + sources.len());
        let call = input(&spec, 13, seed);
        let before = forward(&spec, &reference(&set), &call);
        let call = moved(&call, experts, sources.len());
        let after = forward(&grown.spec, &reference(&grown.tensors), &call);
        assert_eq!(before.y, after.y, "seed {seed}: {spec:?}");
        done += 1;
        gated += usize::from(spec.router.bias != grown.spec.router.bias);
    }
    assert!(
        done > 150 && gated > 50,
        "{done} layers, {gated} with a new bias"
    );
}

#[test]
fn state_of_added_experts() {
    let spec = dense(4, 2);
    let set = checkpoint(&spec, 3);
    let growth = Growth {
        sources: &[2, 0],
        zero_down: true,
        margin: None,
        tokens: None,
    };
    let grown = add_experts(&spec, &set, &growth).expect("it grows").tensors;
    let rows = |name: &str| {
        let values = grown[name].to_f64();
        let size = values.len() / grown[name].shape[0];
        let row = |i: usize| values[i * size..(i + 1) * size].to_vec();
        (0..grown[name].shape[0]).map(row).collect::<Vec<_>>()
    };
    let up = rows("experts.up.weight");
    assert_eq!((&up[4], &up[5]), (&up[2], &up[0]));
    assert!(rows("experts.down.weight")[4].iter().all(|v| *v == 0.0));
    assert!(
        rows("optimizer.first.experts.up.weight")[5]
            .iter()
            .all(|v| *v == 0.0)
    );
    let squares = rows("optimizer.second.experts.down.weight");
    assert_eq!(squares[4], squares[2]);
    assert_eq!(grown["optimizer.step"], set["optimizer.step"]);
    assert_eq!(grown["router.bias"].shape, [6]);
}

/// A new expert at distance m takes at most e⁻ᵐ of its source's share, and waking sets that
/// distance.
#[test]
fn a_margin_lets_new_experts_in() {
    let spec = dense(4, 2);
    let set = checkpoint(&spec, 5);
    let growth = |margin| Growth {
        sources: &[1],
        zero_down: false,
        margin,
        tokens: None,
    };
    let near = add_experts(&spec, &set, &growth(Some(2.0))).expect("it grows");
    assert!(!near.exact);
    let call = input(&spec, 40, 9);
    let logits = forward(&near.spec, &reference(&near.tensors), &call)
        .logits
        .expect("logits");
    for row in logits.chunks(5) {
        assert!((row[1] - row[4] - 2.0).abs() < 1e-6, "{row:?}");
    }
    let mut woken = add_experts(&spec, &set, &growth(None)).expect("it grows");
    wake_experts(&mut woken.tensors, &[(4, 1)], 2.0).expect("it has a bias");
    assert_eq!(woken.tensors, near.tensors);
    assert!(wake_experts(&mut woken.tensors, &[(9, 1)], 2.0).is_err());
    for margin in [f32::NAN, f32::INFINITY, -1.0] {
        let error = add_experts(&spec, &set, &growth(Some(margin))).expect_err("no distance");
        assert!(
            error.to_string().contains("finite, and not below 0"),
            "{error}"
        );
        assert!(wake_experts(&mut woken.tensors, &[(4, 1)], margin).is_err());
    }
}

#[test]
fn a_capacity_by_a_factor_is_kept_for_the_calls_that_are_named() {
    let factors = [0.3, 1.0, 1.25, -0.75, 2.0];
    for (tokens, factor, new) in [7, 16, 33, 64]
        .into_iter()
        .flat_map(|t| factors.map(|f| (t, f)))
        .flat_map(|(t, f)| [1, 2, 5].map(|n| (t, f, n)))
    {
        let mut spec = dense(4, 2);
        spec.capacity.mode = CapacityMode::Factor;
        spec.capacity.factor = factor;
        spec.capacity.eval_factor = [None, Some(0.7), Some(0.0)][(tokens + new) % 3];
        let set = checkpoint(&spec, 3);
        let growth = Growth {
            sources: &vec![1; new],
            zero_down: false,
            margin: None,
            tokens: Some(tokens),
        };
        let grown = add_experts(&spec, &set, &growth).expect("it grows");
        let kept = grown.tokens.clone().expect("a range");
        assert!(grown.exact && kept.contains(&tokens), "{kept:?}");
        for t in kept {
            for draw in [None, Some(Draw::default())] {
                let call = Input {
                    draw,
                    ..input(&spec, t, 5)
                };
                let before = forward(&spec, &reference(&set), &call);
                let after = forward(&grown.spec, &reference(&grown.tensors), &call);
                let what = format!("{tokens} tokens, factor {factor}, {new} more, {t}, {draw:?}");
                assert_eq!(after.locations, before.locations, "{what}");
                assert_eq!(after.capacity, before.capacity, "{what}");
            }
        }
    }
    let mut spec = dense(4, 2);
    spec.capacity.mode = CapacityMode::Factor;
    spec.capacity.factor = 0.0;
    let growth = Growth {
        sources: &[1],
        zero_down: false,
        margin: None,
        tokens: None,
    };
    let grown = add_experts(&spec, &checkpoint(&spec, 3), &growth).expect("it grows");
    assert_eq!((grown.exact, grown.tokens), (true, None));
}

fn dense(experts: usize, k: usize) -> LayerSpec {
    let text =
        format!("shape = {{ model_dim = 6, hidden_dim = 5, experts = {experts}, top_k = {k} }}");
    LayerSpec::from_toml(&text).expect("a valid spec")
}

const BLOCKS: TokenBlocks = TokenBlocks {
    tokens: 4,
    experts: 3,
};

#[test]
fn what_depends_on_the_number_of_experts_is_refused() {
    let growth = Growth {
        sources: &[0],
        zero_down: false,
        margin: None,
        tokens: None,
    };
    let changes: [fn(&mut LayerSpec); 9] = [
        |s| s.capacity.mode = CapacityMode::Factor,
        |s| s.router.blocks = Some(BLOCKS),
        |s| s.router.select = Select::PerGroup(2),
        |s| s.router.always_chosen = 1,
        |s| s.router.logit_softcap = Some(30.0),
        |s| s.router.select = Select::Sinkhorn(3),
        |s| {
            s.router.kind = RouterKind::Cosine;
            s.router.projection_dim = Some(3);
        },
        |s| {
            let groups = Groups {
                count: 2,
                keep: 1,
                stat: GroupStat::Max,
                mask: GroupMask::Exclude,
            };
            s.router.groups = Some(groups);
        },
        |s| s.shape.experts = 1 << 20,
    ];
    for change in changes {
        let mut spec = dense(4, 2);
        change(&mut spec);
        let error = add_experts(&spec, &Tensors::new(), &growth).expect_err("refused");
        assert!(matches!(error, TrainError::NotPreserved(_)), "{error}");
    }
    let spec = dense(4, 2);
    let missing = Growth {
        sources: &[4],
        ..growth
    };
    assert!(add_experts(&spec, &Tensors::new(), &missing).is_err());
    let mut foreign = checkpoint(&spec, 1);
    foreign.insert("other".to_string(), Tensor::copied(&[1], &[0.0]));
    assert!(matches!(
        add_experts(&spec, &foreign, &growth),
        Err(TrainError::Tensor { name, .. }) if name == "other"
    ));
    let cut = checkpoint(&dense(3, 2), 1);
    assert!(matches!(
        add_experts(&spec, &cut, &growth),
        Err(TrainError::Tensor { .. })
    ));
}

#[test]
fn splitting_and_merging_gives_the_same_bytes() {
    let mut done = 0;
    for seed in 0..300 {
        let mut spec = sample(seed);
        spec.router.groups = None;
        let experts = spec.shape.experts;
        if spec.validate().is_err() || experts < 2 {
            continue;
        }
        let set = checkpoint(&spec, seed);
        let first = 1 + seed as usize % (experts - 1);
        let parts = match split_experts(&spec, &set, &[first, experts - first]) {
            Ok(parts) => parts,
            // A part may have fewer experts than a token takes, which is refused.
            Err(TrainError::NotPreserved(_)) => continue,
            Err(other) => panic!("seed {seed}: {other}"),
        };
        for (part, tensors) in &parts {
            for tensor in canonical_tensors(part) {
                assert_eq!(tensors[&tensor.name].shape, tensor.shape, "seed {seed}");
            }
        }
        let (whole, merged) = merge_experts(&parts).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((whole, merged), (spec, set), "seed {seed}");
        done += 1;
    }
    assert!(done > 80, "{done} layers");
}

fn mesh(ep: usize, shards: usize) -> Parallel {
    Parallel {
        ep,
        expert_tp: shards,
        ..Parallel::default()
    }
}

#[test]
fn shards_make_the_whole_again() {
    for seed in 0..120 {
        let spec = sample(seed);
        let set = checkpoint(&spec, seed);
        let experts = spec.shape.experts;
        let width = spec.shape.hidden_dim;
        let slices = if width.is_multiple_of(2) { 2 } else { 1 };
        let meshes = [(1, slices), (2, 1), (3, slices), (experts, 1)];
        let meshes = meshes.map(|(ep, shards)| mesh(ep.min(experts), shards));
        for mesh in meshes {
            let shards = shard_experts(&spec, &set, mesh).unwrap_or_else(|e| panic!("{e}"));
            let up = &shards[mesh.ranks() - 1]["experts.up.weight"];
            assert_eq!(up.shape[..2], [experts / mesh.ep, width / mesh.expert_tp]);
            let whole = unshard_experts(&spec, &shards, mesh).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(whole, set, "seed {seed}, {mesh:?}");
        }
    }
}

#[test]
fn slices_of_shared_experts_make_the_whole_again() {
    let mut done = 0;
    for seed in 0..120 {
        let mut spec = sample(seed);
        spec.shape.hidden_dim *= 2;
        for shared in &mut spec.shared {
            shared.hidden_dim *= 2;
        }
        let set = checkpoint(&spec, seed);
        let mesh = Parallel {
            shared: SharedExperts::Sharded,
            ..mesh(2.min(spec.shape.experts), 2)
        };
        let shards = shard_experts(&spec, &set, mesh).unwrap_or_else(|e| panic!("{e}"));
        for (index, shared) in spec.shared.iter().enumerate() {
            let part = |part: &str| &shards[1][&format!("shared.{index}.{part}.weight")].shape;
            assert_eq!(part("up")[0], shared.hidden_dim / 2);
            assert_eq!(part("down")[1], shared.hidden_dim / 2);
            let bias = &shards[1].get(&format!("shared.{index}.down.bias"));
            let silent = |bias: &Tensor<'_>| bias.data.iter().all(|byte| *byte == 0);
            assert!(bias.is_none_or(silent), "the first slice adds it");
            done += 1;
        }
        let whole = unshard_experts(&spec, &shards, mesh).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(whole, set, "seed {seed}");
    }
    assert!(done > 20, "{done} shared experts");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let spec = dense(6, 2);
    let set = checkpoint(&spec, 1);
    assert!(shard_experts(&spec, &set, mesh(7, 1)).is_err());
    assert!(shard_experts(&spec, &set, mesh(0, 1)).is_err());
    let mut shards = shard_experts(&spec, &set, mesh(3, 1)).expect("shards");
    let first = shards[0].clone();
    shards[1].remove("experts.up.weight");
    assert!(matches!(
        unshard_experts(&spec, &shards, mesh(3, 1)),
        Err(TrainError::Tensor { name, .. }) if name == "experts.up.weight"
    ));
    shards[1] = first;
    shards[2].insert("optimizer.step".to_string(), Tensor::copied(&[1], &[18i64]));
    assert!(matches!(
        unshard_experts(&spec, &shards, mesh(3, 1)),
        Err(TrainError::Tensor { name, .. }) if name == "optimizer.step"
    ));
    assert!(
        split_experts(&spec, &set, &[5, 1]).is_err(),
        "one expert and top_k 2"
    );
    assert!(split_experts(&spec, &set, &[2, 2]).is_err(), "two are left");
    let mut parts = split_experts(&spec, &set, &[3, 3]).expect("parts");
    parts[1].0.shape.hidden_dim = 7;
    assert!(merge_experts(&parts).is_err());
    assert!(merge_experts(&[]).is_err());
    let changes: [fn(&mut LayerSpec); 3] = [
        |s| s.router.blocks = Some(BLOCKS),
        |s| s.router.select = Select::PerGroup(2),
        |s| s.router.always_chosen = 1,
    ];
    for change in changes {
        let mut spec = dense(6, 2);
        change(&mut spec);
        let error = split_experts(&spec, &set, &[3, 3]).expect_err("refused");
        assert!(matches!(error, TrainError::NotPreserved(_)), "{error}");
    }
}
