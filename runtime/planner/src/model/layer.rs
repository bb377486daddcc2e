//! Layers with experts: the simulated passes of one micro-batch.

use super::scenario::ModelScenario;
use crate::memory::MemoryUse;
use crate::{PassEstimate, Prediction, RoutedRows, Scenario, Simulator, Space, search};
use moesaic_plan::{CommDtype, Parallel, ShadowModel, SharedExperts, Strategy};
use moesaic_spec::ExpertForm;

/// The properties that decide what a layer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LayerKey {
    pub ep: usize,
    pub expert_tp: usize,
    /// The tokens of a rank.
    pub tokens: usize,
}

/// The simulated passes of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerCosts {
    pub strategy: Strategy,
    pub forward: PassCosts,
    pub backward: PassCosts,
    pub memory: MemoryUse,
}

/// The seconds of one pass.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassCosts {
    /// All of it.
    pub seconds: f64,
    /// Its kernels.
    pub compute: f64,
    /// Its exchanges.
    pub exchange: f64,
}

/// The costs of a layer by the fastest strategy, and by the fastest without chunks, whose
/// exchanges another micro-batch can hide.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerChoices {
    pub fastest: LayerCosts,
    pub whole: LayerCosts,
}

/// The strategies to choose from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strategies<'a> {
    pub only: Option<Strategy>,
    pub comm_dtypes: &'a [CommDtype],
}

/// Returns the costs of a layer; `None` where it cannot be shared like that, or does not fit.
pub(super) fn choices(
    model: &ModelScenario,
    key: LayerKey,
    strategies: Strategies,
) -> Option<LayerChoices> {
    let mesh = Parallel {
        ep: key.ep,
        expert_tp: key.expert_tp,
        // Copies of the experts change neither rows nor exchanges, and their sums are counted once a
        // step, so meshes that differ in them share a simulation.
        dp: 1,
        shared: SharedExperts::Whole,
    };
    mesh.check(&model.layer).ok()?;
    let scenario = Scenario {
        spec: model.layer.clone(),
        machine: model.weights_machine(),
        world: mesh.ranks(),
        training: model.training,
        routing: routing(model, key.tokens)?,
        placement: None,
        shadow_model: ShadowModel::of(&model.layer),
    };
    let space = Space {
        mesh: Some(mesh),
        strategy: strategies.only,
        overlap_degrees: vec![1, 2, 4],
        comm_dtypes: strategies.comm_dtypes.to_vec(),
        shadows: vec![0],
    };
    let ranked = search(&scenario, &space).ok()?;
    let simulator = Simulator::new(&scenario);
    let costs = |found: &Prediction| {
        let found = simulator.predict(found.mesh, found.strategy).ok()?;
        Some(LayerCosts::of(&found).with_casts(casts(model, key)))
    };
    let fastest = ranked.best.first()?;
    let is_whole = |found: &&Prediction| {
        let chunks = found.strategy.overlap_degree;
        chunks.forward == 1 && chunks.backward == 1
    };
    // Chunks of one micro-batch and a second micro-batch would hide the same exchanges twice.
    let whole = ranked.best.iter().find(is_whole).unwrap_or(fastest);
    Some(LayerChoices {
        fastest: costs(fastest)?,
        whole: costs(whole)?,
    })
}

/// Returns the seconds in which a rank casts the operands of experts' GEMMs to FP8, forward and
/// backward, if experts have equally many rows.
fn casts(model: &ModelScenario, key: LayerKey) -> [f64; 2] {
    let spec = &model.layer;
    let rows = (key.tokens * spec.shape.top_k) as f64;
    // Each shard of an expert has all of its rows, and a part of its width.
    let input = (spec.expert_input_dim() * key.expert_tp) as f64;
    let output = (spec.expert_output_dim() * key.expert_tp) as f64;
    let hidden = spec.shape.hidden_dim as f64;
    // Backward multiplies the gradients of gate and up, each as wide as the hidden layer.
    let gated = if spec.experts.form == ExpertForm::Plain {
        1.0
    } else {
        2.0
    };
    [input + hidden, output + gated * hidden].map(|values| model.cast(rows * values))
}

fn routing(model: &ModelScenario, tokens: usize) -> Option<RoutedRows> {
    let (experts, top_k) = (model.layer.shape.experts, model.layer.shape.top_k);
    match model.skew {
        0.0 => Some(RoutedRows::even(tokens as u64, experts, top_k)),
        skew => RoutedRows::zipf_of(&model.layer, tokens as u64, skew).ok(),
    }
}

impl LayerCosts {
    fn of(found: &Prediction) -> LayerCosts {
        let pass = |name| {
            let pass = found.passes.iter().find(|pass| pass.name == name);
            pass.map_or_else(PassCosts::default, PassCosts::of)
        };
        LayerCosts {
            strategy: found.strategy,
            forward: pass("forward"),
            backward: pass("backward"),
            memory: found.memory,
        }
    }
}

impl LayerCosts {
    fn with_casts(mut self, [forward, backward]: [f64; 2]) -> LayerCosts {
        for (pass, casts) in [(&mut self.forward, forward), (&mut self.backward, backward)] {
            pass.seconds += casts;
            pass.compute += casts;
        }
        self
    }
}

impl PassCosts {
    fn of(pass: &PassEstimate) -> PassCosts {
        let sum = |exchanges: bool| {
            let phases = pass.phases.iter();
            let own = phases.filter(|phase| (phase.whose == "ranks") == exchanges);
            own.map(|phase| phase.seconds).sum::<f64>()
        };
        // Chunks wait for each other, so phases may take longer than the pass.
        PassCosts {
            seconds: pass.seconds,
            compute: sum(false).min(pass.seconds),
            exchange: sum(true),
        }
    }

    /// Returns the seconds of the pass that no kernel fills.
    pub fn exposed(&self) -> f64 {
        self.seconds - self.compute
    }
}
