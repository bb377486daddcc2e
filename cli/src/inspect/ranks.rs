//! The steps of one rank and the bytes it sends.

use super::model::unknown_kernel;
use crate::disassemble;
use crate::failure::{Failure, Result};
use crate::palette::Palette;
use crate::rank::OfRank;
use crate::table::Table;
use crate::units;
use moesaic::engine::compile_all;
use moesaic::kernel::KernelSource;
use moesaic::plan::{RankPlan, RankStep, Sent};
use moesaic::target::CompileOptions;
use moesaic::{Compilers, Store, Target};
use serde_json::{Value, json};
use std::sync::Arc;

/// A kernel of a rank to show.
pub struct Shown {
    kernel: OfRank,
    /// The machine code, if it was requested.
    asm: Option<String>,
}

/// Returns the kernels that match a stem, a name or the name of an entry in the steps.
pub fn chosen(all: Vec<OfRank>, wanted: Option<&str>) -> Result<Vec<Shown>> {
    let names: Vec<String> = all.iter().map(|one| one.source.name.clone()).collect();
    let fits = |one: &OfRank| wanted.is_none_or(|wanted| is_called(&one.source, wanted));
    let show = |kernel| Shown { kernel, asm: None };
    let chosen: Vec<Shown> = all.into_iter().filter(fits).map(show).collect();
    match wanted {
        Some(wanted) if chosen.is_empty() => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            Err(unknown_kernel(&names, wanted))
        }
        _ => Ok(chosen),
    }
}

fn is_called(source: &KernelSource, wanted: &str) -> bool {
    let mut entries = source.entries.iter();
    source.name == wanted
        || source.stem.name() == wanted
        || entries.any(|entry| entry.symbol == wanted)
}

/// Compiles the kernels and disassembles their binaries.
pub fn disassemble(kernels: &mut [Shown], target: Target, store: &Arc<Store>) -> Result {
    let compiler = Compilers::new(Some(store.clone())).get(target);
    let compiler = compiler.map_err(|error| Failure::from(&error))?;
    let sources: Vec<_> = kernels.iter().map(|shown| &shown.kernel.source).collect();
    let built = compile_all(&sources, &compiler, store, &CompileOptions::default());
    for (shown, artifact) in kernels.iter_mut().zip(built) {
        shown.asm = Some(disassemble::disassemble(target, &artifact?)?);
    }
    Ok(())
}

/// Renders kernels for people: their source, their machine code, or a hint on how to see them.
pub fn listing(kernels: &[Shown], source: bool, palette: &Palette) -> String {
    let mut text = String::new();
    for shown in kernels {
        let name = shown.kernel.file_name();
        if source {
            let source = shown.kernel.source.text.trim_end();
            text += &format!("\n{}\n{source}\n", palette.bold(&name));
        }
        if let Some(asm) = &shown.asm {
            let title = format!("{name} machine code");
            text += &format!("\n{}\n{asm}", palette.bold(&title));
        }
    }
    if text.is_empty() {
        let how = "--source shows the source of its kernels, --asm the machine code";
        text = format!("\n{}\n", palette.dim(how));
    }
    text
}

/// Returns the passes of a plan.
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

/// Renders the steps of each pass, with the bytes of each step at some numbers of tokens per rank.
pub fn text(plan: &RankPlan, tokens: &[u64], per_node: usize, palette: &Palette) -> String {
    let mesh = plan.mesh;
    let mut text = format!(
        "rank {} of {}: ep {} of {}, shard {} of {}, group {} of {}; experts {}{}\n\n{}\n",
        mesh.rank(plan.place),
        mesh.ranks(),
        plan.place.ep,
        mesh.ep,
        plan.place.tp,
        mesh.expert_tp,
        plan.place.dp,
        mesh.dp,
        experts(plan),
        shards(plan) + &adaptive_r(plan),
        plan.text()
    );
    let mut table = Table::new(&[
        "PASS",
        "TOKENS A RANK",
        "TO ITSELF",
        "TO ITS NODE",
        "TO OTHERS",
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

/// Describes the rank's experts as a range, or as a list if they are out of order.
fn experts(plan: &RankPlan) -> String {
    let own = plan.own_experts();
    if own.is_sorted_by(|a, b| a + 1 == *b) {
        format!("{}..{}", own[0], own[own.len() - 1] + 1)
    } else {
        format!("{own:?}")
    }
}

/// Describes sharded shared experts.
fn shards(plan: &RankPlan) -> String {
    let Some(sharded) = &plan.shared else {
        return String::new();
    };
    let widths = sharded
        .spec
        .shared
        .iter()
        .map(|one| one.hidden_dim.to_string());
    let widths = widths.collect::<Vec<_>>().join(", ");
    format!("; shards of shared experts, of width {widths}")
}

/// Describes gathered weights.
fn adaptive_r(plan: &RankPlan) -> String {
    let by = plan.by();
    let (place, shards) = (by.place(plan.mesh.rank(plan.place)), by.mesh().expert_tp);
    match by.adaptive_r() {
        _ if by.is_owner_only() => String::new(),
        0 => "; rows stay, and weights of all experts are gathered".to_string(),
        adaptive_r => format!(
            "; rows go to {adaptive_r} shards, and shard {} of {shards} is gathered from {} ranks",
            place.tp,
            by.owners()
        ),
    }
}

/// Returns the rank's plan as JSON, for scripts.
pub fn json(plan: &RankPlan, kernels: &[Shown], tokens: &[u64], per_node: usize) -> Value {
    let bytes =
        |sent: Sent| json!({ "here": sent.here, "node": sent.node, "network": sent.network });
    let of_pass = |(name, steps): &(&str, &[RankStep])| {
        let sent = tokens.iter().map(|&tokens| {
            json!({ "tokens": tokens, "sent": bytes(plan.bytes_of(steps, tokens, per_node)) })
        });
        json!({ "pass": name, "steps": steps, "bytes": sent.collect::<Vec<_>>() })
    };
    let own = plan.own_experts();
    let in_order = plan.placement.is_none();
    json!({
        "mesh": plan.mesh,
        "place": plan.place,
        "adaptive_r": plan.adaptive_r,
        "experts": in_order.then(|| [own[0], own[own.len() - 1] + 1]),
        "own": own,
        "placement": plan.placement,
        "passes": passes(plan).iter().map(of_pass).collect::<Vec<_>>(),
        "kernels": kernels.iter().map(one_kernel).collect::<Vec<_>>(),
    })
}

fn one_kernel(shown: &Shown) -> Value {
    let OfRank { part, source } = &shown.kernel;
    json!({
        "part": part,
        "name": source.name,
        "stem": source.stem.name(),
        "file": shown.kernel.file_name(),
        "source": source.text,
        "asm": shown.asm,
    })
}
