//! A whole forward pass as data: kernels, tensors, and the launches in order.

use crate::desc::{self, GateTopkDesc, Half, KernelDesc};
use crate::{GroupedGemmConfig, KernelConfig, KernelPlan, PlanError, entries, heuristics};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Entry, Size, Target};
use moesaic_spec::{LayerSpec, RouterKind, SharedGate, canonical_tensors};
use serde::{Deserialize, Serialize};

/// Everything a runtime needs to run a layer forward on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// The layer.
    pub spec: LayerSpec,
    /// The target the configs were chosen for.
    pub target: Target,
    /// The kernel sources to emit.
    pub kernels: Vec<KernelPlan>,
    /// Every tensor that a step names.
    pub tensors: Vec<TensorPlan>,
    /// The launches of a forward pass, in order.
    pub steps: Vec<Step>,
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
    /// The layer; the caller may read it after a call.
    Output,
    /// The layer, for itself.
    Scratch,
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
/// [`PlanError::Unsupported`] when no kernel of the target computes an option.
pub fn plan(spec: &LayerSpec, target: Target) -> Result<LayerPlan, PlanError> {
    let mut builder = Builder::new(spec, target);
    builder.routing();
    builder.scan();
    builder.experts();
    for index in 0..spec.shared.len() {
        builder.shared(index);
    }
    builder.combine();
    Ok(builder.plan)
}

/// Collects kernels and steps while the pass is written down.
struct Builder {
    plan: LayerPlan,
}

impl Builder {
    fn new(spec: &LayerSpec, target: Target) -> Builder {
        let tensors = declared_tensors(spec, target);
        let spec = spec.clone();
        Builder {
            plan: LayerPlan {
                spec,
                target,
                kernels: vec![],
                tensors,
                steps: vec![],
            },
        }
    }

    /// Adds a kernel and one step per entry. `bind` renames parameters to
    /// tensors; a parameter it does not name is a tensor of the same name.
    fn launch(&mut self, name: &str, desc: KernelDesc, bind: &[(&str, &str)]) {
        let config = self.config(&desc);
        let entries = entries(&desc, &config);
        let kernel = self.plan.kernels.len();
        for entry in &entries {
            let pointers = entry.params.iter().filter(|p| p.ty.tensor().is_some());
            let tensors = pointers
                .map(|p| {
                    bind.iter()
                        .find(|(from, _)| *from == p.name)
                        .map_or(&*p.name, |b| b.1)
                })
                .map(str::to_string)
                .collect();
            self.plan.steps.push(Step {
                kernel,
                symbol: entry.symbol.clone(),
                tensors,
            });
        }
        self.plan.kernels.push(KernelPlan {
            name: name.to_string(),
            desc,
            config,
            entries,
        });
    }

    /// The tiling of a kernel. The scan lists the row tiles of the GEMM, so
    /// their heights agree.
    fn config(&self, desc: &KernelDesc) -> KernelConfig {
        let mut config = heuristics::choose(desc, self.plan.target);
        if let KernelConfig::ExpertScan(scan) = &mut config {
            scan.tile_rows = expert_gemm(&self.plan.spec, Half::Up, self.plan.target).tile_rows;
        }
        config
    }

    fn routing(&mut self) {
        let Some(desc) = desc::gate_topk(&self.plan.spec) else {
            return;
        };
        let bind = [
            ("logits", "router.logits"),
            ("weight", "router.weight"),
            ("bias", "router.bias"),
            ("input_scale", "router.input_scale"),
            ("projector_weight", "router.projector.weight"),
            ("projector_bias", "router.projector.bias"),
            ("projected", "router.projected"),
            ("similarity", "router.similarity"),
            ("temperature", "router.temperature"),
            ("select_bias", "router.select_bias"),
            ("expert_scale", "router.expert_scale"),
            ("table", "router.table"),
        ];
        self.launch("gate_topk", KernelDesc::GateTopk(desc), &bind);
    }

    fn scan(&mut self) {
        let desc = desc::expert_scan(&self.plan.spec);
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
        let bind = [
            ("gate", "experts.gate.weight"),
            ("up", "experts.up.weight"),
            ("down", "experts.down.weight"),
            ("gate_bias", "experts.gate.bias"),
            ("up_bias", "experts.up.bias"),
            ("down_bias", "experts.down.bias"),
            ("rows_map", "rows"),
            ("hidden_map", "hidden"),
            ("gate_map", "experts.gate.weight"),
            ("up_map", "experts.up.weight"),
            ("down_map", "experts.down.weight"),
        ];
        let up = desc::grouped_gemm(&self.plan.spec, Half::Up);
        self.launch("grouped_gemm_up", KernelDesc::GroupedGemm(up), &bind);
        let down = desc::grouped_gemm(&self.plan.spec, Half::Down);
        self.launch("grouped_gemm_down", KernelDesc::GroupedGemm(down), &bind);
    }

    fn shared(&mut self, index: usize) {
        let spec = self.plan.spec.clone();
        let shared = &spec.shared[index];
        let name = |part: &str| format!("shared.{index}.{part}");
        let names = ["gate", "up", "down"]
            .map(|p| (name(&format!("{p}.weight")), name(&format!("{p}.bias"))));
        let (hidden, out) = (name("hidden"), name("out"));
        let bind = [
            ("rows", "x"),
            ("rows_map", "x"),
            ("hidden", &*hidden),
            ("hidden_map", &*hidden),
            ("out", &*out),
            ("gate", &*names[0].0),
            ("up", &*names[1].0),
            ("down", &*names[2].0),
            ("gate_map", &*names[0].0),
            ("up_map", &*names[1].0),
            ("down_map", &*names[2].0),
            ("gate_bias", &*names[0].1),
            ("up_bias", &*names[1].1),
            ("down_bias", &*names[2].1),
        ];
        for (half, part) in [(Half::Up, "up"), (Half::Down, "down")] {
            let desc = desc::shared_gemm(&spec, half, shared.hidden_dim);
            let kernel = format!("grouped_gemm_{part}_shared_{index}");
            self.launch(&kernel, KernelDesc::GroupedGemm(desc), &bind);
        }
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

/// Every tensor a layer can name. Those that no step uses are left out by
/// [`declared_tensors`]' conditions, which mirror the signatures.
fn declared_tensors(spec: &LayerSpec, target: Target) -> Vec<TensorPlan> {
    let mut list: Vec<TensorPlan> = canonical_tensors(spec)
        .into_iter()
        .map(|t| TensorPlan {
            name: t.name,
            dtype: t.dtype,
            shape: t.shape.into_iter().map(|n| Size::Const(n as u64)).collect(),
            role: Role::Weight,
        })
        .collect();
    list.extend(routing_tensors(spec));
    list.extend(scan_tensors(spec, target));
    list.extend(expert_tensors(spec, target));
    list
}

fn tensor(name: &str, dtype: DType, shape: &[Size], role: Role) -> TensorPlan {
    TensorPlan {
        name: name.to_string(),
        dtype,
        shape: shape.to_vec(),
        role,
    }
}

fn constant(n: usize) -> Size {
    Size::Const(n as u64)
}

fn routing_tensors(spec: &LayerSpec) -> Vec<TensorPlan> {
    let (tokens, k) = (Size::Tokens, constant(spec.shape.top_k));
    let model = constant(spec.shape.model_dim);
    let experts = constant(spec.routed_experts());
    let kind = spec.router.kind;
    let decided = if kind == RouterKind::External {
        Role::Input
    } else {
        Role::Output
    };
    let mut list = vec![
        tensor(
            "x",
            spec.precision.activations,
            &[tokens.clone(), model],
            Role::Input,
        ),
        tensor("topk_ids", I32, &[tokens.clone(), k.clone()], decided),
        tensor("topk_weights", F32, &[tokens.clone(), k], decided),
    ];
    if spec.has_logits() {
        list.push(tensor(
            "router.logits",
            F32,
            &[tokens.clone(), experts],
            Role::Output,
        ));
    }
    if let (RouterKind::Cosine, Some(width)) = (kind, spec.router.projection_dim) {
        let shape = [tokens.clone(), constant(width)];
        list.push(tensor("router.projected", F32, &shape, Role::Scratch));
    }
    if kind == RouterKind::Table {
        list.push(tensor("token_ids", I32, &[tokens], Role::Input));
    }
    list
}

fn scan_tensors(spec: &LayerSpec, target: Target) -> Vec<TensorPlan> {
    let desc = desc::expert_scan(spec);
    let KernelConfig::ExpertScan(config) =
        heuristics::choose(&KernelDesc::ExpertScan(desc.clone()), target)
    else {
        unreachable!("the scan's config is a scan config")
    };
    let (tokens, k) = (Size::Tokens, constant(desc.top_k));
    let slots = tokens.clone() * k.clone();
    let tiles = desc.tiles(&config);
    let (routed, edges) = (constant(desc.routed_experts), constant(desc.experts + 1));
    let per_slot = [tokens.clone(), k];
    let tile_shape = [tiles.clone(), routed.clone()];
    let edge = std::slice::from_ref(&edges);
    let mut list = vec![
        tensor("tile_counts", I32, &tile_shape, Role::Scratch),
        tensor("counts", I64, std::slice::from_ref(&routed), Role::Output),
        tensor("offsets", I64, edge, Role::Output),
        tensor("row_tiles", I32, edge, Role::Scratch),
        tensor("locations", I32, &per_slot, Role::Output),
        tensor("slot_rows", I32, &per_slot, Role::Output),
        tensor("row_slots", I32, std::slice::from_ref(&slots), Role::Output),
    ];
    if let Some(chunk) = config.chunk_tiles {
        let shape = [tiles.floor_div(chunk as u64) + 1, routed];
        list.push(tensor("chunk_counts", I32, &shape, Role::Scratch));
    }
    if desc.limited() {
        list.push(tensor("capacity", I64, &[constant(1)], Role::Output));
    }
    if desc.capacity.mode == moesaic_spec::CapacityMode::Bounded {
        list.push(tensor("overflow", I64, &[constant(1)], Role::Output));
    }
    if let (Some(_), Some(items)) = (config.sort_run, desc.sorted_items()) {
        list.push(tensor("sorted_keys", I64, &[items], Role::Scratch));
    }
    if desc.ordered() {
        let per_token = std::slice::from_ref(&tokens);
        list.push(tensor("best_score", F32, per_token, Role::Scratch));
        list.push(tensor("token_order", I32, per_token, Role::Scratch));
    }
    if desc.ranked() {
        list.push(tensor("bucket_offsets", I64, &[edges], Role::Scratch));
        list.push(tensor("bucket_slots", I32, &[slots], Role::Scratch));
    }
    list
}

fn expert_tensors(spec: &LayerSpec, target: Target) -> Vec<TensorPlan> {
    let (tokens, activations) = (Size::Tokens, spec.precision.activations);
    let rows = tokens.clone() * spec.shape.top_k as u64;
    let (model, output) = (constant(spec.shape.model_dim), constant(spec.output_dim()));
    let scratch = |name: &str, rows: &Size, width: Size| {
        tensor(name, activations, &[rows.clone(), width], Role::Scratch)
    };
    let mut list = vec![
        scratch("hidden", &rows, constant(spec.shape.hidden_dim)),
        scratch("out", &rows, output.clone()),
    ];
    if !gathers(spec, target) {
        list.push(scratch("rows", &rows, model));
    }
    for (i, shared) in spec.shared.iter().enumerate() {
        let hidden = constant(shared.hidden_dim);
        list.push(scratch(&format!("shared.{i}.hidden"), &tokens, hidden));
        list.push(scratch(&format!("shared.{i}.out"), &tokens, output.clone()));
        if shared.gate == SharedGate::Sigmoid {
            let name = format!("shared.{i}.router.logits");
            list.push(tensor(
                &name,
                F32,
                &[tokens.clone(), constant(1)],
                Role::Scratch,
            ));
        }
    }
    list.push(tensor("y", activations, &[tokens, output], Role::Output));
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_kernel::CpuIsa;
    use moesaic_spec::{CapacityMode, CapacityOrder, SharedExpert};

    fn spec() -> LayerSpec {
        let text = r#"{"shape":{"model_dim":16,"hidden_dim":24,"experts":4,"top_k":2}}"#;
        serde_json::from_str(text).unwrap()
    }

    fn planned(change: impl FnOnce(&mut LayerSpec)) -> LayerPlan {
        let mut spec = spec();
        change(&mut spec);
        plan(&spec, Target::Cpu(CpuIsa::Avx2)).unwrap()
    }

    /// Every tensor of every step is declared, with the parameter's dtype,
    /// and every declared tensor is used.
    fn check(plan: &LayerPlan) {
        for step in &plan.steps {
            let params = plan.entry(step).params.iter();
            let dtypes = params.filter_map(|p| p.ty.tensor().map(|(dtype, _)| dtype));
            for (name, dtype) in step.tensors.iter().zip(dtypes) {
                let tensor = plan
                    .tensor(name)
                    .unwrap_or_else(|| panic!("{name} is undeclared"));
                assert_eq!(tensor.dtype, dtype, "{name} in {}", step.symbol);
            }
        }
        for tensor in &plan.tensors {
            let used = plan
                .steps
                .iter()
                .any(|step| step.tensors.contains(&tensor.name));
            assert!(used, "{} is never used", tensor.name);
        }
    }

    #[test]
    fn tensors_and_parameters_agree() {
        check(&planned(|_| ()));
        check(&planned(|s| {
            s.shared.push(SharedExpert {
                hidden_dim: 8,
                gate: SharedGate::Sigmoid,
            });
            s.experts.bias = true;
            s.experts.identity = 2;
            s.capacity.mode = CapacityMode::Bounded;
            s.capacity.order = CapacityOrder::BatchPrioritized;
        }));
        check(&planned(|s| {
            s.router.kind = RouterKind::Cosine;
            s.router.projection_dim = Some(8);
            s.capacity.order = CapacityOrder::Probability;
            s.capacity.renormalize_after_drop = true;
        }));
        check(&planned(|s| s.router.kind = RouterKind::External));
    }

    #[test]
    fn a_plan_is_the_same_every_time() {
        assert_eq!(planned(|_| ()), planned(|_| ()));
    }
}
