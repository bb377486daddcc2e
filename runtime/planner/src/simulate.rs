//! The simulator: the steps of ranks, one after another, on the model of a machine.

use crate::chunks::{Choices, ChunkShare};
use crate::collective_ops::CommConfig;
use crate::cost::Costs;
use crate::error::PlannerError;
use crate::geometry::{self, Rank};
use crate::memory::memory;
use crate::reach;
use crate::routing::RoutedRows;
use crate::run::Run;
use crate::scenario::{Prediction, Scenario, Simulated};
use crate::traffic;
use moesaic_plan::{
    AllToAll, Both, CommDtype, OverlapBy, Parallel, Placement, PlanError, PlanForm, PlanOptions,
    RankPlan, ShadowModel, Sharing, Strategy, most_rows, plan_rank,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The properties that decide which ranks have equal work: mesh, all-to-all algorithm, shards per
/// row, and shadows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RankWork {
    mesh: Parallel,
    all_to_all: AllToAll,
    adaptive_r: usize,
    shadows: usize,
}

/// The properties that decide which steps a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    mesh: Parallel,
    form: PlanForm,
}

/// A plan with the costs of its launches.
#[derive(Debug)]
struct Planned {
    plan: RankPlan,
    costs: Costs,
}

/// A simulator of configurations of one layer on one machine. It shares intermediate results
/// between configurations.
#[derive(Debug)]
pub struct Simulator<'q> {
    scenario: &'q Scenario,
    /// The rows that experts accept.
    routing: RoutedRows,
    plans: RefCell<HashMap<PlanKey, Rc<Planned>>>,
    ranks: RefCell<HashMap<RankWork, Rc<Vec<Rank>>>>,
}

impl<'q> Simulator<'q> {
    /// Returns a simulator for a scenario.
    pub fn new(scenario: &'q Scenario) -> Simulator<'q> {
        Simulator {
            routing: cost_of(scenario),
            scenario,
            plans: RefCell::default(),
            ranks: RefCell::default(),
        }
    }

    /// Returns the scenario.
    pub fn scenario(&self) -> &'q Scenario {
        self.scenario
    }

    /// Returns whether a mesh has the nodes that two-dimensional all-to-all algorithms need.
    pub fn has_nodes(&self, mesh: Parallel) -> bool {
        geometry::has_nodes(&self.scenario.machine, mesh, &self.routing)
    }

    /// Predicts a configuration, with the phases of each pass.
    ///
    /// # Errors
    /// [`PlannerError`] for impossible meshes and strategies.
    pub fn predict(&self, mesh: Parallel, strategy: Strategy) -> Result<Prediction, PlannerError> {
        Ok(self.run(mesh, strategy, true)?.0)
    }

    /// Predicts a configuration and returns the timeline of each distinct rank.
    ///
    /// # Errors
    /// As [`Simulator::predict`].
    pub fn timeline(
        &self,
        mesh: Parallel,
        strategy: Strategy,
    ) -> Result<(Prediction, Vec<Simulated>), PlannerError> {
        self.run(mesh, strategy, true)
    }

    pub(crate) fn brief(
        &self,
        mesh: Parallel,
        strategy: Strategy,
    ) -> Result<Prediction, PlannerError> {
        Ok(self.run(mesh, strategy, false)?.0)
    }

    fn run(
        &self,
        mesh: Parallel,
        strategy: Strategy,
        detail: bool,
    ) -> Result<(Prediction, Vec<Simulated>), PlannerError> {
        self.check(mesh, strategy)?;
        let scenario = self.scenario;
        let adaptive_r = strategy.adaptive_r(&mesh);
        let planned = self.plan(mesh, strategy)?;
        let plan = &planned.plan;
        // Rows stay, so the algorithm does not matter; one name for all lets them share their
        // ranks.
        let all_to_all = if adaptive_r == 0 {
            AllToAll::Linear
        } else {
            strategy.all_to_all
        };
        let ranks = self.ranks(RankWork {
            mesh,
            all_to_all,
            adaptive_r,
            shadows: strategy.shadows,
        });
        let Both { forward, backward } = strategy.overlap_degree;
        let comm = |comm_dtype, overlap_degree| {
            self.comm(&planned, (mesh, strategy), comm_dtype, overlap_degree)
        };
        let there = comm(strategy.comm_dtype.forward, forward);
        let mut run = Run::new(&ranks, detail);
        run.forward(&there, scenario.training.is_some());
        if scenario.training.is_some() {
            let back = comm(strategy.comm_dtype.backward, backward);
            run.backward(&back);
            run.gradients(&back);
        }
        // With all shards in use, a rank's plan holds exactly its own weights.
        let owned = if adaptive_r == mesh.expert_tp {
            1.0
        } else {
            there.owned_part()
        };
        // Where rows stay, a rank holds the rows of its own tokens alone.
        let held = match adaptive_r {
            0 => 1.0 / mesh.group() as f64,
            _ => there.part(),
        };
        let held = memory(plan, &ranks, owned, held);
        Ok(run.finish(mesh, strategy, held))
    }

    fn comm<'a>(
        &'a self,
        planned: &'a Planned,
        (mesh, strategy): (Parallel, Strategy),
        comm_dtype: CommDtype,
        overlap_degree: usize,
    ) -> CommConfig<'a> {
        // In training, ranks launch the GEMMs of both passes for the chunks that both have in
        // common.
        let launched = match self.scenario.training {
            Some(_) => strategy.chunks().common(),
            None => strategy.overlap_degree.forward,
        };
        CommConfig {
            machine: &self.scenario.machine,
            plan: &planned.plan,
            costs: &planned.costs,
            mesh,
            adaptive_r: strategy.adaptive_r(&mesh),
            all_to_all: strategy.all_to_all,
            comm_dtype,
            overlap_degree,
            launched,
            overlap_by: strategy.overlap_by,
            repeats: self.repeats(mesh, strategy.all_to_all, overlap_degree),
            chunk: ChunkShare::WHOLE,
        }
    }

    /// Returns the mean number of chunks in which a token that goes to a node, or to a rank,
    /// appears; 1 unless rows are deduplicated.
    fn repeats(&self, mesh: Parallel, all_to_all: AllToAll, overlap_degree: usize) -> f64 {
        if !all_to_all.row().deduplicates {
            return 1.0;
        }
        let Scenario { spec, machine, .. } = self.scenario;
        let ranks = if all_to_all.row().deduplicates_ranks() {
            mesh.expert_tp
        } else {
            machine.per_node()
        };
        let nodes = mesh.group() as f64 / ranks as f64;
        let choices = Choices {
            // One number for all ranks, because the mean depends only weakly on the number of
            // tokens.
            tokens: self.routing.most_tokens(),
            top_k: spec.shape.top_k,
            experts: spec.shape.experts as f64,
            nodes: reach::of_nodes(spec, nodes.max(1.0)),
        };
        choices.chunks_touched(overlap_degree)
    }

    /// Returns the bytes of a forward message between nodes, as a mean over ranks: the size that
    /// [`Machine::all_to_all`](crate::Machine::all_to_all) looks up.
    pub(crate) fn message(&self, mesh: Parallel, strategy: Strategy) -> Result<f64, PlannerError> {
        self.check(mesh, strategy)?;
        let adaptive_r = strategy.adaptive_r(&mesh);
        let planned = self.plan(mesh, strategy)?;
        let ranks = self.ranks(RankWork {
            mesh,
            all_to_all: strategy.all_to_all,
            adaptive_r,
            shadows: strategy.shadows,
        });
        let overlap_degree = strategy.overlap_degree.forward;
        let comm = self.comm(
            &planned,
            (mesh, strategy),
            strategy.comm_dtype.forward,
            overlap_degree,
        );
        // By peers the first chunk is a rank's own rows and has no message, so look at the last.
        let last = comm.chunk_shares().pop().unwrap_or(ChunkShare::WHOLE);
        let comm = comm.of_chunk(last);
        let sum: f64 = ranks.iter().map(|rank| comm.message(rank)).sum();
        Ok(sum / ranks.len().max(1) as f64)
    }

    /// Checks a strategy ([`Strategy::check`]) against the nodes that the machine has.
    /// Checks that the job's ranks can form a mesh, and that the layer fits it.
    pub(crate) fn check_mesh(&self, mesh: Parallel) -> Result<(), PlannerError> {
        let world = self.scenario.world;
        let wanted = mesh.ranks();
        let spec = &self.scenario.spec;
        self.scenario.machine.check_ranks(world)?;
        mesh.check(spec).map_err(PlanError::from)?;
        if let Some(placement) = &self.scenario.placement {
            let fits = placement.check(&mesh, spec.shape.experts);
            fits.map_err(PlanError::from)?;
        }
        if wanted != world {
            return Err(PlannerError::World { wanted, world });
        }
        Ok(())
    }

    fn check(&self, mesh: Parallel, strategy: Strategy) -> Result<(), PlannerError> {
        self.check_mesh(mesh)?;
        strategy.check(&mesh)?;
        if !strategy.all_to_all.row().is_direct() && strategy.overlap_by != OverlapBy::Rows {
            let all_to_all = strategy.all_to_all.to_string();
            return Err(PlannerError::OverlapBy { all_to_all });
        }
        if strategy.all_to_all.row().needs_nodes() && !self.has_nodes(mesh) {
            return Err(PlannerError::AllToAll {
                all_to_all: strategy.all_to_all.to_string(),
                group: mesh.group(),
                per_node: self.scenario.machine.per_node(),
            });
        }
        Ok(())
    }

    /// Returns the placement of experts in a mesh.
    fn placement(&self, mesh: Parallel) -> Placement {
        let in_order = || Placement::contiguous(mesh.ep, self.scenario.spec.shape.experts);
        self.scenario.placement.clone().unwrap_or_else(in_order)
    }

    /// Returns the plan of the first of the ranks with the most experts.
    fn plan(&self, mesh: Parallel, strategy: Strategy) -> Result<Rc<Planned>, PlannerError> {
        // The number of groups changes no step, so all meshes that differ in it share a plan.
        let mesh = Parallel { dp: 1, ..mesh };
        let key = PlanKey {
            mesh,
            form: strategy.plan_form(&mesh),
        };
        if let Some(plan) = self.plans.borrow().get(&key) {
            return Ok(Rc::clone(plan));
        }
        let scenario = self.scenario;
        let options = PlanOptions::training(scenario.training);
        let target = scenario.machine.target;
        let placement = self.placement(mesh);
        // `max_by_key` returns the last of equal groups, so the walk is backwards to find the
        // first.
        let most = (0..mesh.ep).rev().max_by_key(|ep| placement.count(*ep));
        let rank = most.unwrap_or(0) * mesh.expert_tp;
        let sharing = Sharing::from(mesh).by(key.form);
        let sharing = sharing.placed(scenario.placement.as_ref());
        let plan = Rc::new(Planned {
            plan: plan_rank(&scenario.spec, target, &options, sharing, rank)?,
            costs: Costs::default(),
        });
        self.plans.borrow_mut().insert(key, Rc::clone(&plan));
        Ok(plan)
    }

    fn ranks(&self, work: RankWork) -> Rc<Vec<Rank>> {
        let RankWork {
            mesh,
            all_to_all,
            adaptive_r,
            shadows,
        } = work;
        // Two-dimensional exchanges spread rows evenly, however many shards get them.
        let node = self.scenario.machine.units()[0];
        let by_place = traffic::by_place(all_to_all, node, traffic::block(mesh, adaptive_r));
        let adaptive_r = if by_place { adaptive_r } else { mesh.expert_tp };
        let scenario = self.scenario;
        let model = ShadowModel {
            most: scenario.shadow_model.most.min(shadows),
            ..scenario.shadow_model
        };
        let made = || {
            Rc::new(geometry::ranks(
                &scenario.machine,
                mesh,
                (&self.routing, &self.placement(mesh)),
                (all_to_all, adaptive_r),
                (shadows > 0).then_some(&model),
            ))
        };
        let mut ranks = self.ranks.borrow_mut();
        let key = RankWork { adaptive_r, ..work };
        Rc::clone(ranks.entry(key).or_insert_with(made))
    }
}

/// Returns the rows that experts accept: without those that a layer with a capacity drops.
fn cost_of(scenario: &Scenario) -> RoutedRows {
    let routing = scenario.routing.clone().limited(&scenario.spec);
    let factor = scenario
        .spec
        .capacity
        .factor_of(scenario.training.is_some());
    let tokens = routing.most_tokens().ceil() as u64;
    match most_rows(&scenario.spec, factor, tokens) {
        Some(most) => routing.capped(most as f64),
        None => routing,
    }
}

#[cfg(test)]
mod tests;
