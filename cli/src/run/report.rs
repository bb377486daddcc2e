//! What `run` says.

use super::check::Comparison;
use crate::console::Palette;
use crate::units;
use moesaic::weights::HostWeights;
use moesaic::{Engine, Layer};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// A finished run.
pub struct Report<'a> {
    pub engine: &'a Engine,
    pub layer: &'a Layer,
    pub tokens: usize,
    pub outputs: &'a HostWeights,
    pub built: Duration,
    pub ran: Duration,
    pub comparison: Option<Comparison>,
    pub path: &'a Path,
}

impl Report<'_> {
    /// For people.
    pub fn text(&self, stats: bool, palette: &Palette) -> String {
        let mut text = format!(
            "{} through {} on {} in {}\n",
            units::count(self.tokens, "token"),
            palette.bold(&self.layer.spec().name),
            self.engine.target(),
            units::seconds(self.ran.as_secs_f64())
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

    fn tensors(&self) -> Vec<String> {
        let one = |(name, t): (&String, &moesaic::weights::HostTensor)| {
            format!("{name} {:?} {}", t.shape, t.dtype)
        };
        self.outputs.iter().map(one).collect()
    }

    fn stats(&self) -> String {
        let stats = self.engine.stats();
        let device = self.engine.device_info();
        let mut text = format!(
            "device: {}\nkernels: {} compiled, {} from the cache, in {}\nworkspace: {}\n",
            device.name,
            stats.compiled,
            stats.from_store,
            units::seconds(self.built.as_secs_f64()),
            units::bytes(self.layer.workspace_bytes()),
        );
        let counts = self.counts();
        if let (Some(least), Some(most)) = (counts.iter().min(), counts.iter().max()) {
            let idle = counts.iter().filter(|&&n| n == 0).count();
            let mean = counts.iter().sum::<i64>() as f64 / counts.len() as f64;
            text += &format!(
                "experts: {least} to {most} tokens each, {} on average, {idle} idle\n",
                units::short(mean)
            );
        }
        match self.dropped() {
            Some(dropped) => text + &format!("dropped: {}\n", units::count(dropped, "assignment")),
            None => text,
        }
    }

    fn counts(&self) -> Vec<i64> {
        let counts = self
            .outputs
            .get("counts")
            .map(|t| t.to_f64())
            .unwrap_or_default();
        counts.into_iter().map(|n| n as i64).collect()
    }

    /// Assignments without a place; absent where nothing can be dropped.
    fn dropped(&self) -> Option<usize> {
        let places = self.outputs.get("locations")?.to_f64();
        let ids = self.outputs.get("topk_ids")?.to_f64();
        let experts = self.layer.spec().shape.experts as f64;
        let real = |id: &f64| (0.0..experts).contains(id);
        Some(
            places
                .iter()
                .zip(&ids)
                .filter(|(place, id)| **place < 0.0 && real(id))
                .count(),
        )
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        let stats = self.engine.stats();
        let tensors = self
            .outputs
            .iter()
            .map(|(name, t)| json!({ "name": name, "dtype": t.dtype.name(), "shape": t.shape }));
        json!({
            "layer": self.layer.spec().name,
            "target": self.engine.target().to_string(),
            "device": self.engine.device_info().name,
            "tokens": self.tokens,
            "output": self.path.display().to_string(),
            "tensors": tensors.collect::<Vec<_>>(),
            "kernels": { "compiled": stats.compiled, "from_cache": stats.from_store },
            "build_seconds": self.built.as_secs_f64(),
            "forward_seconds": self.ran.as_secs_f64(),
            "workspace_bytes": self.layer.workspace_bytes(),
            "counts": self.counts(),
            "dropped": self.dropped(),
            "reference": self.comparison.as_ref().map(|comparison| json!({
                "y_error": comparison.y_error,
                "tokens_with_other_experts": comparison.other_experts,
                "seconds": comparison.time.as_secs_f64(),
            })),
        })
    }
}

fn compared(comparison: &Comparison) -> String {
    let experts = match comparison.other_experts {
        0 => "every token has the same experts".to_string(),
        n => format!(
            "{} other experts",
            units::count(n, "token") + if n == 1 { " has" } else { " have" }
        ),
    };
    format!(
        "reference: largest error of y {:.1e} of its largest element; {experts} ({})\n",
        comparison.y_error,
        units::seconds(comparison.time.as_secs_f64())
    )
}
