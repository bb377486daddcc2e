//! Upload of weights in the order that kernels read them, a few rows at a time, so that memory
//! holds a layer once.

use crate::call::shape_for;
use crate::error::EngineError;
use crate::launch::{Modules, dims};
use crate::memory::Buffers;
use crate::reason::WeightReason;
use moesaic_plan::{LaunchStep, LayerPlan, TensorId, TensorPlan, TensorRole};
use moesaic_spec::{LayerSpec, check_weight_name};
use moesaic_target::{Arg, Buffer, Device, Ptr};
use moesaic_tensor::{Tensor, TensorKind, WeightSource, check_kind};
use std::ops::Range;

/// The bytes of a weight that are read at a time: enough work for all threads, and little compared
/// with a layer.
const READ_BYTES: usize = 8 << 20;

/// Puts the wanted weights of a plan on the device, packed ones among them. All dtypes and shapes
/// are checked before any weight is read. Rows are read from the source when they are uploaded or
/// packed, and freed before the next are read.
pub(crate) fn placed(
    plan: &LayerPlan,
    modules: &Modules,
    device: &dyn Device,
    weights: &dyn WeightSource,
    wanted: impl Fn(&str) -> bool,
) -> Result<Buffers, EngineError> {
    let of = |role: TensorRole| {
        let tensors = plan.tensors.iter().enumerate();
        let tensors = tensors.map(|(at, tensor)| (TensorId(at), tensor));
        tensors.filter(move |(_, tensor)| tensor.role == role)
    };
    let packing = Packing {
        plan,
        modules,
        device,
    };
    let is_wanted = |(id, tensor): &(TensorId, &TensorPlan)| {
        if plan.packs_away(*id) {
            packing.made_of(*id).any(|packed| wanted(&packed.name))
        } else {
            wanted(&tensor.name)
        }
    };
    let found = of(TensorRole::Weight).filter(is_wanted);
    let found = found.map(|(id, tensor)| Ok((id, Weight::find(weights, tensor)?)));
    // Checked before the first byte is read: a wrong checkpoint usually has many wrong tensors, and
    // gigabytes would be uploaded before the second error.
    let found = all_or_every_error(found)?;

    let _placing = Placing::begin(device);
    let mut held = Buffers::default();
    for (id, tensor) in of(TensorRole::Packed).filter(|(_, tensor)| wanted(&tensor.name)) {
        let bytes = usize::try_from(tensor.bytes(0)).unwrap_or(usize::MAX);
        held.push(id, device.alloc(bytes)?);
    }
    for (id, weight) in found {
        if plan.packs_away(id) {
            packing.pack_all(id, &weight, &held)?
        } else {
            held.push(id, packing.upload(&weight)?)
        }
    }
    Ok(held)
}

/// Checks that a spec has every weight of a source that was put together for its layer. A bias that
/// it lacks, say, would otherwise be left out of y without a word.
pub(crate) fn check_names(spec: &LayerSpec, weights: &dyn WeightSource) -> Result<(), EngineError> {
    let check = |name| check_weight_name(spec, name).map_err(|why| EngineError::weight(name, why));
    let names = weights.names().unwrap_or_default();
    all_or_every_error(names.into_iter().map(check)).map(drop)
}

/// Returns all results, or one error with everything that was wrong.
fn all_or_every_error<T>(
    found: impl Iterator<Item = Result<T, EngineError>>,
) -> Result<Vec<T>, EngineError> {
    let (mut good, mut wrong) = (Vec::new(), Vec::new());
    for one in found {
        match one {
            Ok(one) => good.push(one),
            Err(error) => wrong.push(error),
        }
    }
    match wrong.len() {
        0 => Ok(good),
        1 => Err(wrong.remove(0)),
        _ => Err(EngineError::Weights(wrong)),
    }
}

/// A guard during which weights stay on the NUMA node that writes them first; it ends when dropped,
/// also by an error.
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

/// A weight of a plan in a source that has one of this dtype and shape.
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
            weight.refused(WeightReason::Missing {
                dtype,
                shape: shape.clone(),
            })
        })?;
        let found = TensorKind {
            dtype: found,
            shape: &sizes,
        };
        let same = check_kind(found, TensorKind { dtype, shape });
        same.map_err(|differs| weight.refused(differs))?;
        Ok(weight)
    }

    fn refused(&self, reason: impl Into<WeightReason>) -> EngineError {
        EngineError::weight(&self.tensor.name, reason)
    }

    fn count(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    fn row_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * self.tensor.dtype.size()
    }

    /// Passes its rows on in order, at most `most` at a time, with the index of the first; all at
    /// once if they must stay together.
    fn each_chunk(
        &self,
        most: usize,
        mut take: impl FnMut(usize, &Tensor<'_>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut first = 0;
        while first < self.count() {
            let rows = first..self.count().min(first + most);
            let mut read = self.rows(rows.clone())?;
            // A source may return fewer rows than asked for, because experts lie in several files,
            // but a weight that is packed or placed as a whole must arrive in one read.
            if most >= self.count() && read.shape != self.shape {
                read = self.joined(read)?;
            }
            take(first, &read)?;
            // Pages of a mapped file count as memory of this process until they are released; the
            // layer would be in memory twice.
            read.data.release();
            first += read.shape.first().copied().unwrap_or(1);
        }
        Ok(())
    }

    /// Reads at most these rows, at least one.
    fn rows(&self, rows: Range<usize>) -> Result<Tensor<'a>, EngineError> {
        let name = &self.tensor.name;
        let read = self.source.rows(name, rows.clone());
        let read = read.map_err(|source| EngineError::Source {
            name: name.clone(),
            source,
        })?;
        let mut shape = self.shape.clone();
        if let Some(count) = shape.first_mut() {
            let given = read.shape.first().copied().unwrap_or(0);
            // Fewer rows are fine and are asked for again. No row would loop for ever and more rows
            // would overrun the buffer, so both fail the check below.
            *count = given.clamp(1, rows.len());
        }
        let checked = read.check(self.tensor.dtype, &shape);
        checked.map_err(|differs| self.refused(differs))?;
        Ok(read)
    }

    /// Reads all rows; `first` are the first of them.
    fn joined(&self, first: Tensor<'_>) -> Result<Tensor<'static>, EngineError> {
        let mut whole = Tensor::zeros(self.tensor.dtype, &self.shape);
        let mut to = whole.data.to_mut();
        let mut next = 0;
        let mut read = first;
        loop {
            let (own, rest) = to.split_at_mut(read.data.len());
            own.copy_from_slice(&read.data);
            read.data.release();
            next += read.shape[0];
            if next == self.count() {
                return Ok(whole);
            }
            to = rest;
            read = self.rows(next..self.count())?;
        }
    }
}

/// The packing of weights; uploads those that are not packed.
pub(crate) struct Packing<'a> {
    pub plan: &'a LayerPlan,
    pub modules: &'a Modules,
    pub device: &'a dyn Device,
}

impl Packing<'_> {
    /// Uploads a weight to device memory.
    fn upload(&self, weight: &Weight<'_>) -> Result<Buffer, EngineError> {
        let bytes = usize::try_from(weight.tensor.bytes(0)).unwrap_or(usize::MAX);
        let buffer = self.device.alloc(bytes.max(64))?;
        weight.each_chunk(self.most(weight), |first, read| {
            let at = first * weight.row_bytes();
            let upload = |read: &Tensor<'_>| self.device.upload(&read.data, &buffer, at);
            if weight.tensor.name == TABLE {
                upload(&checked_table(&self.plan.spec, read, first)?)?
            } else {
                upload(read)?
            }
            Ok(())
        })?;
        Ok(buffer)
    }

    /// Packs a weight into all packed tensors made of it.
    fn pack_all(
        &self,
        id: TensorId,
        weight: &Weight<'_>,
        held: &Buffers,
    ) -> Result<(), EngineError> {
        // Only experts are packed independently of each other. Within one matrix a tile mixes rows,
        // so every other weight is packed as a whole.
        let by_expert = self.steps(id).all(|step| {
            let experts = self.experts(step);
            weight.shape.len() == 3 && weight.shape[0] == experts
        });
        let most = if by_expert {
            self.most(weight)
        } else {
            weight.count()
        };
        weight.each_chunk(most, |first, read| self.pack(id, read, first, held))
    }

    /// Returns the number of rows to read at a time.
    fn most(&self, weight: &Weight<'_>) -> usize {
        if self.device.places_whole() {
            weight.count()
        } else {
            (READ_BYTES / weight.row_bytes().max(1)).max(1)
        }
    }

    /// Packs experts of a weight, from `first` on, into the packed tensors made of it; or all of
    /// it, with `first` 0.
    pub(crate) fn pack(
        &self,
        weight: TensorId,
        read: &Tensor<'_>,
        first: usize,
        held: &Buffers,
    ) -> Result<(), EngineError> {
        let staged;
        let from = match self.where_it_is(read) {
            Some(address) => address,
            None => {
                staged = self.device.alloc(read.data.len().max(64))?;
                self.device.upload(&read.data, &staged, 0)?;
                staged.ptr()
            }
        };
        for step in self.steps(weight) {
            let experts = self.experts(step);
            let some = first..experts.min(first + read.shape[0]);
            let packed = held
                .get(step.tensors[1])
                .expect("packed weights have memory");
            let bytes = self.plan[step.tensors[1]].bytes(0) / experts as u64;
            let to = Ptr(packed.ptr().0 + bytes * first as u64);
            self.launch(step, from, to, (some.len() < experts).then_some(some.len()))?;
        }
        // The caller frees the source next, so the kernels that read it must have finished.
        Ok(self.device.synchronize()?)
    }

    /// Returns the address of what was read, if kernels can read it there: its elements must be
    /// aligned as their type is.
    fn where_it_is(&self, read: &Tensor<'_>) -> Option<Ptr> {
        let address = self.device.host_ptr(&read.data)?;
        let aligned = address.0.is_multiple_of(read.dtype.size() as u64);
        aligned.then_some(address)
    }

    /// Returns the launches that read a weight.
    fn steps(&self, weight: TensorId) -> impl Iterator<Item = &LaunchStep> {
        let steps = self.plan.prepare.iter();
        steps.filter(move |step| step.tensors[0] == weight)
    }

    /// Returns the packed tensors that are made of a weight.
    fn made_of(&self, weight: TensorId) -> impl Iterator<Item = &TensorPlan> {
        let packed = self.steps(weight).map(|step| step.tensors[1]);
        packed.map(|id| &self.plan[id])
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
            // A grid with fewer experts leaves the rest of the packed tensor alone; no kernel of
            // its own is needed for a part.
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

/// Returns the gradient of a weight, all zero.
pub(crate) fn zeroed(tensor: &TensorPlan, device: &dyn Device) -> Result<Buffer, EngineError> {
    let bytes = (tensor.bytes(0) as usize).max(64);
    let buffer = device.alloc(bytes)?;
    // Memory of a device is undefined, and a first backward pass may accumulate.
    device.upload(&vec![0; bytes], &buffer, 0)?;
    Ok(buffer)
}

/// The weight that has ids.
pub(crate) const TABLE: &str = "router.table";

/// Rows of a routing table from the first on, copied. Expert ids index device memory,
/// so they are checked: the copy, since a file that is mapped may change meanwhile.
pub(crate) fn checked_table(
    spec: &LayerSpec,
    rows: &Tensor<'_>,
    first: usize,
) -> Result<Tensor<'static>, EngineError> {
    let ids: Vec<i32> = rows.to_vec().unwrap_or_default();
    match spec
        .indices(TABLE)
        .map_or(Ok(()), |range| range.check(&ids))
    {
        Ok(()) => Ok(Tensor::owned(&rows.shape, ids)),
        Err(error) => {
            let reason = WeightReason::NoExpert {
                found: error.found,
                at: first * (ids.len() / rows.shape[0].max(1)) + error.at,
                experts: spec.routed_experts() as i32,
            };
            Err(EngineError::weight(TABLE, reason))
        }
    }
}
