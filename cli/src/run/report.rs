//! The output of `run`.

use super::check::Comparison;
use super::outcome::RunOutcome;
use super::ranks::SharedLayer;
use crate::console::is_screen;
use crate::mesh::words;
use crate::palette::Palette;
use crate::units;
use moesaic::{Engine, LayerSpec, Statistics, Tensor};
use serde_json::{Value, json};
use std::path::Path;

/// A finished run.
pub struct RunReport<'a> {
    pub engine: &'a Engine,
    pub spec: &'a LayerSpec,
    pub tokens: usize,
    pub outcome: &'a RunOutcome,
    pub shared: Option<&'a SharedLayer>,
    pub comparison: Option<Comparison>,
    pub routing: Option<Statistics>,
    pub path: &'a Path,
}

impl RunReport<'_> {
    /// Renders the report for people.
    pub fn text(&self, stats: bool, palette: &Palette) -> String {
        let mut text = format!(
            "{} through {} on {}{} in {}\n",
            units::count(self.tokens, "token"),
            palette.bold(&self.spec.name),
            self.engine.target(),
            self.ranks(),
            units::seconds(self.outcome.ran.as_secs_f64())
        );
        text += &format!("{}: {}\n", self.path.display(), self.tensors().join(", "));
        if stats {
            text += &self.stats();
        }
        if let Some(comparison) = &self.comparison {
            text += &compared(comparison);
        }
        text
    }

    fn ranks(&self) -> String {
        let of = |shared: &SharedLayer| {
            let ranks = units::count(shared.mesh.ranks(), "rank");
            let placed = shared.placement.as_ref().map(|_| ", experts placed");
            format!(
                ", {ranks} ({}{}),",
                words(shared.mesh),
                placed.unwrap_or_default()
            )
        };
        self.shared.map(of).unwrap_or_default()
    }

    fn tensors(&self) -> Vec<String> {
        let one = |(name, t): (&String, &Tensor<'_>)| format!("{name} {:?} {}", t.shape, t.dtype);
        self.outcome.outputs.iter().map(one).collect()
    }

    fn stats(&self) -> String {
        let stats = self.engine.stats();
        let device = self.engine.device_info();
        let mut text = format!(
            "device: {}\nkernels: {} compiled, {} from the cache, in {}\nworkspace: {}\n",
            device.name,
            stats.compiled,
            stats.from_store,
            units::seconds(self.outcome.built.as_secs_f64()),
            units::bytes(self.outcome.workspace),
        );
        if let Some(routing) = &self.routing {
            text += &routed(routing, self.spec);
        }
        text
    }

    fn counts(&self) -> Vec<i64> {
        let counts = self
            .outcome
            .outputs
            .get("counts")
            .map(|t| t.to_f64())
            .unwrap_or_default();
        counts.into_iter().map(|n| n as i64).collect()
    }

    /// Returns the number of dropped assignments, or `None` if nothing can be dropped.
    fn dropped(&self) -> Option<u64> {
        self.outcome.outputs.get("locations")?;
        Some(self.routing.as_ref()?.overflow())
    }

    /// Returns the report as JSON, for scripts.
    pub fn json(&self) -> Value {
        let stats = self.engine.stats();
        let tensors =
            self.outcome.outputs.iter().map(
                |(name, t)| json!({ "name": name, "dtype": t.dtype.name(), "shape": t.shape }),
            );
        json!({
            "layer": self.spec.name,
            "target": self.engine.target().to_string(),
            "device": self.engine.device_info().name,
            "tokens": self.tokens,
            "mesh": self.shared.map(|shared| shared.mesh),
            "placement": self.shared.and_then(|shared| shared.placement.as_ref()),
            "output": self.path.display().to_string(),
            "tensors": tensors.collect::<Vec<_>>(),
            "kernels": { "compiled": stats.compiled, "from_cache": stats.from_store },
            "build_seconds": self.outcome.built.as_secs_f64(),
            "forward_seconds": self.outcome.ran.as_secs_f64(),
            "workspace_bytes": self.outcome.workspace,
            "counts": self.counts(),
            "dropped": self.dropped(),
            "routing": self.routing.as_ref().map(routing_json),
            "reference": self.comparison.as_ref().map(|comparison| json!({
                "y_error": comparison.y_error,
                "gradient_error": comparison.gradient_error,
                "tokens_with_other_experts": comparison.other_experts,
                "seconds": comparison.time.as_secs_f64(),
            })),
        })
    }
}

/// Describes the decisions of the router, with a bar for each expert.
fn routed(found: &Statistics, spec: &LayerSpec) -> String {
    let least = found.loads.iter().min().copied().unwrap_or(0);
    let most = found.loads.iter().max().copied().unwrap_or(0);
    let mean = found.total() as f64 / found.loads.len().max(1) as f64;
    let even = (found.loads.len() as f64).ln().max(f64::MIN_POSITIVE);
    let mut text = format!(
        "experts: {least} to {most} tokens each, {} on average, {} idle\n\
         balance: entropy {:.3} of {:.3}, cv {:.3}, max/mean {:.2}; largest weight {:.0} % of a token's\n",
        units::short(mean),
        found.idle(),
        found.entropy,
        if found.loads.len() > 1 { even } else { 0.0 },
        found.variation,
        found.peak,
        100.0 * found.confidence,
    );
    if spec.may_drop() || found.overflow() > 0 {
        let slots: Vec<String> = found.dropped.iter().map(u64::to_string).collect();
        text += &format!(
            "dropped: {}, by slot {}; {} without an expert\n",
            units::count(found.overflow() as usize, "assignment"),
            slots.join(" "),
            units::count(found.lost_tokens as usize, "token"),
        );
    }
    if found.masked > 0 {
        text += &format!("masked: {}\n", units::count(found.masked as usize, "slot"));
    }
    let columns = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    let blocks = is_screen(&std::io::stdout());
    text + &found.chart(columns.unwrap_or(80), 64, blocks)
}

fn routing_json(found: &Statistics) -> Value {
    json!({
        "loads": found.loads,
        "dropped_by_slot": found.dropped,
        "masked_slots": found.masked,
        "tokens_without_expert": found.lost_tokens,
        "idle_experts": found.idle(),
        "entropy": found.entropy,
        "cv": found.variation,
        "max_over_mean": found.peak,
        "largest_weight_share": found.confidence,
    })
}

fn compared(comparison: &Comparison) -> String {
    let experts = match comparison.other_experts {
        0 => "every token has the same experts".to_string(),
        n => format!(
            "{} other experts",
            units::count(n, "token") + if n == 1 { " has" } else { " have" }
        ),
    };
    let error = |what: &str, error: Option<f64>| {
        let error = error
            .map(|error| format!("largest error of {what} {error:.1e} of its largest element; "));
        error.unwrap_or_default()
    };
    format!(
        "reference: {}{}{experts} ({})\n",
        error("y", comparison.y_error),
        error("a gradient", comparison.gradient_error),
        units::seconds(comparison.time.as_secs_f64())
    )
}
