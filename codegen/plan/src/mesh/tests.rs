//! Rank plans, held against what each part needs.

use super::ports::shared_part;
use super::*;
use crate::{Recompute, Step, TensorId, TensorRole, Training};
use moesaic_dist::{AdaptiveMesh, SharedExperts, Strategy};
use moesaic_dist::{Amount, Both, Chunk, CollectiveOp, Distance, Overlap, OverlapBy, PlanPart};
use moesaic_spec::testing::sample;
use std::collections::BTreeSet;

fn spec(text: &str) -> LayerSpec {
    LayerSpec::from_toml(text).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

fn planned(spec: &LayerSpec, target: &str, mesh: Parallel, rank: usize, trains: bool) -> RankPlan {
    let options = PlanOptions::training(trains.then(Training::default));
    let target = target.parse().unwrap();
    plan_rank(spec, target, &options, mesh, rank).unwrap()
}

/// A sample whose shared experts have an even width.
fn sharded_sample(seed: u64) -> (LayerSpec, Parallel) {
    let mut spec = sample(seed);
    spec.shape.hidden_dim *= 2;
    for shared in &mut spec.shared {
        shared.hidden_dim *= 2;
    }
    let mesh = Parallel {
        ep: 1 + seed as usize % spec.shape.experts.min(3),
        expert_tp: 2,
        dp: 1,
        shared: SharedExperts::Sharded,
    };
    (spec, mesh)
}

fn has_steps(text: &str, shared: SharedExperts, expected: &str) {
    let mesh = Parallel {
        ep: 2,
        expert_tp: 2,
        dp: 1,
        shared,
    };
    let plan = planned(&spec(text), "cpu:avx2", mesh, 1, true);
    let text = plan.text();
    assert!(text == expected, "the steps are now\n{text}");
}

#[test]
fn a_rank_has_its_steps_in_this_order() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         experts = { bias = true }
         shared = [{ hidden_dim = 8 }]
         router = { noise = 1.0 }
         capacity = { mode = 'factor', factor = 1.5 }
         losses = [{ kind = 'global', coefficient = 0.1 }]";
    has_steps(text, SharedExperts::Whole, include_str!("steps.txt"));
}

/// Checks the steps of two chunks in forward and four in backward, with sums over shards.
#[test]
fn chunks_have_their_steps_in_this_order() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         experts = { bias = true }";
    let mesh = Parallel {
        ep: 2,
        expert_tp: 2,
        ..Parallel::default()
    };
    let plan = planned(&spec(text), "cpu:avx2", mesh, 1, true);
    assert_eq!(plan.in_chunks(Strategy::default().chunks()), plan);
    let strategy: Strategy = "overlap_degree=2/4".parse().unwrap();
    let text = plan.in_chunks(strategy.chunks()).text();
    let expected = include_str!("steps_in_chunks.txt");
    assert!(text == expected, "the steps are now\n{text}");
}

/// Checks the steps of two chunks in forward with shadows, which run between sends and GEMMs.
#[test]
fn shadows_have_their_steps_in_this_order() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         router = { weight_on = 'activation' }
         experts = { bias = true }";
    let mesh = Parallel {
        ep: 2,
        ..Parallel::default()
    };
    let options = PlanOptions::training(Training::default());
    let planned = |shadows: usize, mesh: Parallel| {
        let sharing = Sharing::from(mesh).shadowing(shadows);
        plan_rank(
            &spec(text),
            "cpu:avx2".parse().unwrap(),
            &options,
            sharing,
            1,
        )
        .unwrap()
    };
    let strategy: Strategy = "overlap_degree=2/1,shadows=2".parse().unwrap();
    let plan = planned(2, mesh).in_chunks(strategy.chunks());
    let expected = include_str!("steps_with_shadows.txt");
    let found = plan.text();
    assert!(found == expected, "the steps are now\n{found}");
    // The other parts are as without shadows, and the last expert never has one.
    let without = planned(0, mesh);
    assert_eq!(
        (&plan.tokens, &plan.experts),
        (&without.tokens, &without.experts)
    );
    assert_eq!(planned(9, mesh).shadows.unwrap().spec.shape.experts, 3);
    // Where every rank has all experts there is nothing to shadow.
    assert_eq!(
        planned(
            2,
            Parallel {
                ep: 1,
                dp: 2,
                ..mesh
            }
        )
        .shadows,
        None
    );
}

/// Checks that weights of shadows are sent once a step, or once more where backward recomputes, and
/// that forward has every weight that backward reads.
#[test]
fn weights_of_shadows_stay_where_what_they_make_is_kept() {
    let sent = |steps: &[RankStep]| -> Vec<TensorId> {
        let exchanges = steps.iter().filter_map(RankStep::exchange);
        let weights =
            exchanges.filter(|exchange| exchange.op == CollectiveOp::BroadcastShadowWeight);
        let weight = |exchange: &Exchange| exchange.writes().map(|weight| weight.tensor);
        weights.filter_map(weight).collect()
    };
    for seed in 0..40 {
        let (spec, mesh) = layer(seed);
        if mesh.ep == 1 || mesh.expert_tp > 1 || spec.shape.experts == 1 {
            continue;
        }
        for recompute in [Recompute::None, Recompute::Hidden, Recompute::All] {
            let options = PlanOptions::training(Training { recompute });
            let sharing = Sharing::from(mesh).shadowing(2);
            let target = "cpu:avx2".parse().unwrap();
            let plan = plan_rank(&spec, target, &options, sharing, 0).unwrap();
            let (there, again) = (sent(&plan.steps), sent(&plan.backward));
            assert_eq!(plan.keeps_shadow_weights(), recompute == Recompute::None);
            assert!(again.iter().all(|weight| there.contains(weight)), "{seed}");
            let shadows = plan.shadows.unwrap();
            for step in &shadows.backward {
                let weights = step.tensors().iter();
                let mut weights = weights.filter(|id| shadows[**id].role == TensorRole::Weight);
                assert!(weights.all(|weight| there.contains(weight)), "{seed}");
            }
        }
    }
}

/// Checks that chunks carry the same rows as one exchange, for any numbers of chunks.
#[test]
fn chunks_make_up_the_whole() {
    for seed in 0..60 {
        let (spec, mesh) = layer(seed);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, seed % 3 > 0);
        for (forward, backward) in [(1, 3), (2, 1), (4, 4), (4, 2), (2, 3)] {
            let degree = Both { forward, backward };
            let by = [OverlapBy::Rows, OverlapBy::Peers][seed as usize % 2];
            let chunks = plan.in_chunks(Overlap { degree, by });
            let passes = [
                (&plan.steps, &chunks.steps, forward),
                (&plan.evaluation, &chunks.evaluation, forward),
                (&plan.backward, &chunks.backward, backward),
            ];
            for (whole, list, degree) in passes {
                let what = format!("seed {seed}, {forward}/{backward}");
                let sent = |steps: &[RankStep]| plan.bytes_of(steps, 37, 2);
                assert_eq!(sent(list), sent(whole), "{what}");
                let launched = RankPlan::launched_chunks(list);
                if by == OverlapBy::Rows {
                    assert_eq!(launched % degree.max(1) * whole.len(), 0, "{what}");
                }
                check_order(list, &what);
                let count = |steps: &[RankStep], which: fn(&RankStep) -> bool| {
                    steps.iter().filter(|step| which(step)).count()
                };
                let products = |step: &RankStep| {
                    let part = PlanPart::Experts;
                    matches!(step, RankStep::Launch { part: whose, .. } if *whose == part)
                };
                assert_eq!(
                    count(list, products),
                    count(whole, products) * launched,
                    "{what}"
                );
                let goes = |step: &RankStep| matches!(step, RankStep::Exchange(Exchange { op, .. }) if op.exchanges_rows());
                assert_eq!(count(list, goes), count(whole, goes) * degree, "{what}");
            }
        }
    }
}

/// Checks that rows are sent before their GEMMs are launched, and answered after.
fn check_order(list: &[RankStep], what: &str) {
    let units = RankPlan::launched_chunks(list);
    let (mut sent, mut multiplied) = (vec![0; units], vec![0; units]);
    let all = Chunk {
        number: 0,
        of: 1,
        by: OverlapBy::Rows,
    };
    let launches = list.iter().filter(|step| {
        matches!(step, RankStep::Launch { part, chunk: None | Some(Chunk { number: 0, .. }), .. }
            if *part == PlanPart::Experts)
    });
    let launches = launches.count();
    for step in list {
        match step {
            RankStep::Launch {
                part: PlanPart::Experts,
                chunk,
                ..
            } => {
                let unit = chunk.map_or(0, |chunk| chunk.number);
                assert!(sent[unit] > 0, "{what}: products of {unit} before its rows");
                multiplied[unit] += 1;
            }
            RankStep::Launch { .. } => {}
            RankStep::Exchange(exchange) => {
                let mut units = exchange.chunk.unwrap_or(all).units(units);
                match exchange.op {
                    CollectiveOp::Dispatch => units.for_each(|unit| sent[unit] += 1),
                    CollectiveOp::AllReduceTp | CollectiveOp::Combine => {
                        let done = |unit| multiplied[unit] == launches;
                        assert!(units.all(done), "{what}: `{}` too early", exchange.name);
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn a_chunk_has_its_part_of_any_number_of_rows() {
    for of in 1..9 {
        for n in 0..20 {
            let by = OverlapBy::Rows;
            let somewhere = Distance::between(0, 1, 3);
            let chunks = (0..of).map(|number| Chunk { number, of, by }.rows(n, somewhere));
            let rows: Vec<usize> = chunks.flatten().collect();
            assert!(rows.into_iter().eq(0..n), "{n} rows in {of}");
            // Checks that finer chunks lie within coarser ones.
            let coarse = Chunk {
                number: of - 1,
                of,
                by,
            };
            let fine = Chunk {
                number: 3 * of - 3,
                of: 3 * of,
                by,
            };
            let start = |chunk: Chunk| chunk.rows(n, somewhere).start;
            assert_eq!(start(coarse), start(fine));
        }
    }
}

/// Checks that tensors which GEMMs keep from launch to launch have a row for each row, so each
/// chunk has its own part; only the layout is uploaded anew for each chunk.
#[test]
fn what_products_keep_has_a_row_for_each_row() {
    for seed in 0..120 {
        let (spec, mesh) = layer(seed);
        for target in [
            "cpu:avx512",
            "cpu:amx",
            "cuda:sm_80",
            "cuda:sm_90a",
            "rocm:gfx942",
        ] {
            let plan = planned(&spec, target, mesh, 0, true);
            for id in plan.experts.saved() {
                let tensor = &plan.experts[id];
                let table = ["offsets", "row_tiles"].contains(&&*tensor.name);
                let (name, shape) = (&tensor.name, &tensor.shape);
                assert!(
                    table || tensor.is_by_token(),
                    "{target}: `{name}` {shape:?}"
                );
            }
        }
    }
}

#[test]
fn shards_of_shared_experts_have_their_steps_in_this_order() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         experts = { bias = true }
         shared = [{ hidden_dim = 8, gate = 'sigmoid' }, { hidden_dim = 4 }]";
    let expected = include_str!("steps_with_shared_tp.txt");
    has_steps(text, SharedExperts::Sharded, expected);
}

#[test]
fn smaller_degrees_have_their_steps_in_this_order() {
    let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }
         experts = { bias = true }";
    let mesh = Parallel {
        ep: 2,
        expert_tp: 4,
        ..Parallel::default()
    };
    let options = PlanOptions::training(Training::default());
    let target = "cpu:avx2".parse().unwrap();
    let plan = plan_rank(
        &spec(text),
        target,
        &options,
        Sharing::from(mesh).at_r(2),
        5,
    )
    .unwrap();
    let text = plan.text();
    assert!(
        text == include_str!("steps_at_r.txt"),
        "the steps are now\n{text}"
    );
}

/// Checks that every exchange moves rows of one size, between tensors that both parts have.
#[test]
fn both_parts_of_an_exchange_have_the_same_rows() {
    for seed in 0..120 {
        let (spec, mesh) = layer(seed);
        for target in ["cpu:avx512", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"] {
            let plan = planned(&spec, target, mesh, mesh.ranks() - 1, true);
            let passes = [&plan.steps, &plan.evaluation, &plan.backward];
            for step in passes.into_iter().flatten() {
                let RankStep::Exchange(exchange) = step else {
                    continue;
                };
                let moves = matches!(
                    exchange.op.row().amount,
                    Amount::ExpertRows | Amount::ShadowRows | Amount::TokenRows | Amount::Tensor
                );
                let ends = exchange.reads().zip(exchange.writes());
                let Some((reads, writes)) = ends.filter(|_| moves) else {
                    continue;
                };
                let [a, b] = [reads, writes].map(|at| plan.row_bytes(at.part, at.tensor));
                assert_eq!(a, b, "{}: seed {seed}, {target}", exchange.name);
                assert!(a > 0);
            }
        }
    }
}

/// Checks that a rank launches every step of its parts once, in order.
#[test]
fn every_launch_of_every_part_is_there_once() {
    for seed in 0..120 {
        let (spec, mesh) = layer(seed);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        type Launched = fn(&LayerPlan) -> &[Step];
        let passes: [(&[RankStep], Launched); 3] = [
            (&plan.steps, |plan| &plan.steps),
            (&plan.evaluation, |plan| &plan.evaluation),
            (&plan.backward, |plan| &plan.backward),
        ];
        let mut parts = vec![PlanPart::Dispatch, PlanPart::Experts];
        parts.extend(plan.shared.is_some().then_some(PlanPart::Shared));
        for (steps, of) in passes {
            for &part in &parts {
                let launched = steps.iter().filter_map(|step| match step {
                    RankStep::Launch {
                        part: whose, step, ..
                    } if *whose == part => Some(*step),
                    _ => None,
                });
                let own = of(plan.part(part)).len();
                assert!(launched.eq(0..own), "seed {seed}: {part:?}");
            }
        }
    }
}

/// Checks that ranks expect what other ranks send, also where groups have different numbers of
/// experts.
#[test]
fn ranks_agree_on_the_parts_of_a_gradient() {
    for target in ["cpu:avx512", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942"] {
        for experts in [3, 5, 64, 65] {
            let text = format!(
                "shape = {{ model_dim = 64, hidden_dim = 96, experts = {experts}, top_k = 2 }}"
            );
            let spec = spec(&text);
            let mesh = Parallel {
                ep: 3,
                ..Parallel::default()
            };
            let parts = (0..3).map(|rank| {
                let plan = planned(&spec, target, mesh, rank, true);
                let parts = plan.tokens.tensor("dweight_parts").unwrap();
                parts.shape.clone()
            });
            let parts: BTreeSet<String> = parts.map(|shape| format!("{shape:?}")).collect();
            assert_eq!(parts.len(), 1, "{experts} on {target}: {parts:?}");
        }
    }
}

/// Checks that expert weights are on the expert part, sharded shared experts on theirs, all others
/// on the dispatch part. A weighted last bias, which the first shard adds, is on the dispatch part,
/// too.
#[test]
fn every_weight_has_one_part() {
    for seed in 0..120 {
        let (spec, mesh) = layer(seed);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        let weights = |plan: &LayerPlan| -> BTreeSet<String> {
            let weights = plan.tensors.iter().filter(|t| t.role == TensorRole::Weight);
            weights.map(|tensor| tensor.name.clone()).collect()
        };
        let (tokens, experts) = (weights(&plan.tokens), weights(&plan.experts));
        let shared = plan.shared.as_ref().map(weights).unwrap_or_default();
        assert!(experts.intersection(&shared).next().is_none());
        let elsewhere: BTreeSet<String> = experts.union(&shared).cloned().collect();
        let mut twice = tokens.intersection(&elsewhere);
        let added_once = |name: &&String| name.ends_with(".down.bias");
        assert!(twice.all(|name| added_once(&name)), "seed {seed}");
        for tensor in moesaic_spec::canonical_tensors(&spec) {
            let part = shared_part(&tensor.name);
            let of_slice = part.is_some_and(|part| !part.starts_with("router."));
            let part = if of_slice && plan.shared.is_some() {
                &shared
            } else if tensor.name.starts_with("experts.") {
                &experts
            } else {
                &tokens
            };
            assert!(part.contains(&tensor.name), "seed {seed}: {}", tensor.name);
        }
    }
}

/// Checks that tokens and gradients go to the TP peers, and outputs and gradients come back.
#[test]
fn every_pass_of_shards_of_shared_experts_has_its_exchanges() {
    for seed in (1..120).step_by(2) {
        let (spec, mesh) = layer(seed);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        assert_eq!(plan.shared.is_some(), !spec.shared.is_empty());
        let named = |steps: &[RankStep]| -> Vec<String> {
            let of_slices = |step: &RankStep| match step {
                RankStep::Exchange(Exchange { name, op, .. }) => matches!(
                    op,
                    CollectiveOp::AllGatherTp
                        | CollectiveOp::ReduceScatterTp
                        | CollectiveOp::BroadcastTp
                )
                .then(|| name.clone()),
                RankStep::Launch { .. } => None,
            };
            steps.iter().filter_map(of_slices).collect()
        };
        let (mut forward, mut backward) = (Vec::new(), BTreeSet::new());
        for (index, shared) in spec.shared.iter().enumerate() {
            let gated = shared.gate != moesaic_spec::SharedGate::None;
            let name = |part: &str| format!("shared.{index}.{part}");
            forward.push(name("out"));
            backward.insert(name("drows"));
            if gated {
                backward.extend(["weight", "dweight_parts"].map(name));
            }
            if gated && spec.shared_bias(index).down() {
                backward.insert(name("down.bias"));
            }
        }
        if !spec.shared.is_empty() {
            forward.insert(0, "x".to_string());
            backward.insert("dy".to_string());
        }
        assert_eq!(named(&plan.steps), forward, "seed {seed}");
        assert_eq!(named(&plan.evaluation), forward, "seed {seed}");
        let found: BTreeSet<String> = named(&plan.backward).into_iter().collect();
        assert_eq!(found, backward, "seed {seed}");
    }
}

/// Checks that tensors which arrive in a backward pass are not kept from forward.
#[test]
fn forward_keeps_nothing_of_what_backward_is_brought() {
    for seed in 0..120 {
        let (spec, mesh) = layer(seed);
        let plan = planned(&spec, "cpu:avx2", mesh, 0, true);
        for part in plan.parts() {
            for id in part.saved() {
                let name = &*part[id].name;
                let brought = ["dout", "dy", "drows", "dweight_parts", "weight"];
                let part = shared_part(name).unwrap_or(name);
                assert!(!brought.contains(&part), "seed {seed}: {name}");
            }
        }
    }
}

/// Samples layers on meshes with whole and with sharded shared experts.
fn layer(seed: u64) -> (LayerSpec, Parallel) {
    if seed % 2 == 1 {
        return sharded_sample(seed);
    }
    let spec = sample(seed);
    let mesh = Parallel::of(1 + seed as usize % 8, &spec);
    (spec, mesh)
}

/// Checks the table of docs/adaptive/adaptive_r.md: the bytes that a rank sends in a forward pass
/// at each degree.
#[test]
fn degrees_send_what_their_table_says() {
    let text = "shape = { model_dim = 16, hidden_dim = 48, experts = 4, top_k = 2 }";
    let (spec, tokens) = (spec(text), 96);
    let (rows, weights) = ((tokens * 2 * 16 * 4) as f64, (3 * 4 * 16 * 48 * 4) as f64);
    let target = "cpu:avx2".parse().unwrap();
    for (ep, expert_tp) in [(4, 6), (2, 2), (4, 1), (1, 12)] {
        let mesh = Parallel {
            ep,
            expert_tp,
            ..Parallel::default()
        };
        for by in AdaptiveMesh::all(mesh) {
            let sharing = Sharing::from(mesh).at_r(by);
            let plan = plan_rank(&spec, target, &PlanOptions::default(), sharing, 0).unwrap();
            let sent = |wanted: &[&str]| {
                let exchanges = plan.steps.iter().filter_map(|step| match step {
                    RankStep::Exchange(exchange) => Some(exchange),
                    RankStep::Launch { .. } => None,
                });
                let wanted = exchanges.filter(|exchange| wanted.contains(&&*exchange.name));
                let sent = wanted.map(|exchange| plan.bytes(exchange, tokens, 1).network);
                sent.sum::<u64>() as f64
            };
            let (ep, s, r) = (ep as f64, expert_tp as f64, by as f64);
            let (there, back, gathered, borrowed) = match by {
                0 => (0.0, 0.0, weights * (1.0 - 1.0 / (ep * s)), weights),
                _ => (
                    rows * (r - 1.0 / ep),
                    rows * (1.0 - 1.0 / ep) + 2.0 * rows * (r - 1.0),
                    weights / ep * (1.0 / r - 1.0 / s),
                    weights / (ep * r),
                ),
            };
            let near = |found: f64, want: f64, of: &str| {
                let what = format!("{of} of {by} adaptive_r on {mesh:?}: {found}, not {want}");
                assert!((found - want).abs() <= 1e-6 * want, "{what}");
            };
            near(sent(&["rows"]), there, "rows");
            near(sent(&["out of shards", "out"]), back, "answers");
            let matrices = ["gate", "up", "down"].map(|name| format!("experts.{name}.weight"));
            near(
                sent(&matrices.each_ref().map(|name| &**name)),
                gathered,
                "weights",
            );
            let held = plan.experts.tensors.iter();
            let held = held.filter(|tensor| tensor.role == TensorRole::Weight);
            let held: u64 = held.map(|tensor| tensor.bytes(0)).sum();
            near(held as f64, borrowed, "memory");
        }
    }
}
