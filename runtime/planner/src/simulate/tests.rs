//! The simulator against the plan's own numbers and against independent calculations.

use super::*;
use crate::{AllToAllFactor, Bottleneck, RoutedRows, Space, published, search};
use moesaic_plan::{CommDtype, OverlapBy, Training};
use moesaic_spec::{CapacityMode, LayerSpec};

const LAYER: &str = "shape = { model_dim = 256, hidden_dim = 512, experts = 16, top_k = 2 }
                     precision = { weights = \"bf16\", activations = \"bf16\" }";

fn scenario(world: usize, tokens: u64, training: bool) -> Scenario {
    let spec = LayerSpec::from_toml(LAYER).unwrap();
    Scenario {
        routing: RoutedRows::even(tokens, spec.shape.experts, spec.shape.top_k),
        placement: None,
        shadow_model: ShadowModel::of(&spec),
        spec,
        machine: published("h100-ib").unwrap().with_per_node(4),
        world,
        training: training.then(Training::default),
    }
}

fn mesh(ep: usize, expert_tp: usize, dp: usize) -> Parallel {
    Parallel {
        ep,
        expert_tp,
        dp,
        ..Parallel::default()
    }
}

fn strategy(text: &str) -> Strategy {
    text.parse().unwrap()
}

#[test]
fn bytes_are_those_that_the_plan_says_of_itself() {
    for (ep, expert_tp, dp) in [(8, 1, 1), (16, 1, 1), (4, 2, 2), (4, 4, 1), (1, 1, 8)] {
        let scenario = scenario(ep * expert_tp * dp, 4096, true);
        let simulator = Simulator::new(&scenario);
        let mesh = mesh(ep, expert_tp, dp);
        let found = simulator.predict(mesh, Strategy::default()).unwrap();
        let planned = simulator.plan(mesh, Strategy::default()).unwrap();
        let plan = &planned.plan;
        // Sums of gradients are no steps of a pass.
        let summed = found.passes.iter().filter(|pass| pass.name == "gradients");
        let summed: Vec<_> = summed
            .flat_map(|pass| &pass.phases)
            .map(|phase| phase.sent)
            .collect();
        let (mut node, mut network) = (0u64, 0u64);
        for steps in [&plan.steps, &plan.backward] {
            let sent = plan.bytes_of(steps, 4096, 4);
            (node, network) = (node + sent.node, network + sent.network);
        }
        let near = |found: f64, said: u64| (found - said as f64).abs() <= 0.02 * found.max(1e5);
        let [own_node, own_network] =
            [0, 1].map(|at| found.sent[at] - summed.iter().map(|sent| sent[at]).sum::<f64>());
        assert!(near(own_node, node), "{mesh:?} {own_node} {node}");
        assert!(
            near(own_network, network),
            "{mesh:?} {own_network} {network}"
        );
    }
}

#[test]
fn equal_counts_of_every_rank_are_as_good_as_one_class() {
    let even = scenario(16, 1600, true);
    let counts = vec![vec![200; 16]; 16];
    let mut other = counts.clone();
    other[3][2] = 201;
    for (counts, tolerance) in [(counts, 1e-9), (other, 1e-2)] {
        let mut counted = even.clone();
        counted.routing = RoutedRows::counted(16, 16, 2, &counts).unwrap();
        let [a, b] = [&even, &counted].map(Simulator::new);
        for text in [
            "default",
            "overlap_degree=4",
            "all_to_all=2dh",
            "all_to_all=dedup,overlap_degree=2",
        ] {
            let [a, b] = [&a, &b].map(|s| s.predict(mesh(16, 1, 1), strategy(text)).unwrap());
            assert!(
                (a.seconds / b.seconds - 1.0).abs() <= tolerance,
                "{text} {a:?} {b:?}"
            );
        }
    }
}

#[test]
fn repeated_experts_cost_the_sums_of_their_gradients() {
    let scenario = scenario(16, 64, true);
    let simulator = Simulator::new(&scenario);
    let sums = |ep, dp| {
        let found = simulator
            .predict(mesh(ep, 1, dp), Strategy::default())
            .unwrap();
        let sums = found
            .passes
            .iter()
            .find(|pass| pass.name == "gradients")
            .unwrap();
        let experts = sums
            .phases
            .iter()
            .find(|phase| phase.name == "gradients of experts");
        experts.map_or(0.0, |phase| phase.sent.iter().sum())
    };
    // Eight experts with three matrices and f32 gradients, over eight groups.
    assert_eq!(sums(16, 1), 0.0);
    let weights = 3.0 * 256.0 * 512.0 * 4.0;
    let expected = 8.0 * weights * 2.0 * 7.0 / 8.0;
    assert_eq!(sums(2, 8), expected);
}

#[test]
fn one_rank_exchanges_nothing() {
    let scenario = scenario(1, 100, false);
    let found = Simulator::new(&scenario)
        .predict(mesh(1, 1, 1), Strategy::default())
        .unwrap();
    assert_eq!(found.sent, [0.0; 4]);
    let phases = &found.passes[0].phases;
    let launched: f64 = phases
        .iter()
        .filter(|p| p.whose != "ranks")
        .map(|p| p.seconds)
        .sum();
    assert!(launched > 0.9 * found.seconds && found.passes.len() == 1);
}

#[test]
fn no_tokens_are_no_trouble() {
    for world in [1, 16] {
        let scenario = scenario(world, 0, true);
        let ranked = search(&scenario, &Space::default()).unwrap();
        assert!(
            ranked
                .best
                .iter()
                .all(|p| p.seconds.is_finite() && p.seconds >= 0.0)
        );
    }
}

#[test]
fn a_step_is_as_long_as_its_phases_where_nothing_overlaps() {
    let scenario = scenario(16, 4096, true);
    let simulator = Simulator::new(&scenario);
    for text in ["default", "all_to_all=2dh", "r=0", "comm_dtype=fp8"] {
        let (found, timeline) = simulator.timeline(mesh(16, 1, 1), strategy(text)).unwrap();
        let phases = found.passes.iter().flat_map(|pass| &pass.phases);
        let sum: f64 = phases.map(|phase| phase.seconds).sum();
        assert!((sum / found.seconds - 1.0).abs() < 1e-9, "{text}");
        let last = timeline.iter().map(|e| e.end).fold(0.0, f64::max);
        assert!((last / found.seconds - 1.0).abs() < 1e-9, "{text}");
    }
}

#[test]
fn chunks_overlap_and_nothing_of_a_stream_does() {
    let scenario = scenario(16, 65536, true);
    let simulator = Simulator::new(&scenario);
    let whole = simulator
        .predict(mesh(16, 1, 1), Strategy::default())
        .unwrap();
    let (chunks, timeline) = simulator
        .timeline(mesh(16, 1, 1), strategy("overlap_degree=4"))
        .unwrap();
    assert!(
        chunks.seconds < whole.seconds,
        "{} {}",
        chunks.seconds,
        whole.seconds
    );
    let both = |stream: &str| {
        timeline
            .iter()
            .filter(|e| e.stream == stream)
            .collect::<Vec<_>>()
    };
    let (products, exchanges) = (both("compute"), both("exchange"));
    let overlap = |a: &Simulated, b: &Simulated| a.end.min(b.end) - a.start.max(b.start);
    assert!(
        products
            .iter()
            .any(|p| exchanges.iter().any(|e| overlap(p, e) > 1e-6))
    );
    for stream in [products, exchanges] {
        let mut sorted = stream.clone();
        sorted.sort_by(|a, b| a.start.total_cmp(&b.start));
        assert!(sorted.windows(2).all(|w| overlap(w[0], w[1]) < 1e-12));
    }
}

/// By peers every message is in one chunk, by rows in each of them; bytes are equal.
#[test]
fn chunks_by_ranks_have_no_more_messages_than_one() {
    let scenario = scenario(16, 1600, true);
    let simulator = Simulator::new(&scenario);
    let of = |text: &str| simulator.predict(mesh(16, 1, 1), strategy(text)).unwrap();
    let [one, rows, ranks] = [
        "default",
        "overlap_degree=8",
        "overlap_degree=8,overlap_by=peers",
    ]
    .map(of);
    assert!(ranks.seconds < rows.seconds, "{ranks:?} {rows:?}");
    for (one, ranks) in one.sent.iter().zip(ranks.sent) {
        assert!((ranks / one.max(1.0) - one / one.max(1.0)).abs() < 1e-9);
    }
    let error = simulator
        .predict(
            mesh(16, 1, 1),
            strategy("overlap_degree=2,overlap_by=peers,all_to_all=dedup"),
        )
        .unwrap_err();
    assert!(
        error.to_string().contains("take all_to_all=linear"),
        "{error}"
    );
}

/// Dropped rows are neither sent nor processed.
#[test]
fn a_hot_expert_takes_no_more_than_its_capacity() {
    let mut scenario = scenario(16, 65536, true);
    scenario.routing = RoutedRows::zipf(65536, 16, 2, 1.2).unwrap();
    let seconds = |scenario: &Scenario| {
        let found = Simulator::new(scenario).predict(mesh(16, 1, 1), Strategy::default());
        found.unwrap().seconds
    };
    let all = seconds(&scenario);
    let capacity = &mut scenario.spec.capacity;
    (capacity.mode, capacity.factor) = (CapacityMode::Factor, 1.0);
    let capped = seconds(&scenario);
    let mut even = scenario.clone();
    even.routing = RoutedRows::even(65536, 16, 2);
    assert!(capped < 0.6 * all, "{capped} {all}");
    assert!(capped < 1.05 * seconds(&even) && capped > 0.5 * seconds(&even));
}

#[test]
fn skew_makes_the_rank_of_a_hot_expert_the_slowest() {
    let even = scenario(16, 65536, false);
    let mut skewed = even.clone();
    skewed.routing = RoutedRows::zipf(65536, 16, 2, 1.5).unwrap();
    let time = |q: &Scenario| {
        let found = Simulator::new(q).predict(mesh(16, 1, 1), Strategy::default());
        found.unwrap().seconds
    };
    assert!(time(&skewed) > 1.5 * time(&even));
}

#[test]
fn fewer_shards_send_fewer_rows_and_gather_weights() {
    let scenario = scenario(16, 4096, false);
    let simulator = Simulator::new(&scenario);
    let found = |text: &str| simulator.predict(mesh(2, 8, 1), strategy(text)).unwrap();
    let rows = |found: &Prediction| {
        let phases = &found.passes[0].phases;
        let rows = phases
            .iter()
            .filter(|p| p.whose == "ranks" && p.name == "rows");
        rows.map(|p| p.sent.iter().sum::<f64>()).sum::<f64>()
    };
    let (all, two, none) = (found("default"), found("r=2"), found("r=0"));
    // A rank sends the rows for all shards less those for its own; with half the shards, 1.5
    // instead of 7.5 times.
    assert!((rows(&all) / rows(&two) - 5.0).abs() < 1e-6);
    assert_eq!(rows(&none), 0.0);
    assert!(all.memory.gathered == 0.0 && two.memory.gathered > 0.0);
    assert!(none.memory.gathered > two.memory.gathered);
    let own = all.memory.weights;
    assert!(
        (two.memory.weights / own - 1.0).abs() < 0.05,
        "weights do not move"
    );
}

/// Here a node has all shards of an expert, so it gets a token once however many shards take its
/// rows, and returns one sum.
#[test]
fn what_crosses_once_does_so_at_any_adaptive_r() {
    let scenario = scenario(16, 4096, true);
    let simulator = Simulator::new(&scenario);
    let nodes = crate::expected_groups(16.0, 2, 4.0) * 3.0 / 4.0;
    let expected = 4096.0 * nodes * 512.0;
    for text in [
        "all_to_all=dedup",
        "r=2,all_to_all=dedup",
        "r=1,all_to_all=dedup",
    ] {
        let found = simulator.predict(mesh(4, 4, 1), strategy(text)).unwrap();
        for (pass, name) in [(0, "rows"), (1, "dout"), (1, "drows")] {
            let phases = found.passes[pass].phases.iter();
            let sent: f64 = phases.filter(|p| p.name == name).map(|p| p.sent[1]).sum();
            // The indices of rows that share a token are sent along with the rows.
            let off = sent / expected - 1.0;
            assert!(
                (0.0..0.04).contains(&off),
                "{text}: {name} {sent}, not {expected}"
            );
        }
    }
}

/// A token's experts are in at most `keep` groups, each of which is on one node, on two nodes, or
/// shares a node with another.
#[test]
fn groups_limit_the_nodes_that_tokens_cross_to() {
    let sent = |groups: &str, per_node: usize, text: &str| {
        let layer = format!(
            "shape = {{ model_dim = 256, hidden_dim = 512, experts = 256, top_k = 8 }}
             precision = {{ weights = \"bf16\", activations = \"bf16\" }}
             {groups}"
        );
        let spec = LayerSpec::from_toml(&layer).unwrap();
        let scenario = Scenario {
            routing: RoutedRows::even(4096, 256, 8),
            machine: published("h100-ib").unwrap().with_per_node(per_node),
            shadow_model: ShadowModel::of(&spec),
            placement: None,
            world: 64,
            training: None,
            spec,
        };
        let found = Simulator::new(&scenario).predict(mesh(64, 1, 1), strategy(text));
        let phases = &found.unwrap().passes[0].phases;
        let rows = phases.iter().filter(|phase| phase.name == "rows");
        let bytes: f64 = rows.map(|phase| phase.sent[1]).sum();
        let away = 1.0 - per_node as f64 / 64.0;
        bytes / (4096.0 * 512.0 * away)
    };
    let kept = |keep: usize| {
        format!("router = {{ groups = {{ count = 8, keep = {keep}, stat = \"max\" }} }}")
    };
    let all = |nodes: f64| crate::expected_groups(256.0, 8, nodes);
    for (groups, per_node, nodes) in [
        ("", 8, all(8.0)),
        (&*kept(8), 8, all(8.0)),
        // Drawn tokens reach 3.98 and 2.00 nodes, as a test of `reach` shows.
        (&*kept(4), 8, 3.98),
        (&*kept(2), 8, 2.0),
        (&*kept(1), 8, 1.0),
        (&*kept(1), 4, crate::expected_groups(32.0, 8, 2.0)),
        (&*kept(1), 16, 1.0),
    ] {
        let found = sent(groups, per_node, "all_to_all=dedup");
        // The indices of rows that share a token are sent along with the rows.
        let off = found - nodes;
        assert!(
            (-0.01..0.07).contains(&off),
            "{groups}, {per_node}: {found}, not {nodes}"
        );
        // In chunks a token crosses more than once, but never more often than it has experts.
        let chunks = sent(groups, per_node, "all_to_all=dedup,overlap_degree=4");
        assert!(chunks >= found && chunks <= 8.1, "{groups}: {chunks}");
        let linear = sent(groups, per_node, "default");
        assert!((linear - 8.0).abs() < 0.2, "{linear}");
    }
}

#[test]
fn what_is_smaller_between_nodes_is_smaller_there_alone() {
    let scenario = scenario(16, 4096, false);
    let simulator = Simulator::new(&scenario);
    let found = |text: &str| {
        simulator
            .predict(mesh(16, 1, 1), strategy(text))
            .unwrap()
            .sent
    };
    let (exact, fp8) = (found("default"), found("comm_dtype=fp8"));
    assert_eq!(exact[0], fp8[0]);
    assert!(
        (fp8[1] / exact[1] - 264.0 / 512.0).abs() < 0.01,
        "{exact:?} {fp8:?}"
    );
    assert_eq!(cast_free(), 1.0);
}

fn cast_free() -> f64 {
    crate::collective_ops::comm_dtype_part(CommDtype::Bf16, 512.0, 2)
}

#[test]
fn what_cannot_be_says_what_can() {
    let scenario = scenario(16, 64, false);
    let simulator = Simulator::new(&scenario);
    let error = |mesh, text| {
        simulator
            .predict(mesh, strategy(text))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(mesh(4, 1, 1), "default"),
        "the mesh has 4 ranks, the job 16"
    );
    assert!(error(mesh(4, 4, 1), "r=3").contains("a divisor of 4"));
    assert!(error(mesh(32, 1, 1), "default").contains("at most 16"));
    let error = error(mesh(4, 1, 4), "all_to_all=dedup");
    assert!(error.contains("4 ranks with 4 a node do not"), "{error}");
}

#[test]
fn the_best_that_is_found_is_the_best_of_all() {
    let scenario = scenario(16, 8192, true);
    let simulator = Simulator::new(&scenario);
    let ranked = search(&scenario, &Space::default()).unwrap();
    // The simplest of practically equal configurations comes before the fastest.
    let all = ranked.best.iter();
    let best = all.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap();
    let sorted = ranked.best[1..].windows(2);
    assert!(sorted.clone().all(|w| w[0].seconds <= w[1].seconds + 1e-9));
    assert!(ranked.best[0].seconds <= best.seconds * 1.03);
    for (ep, expert_tp, dp) in [(16, 1, 1), (8, 2, 1), (4, 2, 2), (1, 1, 16), (2, 8, 1)] {
        for text in ["default", "overlap_degree=2/4", "r=0"] {
            let found = simulator
                .predict(mesh(ep, expert_tp, dp), strategy(text))
                .unwrap();
            assert!(best.seconds <= found.seconds + 1e-9, "{best:?} {found:?}");
        }
    }
    assert!(best.bound_part > 0.0 && best.bound != Bottleneck::Waiting);
}

/// 16 ranks of one expert each, one of which has most rows.
fn hot(tokens: u64, zipf: f64) -> Scenario {
    let scenario = scenario(16, tokens, true);
    Scenario {
        routing: RoutedRows::zipf(tokens, 16, 2, zipf).unwrap(),
        ..scenario
    }
}

#[test]
fn a_hot_expert_has_a_shadow_and_its_rows_stay() {
    let scenario = hot(16384, 1.5);
    let simulator = Simulator::new(&scenario);
    let mesh = mesh(16, 1, 1);
    let of = |text: &str| simulator.predict(mesh, strategy(text)).unwrap();
    let (plain, shadowed) = (of("default"), of("shadows=4"));
    let forward = |found: &Prediction, whose: &str| -> f64 {
        let phases = found.passes[0].phases.iter();
        let of_side = phases.filter(|phase| phase.whose == whose);
        of_side.map(|phase| phase.seconds).sum()
    };
    assert_eq!(forward(&plain, "shadows"), 0.0);
    assert!(forward(&shadowed, "shadows") > 0.0);
    // The expert's weights are 0.8 MB, its rows 100 MB: a shadow pays off.
    assert!(shadowed.seconds < plain.seconds, "{shadowed:?} {plain:?}");
    let bytes = |found: &Prediction| found.sent.iter().sum::<f64>();
    assert!(bytes(&shadowed) < bytes(&plain));
    assert!(shadowed.memory.bytes() != plain.memory.bytes());
    // GEMMs of shadows run while the first rows are in flight.
    let (_, timeline) = simulator
        .timeline(mesh, strategy("overlap_degree=4,shadows=4"))
        .unwrap();
    let first = |name: &str| timeline.iter().find(|event| event.name.contains(name));
    let all: Vec<&str> = timeline.iter().map(|event| &*event.name).collect();
    let loads = first("tokens per expert").unwrap_or_else(|| panic!("{all:?}"));
    assert!(loads.end > loads.start);
    // With few rows the weights dominate, and a shadow does not pay off.
    let scenario = hot(16, 1.5);
    let simulator = Simulator::new(&scenario);
    let of = |text: &str| simulator.predict(mesh, strategy(text)).unwrap();
    assert!(of("shadows=4").seconds >= of("default").seconds);
}

#[test]
fn a_search_looks_for_shadows_where_an_expert_is_hot() {
    let space = Space {
        mesh: Some(mesh(16, 1, 1)),
        ..Space::default()
    };
    let shadowed = |scenario: &Scenario| {
        let ranked = search(scenario, &space).unwrap();
        let shadows = ranked.best.iter().map(|found| found.strategy.shadows);
        shadows.filter(|most| *most > 0).count()
    };
    assert!(shadowed(&hot(16384, 1.5)) > 20);
    assert_eq!(shadowed(&hot(16384, 0.0)), 0);
}

/// Chunks that both passes consist of are launched in both ([`Overlap::common`]).
#[test]
fn other_chunks_in_backward_are_launches_more_in_forward() {
    let scenario = scenario(8, 64, true);
    let simulator = Simulator::new(&scenario);
    let forward = |text: &str| {
        let found = simulator.predict(mesh(8, 1, 1), strategy(text)).unwrap();
        found.passes[0].seconds
    };
    let launch = scenario.machine.launch();
    let (one, more) = (forward("default"), forward("overlap_degree=1/4"));
    // Two GEMMs, launched three times more.
    assert!((more - one) >= 6.0 * launch, "{one} {more} {launch}");
    assert_eq!(forward("overlap_degree=4"), forward("overlap_degree=4/2"));
    assert!(forward("overlap_degree=4/3") > forward("overlap_degree=4"));
}

/// The factor of an algorithm applies to rows that use it and to nothing else.
#[test]
fn an_algorithm_takes_as_much_longer_as_was_measured() {
    let mut scenario = scenario(8, 2048, true);
    let seconds = |scenario: &Scenario, text: &str| {
        let found = Simulator::new(scenario).predict(mesh(8, 1, 1), strategy(text));
        found.unwrap().seconds
    };
    let [before, other] =
        ["default", "all_to_all=2dh-inter-first"].map(|text| seconds(&scenario, text));
    let mut with = |by: f64| {
        scenario.machine.all_to_all_factors = vec![AllToAllFactor {
            name: AllToAll::Linear,
            overlap_by: OverlapBy::Rows,
            overlap_degree: 1,
            message_kib: 1.0,
            by,
        }];
        seconds(&scenario, "default")
    };
    let (double, triple) = (with(2.0), with(3.0));
    assert!(double > before && double < 2.0 * before);
    assert!(((triple - double) / (double - before) - 1.0).abs() < 1e-9);
    assert_eq!(seconds(&scenario, "all_to_all=2dh-inter-first"), other);
}

fn placed(scenario: Scenario, text: &str) -> Scenario {
    let placement = Some(text.parse().expect("a placement"));
    Scenario {
        placement,
        ..scenario
    }
}

/// Replicas process fewer rows than the one owner did, and their gradients are summed.
#[test]
fn replicas_take_rows_of_a_hot_expert() {
    let mesh = mesh(16, 1, 1);
    let predict = |scenario: &Scenario| {
        let simulator = Simulator::new(scenario);
        simulator.predict(mesh, Strategy::default()).unwrap()
    };
    let hottest = |scenario: &Scenario| {
        let rows = scenario.routing.rows(0);
        let most = |a: &usize, b: &usize| rows[*a].total_cmp(&rows[*b]);
        (0..16).max_by(most).unwrap()
    };
    let plain = hot(16384, 1.5);
    let expert = hottest(&plain);
    let everywhere: Vec<String> = (0..16)
        .map(|own| {
            if own == expert {
                own.to_string()
            } else {
                format!("{own},+{expert}")
            }
        })
        .collect();
    let everywhere = everywhere.join(" | ");
    let even = predict(&placed(plain.clone(), &everywhere));
    let near = predict(&placed(plain.clone(), &format!("near: {everywhere}")));
    let in_order = (0..16).map(|e: usize| e.to_string());
    let in_order = in_order.collect::<Vec<_>>().join(" | ");
    let same = predict(&placed(plain.clone(), &in_order));
    let plain = predict(&plain);
    assert_eq!(same, plain);
    let passes = |found: &Prediction| found.passes[0].seconds + found.passes[1].seconds;
    assert!(passes(&even) < passes(&plain));
    // Rows of the hot expert stay where they are: fewer bytes, and no rank has more of them.
    assert!(passes(&near) < passes(&even));
    let sums = |found: &Prediction| -> f64 {
        let phases = found.passes[2].phases.iter();
        let of = phases.filter(|phase| phase.name == "gradients of replicas");
        of.map(|phase| phase.seconds).sum()
    };
    assert_eq!(sums(&plain), 0.0);
    assert!(sums(&even) > 0.0 && (sums(&even) / sums(&near) - 1.0).abs() < 1e-9);
    assert!(even.memory.weights > plain.memory.weights);
}

#[test]
fn a_placement_has_to_fit_the_ranks_and_the_layer() {
    let asked = |text: &str| search(&placed(scenario(16, 64, false), text), &Space::default());
    let error = asked("0-4 | 5-9 | 10-15").unwrap_err().to_string();
    assert!(error.contains("on 3 groups of ranks, which 16"), "{error}");
    let error = asked("0-3 | 4-7").unwrap_err().to_string();
    assert!(error.contains("8 experts on 2 groups"), "{error}");
    let found = asked("8-15 | 0-7").unwrap();
    assert!(found.best.iter().all(|p| p.mesh.ep == 2));
    let mesh = mesh(16, 1, 1);
    let scenario = placed(scenario(16, 64, false), "8-15 | 0-7");
    let wrong = Simulator::new(&scenario).predict(mesh, Strategy::default());
    assert!(matches!(wrong, Err(PlannerError::Plan(_))), "{wrong:?}");
}
