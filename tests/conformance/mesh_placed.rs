//! Placements: with experts anywhere, some replicated, ranks compute the results of one process,
//! and replicas stay equal.

use super::arranged::Arranged;
use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{compare_on, evaluated, layer_on, mesh, on_ranks, part, sharded, shares};
use super::mesh::{spec, specs};
use super::mesh_training::{alone, layer_of, learned};
use super::trained::RNG_KEY;
use moesaic::engine::joined_placed;
use moesaic::mesh::ProcessGroup;
use moesaic::mesh::{Balancer, Balancing, Eplb, Split};
use moesaic::plan::{Placement, ShadowForm, ShadowModel, shadows};
use moesaic::spec::testing::SampleRng;
use moesaic::tensor::WeightSource;
use moesaic::train::elastic::{shard_placed, unshard_placed};
use moesaic::weights::{Checkpoint, Writer};
use moesaic::{Engine, LayerOptions, Parallel, Recompute, Strategy, Tensors, Training};
use moesaic_harness::thorough::in_turns;

/// Threads that share an engine, with experts placed so.
fn at_placement(engine: &Engine, placement: Placement) -> Arranged<'_> {
    Arranged {
        engine,
        per_node: usize::MAX,
        placement: Some(placement),
        strategy: Strategy::default(),
    }
}

/// Experts in some order on some groups, about a third of them on two or three.
pub fn scattered(groups: usize, experts: usize, seed: u64, split: Split) -> Placement {
    let draw = &mut SampleRng::new(seed);
    let mut order: Vec<usize> = (0..experts).collect();
    for at in (1..experts).rev() {
        order.swap(at, draw.between(0, at));
    }
    let mut lists = vec![Vec::new(); groups];
    for (at, &expert) in order.iter().enumerate() {
        let mut on = vec![at % groups];
        for _ in 0..2 {
            let other = draw.between(0, groups - 1);
            on.extend(draw.one_in(3).then_some(other));
        }
        on.sort_unstable();
        on.dedup();
        on.into_iter().for_each(|group| lists[group].push(expert));
    }
    let last = |expert: usize| lists.iter().rposition(|list| list.contains(&expert));
    let owners = (0..experts).map(|expert| last(expert).unwrap()).collect();
    Placement::new(experts, lists, Some(owners), split).unwrap()
}

const MESHES: [Parallel; 4] = [mesh(2, 1, 1), mesh(3, 1, 1), mesh(4, 1, 1), mesh(2, 1, 2)];

#[test]
fn dropless_outputs_are_the_same_bytes_wherever_experts_are() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        let whole = case.layer(&engine).forward(&case.input()).unwrap();
        for (at, parallel) in MESHES.into_iter().enumerate() {
            let split = [Split::Even, Split::Near][(seed + at) % 2];
            let seed = 31 * seed as u64 + at as u64;
            let placement = scattered(parallel.ep, spec.shape.experts, seed, split);
            let text = placement.to_string();
            let ranks = at_placement(&engine, placement);
            let found = evaluated(&ranks, parallel, &case);
            let placement = text;
            assert!(found == *whole.y().data, "{placement}: {}", case.describe());
        }
    }
}

/// Outputs and gradients, of slices and with capacities, too.
#[test]
fn training_gives_what_one_process_gives_wherever_experts_are() {
    let engine = cpu();
    let mut some = specs();
    some.push(spec(
        "shape = { model_dim = 16, hidden_dim = 12, experts = 6, top_k = 2 }
         experts = { bias = true }
         losses = [{ kind = 'global', coefficient = 0.1 }]",
    ));
    for (seed, spec) in some.iter().enumerate() {
        let case = Case::random(spec, 33, seed as u64);
        let meshes = [mesh(3, 1, 1), mesh(2, 2, 1), mesh(2, 1, 2)].into_iter();
        for (at, parallel) in in_turns(seed, meshes.enumerate()) {
            let split = [Split::Even, Split::Near][(seed / 2 + at) % 2];
            let placement = scattered(parallel.ep, spec.shape.experts, 7 + seed as u64, split);
            let ranks = at_placement(&engine, placement);
            compare_on(&engine, &ranks, parallel, &case, Recompute::None);
        }
    }
}

/// Three optimizers over three steps: norms are counted once, whole parameters are those of
/// one process, and replicas are the same bytes.
#[test]
fn replicas_learn_the_same() {
    let case = layer_of(24);
    let want = alone(&case);
    for (parallel, split) in [
        (mesh(3, 1, 1), Split::Even),
        (mesh(2, 1, 2), Split::Near),
        (sharded(2, 2, 1), Split::Even),
    ] {
        let placement = scattered(parallel.ep, 8, 5, split);
        assert!(!placement.replicated().is_empty());
        let ranks = on_ranks(&cpu(), parallel, |mesh| {
            learned(&mesh.placed(&placement).unwrap(), &case)
        });
        for (run, (whole, norms)) in want.iter().enumerate() {
            for all in &ranks {
                assert_eq!(all[run].1, ranks[0][run].1, "norms of all ranks");
            }
            for (found, want) in ranks[0][run].1.iter().zip(norms) {
                let off = (found - want).abs() / want;
                assert!(
                    off < 1e-5,
                    "{placement}, run {run}: a norm is {found}, not {want}"
                );
            }
            let parts: Vec<Tensors<'static>> = ranks.iter().map(|all| all[run].0.clone()).collect();
            let group = &parts[..parallel.group()];
            if !parallel.shards_shared() {
                // Refuses replicas that are not as their owner.
                unshard_placed(&case.spec, group, parallel, Some(&placement)).unwrap();
            }
            for (name, want) in whole {
                let of = |place| parts[parallel.rank(place)][name].lend();
                let found = match ProcessGroup::of(parallel, name) {
                    ProcessGroup::World => parts[0][name].lend(),
                    _ => joined_placed(name, (parallel, Some(&placement)), of),
                };
                for (found, want) in found.to_f32().iter().zip(want.to_f32()) {
                    let what = format!("{placement}, run {run}: `{name}` is {found}, not {want}");
                    assert!((found - want).abs() < 4e-6, "{what}");
                }
            }
            for (rank, part) in parts.iter().enumerate().skip(parallel.group()) {
                assert!(
                    *part == parts[rank - parallel.group()],
                    "groups have the same"
                );
            }
        }
    }
}

#[test]
fn what_is_placed_is_saved_as_one_process_has_it() {
    let case = layer_of(24);
    let whole = case.host_weights();
    let folder = tempfile::tempdir().unwrap();
    for (number, parallel) in [mesh(3, 1, 1), mesh(2, 2, 1), mesh(2, 1, 2)]
        .into_iter()
        .enumerate()
    {
        let file = folder.path().join(format!("{number}"));
        let placement = scattered(parallel.ep, 8, number as u64, Split::Even);
        on_ranks(&cpu(), parallel, |mesh| {
            let mesh = mesh.placed(&placement).unwrap();
            let layer = layer_on(&cpu(), &mesh, &case, None);
            let own = layer.weights_of(&whole).unwrap();
            let experts = own["experts.up.weight"].shape[0];
            assert_eq!(experts, placement.count(mesh.place().ep));
            layer
                .ranks()
                .unwrap()
                .collect(&own, &mut Writer::file(&file))
                .unwrap();
            // From its part alone the layer is the same.
            let of_part = cpu()
                .layer_with(
                    &case.spec,
                    &own,
                    LayerOptions {
                        part: true,
                        ..LayerOptions::over(&mesh)
                    },
                )
                .unwrap();
            let tokens = part(&case, &shares(29, parallel.ranks())[mesh.rank()]);
            let [a, b] = [&layer, &of_part].map(|layer| layer.forward(&tokens.input()).unwrap());
            assert!(a.y().data == b.y().data);
        });
        let checkpoint = Checkpoint::open(&file).unwrap();
        for (name, tensor) in &whole {
            let found = checkpoint.read(name).unwrap();
            assert!(found == *tensor, "{placement}: `{name}`");
        }
        let one = Parallel { dp: 1, ..parallel };
        let shards = shard_placed(&case.spec, &whole, one, Some(&placement)).unwrap();
        let again = unshard_placed(&case.spec, &shards, one, Some(&placement)).unwrap();
        assert!(again == whole);
        if let Some(&expert) = placement.replicated().first() {
            let ep = *placement
                .holders(expert)
                .iter()
                .find(|ep| **ep != placement.owner(expert))
                .unwrap();
            let mut wrong = shards;
            let tensor = wrong[ep * one.expert_tp]
                .get_mut("experts.up.weight")
                .unwrap();
            let slot = placement.slot(ep, expert).unwrap();
            let row = tensor.data.len() / placement.count(ep);
            tensor.data.to_mut()[slot * row] ^= 1;
            let error = unshard_placed(&case.spec, &wrong, one, Some(&placement)).unwrap_err();
            assert!(
                error.to_string().contains(&format!("expert {expert}")),
                "{error}"
            );
        }
    }
}

#[test]
fn a_placement_of_another_layer_is_refused() {
    let case = layer_of(24);
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        mesh.placed(&Placement::contiguous(3, 8)).err().unwrap();
        let other = mesh.placed(&"0-4,6 | 5".parse().unwrap()).unwrap();
        let weights = case.host_weights();
        let error = cpu()
            .layer_with(&case.spec, &weights, LayerOptions::over(&other))
            .err()
            .unwrap();
        assert!(
            error.to_string().contains("7 experts on 2 groups"),
            "{error}"
        );
        // Ranks that place otherwise find out.
        let texts = ["0-3,+4 | 4-7", "0-3 | 4-7,+0"];
        let own = mesh.placed(&texts[mesh.rank()].parse().unwrap()).unwrap();
        let error = cpu()
            .layer_with(&case.spec, &weights, LayerOptions::over(&own))
            .err()
            .unwrap();
        assert!(error.to_string().contains("placement"), "{error}");
    });
}

/// Tokens whose experts follow Zipf's law with exponent 1.5, for an external router.
pub fn hot(tokens: usize, experts: usize) -> Case {
    let text = format!(
        "shape = {{ model_dim = 8, hidden_dim = 8, experts = {experts}, top_k = 1 }}
         router = {{ kind = 'external' }}"
    );
    let mut case = Case::random(&spec(&text), tokens, 3);
    let loads: Vec<f64> = (0..experts).map(|e| (1.0 + e as f64).powf(-1.5)).collect();
    let sum: f64 = loads.iter().sum();
    let draw = &mut SampleRng::new(9);
    let pick = |draw: &mut SampleRng| {
        let mut at = draw.between(0, 999_999) as f64 / 1e6 * sum;
        let found = loads.iter().position(|load| {
            at -= load;
            at < 0.0
        });
        found.unwrap_or(experts - 1) as i32
    };
    let ids = (0..tokens).map(|_| pick(draw)).collect();
    case.input.routing = Some((ids, vec![1.0; tokens]));
    case
}

/// Counts, not times: rows on the busiest rank with experts in order, and where the balancer
/// places them after it has seen a few steps.
#[test]
fn a_hot_experts_rows_get_balanced() {
    let (tokens, experts, parallel) = (2000, 16, mesh(8, 1, 1));
    let case = hot(tokens, experts);
    let rows = |placement: &Placement| -> Vec<usize> {
        on_ranks(&cpu(), parallel, |mesh| {
            let mesh = mesh.placed(placement).unwrap();
            let layer = layer_on(&cpu(), &mesh, &case, Some(Training::default()));
            let own = part(&case, &(mesh.rank() * 250..(mesh.rank() + 1) * 250));
            let call = layer.forward_train(&own.input(), RNG_KEY);
            call.unwrap().1.rows().unwrap()
        })
    };
    let eplb = Eplb {
        replicas: 24,
        expert_groups: 1,
        nodes: 1,
        ranks: 8,
    };
    let options = Balancing {
        rest: 2,
        patience: 2,
        ..Balancing::default()
    };
    // Every rank decides alone, from counts that all have.
    let placements = on_ranks(&cpu(), parallel, |mesh| {
        let layer = layer_on(&cpu(), mesh, &case, None);
        let own = part(&case, &(mesh.rank() * 250..(mesh.rank() + 1) * 250));
        let mut balancer = Balancer::new(experts, eplb, options);
        let mut placement = Placement::contiguous(8, experts);
        for _ in 0..5 {
            let output = layer.forward(own.input().reading(&["counts"])).unwrap();
            let counts = super::case::longs(&output, "counts");
            let counts =
                moesaic::train::balance::counts_of_all(&layer.ranks().unwrap(), &counts).unwrap();
            balancer.observe(&counts).unwrap();
            if let Some(next) = balancer.propose(&placement).unwrap() {
                placement = next;
                balancer.moved();
            }
        }
        placement
    });
    let chosen = &placements[0];
    assert!(placements.iter().all(|placement| placement == chosen));
    let (before, after) = (rows(&Placement::contiguous(8, experts)), rows(chosen));
    println!("rows a rank: {before:?} in order, {after:?} with {chosen}");
    let busiest = |rows: &[usize]| *rows.iter().max().unwrap();
    assert_eq!(after.iter().sum::<usize>(), tokens);
    assert!(busiest(&before) > 1000, "{before:?}");
    assert!(busiest(&after) < 330, "{after:?}"); // the mean is 250
    // Shadows of the hottest, as many as FasterMoE's model wants.
    let ids = &case.input.routing.as_ref().unwrap().0;
    let of_rank = |ids: &[i32]| {
        let mut counts = vec![0; experts];
        ids.iter().for_each(|id| counts[*id as usize] += 1);
        counts
    };
    let counts: Vec<Vec<usize>> = ids.chunks(250).map(of_rank).collect();
    let model = ShadowModel {
        form: ShadowForm::Paper,
        ..ShadowModel::fastmoe(64)
    };
    let present = Placement::contiguous(8, experts);
    let shadowed = shadows(&model, &present, 1, &counts);
    let with = present.with_shadows(&shadowed).unwrap();
    let found = rows(&with);
    println!("rows a rank: {found:?} with shadows of {shadowed:?}");
    assert_eq!(found, with.received(1, &counts));
    assert!(!shadowed.is_empty() && busiest(&found) < 500, "{found:?}");
}

/// A rank reads its own experts, and no other.
#[test]
fn a_rank_reads_its_placed_experts_alone() {
    let case = layer_of(24);
    let whole = case.host_weights();
    let placement: Placement = "6,0-1,+3 | 2-5,7".parse().unwrap();
    on_ranks(&cpu(), mesh(2, 1, 1), |mesh| {
        let mesh = mesh.placed(&placement).unwrap();
        let own = placement.of(mesh.place().ep).into_owned();
        assert_eq!(mesh.experts(8), own);
        let layer = layer_on(&cpu(), &mesh, &case, None);
        assert_eq!(layer.rank_plan().unwrap().own_experts(), own);
        let part = mesh.part(&whole, "experts.up.weight").unwrap();
        for (slot, expert) in own.into_iter().enumerate() {
            let want = whole.rows("experts.up.weight", expert..expert + 1).unwrap();
            assert!(part.rows(slot..slot + 1).unwrap().data == want.data);
        }
    });
}
