//! What a simulator counts while it runs the layer once on random tokens.

use super::text::indent;
use crate::failure::{Failure, Result};
use crate::random;
use crate::table::Table;
use crate::units;
use moesaic::target::KernelCounters;
use moesaic::{Engine, EngineOptions, LayerSpec, Store, Target, engine_weights};
use serde_json::{Value, json};
use std::sync::Arc;

/// One run.
pub struct Counted {
    /// The simulator.
    pub target: Target,
    /// Tokens of the call.
    pub tokens: usize,
    /// One per symbol, in the order of first launches.
    pub kernels: Vec<KernelCounters>,
}

impl Counted {
    /// Runs `tokens` random tokens on the simulator of `target`.
    pub fn run(
        spec: &LayerSpec,
        target: Target,
        tokens: usize,
        store: Arc<Store>,
    ) -> Result<Counted> {
        let simulator = match target {
            Target::Sim(_) => target,
            other => other.simulated().ok_or_else(|| no_simulator(other))?,
        };
        let options = EngineOptions {
            store: Some(store),
            ..EngineOptions::default()
        };
        let engine = Engine::open(&simulator.to_string(), options)?;
        let weights = random::weights(spec);
        let layer = engine.layer(spec, &engine_weights(&weights))?;
        layer.forward_with(&random::input(spec, tokens), &[])?;
        Ok(Counted {
            target: simulator,
            tokens,
            kernels: engine.device().take_counters(),
        })
    }

    /// The heading of the table.
    pub fn title(&self) -> String {
        format!("counted on {} at {} tokens", self.target, self.tokens)
    }

    /// One row per kernel.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "KERNEL",
            ">BLOCKS",
            ">WARP INSTRUCTIONS",
            ">READ",
            ">SECTORS/REQUEST",
            ">WRITTEN",
            ">COPIED",
            ">SHARED REQUESTS",
            ">BANK CONFLICTS",
            ">MATRIX FLOP",
        ]);
        for k in &self.kernels {
            table.row([
                k.symbol.clone(),
                k.blocks.to_string(),
                k.warp_instructions().to_string(),
                units::bytes(k.global_loads.bytes),
                format!("{:.1}", k.global_loads.sectors_per_request()),
                units::bytes(k.global_stores.bytes),
                units::bytes(k.async_load_bytes + k.async_store_bytes),
                k.shared.requests.to_string(),
                k.shared.bank_conflicts().to_string(),
                (2 * k.tensor_multiply_adds).to_string(),
            ]);
        }
        table
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        json!({
            "target": self.target.to_string(),
            "tokens": self.tokens,
            "kernels": self.kernels,
        })
    }
}

fn no_simulator(target: Target) -> Failure {
    let known: Vec<String> = Target::all()
        .into_iter()
        .filter_map(Target::simulated)
        .map(|target| target.to_string())
        .collect();
    Failure::input(format!(
        "`{target}` has no simulator\nsimulators: {}",
        indent(&known).trim()
    ))
    .hint("--simulate is for cuda:*, rocm:* and sim:* targets")
}
