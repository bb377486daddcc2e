//! The engines of the process, and the layers that their calls share.

use crate::errors::{Failure, without_gil};
use moesaic::{Engine, EngineOptions, Layer, LayerSpec, Target, Training, resolve_target};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::collections::{BTreeMap, HashMap};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where calls run: a backend, such as "cpu" or "cuda", the number of the GPU, and the driver's
/// handle of the stream, null for its default one.
#[derive(Clone, PartialEq, Eq, Hash, FromPyObject)]
pub struct Place {
    #[pyo3(item(0))]
    backend: String,
    #[pyo3(item(1))]
    ordinal: usize,
    #[pyo3(item(2))]
    stream: usize,
}

impl Place {
    /// This machine's CPU.
    pub fn cpu() -> Place {
        Place::of("cpu")
    }

    /// The first device of a backend, on its default stream.
    pub fn of(backend: &str) -> Place {
        Place {
            backend: backend.to_string(),
            ordinal: 0,
            stream: 0,
        }
    }

    /// Opens the engine.
    fn open(&self, settings: &Settings) -> Result<Engine, Failure> {
        // Threads of its own, never those that engines of a process share: a child of `fork` would
        // find its parent's there.
        let every = || std::thread::available_parallelism().map_or(1, usize::from);
        let options = EngineOptions {
            threads: Some(settings.threads.unwrap_or_else(every)),
            ordinal: self.ordinal,
            ..EngineOptions::default()
        };
        let chosen = settings.targets.get(&self.backend);
        let target = chosen.unwrap_or(&self.backend);
        if !GPUS.contains(&self.backend.as_str()) {
            return Ok(Engine::open(target, options)?);
        }
        let stream = std::ptr::with_exposed_provenance_mut(self.stream);
        // SAFETY: torch keeps its streams for the life of the process. Its side of the package
        // refuses a call while the stream is captured.
        Ok(unsafe { Engine::on_stream(target, stream, options) }?)
    }
}

/// The backends whose calls run on a stream of torch's.
const GPUS: [&str; 2] = ["cuda", "rocm"];

/// The choices that open engines.
#[derive(Clone, Default)]
struct Settings {
    /// The target of a backend, where it is not the best one.
    targets: BTreeMap<String, String>,
    /// `None` takes one thread per processor of the process.
    threads: Option<usize>,
}

/// An engine with the layers that were made on it.
#[derive(Clone)]
struct Opened {
    process: u32,
    engine: Engine,
    layers: Arc<Mutex<HashMap<String, Arc<Layer>>>>,
}

/// The settings, and the engines that there are.
struct Process {
    settings: Settings,
    opened: Vec<(Place, Opened)>,
}

static PROCESS: Mutex<Process> = Mutex::new(Process {
    settings: Settings {
        targets: BTreeMap::new(),
        threads: None,
    },
    opened: Vec::new(),
});

/// How often settings were chosen, or this process forked from another.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Has calls look for their layer again in a child of `fork`. `getpid` in each would be a tenth of
/// what a call costs.
///
/// # Errors
/// Python's own.
pub fn watch_forks(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let changed = PyCFunction::new_closure(py, None, None, |_, _| {
        CHANGES.fetch_add(1, Ordering::Release);
    })?;
    let options = PyDict::new(py);
    options.set_item("after_in_child", changed)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&options))?;
    Ok(())
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the engine of a place, which the first call there opens. A child of `fork` opens engines
/// of its own, because the threads of its parent's stayed behind.
fn opened(place: &Place) -> Result<Opened, Failure> {
    let process = std::process::id();
    let mut state = lock(&PROCESS);
    let foreign = |(_, opened): &mut (Place, Opened)| opened.process != process;
    // Dropping them would wait for threads that this process does not have.
    state
        .opened
        .extract_if(.., foreign)
        .for_each(std::mem::forget);
    if let Some((_, opened)) = state.opened.iter().find(|(known, _)| known == place) {
        return Ok(opened.clone());
    }
    let opened = Opened {
        process,
        engine: place.open(&state.settings)?,
        layers: Arc::default(),
    };
    state.opened.push((place.clone(), opened.clone()));
    Ok(opened)
}

/// Returns the engine of the process's CPU.
pub fn engine() -> Result<Engine, Failure> {
    engine_at(&Place::cpu())
}

/// Returns the engine of a place.
pub fn engine_at(place: &Place) -> Result<Engine, Failure> {
    Ok(opened(place)?.engine)
}

/// Returns the layer of a spec that has no weights of its own. Equal texts share one at each place.
pub fn layer(spec: &LayerSpec, text: &str, place: &Place) -> Result<Arc<Layer>, Failure> {
    let opened = opened(place)?;
    if let Some(layer) = lock(&opened.layers).get(text) {
        return Ok(layer.clone());
    }
    // Compiled outside the lock: other specs may be called meanwhile. Two threads may compile the
    // same spec; the store makes that one compilation.
    let made = opened
        .engine
        .layer_without_weights(spec, Training::default())?;
    let mut layers = lock(&opened.layers);
    let kept = layers.entry(text.to_string());
    Ok(kept.or_insert_with(|| Arc::new(made)).clone())
}

/// A layer that calls need not look up: of the engine that the process had when it was made.
pub struct Held {
    layer: ManuallyDrop<Arc<Layer>>,
    process: u32,
    changes: u64,
}

impl Held {
    /// Holds the layer of a spec, and returns it too.
    ///
    /// # Errors
    /// As [`layer`].
    pub fn new(spec: &LayerSpec, text: &str, place: &Place) -> Result<(Held, Arc<Layer>), Failure> {
        // Read first: settings chosen meanwhile make this one old, not new.
        let changes = CHANGES.load(Ordering::Acquire);
        let layer = layer(spec, text, place)?;
        let held = Held {
            layer: ManuallyDrop::new(layer.clone()),
            process: std::process::id(),
            changes,
        };
        Ok((held, layer))
    }

    /// Returns the layer, unless this is a child of `fork`, or other settings were chosen.
    pub fn current(&self) -> Option<&Arc<Layer>> {
        let unchanged = self.changes == CHANGES.load(Ordering::Acquire);
        unchanged.then_some(&*self.layer)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a child of `fork` the last one would wait for threads of the parent.
        if self.process == std::process::id() {
            // SAFETY: it is dropped here alone.
            unsafe { ManuallyDrop::drop(&mut self.layer) };
        }
    }
}

/// Chooses a target and the number of threads of layers that are made from now on.
///
/// target: "cpu" or a name such as "cpu:avx2", for tensors on the CPU; one such as "cuda:sm_90a" or
/// "rocm:gfx942", for tensors on such a GPU, whose own is the default. None keeps what was chosen.
/// threads: the number of threads, the caller included. None keeps what was chosen.
#[pyfunction]
#[pyo3(signature = (target=None, threads=None))]
pub fn configure(target: Option<String>, threads: Option<isize>) -> PyResult<()> {
    let refused = threads.filter(|count| *count < 1);
    if let Some(count) = refused {
        return Err(Failure::Invalid(format!("{count} threads: take 1 or more")).into());
    }
    let threads = threads.map(isize::unsigned_abs);
    let chosen = target.map(|name| Ok::<_, Failure>((backend(&name)?, name)));
    let chosen = chosen.transpose()?;
    let mut state = lock(&PROCESS);
    state.settings.targets.extend(chosen);
    state.settings.threads = threads.or(state.settings.threads);
    CHANGES.fetch_add(1, Ordering::Release);
    // Layers in use keep the engine that they were made on.
    for (_, opened) in state.opened.drain(..) {
        if opened.process != std::process::id() {
            std::mem::forget(opened);
        }
    }
    Ok(())
}

/// Returns the backend of a target's name.
fn backend(name: &str) -> Result<String, Failure> {
    if GPUS.contains(&name) {
        return Ok(name.to_string());
    }
    match resolve_target(name).map_err(moesaic::Error::from)? {
        Target::Sim(_) => Err(Failure::Invalid(format!(
            "target `{name}` is a simulator, and torch has no tensors there: take cpu, cuda or rocm"
        ))),
        target => Ok(target.backend().to_string()),
    }
}

/// Returns the target, device and threads of the CPU's engine, and its kernels so far by where they came from.
#[pyfunction]
pub fn engine_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let engine = without_gil(py, engine)?;
    let info = PyDict::new(py);
    let stats = engine.stats();
    info.set_item("target", engine.target().to_string())?;
    info.set_item("device", &engine.device_info().name)?;
    info.set_item("threads", engine.device_info().units)?;
    info.set_item("compiled", stats.compiled)?;
    Ok(info)
}

/// Settings that one test chooses close the engines whose memory another one holds.
#[cfg(test)]
pub static TURNS: Mutex<()> = Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic::Ptr;
    use moesaic::spec::canonical_tensors;
    use moesaic::{Input, RawCall, Tensor, Tensors};

    #[test]
    fn chosen_settings_reach_layers_in_use() {
        let _turn = lock(&TURNS);
        let text = "shape = { model_dim = 4, hidden_dim = 4, experts = 2, top_k = 1 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let (held, layer) = Held::new(&spec, text, &Place::cpu()).ok().unwrap();
        assert!(Arc::ptr_eq(held.current().unwrap(), &layer));
        configure(None, None).unwrap();
        assert!(held.current().is_none());
    }

    #[test]
    fn a_layer_without_weights_reads_those_of_its_call() {
        let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        let wave = |elements: usize| -> Vec<f32> {
            (0..elements).map(|i| (i as f32 * 0.7).sin()).collect()
        };
        let mut weights = Tensors::new();
        for tensor in canonical_tensors(&spec) {
            let values = wave(tensor.shape.iter().product());
            weights.insert(tensor.name, Tensor::owned(&tensor.shape, values));
        }
        let x = wave(3 * 8);
        let owning = engine().unwrap().layer(&spec, &weights).unwrap();
        let wanted = owning.forward(&Input::new(3, &x)).unwrap().y().to_f32();

        let layer = layer(&spec, text, &Place::cpu()).ok().unwrap();
        let mut y = vec![0f32; 3 * 8];
        let mut tensors = vec![
            ("x", Ptr(x.as_ptr() as u64)),
            ("y", Ptr(y.as_mut_ptr() as u64)),
        ];
        let call = |tensors: &[(&str, Ptr)]| {
            // SAFETY: x, y and weights have the sizes of the spec, and outlive the call.
            let call = unsafe { RawCall::new(3, tensors) };
            layer.forward(call)
        };
        let error = call(&tensors).unwrap_err().to_string();
        assert!(error.contains("the layer holds no weights"), "{error}");
        let weights = weights.iter();
        tensors.extend(weights.map(|(n, t)| (n.as_str(), Ptr(t.data.as_ptr() as u64))));
        call(&tensors).unwrap();
        for (found, wanted) in y.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-5, "{found} is not {wanted}");
        }
    }
}
