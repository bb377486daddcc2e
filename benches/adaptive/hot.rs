//! A hot expert, with experts in order, with shadows for each call, and with replicas where the
//! balancer places them.

use crate::drawn::{Drawn, RANKS};
use crate::measured::{Passes, Rank};
use crate::{Result, compared, quartile};
use moesaic::collectives::Collectives;
use moesaic::mesh::{Balancer, Balancing, Eplb, Placement, Split};
use moesaic::plan::{CommDtype, ShadowModel};
use moesaic::planner::Machine;
use moesaic::reference::Skew;
use moesaic::spec::LayerSpec;
use moesaic::{Parallel, RngKey};
use serde_json::json;
use std::time::Instant;

/// Zipf's law with exponent 1.5; rows are many, and experts' weights few.
fn layer() -> Drawn {
    Drawn {
        number: 0,
        tokens: 1024,
        model_dim: 256,
        hidden_dim: 64,
        experts: 32,
        top_k: 2,
        mesh: Parallel {
            ep: RANKS,
            ..Parallel::default()
        },
        capacity: None,
        comm_dtype: CommDtype::Unchanged,
        skew: Skew::Zipf(1.5),
    }
}

/// With a machine also what the planner says of experts in order.
pub fn run(rounds: usize, machine: Option<&Machine>) -> Result {
    let mut rank = Rank::start()?;
    let drawn = layer();
    rank.say(&format!("# {drawn}"));
    let mesh = rank.mesh(drawn.mesh)?;
    let own = rank.world.rank();
    let (input, dy) = (drawn.input(own), drawn.output_gradient(own));
    let order = Placement::contiguous(RANKS, drawn.experts);
    let balanced = balanced(&drawn, &order)?;
    let placements = [
        ("in order", order.clone(), "default"),
        ("in order, in chunks", order.clone(), "overlap_degree=4"),
        ("shadows", order.clone(), "shadows=8"),
        ("shadows, in chunks", order, "overlap_degree=4,shadows=8"),
        ("replicas, even", balanced.splitting(Split::Even), "default"),
        ("replicas, near", balanced.splitting(Split::Near), "default"),
    ];
    let mut layers = Vec::new();
    for (_, placement, strategy) in &placements {
        let layer = rank.layer(&mesh.placed(placement)?, &drawn)?;
        layer.set_shadow_model(links(layer.spec()))?;
        layer.set_strategy(strategy.parse()?)?;
        layers.push(layer);
    }
    let mut shadowed = vec![Vec::new(); layers.len()];
    let mut times: Vec<Vec<Passes>> = vec![Vec::new(); layers.len()];
    let mut rows = vec![0; layers.len()];
    for round in 0..=rounds {
        for turn in 0..layers.len() {
            let kind = (round + turn) % layers.len();
            let layer = &layers[kind];
            rank.meet()?;
            let start = Instant::now();
            let (_, saved) = layer.forward_train(input.reading(&["y"]), RngKey::default())?;
            layer.backward(&saved, &dy, false)?;
            let passes = start.elapsed().as_secs_f64();
            // Replicas are made equal here, so it is theirs to pay.
            layer.reduce_gradients()?;
            let sums = start.elapsed().as_secs_f64() - passes;
            rows[kind] = saved.rows().unwrap_or_default();
            shadowed[kind] = saved.shadowed().to_vec();
            if round > 0 {
                times[kind].push([passes, sums]);
            }
        }
    }
    for (kind, (name, placement, strategy)) in placements.iter().enumerate() {
        let slowest = rank.slowest(&times[kind])?;
        let most = rank.slowest(&[[rows[kind] as f64, 0.0]])?[0][0];
        rank.say(&format!(
            "{name}: {:.1} ms a step, {:.1} ms of it sums of gradients; the busiest rank has {most} \
             rows; shadows of {:?}; {placement}",
            1e3 * compared::step(&slowest),
            1e3 * quartile(slowest.iter().map(|[_, sums]| *sums).collect()),
            shadowed[kind]
        ));
        rank.say(&json!({ "placement": name, "rounds": slowest }).to_string());
        if let Some(machine) = machine {
            let strategy = strategy.parse()?;
            let found = compared::predict_placed(&drawn, strategy, machine, (placement, links))?;
            rank.say(&format!("{name}: predicted {:.1} ms a step", 1e3 * found));
        }
    }
    rank.finish()
}

/// The machine that `benches/nodes/links.sh` makes, as FasterMoE's model knows it: 100 Mbit/s for
/// the four ranks of a node, and two processors for all.
fn links(spec: &LayerSpec) -> ShadowModel {
    ShadowModel {
        elements: 100e6 / 8.0 / 4.0 / 4.0,
        operations: 5e9,
        ..ShadowModel::of(spec)
    }
}

/// Returns the placement that the balancer proposes after the counts of a few
/// steps. Experts form one group, so replicas may be on any node, because a hot
/// expert fills the link of its node.
fn balanced(drawn: &Drawn, present: &Placement) -> Result<Placement> {
    let eplb = Eplb {
        replicas: 3 * RANKS,
        expert_groups: 1,
        nodes: 1,
        ranks: RANKS,
    };
    let options = Balancing {
        rest: 2,
        patience: 2,
        ..Balancing::default()
    };
    let mut counts = vec![0i64; drawn.experts];
    for rank in drawn.counts() {
        counts
            .iter_mut()
            .zip(rank)
            .for_each(|(sum, n)| *sum += n as i64);
    }
    let mut balancer = Balancer::new(drawn.experts, eplb, options);
    for _ in 0..6 {
        balancer.observe(&counts)?;
        if let Some(found) = balancer.propose(present)? {
            return Ok(found);
        }
    }
    Err("the balancer proposes nothing".into())
}
