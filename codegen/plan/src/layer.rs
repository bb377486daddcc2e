//! A whole pass as data: kernels, tensors, and the launches in order.

mod backward;
mod gate;
mod gate_bwd;
mod supported;
mod tensors;
mod user;

use crate::desc::{self, GateTopkDesc, GroupedGemmDesc, Half, KernelDesc};
use crate::{
    CacheClass, GroupedGemmConfig, KernelConfig, KernelPlan, PlanError, Tuning, entries, heuristics,
};

use moesaic_kernel::{Access, DType, Entry, Size, Target};
use moesaic_spec::{LayerSpec, SharedGate};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use tensors::declared_tensors;

pub use user::{UserPlan, plan_user_experts};

/// Everything a runtime needs to run a layer forward on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// The layer.
    pub spec: LayerSpec,
    /// The target the configs were chosen for.
    pub target: Target,
    /// Sizes that were chosen by measurement.
    #[serde(default, skip_serializing_if = "Tuning::is_empty")]
    pub tuning: Tuning,
    /// The caches of the CPU that its tiles are for.
    #[serde(default, skip_serializing_if = "CacheClass::is_assumed")]
    pub caches: CacheClass,
    /// The kernel sources to emit.
    pub kernels: Vec<KernelPlan>,
    /// Every tensor that a step names.
    pub tensors: Vec<TensorPlan>,
    /// The launches that make each [`Role::Packed`] tensor from a weight, once
    /// and whenever that changes: the weight first, then the tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepare: Vec<Step>,
    /// The launches of a forward pass, in order.
    pub steps: Vec<Step>,
    /// What backward does again; `None` for a plan without backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
    /// The launches of a backward pass, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward: Vec<Step>,
}

/// What a plan follows beside spec and target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanOptions {
    /// How the layer is trained; `None` is inference alone.
    pub training: Option<Training>,
    /// Sizes instead of those that `heuristics` chooses. GPUs have none.
    pub tuning: Tuning,
    /// The caches that `heuristics` chooses sizes for, on a CPU.
    pub caches: CacheClass,
}

/// How a layer is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Training {
    /// What is computed a second time instead of being kept.
    pub recompute: Recompute,
}

/// What backward computes again. Kernels are reproducible to the bit, so that
/// gradients are the same in every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing: x, the routing record and the pre-activations are kept.
    #[default]
    None,
    /// The pre-activations: x and the routing record are kept.
    Hidden,
    /// Routing too: only the inputs are kept.
    All,
}

/// A tensor of the layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPlan {
    /// The canonical name, or that of an intermediate.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first; row major.
    pub shape: Vec<Size>,
    /// Who provides it.
    pub role: Role,
}

/// Who provides a tensor, and who sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The caller, at every call.
    Input,
    /// The caller, once.
    Weight,
    /// The layer, once, from weights: see [`LayerPlan::prepare`].
    Packed,
    /// The layer; the caller may read it after a call.
    Output,
    /// The layer, for itself.
    Scratch,
    /// The caller, at every backward pass: `dy`.
    OutputGradient,
    /// Backward; the caller may read it: `dx`, `grad.topk_weights`.
    InputGradient,
    /// Backward, which overwrites it or adds to it; the layer keeps it.
    WeightGradient,
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Index into [`LayerPlan::kernels`].
    pub kernel: usize,
    /// The symbol to launch.
    pub symbol: String,
    /// The tensor behind each pointer parameter, in order of the parameters.
    pub tensors: Vec<String>,
}

impl LayerPlan {
    /// The entry a step launches.
    ///
    /// # Panics
    /// When the step is not of this plan.
    pub fn entry(&self, step: &Step) -> &Entry {
        let entries = &self.kernels[step.kernel].entries;
        entries
            .iter()
            .find(|e| e.symbol == step.symbol)
            .expect("steps name entries of the plan")
    }

    /// What a forward pass leaves for backward, inputs included: the tensors
    /// that backward reads before it writes them.
    pub fn saved(&self) -> Vec<&TensorPlan> {
        let mut written = BTreeSet::new();
        let mut saved = BTreeSet::new();
        for step in &self.backward {
            let params = self.entry(step).params.iter();
            let accesses = params.filter_map(|param| Some(param.ty.tensor()?.1));
            for (name, access) in step.tensors.iter().zip(accesses) {
                if access != Access::Write && !written.contains(name) {
                    saved.insert(name);
                }
                if access != Access::Read {
                    written.insert(name);
                }
            }
        }
        let passed = |t: &&TensorPlan| matches!(t.role, Role::Input | Role::Output | Role::Scratch);
        let tensors = self.tensors.iter().filter(passed);
        tensors.filter(|t| saved.contains(&t.name)).collect()
    }

    /// The launches of a forward pass, then those of a backward pass.
    pub fn all_steps(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().chain(&self.backward)
    }

    /// Whether kernels read a weight only in its packed form, so that a runtime
    /// need not keep it.
    pub fn packs_away(&self, weight: &str) -> bool {
        let named = |step: &Step| step.tensors.iter().any(|name| name == weight);
        self.prepare.iter().any(named) && !self.all_steps().any(named)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorPlan> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

impl TensorPlan {
    /// Elements for a token count.
    pub fn elements(&self, tokens: u64) -> u64 {
        self.shape
            .iter()
            .fold(1, |product, size| product.saturating_mul(size.eval(tokens)))
    }

    /// Bytes for a token count.
    pub fn bytes(&self, tokens: u64) -> u64 {
        self.elements(tokens)
            .saturating_mul(self.dtype.size() as u64)
    }
}

/// Plans a layer for a target. The spec must be valid.
///
/// # Errors
/// None so far: every target computes every option. [`super::plan_user_experts`]
/// does not.
pub fn plan(spec: &LayerSpec, target: Target) -> Result<LayerPlan, PlanError> {
    plan_for(spec, target, None)
}

/// Plans a layer that can run backward. Its forward pass does what only
/// training does (noise, losses) and leaves what backward needs.
///
/// # Errors
/// As [`plan`].
pub fn plan_training(
    spec: &LayerSpec,
    target: Target,
    training: Training,
) -> Result<LayerPlan, PlanError> {
    plan_for(spec, target, Some(training))
}

/// [`plan`], or with how the layer is trained [`plan_training`].
///
/// # Errors
/// As [`plan`].
pub fn plan_for(
    spec: &LayerSpec,
    target: Target,
    training: Option<Training>,
) -> Result<LayerPlan, PlanError> {
    let options = PlanOptions {
        training,
        ..PlanOptions::default()
    };
    plan_with(spec, target, &options)
}

/// [`plan_for`] with all that can be said of tiles.
///
/// # Errors
/// As [`plan`].
pub fn plan_with(
    spec: &LayerSpec,
    target: Target,
    options: &PlanOptions,
) -> Result<LayerPlan, PlanError> {
    let mut builder = Builder::new(spec, target, options);
    builder.forward();
    if let Some(training) = options.training {
        builder.backward(training.recompute);
    }
    Ok(builder.finish())
}

/// Collects kernels and steps while the pass is written down.
struct Builder {
    plan: LayerPlan,
    /// Steps go to the backward pass.
    backwards: bool,
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
        let mut tensors = declared_tensors(spec, target, training.is_some());
        if training.is_some() {
            tensors.extend(backward::tensors(spec));
            tensors.extend(gate_bwd::tensors(spec, target));
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
                training,
                backward: vec![],
            },
            backwards: false,
        }
    }

    fn forward(&mut self) {
        self.routing();
        if self.plan.training.is_some() {
            self.losses();
        }
        self.scan();
        self.experts();
        for index in 0..self.plan.spec.shared.len() {
            self.shared(index);
        }
        self.combine();
    }

    /// Drops the tensors that no step names; weights are all wanted.
    fn finish(self) -> LayerPlan {
        let mut plan = self.plan;
        let steps = plan.prepare.iter().chain(plan.all_steps());
        let used: BTreeSet<String> = steps.flat_map(|s| s.tensors.clone()).collect();
        plan.tensors
            .retain(|t| t.role == Role::Weight || used.contains(&t.name));
        plan
    }

    /// Whether the forward pass keeps the pre-activations.
    fn keeps_hidden(&self) -> bool {
        let recompute = self.plan.training.map(|training| training.recompute);
        recompute == Some(Recompute::None)
    }

    /// Adds a kernel and one step per entry. `bind` renames parameters to
    /// tensors; a parameter it does not name is a tensor of the same name.
    fn launch(&mut self, name: &str, desc: KernelDesc, bind: Bind) -> usize {
        let kernel = self.kernel(name, desc);
        for index in 0..self.plan.kernels[kernel].entries.len() {
            self.step(kernel, index, bind);
        }
        kernel
    }

    /// Adds a kernel without a step.
    fn kernel(&mut self, name: &str, desc: KernelDesc) -> usize {
        let config = self.config(&desc);
        let entries = entries(&desc, &config);
        self.plan.kernels.push(KernelPlan {
            name: name.to_string(),
            desc,
            config,
            entries,
        });
        self.plan.kernels.len() - 1
    }

    /// Adds a step: the entry `index` of a kernel.
    fn step(&mut self, kernel: usize, index: usize, bind: Bind) {
        let step = self.step_of(kernel, index, bind);
        match self.backwards {
            true => self.plan.backward.push(step),
            false => self.plan.steps.push(step),
        }
    }

    /// The launch of the entry `index` of a kernel.
    fn step_of(&self, kernel: usize, index: usize, bind: Bind) -> Step {
        let entry = &self.plan.kernels[kernel].entries[index];
        let pointers = entry.params.iter().filter(|p| p.ty.tensor().is_some());
        let renamed = |p: &moesaic_kernel::Param| {
            let found = bind.iter().find(|(from, _)| *from == p.name);
            found.map_or(&*p.name, |b| b.1).to_string()
        };
        Step {
            kernel,
            symbol: entry.symbol.clone(),
            tensors: pointers.map(renamed).collect(),
        }
    }

    /// The tiling of a kernel. The scan lists the row tiles of the GEMM, so
    /// their heights agree. Weights that change at every step are not packed:
    /// it would be a pass over memory for what a block does in its cache.
    fn config(&self, desc: &KernelDesc) -> KernelConfig {
        let mut config = self.tiling(desc);
        match &mut config {
            KernelConfig::ExpertScan(scan) => {
                let up = KernelDesc::GroupedGemm(desc::grouped_gemm(&self.plan.spec, Half::Up));
                if let KernelConfig::GroupedGemm(up) = self.tiling(&up) {
                    scan.tile_rows = up.tile_rows;
                }
            }
            KernelConfig::GroupedGemm(gemm) => gemm.packed &= self.plan.training.is_none(),
            _ => {}
        }
        config
    }

    /// The tiling that was measured to be best, as far as there is one.
    fn tiling(&self, desc: &KernelDesc) -> KernelConfig {
        let mut config = self.heuristic(desc);
        self.plan.tuning.apply(desc, &mut config);
        config
    }

    fn heuristic(&self, desc: &KernelDesc) -> KernelConfig {
        heuristics::choose_for(desc, self.plan.target, self.plan.caches)
    }

    fn scan(&mut self) {
        let desc = desc::expert_scan(&self.plan.spec, self.plan.training.is_some());
        self.launch("expert_scan", KernelDesc::ExpertScan(desc), &[]);
    }

    fn experts(&mut self) {
        let (spec, target) = (&self.plan.spec, self.plan.target);
        let halves = [Half::Up, Half::Down].map(|half| expert_gemm(spec, half, target));
        debug_assert_eq!(
            halves[0].tile_rows, halves[1].tile_rows,
            "one list of row tiles"
        );
        if !gathers(spec, target) {
            let dispatch = desc::dispatch(spec);
            self.launch("dispatch", KernelDesc::Dispatch(dispatch), &[]);
        }
        self.product("grouped_gemm_up", Half::Up, None, self.keeps_hidden());
        self.product("grouped_gemm_down", Half::Down, None, false);
    }

    /// A product of the routed experts, or of a shared one.
    fn product(&mut self, name: &str, half: Half, shared: Option<usize>, keep: bool) {
        let spec = &self.plan.spec;
        let desc = match shared {
            None => desc::grouped_gemm(spec, half),
            Some(index) => desc::shared_gemm(spec, half, spec.shared[index].hidden_dim),
        };
        let mut names = expert_names(shared);
        let owner = shared.map_or("experts".to_string(), |i| format!("shared.{i}"));
        let packed = format!("{owner}.{}.packed", half.name());
        names.push(("packed".to_string(), packed.clone()));
        let desc = GroupedGemmDesc { keep, ..desc };
        let kernel = self.kernel(name, KernelDesc::GroupedGemm(desc));
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
        let plan = &self.plan.kernels[kernel];
        let (KernelDesc::GroupedGemm(desc), KernelConfig::GroupedGemm(config)) =
            (&plan.desc, &plan.config)
        else {
            unreachable!("a product's kernel is a GEMM")
        };
        if config.packed {
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
        if shared.gate == SharedGate::Sigmoid {
            let desc: GateTopkDesc = desc::shared_gate(&spec);
            let (weight, logits) = (name("router.weight"), name("router.logits"));
            let bind = [("weight", &*weight), ("logits", &*logits)];
            let kernel = format!("gate_topk_shared_{index}");
            self.launch(&kernel, KernelDesc::GateTopk(desc), &bind);
        }
    }

    fn combine(&mut self) {
        let desc = desc::combine(&self.plan.spec);
        let renamed: Vec<[String; 2]> = (0..desc.shared.len())
            .flat_map(|i| {
                [
                    [format!("shared_{i}_out"), format!("shared.{i}.out")],
                    [
                        format!("shared_{i}_logit"),
                        format!("shared.{i}.router.logits"),
                    ],
                ]
            })
            .collect();
        let bind: Vec<(&str, &str)> = renamed.iter().map(|[a, b]| (&**a, &**b)).collect();
        self.launch("combine", KernelDesc::Combine(desc), &bind);
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

fn borrowed(names: &[(String, String)]) -> Vec<(&str, &str)> {
    names.iter().map(|(a, b)| (&**a, &**b)).collect()
}

/// The tiling of a routed expert's product.
fn expert_gemm(spec: &LayerSpec, half: Half, target: Target) -> GroupedGemmConfig {
    let desc = KernelDesc::GroupedGemm(desc::grouped_gemm(spec, half));
    match heuristics::choose(&desc, target) {
        KernelConfig::GroupedGemm(config) => config,
        _ => unreachable!("a GEMM's config is a GEMM config"),
    }
}

/// Whether the up half reads tokens itself, and nothing is dispatched.
fn gathers(spec: &LayerSpec, target: Target) -> bool {
    expert_gemm(spec, Half::Up, target).gather
}

#[cfg(test)]
mod tests;
