//! A layer on a device: plans, loaded kernels, weights.

use crate::EngineError;
use crate::forward::shape_for;
use crate::pass::{AllPorts, passing, ports};
use crate::place::{Packing, placed};
use crate::workspace::{Workspace, Workspaces};
use moesaic_plan::{LayerPlan, Role, Tilings};
use moesaic_spec::LayerSpec;
use moesaic_target::{Buffer, Device, Module, Ptr};
use moesaic_tensor::{Tensor, WeightSource};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// A layer that can run. Calls from several threads take turns.
pub struct Layer {
    pub(crate) tilings: Tilings,
    /// For each plan of the tilings one per kernel.
    pub(crate) modules: Vec<Vec<Arc<dyn Module>>>,
    pub(crate) weights: HashMap<String, Buffer>,
    pub(crate) device: Arc<dyn Device>,
    workspaces: Mutex<Workspaces>,
    /// What each pass takes and gives.
    pub(crate) ports: AllPorts,
    /// The tensors that a training call leaves for backward.
    pub(crate) saved: Vec<String>,
    /// Those of them that other calls need for themselves.
    pub(crate) passing: Vec<String>,
    /// What backward adds up, by name: `grad.<weight>`; made when first needed.
    pub(crate) gradients: OnceLock<HashMap<String, Buffer>>,
    /// Sets of kept tensors that no [`crate::Saved`] holds now.
    pub(crate) idle: Arc<Mutex<Vec<Workspace>>>,
}

impl Layer {
    pub(crate) fn new(
        tilings: Tilings,
        modules: Vec<Vec<Arc<dyn Module>>>,
        device: Arc<dyn Device>,
        weights: &dyn WeightSource,
        shared: HashMap<String, Buffer>,
    ) -> Result<Layer, EngineError> {
        let plan = tilings.first();
        let mut held = shared;
        let own = |name: &str| !held.contains_key(name);
        held.extend(placed(plan, &modules[0], &*device, weights, own)?);
        let saved = plan.saved().into_iter().map(|t| plan[t].name.clone());
        Ok(Layer {
            ports: ports(plan),
            saved: saved.collect(),
            passing: passing(plan),
            tilings,
            modules,
            weights: held,
            device,
            workspaces: Mutex::default(),
            gradients: OnceLock::new(),
            idle: Arc::default(),
        })
    }

    /// The address of a weight or of a weight's gradient.
    pub(crate) fn held(&self, name: &str) -> Option<Ptr> {
        let gradient = || self.gradients.get()?.get(name);
        let buffer = self.weights.get(name).or_else(gradient)?;
        Some(buffer.ptr())
    }

    /// Replaces a weight. What was launched before sees the old one.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for an unknown name, dtype or shape.
    pub fn set_weight(&self, name: &str, tensor: &Tensor<'_>) -> Result<(), EngineError> {
        let problem = |problem: String| EngineError::Weight {
            name: name.to_string(),
            problem,
        };
        let weights = || {
            self.plan()
                .tensors
                .iter()
                .filter(|t| t.role == Role::Weight)
        };
        let Some(plan) = weights().find(|tensor| tensor.name == name) else {
            let names: Vec<&str> = weights().map(|tensor| tensor.name.as_str()).collect();
            return Err(problem(format!("is none of {}", names.join(", "))));
        };
        tensor
            .check(plan.dtype, &shape_for(plan, 0))
            .map_err(problem)?;
        if name == "router.table" {
            check_table(&self.plan().spec, tensor, 0)?;
        }
        if let Some(buffer) = self.weights.get(name) {
            self.device.upload(&tensor.data, buffer, 0)?;
            return Ok(());
        }
        let packing = Packing {
            plan: self.plan(),
            modules: &self.modules[0],
            device: &*self.device,
        };
        packing.pack(name, tensor, 0, &self.weights)
    }

    /// The address of a weight on the device, for an optimizer that runs there.
    /// `None` when the layer keeps it only as its kernels read it, which a
    /// training layer never does.
    pub fn weight_ptr(&self, name: &str) -> Option<Ptr> {
        self.weights.get(name).map(Buffer::ptr)
    }

    /// The spec it was made from.
    pub fn spec(&self) -> &LayerSpec {
        &self.plan().spec
    }

    /// Its kernels, tensors and steps. What `moesaic tune` found changes tiles for
    /// some numbers of tokens, and with them sizes of scratch: see
    /// [`Layer::tilings`].
    pub fn plan(&self) -> &LayerPlan {
        self.tilings.first()
    }

    /// Its plans by the number of tokens of a call.
    pub fn tilings(&self) -> &Tilings {
        &self.tilings
    }

    /// Bytes of device memory its intermediates hold at present.
    pub fn workspace_bytes(&self) -> u64 {
        self.lock_workspaces().bytes()
    }

    /// A panic while the lock was held can only have left a workspace that
    /// `reserve` replaces, so poisoning carries no information.
    pub(crate) fn lock_workspaces(&self) -> MutexGuard<'_, Workspaces> {
        self.workspaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes room for a call of so many tokens that keeps nothing.
    pub(crate) fn reserve(
        &self,
        workspaces: &mut Workspaces,
        tokens: usize,
    ) -> Result<(), EngineError> {
        if workspaces.hold(tokens as u64) {
            return Ok(()); // without an allocation for a list
        }
        let Workspaces { every, passing } = workspaces;
        self.check_size(every.bytes() + passing.bytes(), &self.passing, tokens)?;
        every.reserve(&self.tilings, &*self.device, tokens as u64)?;
        let names = self.passing.iter().map(String::as_str);
        passing.reserve_for(names, &self.tilings, &*self.device, tokens as u64)?;
        Ok(())
    }

    /// Makes room for a training call of so many tokens, but for what it keeps.
    pub(crate) fn reserve_training(
        &self,
        every: &mut Workspace,
        tokens: usize,
    ) -> Result<(), EngineError> {
        if !every.holds(tokens as u64) {
            self.check_size(every.bytes(), &self.saved, tokens)?;
            every.reserve(&self.tilings, &*self.device, tokens as u64)?;
        }
        Ok(())
    }
}

/// A spec may have been built in Rust, so it is validated here as well.
pub(crate) fn check_spec(spec: &LayerSpec) -> Result<(), EngineError> {
    spec.validate().map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(|p| format!("  {p}")).collect();
        EngineError::Spec(lines.join("\n"))
    })
}

/// Expert ids in a routing table index device memory. The tensor is the table's rows
/// from the first on.
pub(crate) fn check_table(
    spec: &LayerSpec,
    rows: &Tensor<'_>,
    first: usize,
) -> Result<(), EngineError> {
    let experts = spec.routed_experts() as i32;
    let ids = rows.values::<i32>().unwrap_or_default();
    match ids.iter().position(|id| !(0..experts).contains(id)) {
        None => Ok(()),
        Some(at) => Err(EngineError::Weight {
            name: "router.table".to_string(),
            problem: format!(
                "names expert {} at element {}, there are {experts}",
                ids[at],
                first * (ids.len() / rows.shape[0].max(1)) + at
            ),
        }),
    }
}
