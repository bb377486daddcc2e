//! The time and memory of a step of one configuration.

use super::around::Around;
use super::check::check_mesh;
use super::collective::{Peers, gather, message};
use super::layer::{LayerChoices, LayerCosts, LayerKey, PassCosts, Strategies, choices};
use super::memory::{LayerMemory, RankParameters};
use super::scenario::{
    ModelMesh, ModelPrediction, ModelScenario, RecomputeLevel, StageMemory, StepOrder, StepPhase,
};
use super::stages::{LayerSeconds, StageLayers, split};
use moesaic_plan::Strategy;

/// Predicts one configuration; `None` where it cannot be, or where a layer alone does not fit.
/// `strategy` is that of layers with experts, or `None` for the fastest.
pub fn predict_model(
    model: &ModelScenario,
    mesh: ModelMesh,
    schedule: StepOrder,
    strategy: Option<Strategy>,
) -> Option<ModelPrediction> {
    let key = layer_key(model, mesh, schedule.micro_batch)?;
    let comm_dtypes = strategy.map(|strategy| strategy.comm_dtype.forward);
    let strategies = Strategies {
        only: strategy,
        comm_dtypes: &[comm_dtypes.unwrap_or(moesaic_plan::CommDtype::Unchanged)],
    };
    let costs = choices(model, key, strategies)?;
    evaluate(model, mesh, schedule, &costs)
}

/// Returns the layer that a mesh runs, where ranks and tokens can be divided like that.
pub(super) fn layer_key(
    model: &ModelScenario,
    mesh: ModelMesh,
    micro_batch: usize,
) -> Option<LayerKey> {
    check_mesh(model, mesh, micro_batch).ok()?;
    Some(LayerKey {
        ep: mesh.ep,
        expert_tp: mesh.expert_tp,
        tokens: micro_batch * model.batch.sequence / mesh.tp,
    })
}

/// Returns the micro-batches of a step, if they are whole.
pub(super) fn micro_batches(
    model: &ModelScenario,
    mesh: ModelMesh,
    micro_batch: usize,
) -> Option<usize> {
    let each = mesh.dp(model.world) * micro_batch;
    let whole = each > 0 && model.batch.sequences.is_multiple_of(each);
    (whole && model.batch.sequences > 0).then(|| model.batch.sequences / each)
}

/// Predicts a configuration from the costs of its layers.
pub(super) fn evaluate(
    model: &ModelScenario,
    mesh: ModelMesh,
    schedule: StepOrder,
    choices: &LayerChoices,
) -> Option<ModelPrediction> {
    let micro_batches = micro_batches(model, mesh, schedule.micro_batch)?;
    let costs = if schedule.overlap_batches {
        &choices.whole
    } else {
        &choices.fastest
    };
    let tokens = (schedule.micro_batch * model.batch.sequence / mesh.tp) as f64;
    let work = Work {
        model,
        mesh,
        schedule,
        costs,
        around: Around::of(model, mesh, tokens),
        tokens,
    };
    let stages = work.stages();
    let turns: Vec<MicroBatch> = stages
        .iter()
        .map(|stage| work.micro_batch(*stage))
        .collect();
    let slowest =
        (0..turns.len()).max_by(|a, b| turns[*a].total().total_cmp(&turns[*b].total()))?;
    // Every stage has sums and an optimizer of its own, and the step ends with the longest of them.
    let once = stages.iter().map(|stage| work.once(*stage));
    let once = once.fold(Once::default(), Once::longest);
    let mut phases = turns[slowest].phases(micro_batches as f64);
    phases.extend(work.pipeline(&turns, slowest, micro_batches));
    phases.extend(once.phases(model, &turns[slowest]));
    phases.retain(|phase| phase.seconds > 0.0 || phase.exposed > 0.0);
    let seconds: f64 = phases.iter().map(|phase| phase.exposed).sum();
    let tokens = (model.batch.sequence * model.batch.sequences) as f64;
    let tokens_per_second = tokens / seconds / model.world as f64;
    let flops = tokens_per_second * model.flops_per_token();
    let peak = model.peak();
    Some(ModelPrediction {
        mesh,
        schedule,
        strategy: costs.strategy,
        seconds,
        tokens_per_second,
        flops,
        mfu: peak.map(|peak| flops / peak),
        micro_batches,
        memory: work.memory(&stages, micro_batches),
        phases,
        stages: turns.iter().map(MicroBatch::passes).collect(),
        once: [once.sums, once.gather, once.optimizer],
    })
}

/// A configuration with the costs of its parts.
struct Work<'a> {
    model: &'a ModelScenario,
    mesh: ModelMesh,
    schedule: StepOrder,
    costs: &'a LayerCosts,
    around: Around,
    /// The tokens of a rank in a micro-batch.
    tokens: f64,
}

/// The seconds of one micro-batch on a stage, forward and backward.
#[derive(Clone, Copy, Debug, Default)]
struct MicroBatch {
    kernels: [f64; 2],
    exchange: [f64; 2],
    exposed: [f64; 2],
    attention: [f64; 2],
    dense: [f64; 2],
    head: [f64; 2],
    tp: [f64; 2],
    again: f64,
    /// What no part explains.
    beyond: [f64; 2],
    overlap_batches: bool,
}

/// The seconds of what happens once a step.
#[derive(Clone, Copy, Debug, Default)]
struct Once {
    sums: f64,
    gather: f64,
    optimizer: f64,
}

impl Work<'_> {
    fn stages(&self) -> Vec<StageLayers> {
        let (shape, around) = (&self.model.shape, &self.around);
        let both = |part: super::around::PartTime| match self.model.training {
            Some(_) => part.forward + part.backward,
            None => part.forward,
        };
        let layer = both(around.attention) + both(around.attention_tp);
        let seconds = LayerSeconds {
            dense: layer + both(around.dense) + both(around.dense_tp),
            moe: layer + self.costs.forward.seconds + self.costs.backward.seconds,
            head: both(around.head),
        };
        split(shape.dense_layers, shape.moe_layers, self.mesh.pp, seconds)
    }

    fn micro_batch(&self, stage: StageLayers) -> MicroBatch {
        let (moe, dense) = (stage.moe as f64, stage.dense as f64);
        let layers = moe + dense;
        let around = &self.around;
        let trained = f64::from(u8::from(self.model.training.is_some()));
        let times = |part: super::around::PartTime, by: f64| {
            [part.forward * by, part.backward * by * trained]
        };
        let of = |value: fn(&PassCosts) -> f64| {
            [
                value(&self.costs.forward) * moe,
                value(&self.costs.backward) * moe,
            ]
        };
        let tp = times(around.attention_tp, layers);
        let dense_tp = times(around.dense_tp, dense);
        let mut turn = MicroBatch {
            kernels: of(|pass| pass.compute),
            exchange: of(|pass| pass.exchange),
            exposed: of(PassCosts::exposed),
            attention: times(around.attention, layers),
            dense: times(around.dense, dense),
            head: times(around.head, f64::from(u8::from(stage.last))),
            tp: [tp[0] + dense_tp[0], tp[1] + dense_tp[1]],
            again: 0.0,
            beyond: [0.0; 2],
            overlap_batches: self.schedule.overlap_batches,
        };
        // Before `hide`, because a repeated forward pass has its exchanges in the open: the other
        // micro-batch already hides those of the backward pass.
        turn.again = trained
            * match self.schedule.recompute {
                RecomputeLevel::None => 0.0,
                RecomputeLevel::Projections => layers * around.projections.forward,
                RecomputeLevel::Attention => turn.attention[0] + tp[0],
                RecomputeLevel::Layer => turn.passes()[0] - turn.head[0],
            };
        if self.schedule.overlap_batches {
            turn.hide(self.model.machine.overlap.compute_slowdown);
        }
        // A factor on the whole, because one published number cannot say which part is too fast.
        let factor = self.model.machine.model.as_ref();
        let more = factor.map_or(0.0, |factor| factor.by - 1.0);
        turn.beyond = turn.passes().map(|seconds| seconds * more);
        turn
    }

    /// Returns the sums of gradients and the optimizer of a stage.
    fn once(&self, stage: StageLayers) -> Once {
        let (model, mesh) = (self.model, self.mesh);
        if model.training.is_none() {
            return Once::default();
        }
        let own = RankParameters::of(model, mesh, stage);
        let around = Peers {
            ranks: mesh.dp(model.world),
            stride: mesh.tp,
        };
        let experts = Peers {
            ranks: mesh.expert_dp(model.world),
            stride: mesh.ep * mesh.expert_tp,
        };
        let both = |bytes: f64| {
            gather(&model.machine, around, own.around * bytes)
                + gather(&model.machine, experts, own.experts * bytes)
        };
        let weight = model.layer.precision.weights.size() as f64;
        // The optimizer reads and writes its state, reads gradients and writes weights.
        let each = 2.0 * model.state.optimizer + model.state.gradient + weight;
        Once {
            sums: both(model.state.gradient),
            gather: both(weight),
            optimizer: own.owned(model, mesh) * each / model.machine.memory_rate(),
        }
    }

    /// Returns the time in which the slowest stage waits for others, and that of messages between
    /// stages.
    fn pipeline(
        &self,
        turns: &[MicroBatch],
        slowest: usize,
        micro_batches: usize,
    ) -> [StepPhase; 2] {
        let parts = self.schedule.virtual_stages as f64;
        // The first micro-batch passes all other stages before the slowest is busy, and the last one
        // after it; with parts in turns each of these passes is a part of a stage.
        let others = turns.iter().enumerate().filter(|(at, _)| *at != slowest);
        let bubble = others.map(|(_, turn)| turn.total()).sum::<f64>() / parts;
        let element = self.model.layer.precision.activations.size() as f64;
        let bytes = self.tokens * self.model.shape.width as f64 * element;
        let distance = self.mesh.stage_ranks(self.model.world);
        let hops = (self.mesh.pp - 1) as f64;
        let each = match hops {
            0.0 => 0.0,
            _ => message(&self.model.machine, distance, bytes),
        };
        let ways = if self.model.training.is_some() {
            2.0
        } else {
            1.0
        };
        let sent = micro_batches as f64 * ways * each * parts * hops.min(1.0);
        // Plain 1F1B waits for each message; interleaved stages have another part to run.
        let exposed = match self.schedule.virtual_stages {
            1 => ways * each * (hops + micro_batches as f64 * hops.min(1.0)),
            _ => ways * each * hops,
        };
        [
            StepPhase::whole("waiting for other stages", bubble),
            StepPhase {
                name: "messages between stages",
                seconds: sent.max(exposed),
                exposed,
                behind: (sent > exposed).then_some("other parts of the stage"),
            },
        ]
    }

    fn memory(&self, stages: &[StageLayers], micro_batches: usize) -> StageMemory {
        let (model, mesh, schedule) = (self.model, self.mesh, self.schedule);
        let layer = LayerMemory::of(model, schedule.recompute, self.costs, self.tokens);
        let each = stages.iter().enumerate().map(|(at, stage)| {
            let kept = RankParameters::of(model, mesh, *stage).memory(model, mesh);
            let [activations, buffers] =
                layer.of_stage((*stage, at), mesh, schedule, micro_batches);
            StageMemory {
                stage: at,
                activations,
                buffers,
                ..kept
            }
        });
        let most = each.max_by(|a, b| a.bytes().total_cmp(&b.bytes()));
        most.unwrap_or_default()
    }
}

impl MicroBatch {
    /// Returns the seconds of forward and of backward.
    fn passes(&self) -> [f64; 2] {
        let sum = |at: usize| {
            self.kernels[at]
                + self.exposed[at]
                + self.attention[at]
                + self.dense[at]
                + self.head[at]
                + self.tp[at]
                + self.beyond[at]
        };
        [sum(0), sum(1) + self.again]
    }

    fn total(&self) -> f64 {
        self.passes().iter().sum()
    }

    /// Hides exchanges behind the kernels of another micro-batch, which are slower meanwhile.
    fn hide(&mut self, slowdown: f64) {
        for at in 0..2 {
            let compute = self.kernels[at] + self.attention[at] + self.dense[at];
            let moved = self.exchange[at];
            // Kernels lose multiprocessors and bandwidth to the exchange while both run.
            let slowed = slowdown * compute.min(moved);
            self.exposed[at] = (moved - compute).max(0.0) + slowed;
        }
    }

    fn phases(&self, times: f64) -> Vec<StepPhase> {
        let sum = |pair: [f64; 2]| times * (pair[0] + pair[1]);
        let (exchange, exposed) = (sum(self.exchange), sum(self.exposed));
        let behind = if self.overlap_batches {
            "kernels of another micro-batch"
        } else {
            "experts' GEMMs of other chunks"
        };
        vec![
            StepPhase::whole("experts' layers: kernels", sum(self.kernels)),
            StepPhase {
                name: "experts' layers: exchanges",
                seconds: exchange.max(exposed),
                exposed,
                behind: (exchange > exposed * 1.001).then_some(behind),
            },
            StepPhase::whole("attention", sum(self.attention)),
            StepPhase::whole("layers without experts", sum(self.dense)),
            StepPhase::whole("output head and loss", sum(self.head)),
            StepPhase::whole("tensor-parallel collectives", sum(self.tp)),
            StepPhase::whole("computed again", times * self.again),
            StepPhase::whole("what no part explains", sum(self.beyond)),
        ]
    }
}

impl Once {
    fn longest(self, other: Once) -> Once {
        Once {
            sums: self.sums.max(other.sums),
            gather: self.gather.max(other.gather),
            optimizer: self.optimizer.max(other.optimizer),
        }
    }

    /// Returns the phases: sums hide behind the last backward pass, gathers behind the first
    /// forward pass, which are slower meanwhile.
    fn phases(&self, model: &ModelScenario, turn: &MicroBatch) -> [StepPhase; 3] {
        let [forward, backward] = turn.passes();
        let slowdown = model.machine.overlap.compute_slowdown;
        let hidden = |name, seconds: f64, pass: f64, behind| StepPhase {
            name,
            seconds,
            exposed: (seconds - pass).max(0.0) + slowdown * seconds.min(pass),
            behind: (seconds > 0.0).then_some(behind),
        };
        [
            hidden(
                "sums of gradients",
                self.sums,
                backward,
                "the last backward pass",
            ),
            hidden(
                "gathering weights",
                self.gather,
                forward,
                "the first forward pass",
            ),
            StepPhase::whole("optimizer", self.optimizer),
        ]
    }
}

impl StepPhase {
    fn whole(name: &'static str, seconds: f64) -> StepPhase {
        StepPhase {
            name,
            seconds,
            exposed: seconds,
            behind: None,
        }
    }
}
