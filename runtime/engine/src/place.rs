//! Putting weights on the device, in the order the kernels read them: a piece at a
//! time, so that memory holds a layer once.

use crate::EngineError;
use crate::forward::shape_for;
use crate::launch::dims;
use crate::layer::check_table;
use moesaic_plan::{LaunchStep, LayerPlan, Role, TensorId, TensorPlan};
use moesaic_target::{Arg, Buffer, Device, Module, Ptr};
use moesaic_tensor::{Tensor, WeightSource, check_kind};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a weight that are read together: work for all threads, and little beside
/// a layer.
const PIECE: usize = 8 << 20;

/// The wanted weights of a plan on the device, packed ones among them. A piece of a
/// weight is asked of its source when it is uploaded or packed, and let go of before
/// the next.
pub(crate) fn placed(
    plan: &LayerPlan,
    modules: &[Arc<dyn Module>],
    device: &dyn Device,
    weights: &dyn WeightSource,
    wanted: impl Fn(&str) -> bool,
) -> Result<HashMap<String, Buffer>, EngineError> {
    let _placing = Placing::begin(device);
    let mut held = HashMap::new();
    let of = |role: Role| {
        let tensors = plan.tensors.iter().enumerate();
        tensors.filter(move |(_, tensor)| tensor.role == role)
    };
    for (_, tensor) in of(Role::Packed).filter(|(_, tensor)| wanted(&tensor.name)) {
        let bytes = usize::try_from(tensor.bytes(0)).unwrap_or(usize::MAX);
        held.insert(tensor.name.clone(), device.alloc(bytes)?);
    }
    let packing = Packing {
        plan,
        modules,
        device,
    };
    for (at, tensor) in of(Role::Weight) {
        let away = plan.packs_away(TensorId(at));
        let here = match away {
            true => packing
                .steps(&tensor.name)
                .any(|s| held.contains_key(&plan[s.tensors[1]].name)),
            false => wanted(&tensor.name),
        };
        if !here {
            continue;
        }
        let weight = Weight::find(weights, tensor)?;
        match away {
            true => packing.pack_all(&weight, &held)?,
            false => drop(held.insert(tensor.name.clone(), packing.upload(&weight)?)),
        }
    }
    Ok(held)
}

/// Weights stay where they are written first; ended when dropped, also by an error.
struct Placing<'a>(&'a dyn Device);

impl<'a> Placing<'a> {
    fn begin(device: &'a dyn Device) -> Placing<'a> {
        device.begin_placing();
        Placing(device)
    }
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        self.0.end_placing();
    }
}

/// A weight of a plan in its source, which has one of this type and shape.
struct Weight<'a> {
    source: &'a dyn WeightSource,
    tensor: &'a TensorPlan,
    shape: Vec<usize>,
}

impl<'a> Weight<'a> {
    fn find(source: &'a dyn WeightSource, tensor: &'a TensorPlan) -> Result<Self, EngineError> {
        let shape = shape_for(tensor, 0);
        let weight = Weight {
            source,
            tensor,
            shape,
        };
        let (dtype, shape) = (tensor.dtype, &weight.shape);
        let (found, sizes) = source.describe(&tensor.name).ok_or_else(|| {
            weight.problem(format!("is missing, expected {dtype} of shape {shape:?}"))
        })?;
        let same = check_kind((found, &sizes), (dtype, shape));
        same.map_err(|problem| weight.problem(problem))?;
        Ok(weight)
    }

    fn problem(&self, problem: String) -> EngineError {
        EngineError::Weight {
            name: self.tensor.name.clone(),
            problem,
        }
    }

    fn count(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    fn row_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * self.tensor.dtype.size()
    }

    /// Takes its rows, so many at a time or fewer, with the number of the first; in
    /// one piece whatever the source gives at a time, if they are all to be together.
    fn each_piece(
        &self,
        most: usize,
        mut take: impl FnMut(usize, &Tensor<'_>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut first = 0;
        while first < self.count() {
            let rows = first..self.count().min(first + most);
            let mut piece = self.rows(rows.clone())?;
            if most >= self.count() && piece.shape != self.shape {
                piece = self.joined(piece)?;
            }
            take(first, &piece)?;
            piece.data.release();
            first += piece.shape.first().copied().unwrap_or(1);
        }
        Ok(())
    }

    /// At most these rows, at least one.
    fn rows(&self, rows: Range<usize>) -> Result<Tensor<'a>, EngineError> {
        let name = &self.tensor.name;
        let read = self.source.rows(name, rows.clone());
        let piece = read.map_err(|source| EngineError::Source {
            name: name.clone(),
            source,
        })?;
        let mut shape = self.shape.clone();
        if let Some(count) = shape.first_mut() {
            let given = piece.shape.first().copied().unwrap_or(0);
            *count = given.clamp(1, rows.len());
        }
        let checked = piece.check(self.tensor.dtype, &shape);
        checked.map_err(|problem| self.problem(problem))?;
        Ok(piece)
    }

    /// All rows, of which these are the first.
    fn joined(&self, first: Tensor<'_>) -> Result<Tensor<'static>, EngineError> {
        let mut whole = Tensor::zeros(self.tensor.dtype, &self.shape);
        let mut to = whole.data.to_mut();
        let mut next = 0;
        let mut piece = first;
        loop {
            let (own, rest) = to.split_at_mut(piece.data.len());
            own.copy_from_slice(&piece.data);
            piece.data.release();
            next += piece.shape[0];
            if next == self.count() {
                return Ok(whole);
            }
            to = rest;
            piece = self.rows(next..self.count())?;
        }
    }
}

/// What packs weights, and uploads those that are not packed.
pub(crate) struct Packing<'a> {
    pub plan: &'a LayerPlan,
    pub modules: &'a [Arc<dyn Module>],
    pub device: &'a dyn Device,
}

impl Packing<'_> {
    /// A weight in device memory.
    fn upload(&self, weight: &Weight<'_>) -> Result<Buffer, EngineError> {
        let bytes = usize::try_from(weight.tensor.bytes(0)).unwrap_or(usize::MAX);
        let buffer = self.device.alloc(bytes.max(64))?;
        weight.each_piece(self.most(weight), |first, piece| {
            if weight.tensor.name == "router.table" {
                check_table(&self.plan.spec, piece, first)?;
            }
            let at = first * weight.row_bytes();
            Ok(self.device.upload(&piece.data, &buffer, at)?)
        })?;
        Ok(buffer)
    }

    /// Puts a weight into the packed tensors that are made of it.
    fn pack_all(
        &self,
        weight: &Weight<'_>,
        held: &HashMap<String, Buffer>,
    ) -> Result<(), EngineError> {
        let name = &weight.tensor.name;
        let by_expert = self.steps(name).all(|step| {
            let experts = self.experts(step);
            weight.shape.len() == 3 && weight.shape[0] == experts
        });
        let most = match by_expert {
            true => self.most(weight),
            false => weight.count(),
        };
        weight.each_piece(most, |first, piece| self.pack(name, piece, first, held))
    }

    /// Rows of a piece.
    fn most(&self, weight: &Weight<'_>) -> usize {
        match self.device.places_whole() {
            true => weight.count(),
            false => (PIECE / weight.row_bytes().max(1)).max(1),
        }
    }

    /// Puts experts of a weight, from the first on, into the packed tensors that are
    /// made of it; or all of it, with `first` 0.
    pub(crate) fn pack(
        &self,
        name: &str,
        piece: &Tensor<'_>,
        first: usize,
        held: &HashMap<String, Buffer>,
    ) -> Result<(), EngineError> {
        let staged;
        let from = match self.where_it_is(piece) {
            Some(address) => address,
            None => {
                staged = self.device.alloc(piece.data.len().max(64))?;
                self.device.upload(&piece.data, &staged, 0)?;
                staged.ptr()
            }
        };
        for step in self.steps(name) {
            let experts = self.experts(step);
            let some = first..experts.min(first + piece.shape[0]);
            let packed = &held[&self.plan[step.tensors[1]].name];
            let to = Ptr(packed.ptr().0 + (packed.bytes() / experts * first) as u64);
            self.launch(step, from, to, (some.len() < experts).then_some(some.len()))?;
        }
        // The source goes now, and the kernels that read it must be done.
        Ok(self.device.synchronize()?)
    }

    /// The address of a piece that kernels can read where it is: kernels take
    /// elements that lie as their type does.
    fn where_it_is(&self, piece: &Tensor<'_>) -> Option<Ptr> {
        let address = self.device.host_ptr(&piece.data)?;
        let aligned = address.0.is_multiple_of(piece.dtype.size() as u64);
        aligned.then_some(address)
    }

    /// The launches that read a weight.
    fn steps(&self, name: &str) -> impl Iterator<Item = &LaunchStep> {
        let steps = self.plan.prepare.iter();
        steps.filter(move |step| self.plan[step.tensors[0]].name == name)
    }

    /// Experts of what a step packs.
    fn experts(&self, step: &LaunchStep) -> usize {
        shape_for(&self.plan[step.tensors[1]], 0)[0]
    }

    /// Packs all experts, or only so many.
    fn launch(
        &self,
        step: &LaunchStep,
        from: Ptr,
        to: Ptr,
        experts: Option<usize>,
    ) -> Result<(), EngineError> {
        let entry = &self.plan[step.entry];
        let mut dims = dims(&entry.launch, 0);
        if let Some(experts) = experts {
            dims.grid[self.plan.expert_axis(step)] = experts as u64;
        }
        let args = [Arg::Ptr(from), Arg::Ptr(to), Arg::I64(0)];
        // SAFETY: an entry that packs takes the weight, the packed tensor and a
        // number of tokens. Both have the sizes the plan gives, or, where fewer
        // experts are packed, begin with the first of them and have as many: an
        // expert's blocks touch its own elements only. Both stay until the device
        // is done.
        unsafe { self.modules[step.entry.kernel].launch(&entry.symbol, dims, &args)? };
        Ok(())
    }
}
