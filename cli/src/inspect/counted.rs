//! Counts of a simulator from one run of the layer on random tokens.

use crate::failure::{Failure, Result};
use crate::random;
use crate::table::Table;
use crate::units;
use moesaic::kernel::SimArch;
use moesaic::target::{GlobalCounts, KernelCounters};
use moesaic::{Engine, EngineOptions, LayerSpec, RngKey, Store, Target, Training};
use serde_json::{Value, json};
use std::sync::Arc;

/// Titles of the columns. A title that begins with `>` marks a column of numbers. Sectors per
/// request refer to the column before.
pub const TITLES: [&str; 11] = [
    "KERNEL",
    ">BLOCKS",
    ">WARP INSTRUCTIONS",
    ">READ",
    ">SECTORS/REQUEST",
    ">WRITTEN",
    ">SECTORS/REQUEST",
    ">COPIED",
    ">SHARED REQUESTS",
    ">BANK CONFLICTS",
    ">MATRIX FLOP",
];

/// The counts of one run.
pub struct Counted {
    /// The simulator.
    pub target: Target,
    /// The number of tokens of the call.
    pub tokens: usize,
    /// The counts of each symbol, in the order of first launches.
    pub kernels: Vec<CountedKernel>,
}

/// The counts of all launches of a symbol.
pub struct CountedKernel {
    /// The name of the launch, if only one launch of the symbol has blocks, and otherwise the
    /// symbol. Kernels for few tokens and for many share a symbol, and one of the two has no
    /// blocks.
    pub name: String,
    /// The counters of the symbol.
    pub counters: KernelCounters,
}

impl Counted {
    /// Runs `tokens` random tokens on `simulator`, and also runs backward if the layer trains.
    pub fn run(
        spec: &LayerSpec,
        training: Option<Training>,
        simulator: Target,
        tokens: usize,
        store: Arc<Store>,
    ) -> Result<Counted> {
        let options = EngineOptions {
            store: Some(store),
            ..EngineOptions::default()
        };
        let engine = Engine::open(&simulator.to_string(), options)?;
        engine.check_tokens(spec, tokens)?;
        let weights = random::weights(spec)?;
        let input = random::input(spec, tokens);
        match training {
            None => {
                let layer = engine.layer(spec, &weights)?;
                layer.forward(input.reading(&[]))?;
            }
            Some(training) => {
                let layer = engine.training_layer(spec, &weights, training)?;
                let (_, saved) = layer.forward_train(input.reading(&[]), RngKey::default())?;
                let dy = random::output_gradient(spec, tokens);
                layer.backward(&saved, &dy, false)?;
            }
        }
        let kernels = engine.device().take_counters().into_iter();
        let kernels = kernels.map(|counters| CountedKernel {
            name: counters.symbol.clone(),
            counters,
        });
        Ok(Counted {
            target: simulator,
            tokens,
            kernels: kernels.collect(),
        })
    }

    /// Returns the heading of the table.
    pub fn title(&self) -> String {
        format!("counted on {} at {} tokens", self.target, self.tokens)
    }

    /// Returns a table with one row per kernel.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&TITLES);
        self.rows().into_iter().for_each(|row| table.row(row));
        table
    }

    /// Returns the cells under [`TITLES`], with `-` for counts that this simulator cannot know.
    pub fn rows(&self) -> Vec<[String; TITLES.len()]> {
        let seen = if self.sees_warps() {
            seen_by_warps
        } else {
            seen_by_threads
        };
        let rows = self.kernels.iter();
        rows.map(|kernel| seen(&kernel.name, &kernel.counters))
            .collect()
    }

    /// Returns whether the simulator runs whole warps. AMD's runs threads as host code: it sees the
    /// bytes of a request, but not the lanes that share it.
    fn sees_warps(&self) -> bool {
        !matches!(self.target, Target::Sim(SimArch::Rocm(_)))
    }

    /// Returns the counts as JSON, for scripts.
    pub fn json(&self) -> Value {
        json!({
            "target": self.target.to_string(),
            "tokens": self.tokens,
            "kernels": self.kernels.iter().map(|k| self.kernel_json(k)).collect::<Vec<_>>(),
        })
    }

    /// Returns the counters as JSON, with null for counts that this simulator cannot know.
    fn kernel_json(&self, kernel: &CountedKernel) -> Value {
        let mut json = json!(kernel.counters);
        json["kernel"] = json!(kernel.name);
        let unknown = UNKNOWN_TO_THREADS.iter().filter(|_| !self.sees_warps());
        for place in unknown {
            if let Some(value) = json.pointer_mut(place) {
                *value = Value::Null;
            }
        }
        json
    }
}

/// JSON pointers of the counters that a simulator of single threads leaves at 0.
const UNKNOWN_TO_THREADS: [&str; 15] = [
    "/instructions/integer",
    "/instructions/float",
    "/instructions/convert",
    "/instructions/moves",
    "/instructions/memory",
    "/instructions/control",
    "/instructions/asynchronous",
    "/global_loads/requests",
    "/global_loads/sectors",
    "/global_stores/requests",
    "/global_stores/sectors",
    "/global_widths",
    "/shared",
    "/async_load_bytes",
    "/async_store_bytes",
];

fn seen_by_warps(name: &str, kernel: &KernelCounters) -> [String; TITLES.len()] {
    let (loads, stores) = (&kernel.global_loads, &kernel.global_stores);
    [
        name.to_string(),
        kernel.blocks.to_string(),
        kernel.warp_instructions().to_string(),
        units::bytes(loads.bytes),
        sectors(loads),
        units::bytes(stores.bytes),
        sectors(stores),
        units::bytes(kernel.async_load_bytes + kernel.async_store_bytes),
        kernel.shared.requests.to_string(),
        kernel.shared.bank_conflicts().to_string(),
        (2 * kernel.tensor_multiply_adds).to_string(),
    ]
}

fn seen_by_threads(name: &str, kernel: &KernelCounters) -> [String; TITLES.len()] {
    let unknown = || "-".to_string();
    [
        name.to_string(),
        kernel.blocks.to_string(),
        unknown(),
        units::bytes(kernel.global_loads.bytes),
        unknown(),
        units::bytes(kernel.global_stores.bytes),
        unknown(),
        unknown(),
        unknown(),
        unknown(),
        (2 * kernel.tensor_multiply_adds).to_string(),
    ]
}

/// Returns the sectors per request, or `-` if there was no request.
fn sectors(counts: &GlobalCounts) -> String {
    match counts.requests {
        0 => "-".to_string(),
        _ => format!("{:.1}", counts.sectors_per_request()),
    }
}

/// Returns the simulator of a target, if it counts.
pub fn simulator(target: Target) -> Result<Target> {
    let simulator = match target {
        Target::Sim(_) => Some(target),
        other => other.simulated(),
    };
    let counting = simulator.filter(|simulator| counts(*simulator));
    counting.ok_or_else(|| no_simulator(target))
}

/// Returns whether a simulator counts. Those of GPUs do; the CPU emulator only runs instructions.
fn counts(simulator: Target) -> bool {
    simulator.hardware().backend() != "cpu"
}

fn no_simulator(target: Target) -> Failure {
    let known: Vec<String> = Target::all()
        .into_iter()
        .filter_map(Target::simulated)
        .filter(|simulator| counts(*simulator))
        .map(|target| target.to_string())
        .collect();
    Failure::input(format!(
        "`{target}` has no simulator that counts\nsimulators: {}",
        known.join(" ")
    ))
    .hint("--simulate is for cuda:*, rocm:* and sim:* targets")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(target: &str) -> Counted {
        let mut kernel = KernelCounters {
            symbol: "combine".to_string(),
            launches: 1,
            blocks: 3,
            tensor_multiply_adds: 5,
            ..KernelCounters::default()
        };
        kernel.global_loads.bytes = 64;
        kernel.instructions.sync = 2;
        Counted {
            target: target.parse().unwrap(),
            tokens: 1,
            kernels: vec![CountedKernel {
                name: "combine".to_string(),
                counters: kernel,
            }],
        }
    }

    #[test]
    fn what_a_simulator_cannot_know_is_no_zero() {
        let row = &counted("sim:gfx942").rows()[0];
        let row: Vec<&str> = row.iter().map(String::as_str).collect();
        let bytes = "64 B";
        assert_eq!(
            row,
            [
                "combine", "3", "-", bytes, "-", "0 B", "-", "-", "-", "-", "10"
            ]
        );
        let json = counted("sim:gfx942").json();
        let kernel = &json["kernels"][0];
        assert!(kernel["shared"].is_null(), "{json}");
        assert_eq!(kernel["instructions"]["sync"], 2);
        assert_eq!(kernel["global_loads"]["bytes"], 64);
    }

    #[test]
    fn every_place_that_is_unknown_exists() {
        let json = serde_json::json!(KernelCounters::default());
        for place in UNKNOWN_TO_THREADS {
            assert!(json.pointer(place).is_some(), "{place}");
        }
    }

    #[test]
    fn warps_are_counted_whole() {
        let row = &counted("sim:sm_80").rows()[0];
        assert_eq!(row[2], "2");
        assert_eq!(row[9], "0");
        assert_eq!(
            counted("sim:sm_80").json()["kernels"][0]["shared"]["requests"],
            0
        );
    }
}
