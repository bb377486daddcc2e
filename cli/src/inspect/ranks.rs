//! What a rank does and sends.

use crate::console::Palette;
use crate::table::Table;
use crate::units;
use moesaic::plan::{RankPlan, RankStep, Sent};
use serde_json::{Value, json};

/// The passes that a plan has.
fn passes(plan: &RankPlan) -> Vec<(&'static str, &[RankStep])> {
    let all = [
        ("forward", &*plan.steps),
        ("evaluation", &*plan.evaluation),
        ("backward", &*plan.backward),
    ];
    all.into_iter()
        .filter(|(_, steps)| !steps.is_empty())
        .collect()
}

/// The steps of each pass, and the bytes of each for some numbers of tokens a rank.
pub fn text(plan: &RankPlan, tokens: &[u64], per_node: usize, palette: &Palette) -> String {
    let mesh = plan.mesh;
    let mut text = format!(
        "rank {} of {}: ep {} of {}, slice {} of {}, group {} of {}; experts {}{}\n\n{}\n",
        mesh.rank(plan.place),
        mesh.ranks(),
        plan.place.ep,
        mesh.ep,
        plan.place.shard,
        mesh.shards,
        plan.place.dp,
        mesh.dp,
        experts(plan),
        slices(plan) + &ways(plan),
        plan.text()
    );
    let mut table = Table::new(&[
        "pass",
        "tokens a rank",
        "to itself",
        "to its node",
        "to others",
    ]);
    for (name, steps) in passes(plan) {
        for &tokens in tokens {
            let sent = plan.bytes_of(steps, tokens, per_node);
            let bytes = [sent.here, sent.node, sent.network].map(units::bytes);
            let [here, node, network] = bytes;
            table.row([name.to_string(), tokens.to_string(), here, node, network]);
        }
    }
    text += "what this rank sends, if every expert has equally many rows\n";
    text + &table.render(palette)
}

/// The rank's experts: a range, or in their order.
fn experts(plan: &RankPlan) -> String {
    let own = plan.own_experts();
    if own.is_sorted_by(|a, b| a + 1 == *b) {
        format!("{}..{}", own[0], own[own.len() - 1] + 1)
    } else {
        format!("{own:?}")
    }
}

/// What is said of sliced shared experts.
fn slices(plan: &RankPlan) -> String {
    let Some(sliced) = &plan.shared else {
        return String::new();
    };
    let widths = sliced
        .spec
        .shared
        .iter()
        .map(|one| one.hidden_dim.to_string());
    let widths = widths.collect::<Vec<_>>().join(", ");
    format!("; slices of shared experts, of width {widths}")
}

/// What is said of weights that are gathered.
fn ways(plan: &RankPlan) -> String {
    let by = plan.by();
    let (place, slices) = (by.place(plan.mesh.rank(plan.place)), by.mesh().shards);
    match by.count() {
        _ if by.own_alone() => String::new(),
        0 => "; rows stay, and weights of all experts are gathered".to_string(),
        ways => format!(
            "; rows go {ways} ways, and slice {} of {slices} is gathered from {} ranks",
            place.shard,
            by.owners()
        ),
    }
}

/// For scripts.
pub fn json(plan: &RankPlan, tokens: &[u64], per_node: usize) -> Value {
    let bytes =
        |sent: Sent| json!({ "here": sent.here, "node": sent.node, "network": sent.network });
    let of_pass = |(name, steps): &(&str, &[RankStep])| {
        let sent = tokens.iter().map(|&tokens| {
            json!({ "tokens": tokens, "sent": bytes(plan.bytes_of(steps, tokens, per_node)) })
        });
        json!({ "pass": name, "steps": steps, "bytes": sent.collect::<Vec<_>>() })
    };
    let own = plan.own_experts(); // without a placement a range
    json!({
        "mesh": plan.mesh,
        "place": plan.place,
        "ways": plan.ways,
        "experts": [own[0], own[own.len() - 1] + 1],
        "passes": passes(plan).iter().map(of_pass).collect::<Vec<_>>(),
    })
}
