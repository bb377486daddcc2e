//! Layers' use of memory, observed from the device: a CPU that claims to
//! capture a graph, records its arguments, and makes callers meet.

use super::Case;
use super::layers::engine;
use moesaic::experts::MultiGate;
use moesaic::kernel::{CpuCaches, Entry};
use moesaic::spec::LayerSpec;
use moesaic::target::{
    Arg, Artifact, Buffer, Device, DeviceError, DeviceInfo, FunctionId, LaunchDims, Module, Ptr,
};
use moesaic::tensor::{SourceError, WeightSource};
use moesaic::{
    DType, Engine, EngineError, EngineOptions, Input, Layer, LayerOptions, RawBackward, RawCall,
    RngKey, Tensor, Tensors, Training,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

const SPEC: &str = "shape = { model_dim = 24, hidden_dim = 20, experts = 4, top_k = 2 }\n";

/// The observations.
#[derive(Default)]
struct Seen {
    /// Allocated memory: its bytes by address.
    live: BTreeMap<u64, usize>,
    capturing: bool,
    /// Addresses that captured launches name.
    captured: BTreeSet<u64>,
    /// Buffers that the graph keeps.
    kept: Vec<Arc<Buffer>>,
    /// Ranges of host bytes that were copied.
    uploaded: Vec<Range<usize>>,
    /// Launches of each kernel.
    launched: BTreeMap<String, usize>,
    /// Operations that wait for the device, by name.
    waited: BTreeMap<&'static str, usize>,
    /// Passes in flight, their largest number at a time; `awaited` is the
    /// number that the first waits for.
    passes: [usize; 2],
    awaited: usize,
}

/// A CPU under observation.
struct Watched {
    cpu: Arc<dyn Device>,
    seen: Arc<(Mutex<Seen>, Condvar)>,
}

impl Watched {
    fn new() -> Arc<Watched> {
        Arc::new(Watched {
            cpu: engine().device().clone(),
            seen: Arc::default(),
        })
    }

    fn engine(self: &Arc<Watched>) -> Engine {
        Engine::on_device(self.clone(), EngineOptions::default()).expect("a C compiler")
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.0.lock().unwrap()
    }

    fn begin_capture(&self) {
        self.seen().capturing = true;
    }

    /// The graph: what it was given.
    fn end_capture(&self) -> Vec<Arc<Buffer>> {
        let mut seen = self.seen();
        seen.capturing = false;
        std::mem::take(&mut seen.kept)
    }
}

/// Memory, which is gone when this is dropped.
struct Live(Arc<(Mutex<Seen>, Condvar)>, Buffer);

impl Drop for Live {
    fn drop(&mut self) {
        self.0.0.lock().unwrap().live.remove(&self.1.ptr().0);
    }
}

struct WatchedModule {
    module: Arc<dyn Module>,
    seen: Arc<(Mutex<Seen>, Condvar)>,
    symbols: Mutex<HashMap<usize, String>>,
}

impl Module for WatchedModule {
    fn function(&self, symbol: &str) -> Result<FunctionId, DeviceError> {
        let function = self.module.function(symbol)?;
        let mut symbols = self.symbols.lock().unwrap();
        symbols.insert(function.0, symbol.to_string());
        Ok(function)
    }

    unsafe fn run(
        &self,
        function: FunctionId,
        dims: LaunchDims,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let mut seen = self.seen.0.lock().unwrap();
        if let Some(symbol) = self.symbols.lock().unwrap().get(&function.0) {
            *seen.launched.entry(symbol.clone()).or_default() += 1;
        }
        if seen.capturing {
            let named = args.iter().filter_map(|arg| match arg {
                Arg::Ptr(Ptr(address)) => Some(*address),
                _ => None,
            });
            seen.captured.extend(named);
            return Ok(());
        }
        drop(seen);
        // SAFETY: what the caller vouches for is the same.
        unsafe { self.module.run(function, dims, args) }
    }
}

impl Device for Watched {
    fn info(&self) -> &DeviceInfo {
        self.cpu.info()
    }

    fn capturing(&self) -> Option<String> {
        self.seen().capturing.then(|| "graph".to_string())
    }

    fn keep(&self, used: Arc<Buffer>) {
        self.seen().kept.push(used);
    }

    fn caches(&self) -> CpuCaches {
        self.cpu.caches()
    }

    fn load(&self, artifact: &Artifact, entries: &[Entry]) -> Result<Arc<dyn Module>, DeviceError> {
        let module = self.cpu.load(artifact, entries)?;
        Ok(Arc::new(WatchedModule {
            module,
            seen: self.seen.clone(),
            symbols: Mutex::default(),
        }))
    }

    /// The first waits for the others that are awaited: for ever, if it is alone and
    /// must not be.
    fn begin_pass(&self) {
        let mut seen = self.seen();
        seen.passes[0] += 1;
        seen.passes[1] = seen.passes[1].max(seen.passes[0]);
        self.seen.1.notify_all();
        let meets = |seen: &mut Seen| seen.passes[1] < seen.awaited;
        let patience = Duration::from_millis(300);
        drop(self.seen.1.wait_timeout_while(seen, patience, meets));
        self.cpu.begin_pass();
    }

    fn end_pass(&self) {
        self.cpu.end_pass();
        self.seen().passes[0] -= 1;
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        if self.seen().capturing {
            return Err(DeviceError::Capturing {
                graph: "graph".to_string(),
                attempted: "an allocation".to_string(),
            });
        }
        let memory = self.cpu.alloc(bytes)?;
        let address = memory.ptr();
        self.seen().live.insert(address.0, bytes);
        let live = Live(self.seen.clone(), memory);
        Ok(Buffer::new(address, bytes, Box::new(live)))
    }

    fn upload(&self, bytes: &[u8], buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        let start = bytes.as_ptr() as usize;
        self.seen().uploaded.push(start..start + bytes.len());
        self.cpu.upload(bytes, buffer, offset)
    }

    fn download(
        &self,
        buffer: &Buffer,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        *self.seen().waited.entry("download").or_default() += 1;
        self.cpu.download(buffer, offset, bytes)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        *self.seen().waited.entry("synchronize").or_default() += 1;
        self.cpu.synchronize()
    }
}

fn case(toml: &str, tokens: usize) -> Case {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    Case::random(&spec, tokens, 3)
}

fn training_layer(engine: &Engine, case: &Case) -> Layer {
    let made = engine.training_layer(&case.spec, &case.host_weights(), Training::default());
    made.unwrap_or_else(|e| panic!("{e}"))
}

/// An evaluation and a training step of so many tokens, on memory of the caller's.
fn raw_step(layer: &Layer, device: &dyn Device, tokens: usize, memory: &[Buffer; 4]) {
    let [x, y, dy, dx] = memory.each_ref().map(Buffer::ptr);
    assert!(memory[0].bytes() >= tokens * 24 * 4 && device.info().units > 0);
    let tensors = [("x", x), ("y", y)];
    // SAFETY: all four hold the call's rows, and launches of a CPU have ended.
    let call = unsafe { RawCall::new(tokens, &tensors) };
    let gradients = [("dy", dy), ("dx", dx)];
    // SAFETY: both hold the call's rows.
    let back = unsafe { RawBackward::new(&gradients) };
    layer.forward(call).unwrap();
    let (_, saved) = layer.forward_train(call, RngKey::default()).unwrap();
    layer.backward(&saved, back, false).unwrap();
}

/// Calls that are captured name addresses for good: a larger call, calls that reuse
/// what a step kept, and the end of the layer leave what lies there alone.
#[test]
fn a_graph_keeps_the_memory_of_its_calls() {
    let watched = Watched::new();
    let device: &dyn Device = &*watched;
    let engine = watched.engine();
    let layer = training_layer(&engine, &case(SPEC, 8));
    let memory = [0; 4].map(|_| device.alloc(64 * 24 * 4).unwrap());
    raw_step(&layer, device, 8, &memory);
    watched.begin_capture();
    raw_step(&layer, device, 8, &memory);
    let graph = watched.end_capture();
    let captured = watched.seen().captured.clone();
    assert!(captured.len() > 20, "{}", captured.len());

    // What a step keeps is the graph's: the next call has memory of its own.
    let tensors = [("x", memory[0].ptr()), ("y", memory[1].ptr())];
    // SAFETY: both hold the call's rows.
    let call = unsafe { RawCall::new(8, &tensors) };
    let other = layer.forward_train(call, RngKey::default()).unwrap();
    let input = case(SPEC, 8).input();
    drop(other);
    layer
        .forward_train(input.reading(&["y"]), RngKey::default())
        .unwrap();
    raw_step(&layer, device, 64, &memory);
    let gone = |seen: &Seen| {
        captured
            .iter()
            .filter(|address| !seen.live.contains_key(address))
            .count()
    };
    assert_eq!(gone(&watched.seen()), 0, "after a larger call");
    drop((layer, engine));
    assert_eq!(gone(&watched.seen()), 0, "after the layer");
    drop(graph);
    assert!(gone(&watched.seen()) > 20, "after the graph");
}

/// Another call does not write what a captured step keeps.
#[test]
fn what_a_captured_step_keeps_is_not_reused() {
    let watched = Watched::new();
    let device: &dyn Device = &*watched;
    let layer = training_layer(&watched.engine(), &case(SPEC, 8));
    let memory = [0; 4].map(|_| device.alloc(64 * 24 * 4).unwrap());
    let tensors = [("x", memory[0].ptr()), ("y", memory[1].ptr())];
    // SAFETY: as above.
    let call = unsafe { RawCall::new(8, &tensors) };
    let train = || layer.forward_train(call, RngKey::default()).unwrap();
    let named = || {
        watched.begin_capture();
        drop(train());
        let graph = watched.end_capture();
        (std::mem::take(&mut watched.seen().captured), graph)
    };
    drop(train());
    let (first, _graph) = named();
    drop(train()); // makes memory for the next capture
    let (second, _other) = named();
    let own = first.difference(&second).count();
    assert!(own > 3, "{own} tensors are kept for each");
}

/// Bytes that a caller can change (a mapped file) are read once: what is checked is
/// what kernels get.
#[test]
fn ids_are_checked_where_they_do_not_change() {
    let toml = "shape = { model_dim = 24, hidden_dim = 20, experts = 4, top_k = 2 }\n\
                router = { kind = \"table\", table_rows = 5, score = \"one\" }";
    let case = case(toml, 8);
    let watched = Watched::new();
    let weights = case.host_weights();
    let layer = watched.engine().layer(&case.spec, &weights).unwrap();
    let ids = [0, 1, 2, 3, 4, 3, 2, 1];
    let input = case.input();
    let mut lent = Input {
        tokens: 8,
        ..Input::default()
    };
    lent.insert("x", input.tensors["x"].lend());
    let lent = lent.with_token_ids(&ids);
    layer.forward(&lent).unwrap();
    layer
        .set_weight("router.table", &weights["router.table"])
        .unwrap();
    let start = |bytes: &[u8]| bytes.as_ptr() as usize;
    let seen = watched.seen();
    let copied = |at: usize| seen.uploaded.iter().any(|range| range.contains(&at));
    assert!(copied(start(&input.tensors["x"].data)), "inputs are seen");
    assert!(!copied(ids.as_ptr() as usize), "token_ids");
    assert!(
        !copied(start(&weights["router.table"].data)),
        "router.table"
    );
}

/// A layer that trains, with two gates.
fn two_gates(watched: &Arc<Watched>, case: &Case) -> MultiGate {
    let (mut experts, mut router) = (Tensors::new(), Tensors::new());
    for (name, tensor) in case.host_weights().iter() {
        let own = name.starts_with("router.");
        let weights = if own { &mut router } else { &mut experts };
        weights.insert(name, tensor.clone());
    }
    let routers = [router.clone(), router];
    let options = LayerOptions::default().training(Training::default());
    let engine = watched.engine();
    let gates = engine.multi_gate(&case.spec, &experts, &routers, options);
    gates.unwrap()
}

/// Experts multiply the tokens of all gates at once; where their room ends, those of each.
#[test]
fn experts_multiply_once_for_all_gates() {
    for (capacity, times) in [("", 1), ("capacity = { mode = 'fixed', rows = 4 }", 2)] {
        let watched = Watched::new();
        let case = case(&format!("{SPEC}{capacity}"), 8);
        let gates = two_gates(&watched, &case);
        let launches = |call: &dyn Fn()| {
            watched.seen().launched.clear();
            call();
            let launched = watched.seen().launched.clone();
            ["up", "down"].map(|half| launched[&format!("grouped_gemm_{half}")])
        };
        let input = case.input();
        let forward = launches(&|| drop(gates.forward(input.reading(&["y"])).unwrap()));
        assert_eq!(forward, [times; 2], "{capacity}");
        let rng_key = RngKey::default();
        let train = || drop(gates.forward_train(input.reading(&["y"]), rng_key).unwrap());
        assert_eq!(launches(&train), [times; 2], "{capacity}");
    }
}

/// Layers that add to the same gradients, called from two threads.
#[test]
fn layers_with_common_gradients_take_turns() {
    let watched = Watched::new();
    let case = case(SPEC, 8);
    let gates = two_gates(&watched, &case);
    let dy = Tensor::owned(&[8, 24], vec![1.0f32; 8 * 24]);
    let input = case.input();
    let saved = gates.layers().iter().map(|layer| {
        let passed = layer.forward_train(input.reading(&["y"]), RngKey::default());
        passed.unwrap().1
    });
    let saved: Vec<_> = saved.collect();
    {
        let mut seen = watched.seen();
        (seen.passes, seen.awaited) = ([0, 0], 2);
    }
    std::thread::scope(|scope| {
        for (layer, saved) in gates.layers().iter().zip(&saved) {
            let dy = &dy;
            scope.spawn(move || layer.backward(saved, dy, true).unwrap());
        }
    });
    assert_eq!(watched.seen().passes, [0, 1]);
}

/// Weights whose reads are counted.
struct Counted {
    weights: Tensors<'static>,
    reads: Mutex<usize>,
}

impl WeightSource for Counted {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.weights.describe(name)
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        *self.reads.lock().unwrap() += 1;
        self.weights.rows(name, rows)
    }
}

#[test]
fn shapes_are_checked_before_any_weight_is_read() {
    let case = case(SPEC, 8);
    for name in [
        "router.weight",
        "experts.gate.weight",
        "experts.down.weight",
    ] {
        let mut weights = case.host_weights();
        weights.insert(name, Tensor::zeros(DType::F32, &[1, 2]));
        let counted = Counted {
            weights,
            reads: Mutex::new(0),
        };
        let error = engine().layer(&case.spec, &counted).err().unwrap();
        let start = format!("weight `{name}`: has shape [1, 2], expected ");
        assert!(error.to_string().starts_with(&start), "{error}");
        assert_eq!(*counted.reads.lock().unwrap(), 0, "{name}");
    }
}

#[test]
fn nothing_is_launched_on_no_memory() {
    let case = case(SPEC, 8);
    let engine = engine();
    let layer = engine.layer(&case.spec, &case.host_weights()).unwrap();
    let y = engine.device().alloc(8 * 24 * 4).unwrap();
    let run = |tokens, x| {
        let tensors = [("x", x), ("y", y.ptr())];
        // SAFETY: no kernel reads of an address that is refused, or of no rows.
        let call = unsafe { RawCall::new(tokens, &tensors) };
        layer.forward(call)
    };
    run(0, Ptr(0)).unwrap();
    let error = run(8, Ptr(0)).unwrap_err();
    assert!(matches!(error, EngineError::Input { .. }), "{error}");
    let text = "input `x`: lies at address 0, where no memory is";
    assert_eq!(error.to_string(), text);
}

/// Kernels alone know the rows of each expert: a call without a capacity reads nothing back, sends
/// nothing and waits for nothing.
#[test]
fn a_dropless_step_leaves_counts_on_the_device() {
    let watched = Watched::new();
    let device: &dyn Device = &*watched;
    let layer = training_layer(&watched.engine(), &case(SPEC, 8));
    let memory = [0; 4].map(|_| device.alloc(64 * 24 * 4).unwrap());
    raw_step(&layer, device, 64, &memory);
    let before = watched.seen().uploaded.len();
    watched.seen().waited.clear();
    for tokens in [64, 8] {
        raw_step(&layer, device, tokens, &memory);
    }
    let waited = watched.seen().waited.clone();
    let uploaded = watched.seen().uploaded.len();
    assert_eq!((waited, uploaded), (BTreeMap::new(), before));
}

/// A layer over the experts of another adds no experts to memory: neither weights, in the form that
/// kernels read, nor gradients.
#[test]
fn experts_of_a_bank_are_in_memory_once() {
    let wide = "shape = { model_dim = 64, hidden_dim = 96, experts = 16, top_k = 2 }\n";
    let watched = Watched::new();
    let (engine, case) = (watched.engine(), case(wide, 2));
    let bytes = || watched.seen().live.values().sum::<usize>();
    let step = |layer: &Layer| {
        let (input, dy) = (case.input(), case.dy(7));
        let dy = Tensor::owned(&[2, 64], dy.iter().map(|&dy| dy as f32).collect::<Vec<_>>());
        let call = layer.forward_train(&input, RngKey::default());
        layer.backward(&call.unwrap().1, &dy, false).unwrap();
        layer.forward(&input).unwrap();
    };
    let bank = training_layer(&engine, &case);
    step(&bank);
    let router: Tensors<'_> = case
        .host_weights()
        .iter()
        .filter(|(name, _)| name.starts_with("router."))
        .map(|(name, tensor)| (name.clone(), tensor.clone()))
        .collect();
    let added = |layer: &dyn Fn() -> Layer| {
        let before = bytes();
        let layer = layer();
        step(&layer);
        bytes() - before
    };
    let alone = added(&|| training_layer(&engine, &case));
    let over_bank = added(&|| {
        let layer = engine.layer_over_experts_of(&bank, &case.spec, &router);
        layer.unwrap()
    });
    let experts = 3 * 16 * 64 * 96 * size_of::<f32>();
    assert!(
        over_bank < experts / 4,
        "{over_bank} bytes beside experts of {experts}"
    );
    // Weights and gradients.
    assert!(
        alone >= over_bank + 2 * experts,
        "{alone} bytes alone, {over_bank} over a bank"
    );
}
