//! The steps of ranks, one after another, on the model of a machine.

use crate::geometry::{self, Rank};
use crate::memory::memory;
use crate::pieces::{Choices, Part};
use crate::question::{PlannerError, Prediction, Question, Simulated};
use crate::reach;
use crate::routing::Routing;
use crate::run::Run;
use crate::sides::Costs;
use crate::traffic;
use crate::ways::Travel;
use moesaic_plan::{
    Both, Cut, Parallel, Placement, PlanError, PlanOptions, RankPlan, Route, ShadowModel, Sharing,
    Strategy, Wire, most_rows, plan_rank,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A mesh, how rows go in it, to how many slices, and how many experts may have shadows: what
/// decides who has the same to do.
type Kind = (Parallel, Route, usize, usize);

/// A plan, and what its launches cost.
#[derive(Debug)]
struct Planned {
    plan: RankPlan,
    costs: Costs,
}

/// Simulates configurations of one layer on one machine; what several have in common is made
/// once.
#[derive(Debug)]
pub struct Simulator<'q> {
    question: &'q Question,
    /// Rows that experts take.
    routing: Routing,
    plans: RefCell<HashMap<(Parallel, usize, usize), Rc<Planned>>>,
    ranks: RefCell<HashMap<Kind, Rc<Vec<Rank>>>>,
}

impl<'q> Simulator<'q> {
    /// Of a question.
    pub fn new(question: &'q Question) -> Simulator<'q> {
        Simulator {
            routing: taken(question),
            question,
            plans: RefCell::default(),
            ranks: RefCell::default(),
        }
    }

    /// What is asked.
    pub fn question(&self) -> &'q Question {
        self.question
    }

    /// Whether a mesh has the nodes that routes in two dimensions need.
    pub fn has_nodes(&self, mesh: Parallel) -> bool {
        geometry::has_nodes(&self.question.machine, mesh, &self.routing)
    }

    /// What a configuration takes, with the phases of each pass.
    ///
    /// # Errors
    /// [`PlannerError`] for meshes and strategies that cannot be.
    pub fn predict(&self, mesh: Parallel, strategy: Strategy) -> Result<Prediction, PlannerError> {
        Ok(self.run(mesh, strategy, true)?.0)
    }

    /// The same, with everything that each kind of rank does, for a timeline.
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
        let question = self.question;
        let ways = strategy.ways(&mesh);
        let planned = self.plan(mesh, ways, strategy.shadows)?;
        let plan = &planned.plan;
        let route = if ways == 0 {
            Route::Linear
        } else {
            strategy.route
        };
        let ranks = self.ranks((mesh, route, ways, strategy.shadows));
        let Both { forward, backward } = strategy.degree;
        let travel = |wire, degree| self.travel(&planned, (mesh, strategy), wire, degree);
        let there = travel(strategy.wire.forward, forward);
        let mut run = Run::new(&ranks, detail);
        run.forward(&there, question.training.is_some());
        if question.training.is_some() {
            let back = travel(strategy.wire.backward, backward);
            run.backward(&back);
            run.gradients(&back);
        }
        let owned = if ways == mesh.shards {
            1.0
        } else {
            there.owned()
        };
        // Rows that stay are those of a rank's own tokens.
        let held = match ways {
            0 => 1.0 / mesh.group() as f64,
            _ => there.part(),
        };
        let held = memory(plan, &ranks, owned, held);
        Ok(run.finish(mesh, strategy, held))
    }

    fn travel<'a>(
        &'a self,
        planned: &'a Planned,
        (mesh, strategy): (Parallel, Strategy),
        wire: Wire,
        degree: usize,
    ) -> Travel<'a> {
        let launched = match self.question.training {
            Some(_) => strategy.pieces().common(),
            None => strategy.degree.forward,
        };
        Travel {
            machine: &self.question.machine,
            plan: &planned.plan,
            costs: &planned.costs,
            mesh,
            ways: strategy.ways(&mesh),
            route: strategy.route,
            wire,
            degree,
            launched,
            cut: strategy.cut,
            repeats: self.repeats(mesh, strategy.route, degree),
            piece: Part::WHOLE,
        }
    }

    /// In how many of `degree` pieces a token is that crosses to a node, where it crosses once.
    fn repeats(&self, mesh: Parallel, route: Route, degree: usize) -> f64 {
        if route != Route::Once {
            return 1.0;
        }
        let Question { spec, machine, .. } = self.question;
        let nodes = mesh.group() as f64 / machine.per_node() as f64;
        let choices = Choices {
            tokens: self.routing.most_tokens(),
            top_k: spec.shape.top_k,
            experts: spec.shape.experts as f64,
            nodes: reach::of_nodes(spec, nodes.max(1.0)),
        };
        choices.pieces_touched(degree)
    }

    /// Bytes of a message between nodes in forward, as a mean of ranks: what
    /// [`Machine::route`](crate::Machine::route) goes by.
    pub(crate) fn message(&self, mesh: Parallel, strategy: Strategy) -> Result<f64, PlannerError> {
        self.check(mesh, strategy)?;
        let ways = strategy.ways(&mesh);
        let planned = self.plan(mesh, ways, strategy.shadows)?;
        let ranks = self.ranks((mesh, strategy.route, ways, strategy.shadows));
        let degree = strategy.degree.forward;
        let travel = self.travel(&planned, (mesh, strategy), strategy.wire.forward, degree);
        let last = travel.parts().pop().unwrap_or(Part::WHOLE);
        let travel = travel.of_piece(last);
        let sum: f64 = ranks.iter().map(|rank| travel.message(rank)).sum();
        Ok(sum / ranks.len().max(1) as f64)
    }

    /// As [`Strategy::check`], with the nodes that the machine has.
    fn check(&self, mesh: Parallel, strategy: Strategy) -> Result<(), PlannerError> {
        let world = self.question.world;
        let wanted = mesh.ranks();
        let spec = &self.question.spec;
        mesh.check(spec).map_err(PlanError::from)?;
        if let Some(placement) = &self.question.placement {
            let fits = placement.check(&mesh, spec.shape.experts);
            fits.map_err(PlanError::from)?;
        }
        if wanted != world {
            return Err(PlannerError::World { wanted, world });
        }
        strategy.check(&mesh)?;
        if strategy.route != Route::Linear && strategy.cut != Cut::Rows {
            let route = strategy.route.to_string();
            return Err(PlannerError::Cut { route });
        }
        if strategy.route != Route::Linear && !self.has_nodes(mesh) {
            return Err(PlannerError::Route {
                route: strategy.route.to_string(),
                group: mesh.group(),
                per_node: self.question.machine.per_node(),
            });
        }
        Ok(())
    }

    /// Where experts are in a mesh.
    fn placement(&self, mesh: Parallel) -> Placement {
        let in_order = || Placement::contiguous(mesh.ep, self.question.spec.shape.experts);
        self.question.placement.clone().unwrap_or_else(in_order)
    }

    /// The plan of the first rank of those with the most experts, where a row goes to so many
    /// slices, and so many experts may have shadows.
    fn plan(
        &self,
        mesh: Parallel,
        ways: usize,
        shadows: usize,
    ) -> Result<Rc<Planned>, PlannerError> {
        // How many groups there are changes no step.
        let mesh = Parallel { dp: 1, ..mesh };
        let key = (mesh, ways, shadows);
        if let Some(plan) = self.plans.borrow().get(&key) {
            return Ok(Rc::clone(plan));
        }
        let question = self.question;
        let options = PlanOptions::training(question.training);
        let target = question.machine.target;
        let placement = self.placement(mesh);
        let most = (0..mesh.ep).rev().max_by_key(|ep| placement.count(*ep));
        let rank = most.unwrap_or(0) * mesh.shards;
        let sharing = Sharing::from(mesh).at_ways(ways).shadowing(shadows);
        let sharing = sharing.placed(question.placement.as_ref());
        let plan = Rc::new(Planned {
            plan: plan_rank(&question.spec, target, &options, sharing, rank)?,
            costs: Costs::default(),
        });
        self.plans.borrow_mut().insert(key, Rc::clone(&plan));
        Ok(plan)
    }

    fn ranks(&self, (mesh, route, ways, shadows): Kind) -> Rc<Vec<Rank>> {
        // What goes in two dimensions is spread, however many slices get it.
        let node = self.question.machine.units()[0];
        let by_place = traffic::by_place(route, node, traffic::block(mesh, ways));
        let ways = if by_place { ways } else { mesh.shards };
        let question = self.question;
        let model = ShadowModel {
            most: question.shadow_model.most.min(shadows),
            ..question.shadow_model
        };
        let made = || {
            Rc::new(geometry::ranks(
                &question.machine,
                mesh,
                (&self.routing, &self.placement(mesh)),
                (route, ways),
                (shadows > 0).then_some(&model),
            ))
        };
        let mut ranks = self.ranks.borrow_mut();
        let kind = (mesh, route, ways, shadows);
        Rc::clone(ranks.entry(kind).or_insert_with(made))
    }
}

/// What is routed, but for what a layer with a capacity drops.
fn taken(question: &Question) -> Routing {
    let routing = question.routing.clone().limited(&question.spec);
    let factor = question
        .spec
        .capacity
        .factor_of(question.training.is_some());
    let tokens = routing.most_tokens().ceil() as u64;
    match most_rows(&question.spec, factor, tokens) {
        Some(most) => routing.capped(most as f64),
        None => routing,
    }
}

#[cfg(test)]
mod tests;
