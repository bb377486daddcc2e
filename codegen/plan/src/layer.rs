//! A whole pass, written down: kernels, tensors, and the steps in order.

mod backward;
mod data;
mod gate;
mod gate_bwd;
mod latent;
mod stack;
mod step;
mod supported;
mod tensors;
mod user;

use crate::desc::{self, GroupedGemmDesc, Half};
use crate::{KernelPlan, Knob, Machine, Op, Operator, PlanError};

use moesaic_kernel::Target;
use moesaic_spec::{LayerSpec, SharedGate};
use std::collections::{BTreeMap, BTreeSet};
use tensors::declared_tensors;

pub use data::{LayerPlan, PlanOptions, Recompute, Role, TensorPlan, Training};
pub use stack::stacked;
pub use step::{EntryId, LaunchStep, Step, TensorId};
pub use user::{UserPlan, plan_user_experts};

/// Plans a layer for a target. The spec must be valid. Where the options say how
/// it is trained, its steps do what only training does (noise, losses) and leave
/// what backward needs; it evaluates by others.
///
/// # Errors
/// None so far: every target computes every option. [`super::plan_user_experts`]
/// does not.
pub fn plan(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<LayerPlan, PlanError> {
    let mut builder = Builder::new(spec, target, options);
    builder.forward();
    if let Some(training) = options.training {
        builder.backward(training.recompute);
        builder.evaluation();
    }
    Ok(builder.finish())
}

/// Collects kernels and steps while the pass is written down.
struct Builder {
    plan: LayerPlan,
    /// The tensors that steps name so far. Until the plan is finished, a step has
    /// their numbers in here.
    named: BTreeMap<String, TensorId>,
    /// What kernels are tiled for.
    machine: Machine,
    /// Where steps go.
    pass: Pass,
}

/// What is being written down.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// A forward pass: one that trains, where there is a backward pass.
    Forward,
    Backward,
    /// The forward pass of a layer that trains when it does not.
    Evaluation,
}

/// Renames a parameter to the tensor behind it.
type Bind<'a> = &'a [(&'a str, &'a str)];

impl Builder {
    fn new(spec: &LayerSpec, target: Target, options: &PlanOptions) -> Builder {
        let training = options.training;
        let (tuning, caches) = match target.hardware() {
            Target::Cpu(_) => (options.tuning.clone(), options.caches),
            _ => Default::default(),
        };
        let machine = Machine::of(target, caches);
        let mut tensors = declared_tensors(spec, machine, training.is_some());
        if training.is_some() {
            tensors.extend(backward::tensors(spec));
            tensors.extend(gate_bwd::tensors(spec, machine));
        }
        Builder {
            plan: LayerPlan {
                spec: spec.clone(),
                target,
                tuning,
                caches,
                kernels: vec![],
                tensors,
                prepare: vec![],
                steps: vec![],
                evaluation: vec![],
                training,
                backward: vec![],
            },
            named: BTreeMap::new(),
            machine,
            pass: Pass::Forward,
        }
    }

    /// A forward pass with the layer's own experts.
    fn forward(&mut self) {
        self.routing();
        self.experts();
        for index in 0..self.plan.spec.shared.len() {
            self.shared(index);
        }
        self.combine();
    }

    /// The forward pass once more, without what only training does. Kernels
    /// that are the same are shared.
    fn evaluation(&mut self) {
        self.pass = Pass::Evaluation;
        self.forward();
    }

    /// Gate, scan, and losses: what comes before the experts.
    fn routing(&mut self) {
        self.gate();
        self.scan();
        if self.trains() {
            self.losses();
        }
    }

    /// Whether the pass draws random numbers and keeps what backward needs.
    fn trains(&self) -> bool {
        self.plan.training.is_some() && self.pass != Pass::Evaluation
    }

    /// Drops the tensors that no step names; weights are all wanted. Steps get
    /// the numbers of those that are left.
    fn finish(self) -> LayerPlan {
        let Builder {
            mut plan, named, ..
        } = self;
        let used: BTreeSet<TensorId> = plan.launches().flat_map(|s| s.tensors.clone()).collect();
        let used = |name: &str| named.get(name).is_some_and(|id| used.contains(id));
        plan.tensors
            .retain(|t| t.role == Role::Weight || used(&t.name));
        let mut places = vec![None; named.len()];
        for (at, tensor) in plan.tensors.iter().enumerate() {
            if let Some(id) = named.get(&tensor.name) {
                places[id.0] = Some(TensorId(at));
            }
        }
        let LayerPlan {
            prepare,
            steps,
            evaluation,
            backward,
            ..
        } = &mut plan;
        let called = steps.iter_mut().chain(evaluation).chain(backward);
        let called = called.map(|Step::Launch(launch)| launch);
        for tensor in prepare
            .iter_mut()
            .chain(called)
            .flat_map(|s| &mut s.tensors)
        {
            *tensor = places[tensor.0].expect("steps name declared tensors");
        }
        plan
    }

    /// Whether the forward pass keeps the pre-activations.
    fn keeps_hidden(&self) -> bool {
        let recompute = self.plan.training.map(|training| training.recompute);
        self.trains() && recompute == Some(Recompute::None)
    }

    /// Adds a kernel and one step per entry. `bind` renames parameters to
    /// tensors; a parameter it does not name is a tensor of the same name.
    fn launch(&mut self, name: &str, desc: impl Operator, bind: Bind) -> usize {
        let kernel = self.kernel(name, desc);
        for index in 0..self.plan.kernels[kernel].entries.len() {
            self.step(kernel, index, bind);
        }
        kernel
    }

    /// Adds a kernel without a step; for an evaluation only if training has no
    /// such kernel.
    fn kernel(&mut self, name: &str, desc: impl Operator) -> usize {
        let op = self.tiled(desc);
        let mut name = name.to_string();
        if self.pass == Pass::Evaluation {
            let same = |known: &KernelPlan| known.op == op;
            if let Some(known) = self.plan.kernels.iter().position(same) {
                return known;
            }
            name += "_eval";
        }
        let entries = op.entries();
        self.plan.kernels.push(KernelPlan { name, op, entries });
        self.plan.kernels.len() - 1
    }

    /// Adds a step: the entry `index` of a kernel.
    fn step(&mut self, kernel: usize, index: usize, bind: Bind) {
        let step = Step::Launch(self.step_of(kernel, index, bind));
        match self.pass {
            Pass::Forward => self.plan.steps.push(step),
            Pass::Backward => self.plan.backward.push(step),
            Pass::Evaluation => self.plan.evaluation.push(step),
        }
    }

    /// The launch of the entry `index` of a kernel.
    fn step_of(&mut self, kernel: usize, index: usize, bind: Bind) -> LaunchStep {
        let params = self.plan.kernels[kernel].entries[index].params.iter();
        let pointers = params.filter(|param| param.ty.tensor().is_some());
        let tensors = pointers.map(|param| {
            let renamed = bind.iter().find(|(from, _)| *from == param.name);
            let name = renamed.map_or(&*param.name, |(_, to)| to);
            let next = TensorId(self.named.len());
            *self.named.entry(name.to_string()).or_insert(next)
        });
        LaunchStep {
            tensors: tensors.collect(),
            entry: EntryId {
                kernel,
                entry: index,
            },
        }
    }

    /// A kernel's tiling: what was measured to be best, as far as there is that.
    /// The scan lists the row tiles of the GEMM, so their heights agree. Weights
    /// that change at every step are not packed: it would be a pass over memory
    /// for what a block does in its cache.
    fn tiled(&self, desc: impl Operator) -> Op {
        let mut op = desc.on(self.machine);
        self.plan.tuning.apply(&mut op);
        if let Op::ExpertScan { config, .. } = &mut op {
            config.tile_rows = self.tile_rows();
        }
        if let Some(cpu) = op.gemm_mut().and_then(|gemm| gemm.family.cpu_mut()) {
            cpu.packed &= self.plan.training.is_none();
        }
        op
    }

    /// Rows of a tile of the routed experts' products.
    fn tile_rows(&self) -> usize {
        let up = desc::grouped_gemm(&self.plan.spec, Half::Up);
        let measured = self.plan.tuning.size(Knob::TileRows);
        measured.unwrap_or_else(|| up.tiling(self.machine).tile_rows)
    }

    fn scan(&mut self) {
        let desc = desc::expert_scan(&self.plan.spec, self.trains());
        self.launch("expert_scan", desc, &[]);
    }

    fn experts(&mut self) {
        let spec = self.plan.spec.clone();
        let [up, down] =
            [Half::Up, Half::Down].map(|half| desc::grouped_gemm(&spec, half).tiling(self.machine));
        debug_assert_eq!(up.tile_rows, down.tile_rows, "one list of row tiles");
        self.latent_down();
        if !up.gather() {
            self.launch("dispatch", desc::dispatch(&spec), &self.around());
        }
        self.product("grouped_gemm_up", Half::Up, None, self.keeps_hidden());
        self.product("grouped_gemm_down", Half::Down, None, false);
    }

    /// A product of the routed experts, or of a shared one.
    fn product(&mut self, name: &str, half: Half, shared: Option<usize>, keep: bool) {
        let spec = &self.plan.spec;
        let desc = match shared {
            None => desc::grouped_gemm(spec, half),
            Some(index) => desc::shared_gemm(spec, half, index),
        };
        let owner = shared.map_or("experts".to_string(), |i| format!("shared.{i}"));
        let packed = format!("{owner}.{}.packed", half.name());
        let names = self.expert_names(shared);
        self.gemm(name, GroupedGemmDesc { keep, ..desc }, names, packed);
    }

    /// A product whose matrices may be packed.
    fn gemm(
        &mut self,
        name: &str,
        desc: GroupedGemmDesc,
        mut names: Vec<(String, String)>,
        packed: String,
    ) {
        names.push(("packed".to_string(), packed.clone()));
        let kernel = self.kernel(name, desc);
        let product = self.plan.kernels[kernel].entries.len() - 1;
        let bind = borrowed(&names);
        for index in 0..product {
            let pack = self.step_of(kernel, index, &bind);
            self.plan.prepare.push(pack);
        }
        self.declare_packed(kernel, &packed);
        self.step(kernel, product, &bind);
    }

    /// Declares the packed weights of a product, if it has such.
    fn declare_packed(&mut self, kernel: usize, name: &str) {
        if let Op::GroupedGemm { desc, config } = &self.plan.kernels[kernel].op
            && config.packed()
        {
            let shape = desc.packed_shape(config).map(tensors::constant);
            let packed = tensors::tensor(name, desc.weights, &shape, Role::Packed);
            self.plan.tensors.push(packed);
        }
    }

    fn shared(&mut self, index: usize) {
        let spec = self.plan.spec.clone();
        let shared = &spec.shared[index];
        let name = |part: &str| format!("shared.{index}.{part}");
        let up = format!("grouped_gemm_up_shared_{index}");
        self.product(&up, Half::Up, Some(index), self.keeps_hidden());
        let down = format!("grouped_gemm_down_shared_{index}");
        self.product(&down, Half::Down, Some(index), false);
        if shared.gate != SharedGate::None {
            let desc = desc::shared_gate(&spec, index);
            let (weight, logits) = (name("router.weight"), name("router.logits"));
            let bias = name("router.bias");
            let bind = [("weight", &*weight), ("bias", &*bias), ("logits", &*logits)];
            let kernel = format!("gate_topk_shared_{index}");
            self.launch(&kernel, desc, &bind);
        }
    }

    /// The sum of routed and shared experts, in one step or around a projection.
    fn combine(&mut self) {
        let desc = desc::combine(&self.plan.spec);
        let mut bind = self.shared_outputs(0);
        bind.extend(owned(&self.around()));
        self.launch("combine", desc, &borrowed(&bind));
        self.latent_up();
        if desc::adds_later(&self.plan.spec) {
            let desc = desc::combine_later(&self.plan.spec);
            let mut bind = self.shared_outputs(1);
            bind.push(("shared_0_out".to_string(), "routed".to_string()));
            if let Some(index) = self.plan.spec.residual() {
                let logits = format!("shared.{index}.router.logits");
                bind.push(("shared_0_logit".to_string(), logits));
            }
            self.launch("combine_later", desc, &borrowed(&bind));
        }
    }

    /// Parameters of `combine` that belong to shared experts, the first of which
    /// is the parameters' `first`.
    fn shared_outputs(&self, first: usize) -> Vec<(String, String)> {
        let parts = [("out", "out"), ("logit", "router.logits")];
        let indices = 0..self.plan.spec.shared.len();
        let names = indices.flat_map(|i| {
            let at = first + i;
            parts.map(|(from, to)| (format!("shared_{at}_{from}"), format!("shared.{i}.{to}")))
        });
        names.collect()
    }

    /// As [`expert_names`], with the tensors that routed experts begin and end
    /// with.
    fn expert_names(&self, shared: Option<usize>) -> Vec<(String, String)> {
        let mut names = expert_names(shared);
        if shared.is_none() {
            names.extend(owned(&self.around()));
        }
        names
    }
}

/// The tensors behind the parameters of an expert's kernels, forward and
/// backward: those of the routed experts, or of a shared one.
fn expert_names(shared: Option<usize>) -> Vec<(String, String)> {
    let mut list = Vec::new();
    let mut add = |from: &str, to: String| list.push((from.to_string(), to));
    let prefix = shared.map_or("experts".to_string(), |i| format!("shared.{i}"));
    for part in ["gate", "up", "down"] {
        add(part, format!("{prefix}.{part}.weight"));
        add(&format!("{part}_map"), format!("{prefix}.{part}.weight"));
        add(&format!("{part}_bias"), format!("{prefix}.{part}.bias"));
        add(
            &format!("grad_{part}"),
            format!("grad.{prefix}.{part}.weight"),
        );
        add(
            &format!("grad_{part}_bias"),
            format!("grad.{prefix}.{part}.bias"),
        );
    }
    let tokens = [("rows", "x"), ("dout", "dy")];
    for name in [
        "rows", "dout", "hidden", "out", "gate_pre", "up_pre", "dgate", "dup", "drows",
    ] {
        let as_token = tokens.iter().find(|(from, _)| *from == name);
        let to = match (shared, as_token) {
            (None, _) => name.to_string(),
            (Some(_), Some((_, token))) => token.to_string(),
            (Some(_), None) => format!("{prefix}.{name}"),
        };
        add(name, to.clone());
        add(&format!("{name}_map"), to);
    }
    if shared.is_some() {
        add("topk_weights", format!("{prefix}.weight"));
        add("dweight_parts", format!("{prefix}.dweight_parts"));
    }
    list
}

fn owned(names: Bind) -> Vec<(String, String)> {
    let owned = |(from, to): &(&str, &str)| (from.to_string(), to.to_string());
    names.iter().map(owned).collect()
}

fn borrowed(names: &[(String, String)]) -> Vec<(&str, &str)> {
    names.iter().map(|(a, b)| (&**a, &**b)).collect()
}

#[cfg(test)]
mod tests;
