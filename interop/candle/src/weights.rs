//! The weights of a layer that trains: candle's tensors, read where they lie or copied.

use crate::host::{candle_type, lend, named};
use candle_core::{CpuStorage, Error, Result, Storage, Tensor};
use moesaic::spec::canonical_tensors;
use moesaic::{DType, Engine, Layer, LayerSpec, Ptr, Tensor as HostTensor, Tensors};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

/// The weights of a layer, in canonical order.
pub struct Weights(Vec<Weight>);

/// A weight, and its type in the layer.
struct Weight {
    name: String,
    tensor: Tensor,
    dtype: DType,
    /// Whether kernels read it in candle's memory.
    in_place: bool,
}

impl Weight {
    fn lend<R>(&self, read: impl FnOnce(HostTensor<'_>) -> Result<R>) -> Result<R> {
        let shown = lend(&self.tensor, self.dtype, self.tensor.dims(), read);
        shown.map_err(|error| named(&self.name, error))
    }
}

/// The locks of the weights that a call reads in place.
///
/// An optimizer writes a variable under the same lock, so no weight changes during a call.
#[must_use]
pub struct Reading<'w>(Vec<Lock<'w>>);

/// The lock of a tensor's elements. candle returns a guard whose type it does not export.
type Lock<'w> = Box<dyn Deref<Target = Storage> + 'w>;

impl Reading<'_> {
    /// Ends the call: the layer reads its own memory again, before the locks are given back.
    ///
    /// # Errors
    /// None: the list of weights is empty.
    pub fn end(self, layer: &Layer) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        read_at(layer, &[])
    }
}

impl Weights {
    /// Finds the tensors of a spec by their canonical names.
    ///
    /// # Errors
    /// Some are missing: the error names each.
    pub fn find(spec: &LayerSpec, given: &BTreeMap<String, Tensor>) -> Result<Weights> {
        let (mut all, mut missing) = (Vec::new(), String::new());
        for tensor in canonical_tensors(spec) {
            let Some(found) = given.get(&tensor.name) else {
                missing += &format!("\n  `{}` {:?}", tensor.name, tensor.shape);
                continue;
            };
            all.push(Weight {
                tensor: found.clone(),
                name: tensor.name,
                dtype: tensor.dtype,
                in_place: false,
            });
        }
        if missing.is_empty() {
            Ok(Weights(all))
        } else {
            Err(Error::Msg(format!("weights are missing:{missing}")))
        }
    }

    /// Finds the weights that the kernels of a layer can read in candle's memory.
    pub fn find_in_place(&mut self, engine: &Engine, layer: &Layer) {
        // A layer over ranks keeps parts of weights of its own.
        if layer.mesh().is_some() {
            return;
        }
        let reads_host = engine.device().host_ptr(&[]).is_some();
        for weight in &mut self.0 {
            weight.in_place = reads_host
                && weight.tensor.dtype() == candle_type(weight.dtype)
                && weight.tensor.is_contiguous()
                && layer.reads_weight(&weight.name);
        }
    }

    /// Returns each weight by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|weight| (&*weight.name, &weight.tensor))
    }

    /// Returns the names of the weights that a call copies.
    pub fn copied_names(&self) -> impl Iterator<Item = &str> {
        let copied = self.0.iter().filter(|weight| !weight.in_place);
        copied.map(|weight| &*weight.name)
    }

    /// Copies all weights.
    ///
    /// # Errors
    /// One is of a type that does not convert.
    pub fn copied(&self) -> Result<Tensors<'static>> {
        let mut copied = Tensors::new();
        for weight in &self.0 {
            copied.insert(&weight.name, weight.lend(|host| Ok(host.into_static()))?);
        }
        Ok(copied)
    }

    /// Gives the layer the current values: copies those that it cannot read in place.
    ///
    /// # Errors
    /// A conversion fails.
    pub fn hand_over(&self, layer: &Layer) -> Result<Reading<'_>> {
        for weight in self.0.iter().filter(|weight| !weight.in_place) {
            weight.lend(|host| layer.set_weight(&weight.name, &host).map_err(Error::wrap))?;
        }
        self.read_in_place(layer)
    }

    /// Makes the layer read the other weights where they lie, until [`Reading::end`].
    ///
    /// # Errors
    /// A tensor's elements are misaligned.
    pub fn read_in_place(&self, layer: &Layer) -> Result<Reading<'_>> {
        let here: Vec<&Weight> = self.0.iter().filter(|weight| weight.in_place).collect();
        // Weights may be parts of one tensor. A thread that locks it twice would wait for itself as
        // soon as another thread waits to write in between, so each lock is taken once.
        let place = |weight: &&Weight| -> *const Storage { &*weight.tensor.storage_and_layout().0 };
        let places: Vec<*const Storage> = here.iter().map(place).collect();
        let mut locks: Vec<(*const Storage, Lock<'_>)> = Vec::new();
        for (weight, place) in here.iter().zip(&places) {
            if !locks.iter().any(|(locked, _)| locked == place) {
                locks.push((*place, Box::new(weight.tensor.storage_and_layout().0)));
            }
        }
        let mut addresses = Vec::with_capacity(here.len());
        for (weight, place) in here.iter().zip(&places) {
            let lock = locks.iter().find(|(locked, _)| locked == place);
            let storage = &lock.expect("it was just locked").1;
            let address = address(storage, weight.tensor.layout().start_offset());
            let address = address.map_err(|error| named(&weight.name, error))?;
            addresses.push((&*weight.name, address));
        }
        if !addresses.is_empty() {
            read_at(layer, &addresses)?;
        }
        Ok(Reading(locks.into_iter().map(|(_, lock)| lock).collect()))
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.iter().map(|(name, _)| name))
            .finish()
    }
}

/// Returns the address of an element.
fn address(storage: &Storage, at: usize) -> Result<Ptr> {
    let Storage::Cpu(storage) = storage else {
        candle_core::bail!("is not on the CPU any more")
    };
    Ok(Ptr(match storage {
        CpuStorage::F32(data) => data[at..].as_ptr() as u64,
        CpuStorage::F16(data) => data[at..].as_ptr() as u64,
        CpuStorage::BF16(data) => data[at..].as_ptr() as u64,
        _ => candle_core::bail!("is of a type that kernels do not read"),
    }))
}

fn read_at(layer: &Layer, weights: &[(&str, Ptr)]) -> Result<()> {
    if layer.mesh().is_some() {
        return Ok(());
    }
    // SAFETY: each address is that of a contiguous tensor of the weight's type and shape, which the
    // engine checked when it made the layer of them. Its lock is held until `Reading::end` replaces
    // the addresses, and the layer runs under one lock with no other call in between. A launch on
    // the CPU, the device that reads host memory, has finished when the call returns.
    unsafe { layer.read_weights_at(weights) }.map_err(Error::wrap)
}
