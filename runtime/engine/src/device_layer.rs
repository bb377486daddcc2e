//! A layer on a device: plans, loaded kernels, bound steps, weights.

use crate::call::{StepTime, shape_for};
use crate::error::EngineError;
use crate::launch::{Bound, Modules, Scalars, Watch};
use crate::memory::{
    Addresses, Buffers, Kept, Workspace, Workspaces, needed, outlives_calls, passing_tensors,
    tensors,
};
use crate::pass::{Pass, Ports, passing};
use crate::place::{Packing, TABLE, checked_table, placed};
use crate::reason::{InputReason, SpecReason, WeightReason};
use crate::trace::Recorder;
use crate::turns::{CallTurn, Turns, lock};
use moesaic_plan::{Chunk, LayerPlan, Step, TensorId, TensorPlan, TensorRole, Tilings};
use moesaic_spec::{LayerSpec, UnknownWeight};
use moesaic_target::{Buffer, Device, Ptr};
use moesaic_tensor::{Tensor, WeightSource};
use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// A layer on one device: that of a process, or a part of a rank's. Calls from several threads take
/// turns; threads whose calls should run at the same time use a [`DeviceLayer::handle`] each.
pub(crate) struct DeviceLayer {
    // Handles share these.
    pub(crate) tilings: Arc<Tilings>,
    /// The loaded kernels of each plan.
    modules: Arc<[Modules]>,
    pub(crate) weights: Buffers,
    pub(crate) device: Arc<dyn Device>,
    /// Every tensor, in the order of names.
    by_name: Arc<[TensorId]>,
    /// The inputs and outputs of each pass.
    pub(crate) ports: Arc<[Ports; 4]>,
    /// The steps of each pass.
    passes: Arc<[Bound]>,
    pub(crate) backward: Arc<Bound>,
    /// The tensors that no call leaves for another.
    every: Arc<[TensorId]>,
    /// The tensors that a training call leaves for backward.
    pub(crate) saved: Arc<[TensorId]>,
    /// The tensors among these that other calls need for themselves.
    passing: Arc<[TensorId]>,

    // Each handle has its own of these.
    /// Layers that share memory take turns with each other, too.
    turns: Arc<Turns>,
    workspaces: Mutex<Workspaces>,
    /// The gradients that backward sums, `grad.<weight>`; allocated when first needed.
    pub(crate) gradients: OnceLock<Buffers>,
    /// Sets of kept tensors that no [`crate::Saved`] holds now.
    pub(crate) idle: Arc<Mutex<Vec<Kept>>>,
    /// The recorder of launches.
    recorder: Option<Arc<dyn Recorder>>,
}

impl DeviceLayer {
    pub(crate) fn new(
        tilings: Tilings,
        modules: Vec<Modules>,
        device: Arc<dyn Device>,
        weights: &dyn WeightSource,
        shared: HashMap<String, Arc<Buffer>>,
    ) -> Result<DeviceLayer, EngineError> {
        let plan = tilings.first();
        let own = |name: &str| !shared.contains_key(name);
        let mut held = placed(plan, &modules[0], &*device, weights, own)?;
        for (name, buffer) in shared {
            if let Some(tensor) = plan.id(&name) {
                held.push(tensor, buffer);
            }
        }
        check_held(plan, &held)?;
        DeviceLayer::holding(tilings, modules, device, held)
    }

    /// Makes a layer whose calls bring weights from a workspace, and memory for their gradients.
    pub(crate) fn borrowing(
        tilings: Tilings,
        modules: Vec<Modules>,
        device: Arc<dyn Device>,
    ) -> Result<DeviceLayer, EngineError> {
        let layer = DeviceLayer::holding(tilings, modules, device, Buffers::default())?;
        // An empty set counts as made. The first backward pass would otherwise allocate gradients
        // that the workspace of each call holds.
        let gradients = OnceLock::from(Buffers::default());
        Ok(DeviceLayer { gradients, ..layer })
    }

    /// Makes a layer over weights that exist already.
    fn holding(
        tilings: Tilings,
        modules: Vec<Modules>,
        device: Arc<dyn Device>,
        held: Buffers,
    ) -> Result<DeviceLayer, EngineError> {
        let (tilings, modules) = (Arc::new(tilings), Arc::from(modules));
        let plan = tilings.first();
        let bind = |steps| Bound::new(&tilings, &modules, steps);
        let passes = Pass::ALL.iter().map(|pass| bind(pass.steps(plan)));
        let mut by_name: Vec<TensorId> = (0..plan.tensors.len()).map(TensorId).collect();
        // Raw calls look up every tensor by name, so a search must not walk the whole plan.
        by_name.sort_by_key(|&id| &*plan[id].name);
        Ok(DeviceLayer {
            ports: Pass::ALL.map(|pass| pass.ports(plan)).into(),
            passes: passes.collect::<Result<_, _>>()?,
            backward: bind(&plan.backward)?.into(),
            every: passing_tensors(plan).into(),
            saved: plan.saved().into(),
            passing: passing(plan).into(),
            by_name: by_name.into(),
            tilings,
            modules,
            weights: held,
            device,
            turns: Arc::default(),
            workspaces: Mutex::default(),
            gradients: OnceLock::new(),
            idle: Arc::default(),
            recorder: None,
        })
    }

    /// Returns another handle to the layer: its weights and kernels are the same memory, its
    /// workspace is its own. Calls of two handles run at the same time, on a GPU in the order of the
    /// stream; calls of one take turns. [`DeviceLayer::set_weight`] changes a weight for all handles.
    ///
    /// A handle to a training layer has gradients of its own, and its backward takes what its own
    /// `forward_train` saved.
    pub fn handle(&self) -> DeviceLayer {
        DeviceLayer {
            tilings: Arc::clone(&self.tilings),
            modules: Arc::clone(&self.modules),
            weights: self.weights.clone(),
            device: Arc::clone(&self.device),
            by_name: Arc::clone(&self.by_name),
            ports: Arc::clone(&self.ports),
            passes: Arc::clone(&self.passes),
            backward: Arc::clone(&self.backward),
            every: Arc::clone(&self.every),
            saved: Arc::clone(&self.saved),
            passing: Arc::clone(&self.passing),
            turns: Arc::new(self.turns.handle()),
            workspaces: Mutex::default(),
            gradients: OnceLock::new(),
            idle: Arc::default(),
            recorder: self.recorder.clone(),
        }
    }

    /// Returns another handle to the layer that has its gradients, too, so that calls of the two
    /// take turns.
    pub(crate) fn handle_to_gradients(&self) -> Result<DeviceLayer, EngineError> {
        let handle = self.handle().taking_turns(&self.turns);
        if self.plan().training.is_none() {
            return Ok(handle);
        }
        let gradients = OnceLock::from(self.gradient_buffers()?.clone());
        Ok(DeviceLayer {
            gradients,
            ..handle
        })
    }

    /// Returns the locks by which calls take turns.
    pub(crate) fn turn(&self) -> &Arc<Turns> {
        &self.turns
    }

    /// Returns the layer with the locks of another: calls of the two never run at the same time.
    pub(crate) fn taking_turns(self, turns: &Arc<Turns>) -> DeviceLayer {
        let turns = Arc::clone(turns);
        DeviceLayer { turns, ..self }
    }

    /// Returns the layer with the locks of a handle of another: weights that both have change when
    /// no call of either runs.
    pub(crate) fn beside(self, other: &DeviceLayer) -> DeviceLayer {
        let turns = Arc::new(other.turns.handle());
        DeviceLayer { turns, ..self }
    }

    /// Returns the id of the tensor of this name.
    pub(crate) fn id(&self, name: &str) -> Option<TensorId> {
        let plan = self.plan();
        let found = self
            .by_name
            .binary_search_by(|&id| (*plan[id].name).cmp(name));
        found.ok().map(|at| self.by_name[at])
    }

    /// Returns the steps of a pass.
    pub(crate) fn bound(&self, pass: Pass) -> &Bound {
        &self.passes[pass as usize]
    }

    /// Steps of the layer's plan, bound.
    pub(crate) fn bind(&self, steps: &[Step]) -> Result<Bound, EngineError> {
        Bound::new(&self.tilings, &self.modules, steps)
    }

    /// Sets the addresses of a call: the layer's own tensors, and those in these workspaces. A
    /// captured graph keeps its addresses for good, so it keeps this memory alive: a larger call
    /// gets other memory, and the layer may be dropped.
    pub(crate) fn lay<const N: usize>(&self, addresses: &mut Addresses, memory: [&Workspace; N]) {
        addresses.clear(self.plan().tensors.len());
        let captured = self.captured();
        let held = [Some(&self.weights), self.gradients.get()];
        let passing = memory.map(|workspace| &workspace.buffers);
        for buffers in held.into_iter().flatten().chain(passing) {
            addresses.lay(buffers);
            if captured {
                buffers.keep(&*self.device);
            }
        }
    }

    /// Returns whether launches become part of a graph.
    pub(crate) fn captured(&self) -> bool {
        self.device.capturing().is_some()
    }

    /// Launches steps in order; `times` waits for each.
    pub(crate) fn run(
        &self,
        steps: &Bound,
        scalars: &Scalars,
        addresses: &Addresses,
        times: Option<&mut Vec<StepTime>>,
    ) -> Result<(), EngineError> {
        self.run_chunk(steps, scalars, addresses, times, None)
    }

    /// Launches steps for some of the rows, which traces name.
    pub(crate) fn run_chunk(
        &self,
        steps: &Bound,
        scalars: &Scalars,
        addresses: &Addresses,
        times: Option<&mut Vec<StepTime>>,
        chunk: Option<Chunk>,
    ) -> Result<(), EngineError> {
        let watch = self.recorder.as_deref().map(|recorder| Watch {
            recorder,
            tilings: &self.tilings,
            chunk,
        });
        // Before the first launch, so that nothing is written by a call that cannot end.
        if scalars.tokens() > 0
            && let Some(weight) = steps.missing_weight(addresses)
        {
            let name = self.plan()[weight].name.clone();
            return Err(EngineError::NoWeight { name });
        }
        // Forward and backward of a call must use one tiling: forward lists row tiles and backward
        // reads the list.
        let index = self.tilings.index(scalars.tokens());
        steps.run(index, &*self.device, scalars, addresses, times, watch)
    }

    /// Sets the recorder of every launch; `None` removes it. With a recorder the host waits for
    /// each launch on a GPU, so times are right and launches do not overlap.
    pub fn record(&mut self, recorder: Option<Arc<dyn Recorder>>) {
        self.recorder = recorder;
    }

    /// Replaces a weight, when no call of any [`DeviceLayer::handle`] is in flight. Earlier launches
    /// see the old values.
    ///
    /// # Errors
    /// [`EngineError::Weight`] for an unknown name, dtype or shape.
    pub fn set_weight(&self, name: &str, tensor: &Tensor<'_>) -> Result<(), EngineError> {
        let tensors = self.plan().tensors.iter();
        let weights = || tensors.clone().filter(|t| t.role == TensorRole::Weight);
        let Some(plan) = weights().find(|tensor| tensor.name == name) else {
            let known = weights().map(|tensor| tensor.name.clone()).collect();
            return Err(EngineError::weight(name, UnknownWeight { known }));
        };
        tensor
            .check(plan.dtype, &shape_for(plan, 0))
            .map_err(|differs| EngineError::weight(name, differs))?;
        let table;
        let tensor = if name == TABLE {
            table = checked_table(&self.plan().spec, tensor, 0)?;
            &table
        } else {
            tensor
        };
        let id = self.id(name).expect("found above");
        // Calls of other threads read weights without a copy, so they must not run until the upload
        // is done.
        let _changing = self.turns.change_weights();
        if let Some(buffer) = self.weights.get(id) {
            self.device.upload(&tensor.data, buffer, 0)?;
            return Ok(());
        }
        // A layer for inference on a CPU keeps a packed copy alone, so the new values are packed
        // into that.
        let packing = Packing {
            plan: self.plan(),
            modules: &self.modules[0],
            device: &*self.device,
        };
        packing.pack(id, tensor, 0, &self.weights)
    }

    /// Returns the address of a weight on the device, for an optimizer that runs there. `None` if
    /// the layer only has it packed, which a training layer never does.
    pub fn weight_ptr(&self, name: &str) -> Option<Ptr> {
        self.weights.get(self.id(name)?).map(Buffer::ptr)
    }

    /// Returns the spec it was made from.
    pub fn spec(&self) -> &LayerSpec {
        &self.plan().spec
    }

    /// Returns its kernels, tensors and steps. A tuning by `moesaic tune` changes tiles, and so
    /// sizes of scratch, for some numbers of tokens: see [`DeviceLayer::tilings`].
    pub fn plan(&self) -> &LayerPlan {
        self.tilings.first()
    }

    /// Returns its plans by the number of tokens of a call.
    pub fn tilings(&self) -> &Tilings {
        &self.tilings
    }

    /// Returns the bytes of device memory that its intermediates use now.
    pub fn workspace_bytes(&self) -> u64 {
        self.lock_workspaces().bytes()
    }

    /// Locks the workspaces, also after a panic: that can only have left a workspace that `reserve`
    /// replaces.
    pub(crate) fn lock_workspaces(&self) -> Turn<'_> {
        let turn = self.turns.call();
        Turn {
            workspaces: lock(&self.workspaces),
            _turn: turn,
        }
    }

    /// Reserves memory for a call that keeps nothing.
    pub(crate) fn reserve(
        &self,
        workspaces: &mut Workspaces,
        tokens: usize,
    ) -> Result<(), EngineError> {
        if workspaces.hold(tokens as u64) {
            return Ok(()); // without an allocation for a list
        }
        self.check_size(workspaces.bytes(), &self.passing, tokens)?;
        self.reserve_every(&mut workspaces.every, tokens)?;
        let (passing, tokens) = (&mut workspaces.passing, tokens as u64);
        let tensors = self.passing.iter().copied();
        Ok(passing.reserve(tensors, &self.tilings, &*self.device, tokens)?)
    }

    /// Reserves memory for the tensors that no call keeps.
    pub(crate) fn reserve_every(
        &self,
        every: &mut Workspace,
        tokens: usize,
    ) -> Result<(), EngineError> {
        let tensors = self.every.iter().copied();
        Ok(every.reserve(tensors, &self.tilings, &*self.device, tokens as u64)?)
    }

    /// Reserves memory for a training call, apart from the tensors that it keeps.
    pub(crate) fn reserve_training(
        &self,
        every: &mut Workspace,
        tokens: usize,
    ) -> Result<(), EngineError> {
        if !every.holds(tokens as u64) {
            self.check_size(every.bytes(), &self.saved, tokens)?;
            self.reserve_every(every, tokens)?;
        }
        Ok(())
    }

    /// Checks that a call can be that large, with memory for the tensors that no call keeps and for
    /// `others`; `held` bytes are freed first.
    fn check_size(&self, held: u64, others: &[TensorId], tokens: usize) -> Result<(), EngineError> {
        let tensors = self.every.iter().chain(others);
        check_size(&self.tilings, tensors, &*self.device, held, tokens)
    }

    /// Returns the most tokens of one call: assignments are counted in 31 bits.
    pub fn max_tokens(&self) -> usize {
        most_tokens(self.plan())
    }
}

impl fmt::Debug for DeviceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan();
        f.debug_struct("DeviceLayer")
            .field("shape", &plan.spec.shape)
            .field("target", &plan.target.to_string())
            .field("trains", &plan.training.is_some())
            .finish_non_exhaustive()
    }
}

/// A layer's workspaces during a call; no other call that uses the same memory runs meanwhile.
pub(crate) struct Turn<'a> {
    workspaces: MutexGuard<'a, Workspaces>,
    _turn: CallTurn<'a>,
}

impl Deref for Turn<'_> {
    type Target = Workspaces;

    fn deref(&self) -> &Workspaces {
        &self.workspaces
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Workspaces {
        &mut self.workspaces
    }
}

fn most_tokens(plan: &LayerPlan) -> usize {
    i32::MAX as usize / plan.spec.shape.top_k
}

/// Checks that a call can be that large, with memory for these tensors; `held` bytes are freed
/// first.
pub(crate) fn check_size<'a>(
    tilings: &Tilings,
    tensors: impl Iterator<Item = &'a TensorId>,
    device: &dyn Device,
    held: u64,
    tokens: usize,
) -> Result<(), EngineError> {
    let most = most_tokens(tilings.first());
    if tokens > most {
        let reason = InputReason::TooManyTokens { tokens, most };
        return Err(EngineError::input("x", reason));
    }
    // Linux promises more memory than it has and kills the process that uses it, so a CPU's call
    // that is too large must fail here. A GPU's allocation fails by itself, and `free_bytes` is
    // `None` there.
    let needed = needed(tilings, tensors, tokens as u64);
    match device.free_bytes().map(|free| free.saturating_add(held)) {
        Some(free) if needed > free => Err(EngineError::NoRoom {
            tokens,
            needed,
            free,
        }),
        _ => Ok(()),
    }
}

/// Returns the error of timing without the inputs of a call.
pub(crate) fn untimed(tokens: usize, call: &'static str) -> EngineError {
    EngineError::input("x", InputReason::NotRun { tokens, call })
}

/// Checks that every weight that a call reads has memory. Gradients get theirs before the first
/// backward pass, all other tensors before each call.
fn check_held(plan: &LayerPlan, held: &Buffers) -> Result<(), EngineError> {
    let called = plan.all_steps().chain(&plan.evaluation);
    for tensor in tensors(called) {
        let TensorPlan { name, role, .. } = &plan[tensor];
        let kept = outlives_calls(*role) && *role != TensorRole::WeightGradient;
        if kept && held.get(tensor).is_none() {
            return Err(EngineError::weight(name, WeightReason::NoMemory));
        }
    }
    Ok(())
}

/// Validates a spec, which may have been built in Rust and never parsed.
pub(crate) fn check_spec(spec: &LayerSpec) -> Result<(), EngineError> {
    spec.validate()
        .map_err(|problems| EngineError::Spec(SpecReason::Invalid(problems)))
}
