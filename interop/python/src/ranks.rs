//! Ranks that are processes of a torch process group, and layers over them.

use crate::dlpack::{Array, Imported, lent};
use crate::engines;
use crate::errors::{Failure, without_gil};
use crate::key::Key;
use crate::packed::imported_weights;
use crate::sockets::{Hello, Sockets, join, listen};
use crate::spec::Spec;
use crate::tensors::{Given, check_given};
use moesaic::collectives::Communicator;
use moesaic::{Layer, LayerOptions, Parallel, RawBackward, RawCall, Strategy, Tensors, Training};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// A port that waits for the other ranks of a group.
#[pyclass(frozen, module = "moesaic")]
pub struct Listener(TcpListener);

#[pymethods]
impl Listener {
    /// Opens a port at an address of this machine.
    #[new]
    fn new(host: &str) -> PyResult<Listener> {
        let listener = listen(host);
        let listener = listener.map_err(|error| Failure::Other(format!("{host}: {error}")))?;
        Ok(Listener(listener))
    }

    /// The number of the port.
    #[getter]
    fn port(&self) -> PyResult<u16> {
        let address = self.0.local_addr();
        Ok(address
            .map_err(|error| Failure::Other(error.to_string()))?
            .port())
    }
}

/// The ranks of a group, connected with each other. Every rank makes it.
///
/// Ranks(listener, rank, addresses, key, timeout): "host:port" of each rank, 16 bytes that all
/// share, and the seconds in which ranks must come, and each exchange end.
#[pyclass(frozen, module = "moesaic")]
pub struct Ranks {
    world: Mutex<Communicator>,
    sockets: Sockets,
    size: usize,
}

#[pymethods]
impl Ranks {
    #[new]
    fn new(
        py: Python<'_>,
        listener: &Bound<'_, Listener>,
        rank: usize,
        addresses: Vec<String>,
        key: [u8; 16],
        timeout: f64,
    ) -> PyResult<Ranks> {
        let listener = listener.get();
        let size = addresses.len();
        let timeout = Duration::try_from_secs_f64(timeout).map_err(|error| {
            Failure::Invalid(format!(
                "timeout = {timeout}: give seconds, 0 or more ({error})"
            ))
        })?;
        let (world, sockets) = without_gil(py, || {
            let device = engines::engine()?.device().clone();
            let hello = Hello { rank, key };
            let sockets = join(&listener.0, &hello, &addresses, timeout).map_err(Failure::Other)?;
            let world = Communicator::new(Box::new(sockets.clone()), device);
            Ok((world.with_deadline(timeout), sockets))
        })?;
        let world = Mutex::new(world);
        Ok(Ranks {
            world,
            sockets,
            size,
        })
    }

    /// Makes the mesh of expert_tp shards of each expert, and of as many groups of experts as the
    /// ranks allow. All ranks call it.
    fn mesh(&self, py: Python<'_>, expert_tp: usize) -> PyResult<Mesh> {
        if expert_tp == 0 || !self.size.is_multiple_of(expert_tp) {
            let problem = format!(
                "expert_tp = {expert_tp} does not divide {} ranks",
                self.size
            );
            return Err(Failure::Invalid(problem).into());
        }
        let parallel = Parallel {
            ep: self.size / expert_tp,
            expert_tp,
            ..Parallel::default()
        };
        let mesh = without_gil(py, || {
            let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(moesaic::Mesh::new(&mut *world, parallel)?)
        })?;
        Ok(Mesh(mesh))
    }

    /// Ends the connections, so that the last messages arrive. Exchanges fail afterwards.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        without_gil(py, || {
            self.sockets.lock().leave();
            Ok(())
        })
    }
}

/// A rank's place among those that share layers.
#[pyclass(frozen, module = "moesaic")]
pub struct Mesh(pub moesaic::Mesh);

#[pymethods]
impl Mesh {
    /// Copies this rank's part of a weight of the whole layer, by the weight's name.
    fn part(&self, py: Python<'_>, name: &str, whole: Bound<'_, PyAny>) -> PyResult<Array> {
        let whole = Imported::new(name, &whole)?;
        let part = without_gil(py, || {
            let named = Tensors::from([(name.to_string(), whole.tensor())]);
            Ok(self.0.part(&named, name)?)
        })?;
        Ok(Array::new(part))
    }

    /// Returns the shape of this rank's part of a weight.
    fn part_shape(&self, name: &str, whole: Vec<usize>) -> PyResult<Vec<usize>> {
        let shape = self.0.part_shape(name, &whole);
        Ok(shape.map_err(Failure::from)?)
    }

    /// Returns whether every rank has the same values of a weight.
    fn is_replicated(&self, name: &str) -> bool {
        self.0.process_group(name) == moesaic::mesh::ProcessGroup::World
    }
}

/// Reads how ranks exchange rows.
///
/// # Errors
/// The text, and what in it no strategy has.
pub fn strategy(text: &str) -> Result<Strategy, Failure> {
    let parsed: Result<Strategy, _> = text.parse();
    parsed.map_err(|error| Failure::Invalid(format!("strategy `{text}`: {error}")))
}

/// The state between forward and backward of a call over ranks.
#[pyclass(frozen, module = "moesaic")]
pub struct RankState(moesaic::Saved);

/// One rank's part of a layer. All ranks make the same calls in the same order.
///
/// RankLayer(mesh, spec, weights): this rank's part of the weights by canonical name, which it
/// copies.
#[pyclass(frozen, module = "moesaic")]
pub struct RankLayer {
    layer: RwLock<Layer>,
    process: u32,
}

impl RankLayer {
    fn layer(&self) -> Result<RwLockReadGuard<'_, Layer>, Failure> {
        if self.process != std::process::id() {
            let problem = "the ranks joined before `fork`: start processes by `spawn`";
            return Err(Failure::Other(problem.to_string()));
        }
        Ok(self.layer.read().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl RankLayer {
    #[new]
    fn new(
        py: Python<'_>,
        mesh: &Bound<'_, Mesh>,
        spec: &Bound<'_, Spec>,
        weights: BTreeMap<String, Bound<'_, PyAny>>,
    ) -> PyResult<RankLayer> {
        let (mesh, spec) = (&mesh.get().0, spec.get());
        let weights = imported_weights(&spec.spec, &weights)?;
        let layer = without_gil(py, || {
            let options = LayerOptions {
                part: true,
                ..LayerOptions::over(mesh).training(Training::default())
            };
            Ok(engines::engine()?.layer_with(&spec.spec, &lent(&weights), options)?)
        })?;
        Ok(RankLayer {
            layer: RwLock::new(layer),
            process: std::process::id(),
        })
    }

    /// Replaces weights by copies.
    fn set_weights(&self, py: Python<'_>, tensors: Vec<Given>) -> PyResult<()> {
        without_gil(py, || {
            let layer = self.layer()?;
            for given in &tensors {
                // SAFETY: Python holds the memory until this returns.
                let tensor = unsafe { given.tensor() }?;
                layer.set_weight(given.name(), &tensor)?;
            }
            Ok(())
        })
    }

    /// Sets how ranks exchange rows, such as "overlap_degree=2". All ranks set the same.
    fn set_strategy(&self, py: Python<'_>, strategy: &str) -> PyResult<()> {
        let parsed = self::strategy(strategy)?;
        without_gil(py, || {
            let layer = self.layer.write().unwrap_or_else(PoisonError::into_inner);
            Ok(layer.set_strategy(parsed)?)
        })
    }

    /// Evaluates. `tensors` has inputs and at least the output y.
    #[pyo3(signature = (tokens, tensors, capacity_factor=None))]
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        tensors: Vec<Given>,
        capacity_factor: Option<f64>,
    ) -> PyResult<()> {
        without_gil(py, || {
            let layer = self.layer()?;
            let checked = check_given(&layer, tokens, &tensors)?;
            // SAFETY: the tensors have the sizes of the layer's list, and ids are in range; Python
            // holds their memory until this returns, and a CPU's call is over then.
            let call = unsafe { RawCall::new(tokens, &checked.tensors) }
                .with_capacity_factor(capacity_factor);
            layer.forward(call)?;
            Ok(())
        })
    }

    /// Runs a training call. Its inputs stay where they are until the last backward.
    #[pyo3(signature = (tokens, tensors, rng_key, capacity_factor=None))]
    fn forward_train(
        &self,
        py: Python<'_>,
        tokens: usize,
        tensors: Vec<Given>,
        rng_key: Key,
        capacity_factor: Option<f64>,
    ) -> PyResult<RankState> {
        let saved = without_gil(py, || {
            let layer = self.layer()?;
            let checked = check_given(&layer, tokens, &tensors)?;
            // SAFETY: as in `forward`; the Python side keeps the tensors with the state.
            let call = unsafe { RawCall::new(tokens, &checked.tensors) }
                .with_capacity_factor(capacity_factor);
            let (_, saved) = layer.forward_train(call, rng_key.0)?;
            Ok(saved)
        })?;
        Ok(RankState(saved))
    }

    /// Runs backward. `tensors` has dy and the results dx and grad.topk_weights; `gradients` takes
    /// grad.<name> of weights, f32: sums over the tokens of all ranks for experts, of this rank's
    /// tokens for everything else.
    fn backward(
        &self,
        py: Python<'_>,
        state: &Bound<'_, RankState>,
        tensors: Vec<Given>,
        gradients: Vec<Given>,
    ) -> PyResult<()> {
        let saved = &state.get().0;
        without_gil(py, || {
            let layer = self.layer()?;
            let checked = check_given(&layer, saved.tokens(), &tensors)?;
            // SAFETY: as in `forward`.
            let call = unsafe { RawBackward::new(&checked.tensors) };
            layer.backward(saved, call, false)?;
            for given in &gradients {
                let name = given.name().strip_prefix("grad.").unwrap_or(given.name());
                let gradient = layer.gradient(name)?;
                // SAFETY: Python holds the memory, of this call alone, until this returns.
                unsafe { given.write(&gradient) }?;
            }
            Ok(())
        })
    }
}
