//! A raw call allocates nothing once a call of its size was made: on the CPU neither
//! the calling thread nor the device's own, on CUDA's device nobody. A layer that is made of a
//! checkpoint is in memory once.

use moesaic::collectives::{Call, threads};
use moesaic::cpu::{CpuDevice, Nodes};
use moesaic::engine::{TunedTimes, Untuned};
use moesaic::plan::{TensorRole, Tuning};
use moesaic::reference;
use moesaic::spec::hf;
use moesaic::target::Ptr;
use moesaic::toolchain::testing::{ExternalTool, needed};
use moesaic::weights::{
    Checkpoint, LayerReader, LoadOptions, set_expert_formats, write_safetensors,
};
use moesaic::{
    DType, Engine, EngineOptions, Layer, LayerOptions, LayerSpec, Mesh, Parallel, RawBackward,
    RawCall, RngKey, Store, Tensor, Tensors, Training,
};
use moesaic_probe::idle_driver;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};

/// The system's allocator; counts what it is asked for, and what is held.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

/// Counts are of one test at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MODEL_DIM: usize = 64;

const SPEC: &str = "
shape = { model_dim = 64, hidden_dim = 32, experts = 8, top_k = 2 }
capacity = { mode = \"factor\", factor = 1.0, renormalize_after_drop = true }
router = { renormalize = \"sum\" }
experts = { form = \"gated\", activation = \"silu\" }
";

fn layer(engine: &Engine) -> Layer {
    layer_of(engine, None)
}

fn layer_of(engine: &Engine, training: Option<Training>) -> Layer {
    layer_with(engine, LayerOptions::default().training(training))
}

fn layer_with(engine: &Engine, options: LayerOptions<'_>) -> Layer {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let random = reference::Weights::random(&spec, 7);
    let stored = random.0.into_iter().map(|(name, t)| {
        let data: Vec<f32> = t.data.iter().map(|v| *v as f32).collect();
        (name, t.shape, data)
    });
    let stored: Vec<_> = stored.collect();
    let mut weights = Tensors::new();
    for (name, shape, data) in &stored {
        weights = weights.with(name, shape, data);
    }
    let made = engine.layer_with(&spec, &weights, options);
    made.expect("the kernels compile")
}

/// Allocations of 20 calls of `tokens` tokens.
fn count(layer: &Layer, x: &[f32], y: &mut [f32], tokens: usize) -> usize {
    let address = |start: *const f32| Ptr(start as u64);
    let tensors = [("x", address(x.as_ptr())), ("y", address(y.as_mut_ptr()))];
    // SAFETY: both buffers are in this machine's memory and hold `tokens`
    // rows; a launch on the CPU has finished when it returns.
    let call = unsafe { RawCall::new(tokens, &tensors) };
    let before = COUNT.load(Ordering::Relaxed);
    for _ in 0..20 {
        layer.forward(call).expect("the layer runs");
    }
    COUNT.load(Ordering::Relaxed) - before
}

/// Allocations of 20 training calls of `tokens` tokens and their backward passes.
fn count_training(layer: &Layer, rows: &mut [Vec<f32>; 4], tokens: usize) -> usize {
    let [x, y, dy, dx] = rows.each_mut().map(|rows| Ptr(rows.as_mut_ptr() as u64));
    let (forward, backward) = ([("x", x), ("y", y)], [("dy", dy), ("dx", dx)]);
    // SAFETY: as in `count`.
    let call = unsafe { RawCall::new(tokens, &forward) };
    // SAFETY: as in `count`.
    let back = unsafe { RawBackward::new(&backward) };
    let before = COUNT.load(Ordering::Relaxed);
    for step in 0..20 {
        let rng_key = RngKey {
            step,
            ..RngKey::default()
        };
        let saved = layer.forward_train(call, rng_key);
        layer
            .backward(&saved.expect("it runs").1, back, true)
            .expect("it runs");
    }
    COUNT.load(Ordering::Relaxed) - before
}

#[test]
fn training_allocates_nothing_after_the_first() {
    let _turn = turn();
    const TOKENS: usize = 300;
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let layer = layer_of(&engine, Some(Training::default()));
    let mut rows = [(); 4].map(|()| vec![0.5; TOKENS * MODEL_DIM]);
    let first = count_training(&layer, &mut rows, TOKENS);
    assert!(first > 0, "the counter counts");
    for tokens in [TOKENS, 8, 1, 0] {
        let later = count_training(&layer, &mut rows, tokens);
        assert_eq!(later, 0, "training, {tokens} tokens");
    }
}

#[test]
fn a_raw_call_allocates_nothing_after_the_first() {
    let _turn = turn();
    for threads in [None, Some(1), Some(2), Some(3)] {
        let options = EngineOptions {
            threads,
            ..EngineOptions::default()
        };
        let engine = Engine::open("cpu", options).expect("a C compiler");
        check(&layer(&engine), &format!("{threads:?} threads"));
    }
    let nodes = Nodes::new([vec![0], (1..64).collect(), vec![64]]);
    let device = CpuDevice::with_nodes(3, nodes).expect("threads");
    let engine = Engine::on_device(Arc::new(device), EngineOptions::default());
    check(&layer(&engine.expect("a C compiler")), "three nodes");
    let dir = tempfile::tempdir().expect("a directory");
    let layer = tuned(Arc::new(Store::open(dir.path())));
    assert_eq!(layer.tilings().plans().len(), 2);
    check(&layer, "tuned");
}

/// The safe call between slices of the caller, by each of two handles.
#[test]
fn a_call_between_slices_allocates_nothing_after_the_first() {
    let _turn = turn();
    const TOKENS: usize = 300;
    let options = EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let layer = layer(&engine);
    let (x, mut y) = (vec![0.5; TOKENS * MODEL_DIM], vec![0.0; TOKENS * MODEL_DIM]);
    for layer in [&layer, &layer.handle()] {
        let mut count = |tokens: usize| {
            let rows = ..tokens * MODEL_DIM;
            let before = COUNT.load(Ordering::Relaxed);
            for _ in 0..20 {
                layer
                    .forward_into(&x[rows], &mut y[rows])
                    .expect("the layer runs");
            }
            COUNT.load(Ordering::Relaxed) - before
        };
        assert!(count(TOKENS) > 0, "the counter counts");
        for tokens in [TOKENS, 8, 1, 0] {
            assert_eq!(count(tokens), 0, "{tokens} tokens");
        }
    }
}

/// Nor does one on a GPU: all of it but what the driver does.
#[test]
fn a_raw_call_through_a_driver_allocates_nothing_after_the_first() {
    const NAME: &str = "a_raw_call_through_a_driver_allocates_nothing_after_the_first";
    let _turn = turn();
    if !idle_driver::is_here() {
        let folder = tempfile::tempdir().expect("a directory");
        let mut again = idle_driver::again(folder.path()).expect("a C compiler");
        let output = again.args(["--exact", NAME]).output().expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        return;
    }
    let engine = needed(ExternalTool::Nvrtc, Engine::cuda(0));
    let x = vec![0.5; 300 * MODEL_DIM];
    let mut y = x.clone();
    let layer = layer(&engine);
    const SIZES: [usize; 6] = [300, 65, 64, 8, 1, 0];
    let first = SIZES.map(|tokens| count(&layer, &x, &mut y, tokens));
    assert!(first[0] > 0, "the counter counts");
    for tokens in SIZES {
        assert_eq!(count(&layer, &x, &mut y, tokens), 0, "{tokens} tokens");
    }
    let layer = layer_of(&engine, Some(Training::default()));
    let mut rows = [(); 4].map(|()| x.clone());
    let first = SIZES.map(|tokens| count_training(&layer, &mut rows, tokens));
    assert!(first[0] > 0, "the counter counts");
    for tokens in SIZES {
        let later = count_training(&layer, &mut rows, tokens);
        assert_eq!(later, 0, "training, {tokens} tokens");
    }
}

/// Calls of a layer over two ranks, in its steady state.
struct OverRanks {
    /// Allocations of one call on one rank.
    each: usize,
    /// Bytes of the largest allocation.
    largest: usize,
}

fn over_ranks(layer: &Layer, turns: &Barrier, tokens: usize) -> OverRanks {
    const CALLS: usize = 20;
    let (x, mut y) = (vec![0.5; tokens * MODEL_DIM], vec![0.0; tokens * MODEL_DIM]);
    let mut counted = || {
        // Both ranks count what both of them do, so nobody may be doing other work.
        turns.wait();
        LARGEST.store(0, Ordering::Relaxed);
        let before = COUNT.load(Ordering::Relaxed);
        turns.wait();
        count(layer, &x, &mut y, tokens);
        turns.wait();
        let all = COUNT.load(Ordering::Relaxed) - before;
        turns.wait();
        OverRanks {
            each: all.div_ceil(2 * CALLS),
            largest: LARGEST.load(Ordering::Relaxed),
        }
    };
    counted(); // the first calls make room
    counted()
}

/// A call over ranks plans its exchanges anew, in small pieces, and has room for rows.
#[test]
fn a_decode_call_over_ranks_allocates_no_rows() {
    let _turn = turn();
    const SIZES: [usize; 4] = [64, 8, 1, 0];
    /// The most pieces that a call makes on a rank.
    const MOST: usize = 200;
    let options = EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let turns = Barrier::new(2);
    let ranks = threads::run(
        2,
        |_| Ok(engine.device().clone()),
        |mut world| {
            let parallel = Parallel {
                ep: 2,
                ..Parallel::default()
            };
            let mesh = Mesh::on_host(&mut world, parallel, "node").expect("a mesh");
            let layer = layer_with(&engine, LayerOptions::over(&mesh));
            let found = SIZES.map(|tokens| over_ranks(&layer, &turns, tokens));
            drop(layer);
            world.finish(&Call::new("end")).expect("the other rank");
            found
        },
    );
    for rank in ranks.expect("threads") {
        for (tokens, found) in SIZES.iter().zip(rank.expect("a rank")) {
            let OverRanks { each, largest } = found;
            let what = format!("{tokens} tokens: {each} allocations, the largest of {largest}");
            println!("{what}");
            // Rows of 64 tokens have 16 KiB.
            assert!(each > 0 && each <= MOST && largest <= 4096, "{what}");
        }
    }
}

/// A layer with other tiles for few tokens.
fn tuned(store: Arc<Store>) -> Layer {
    let options = EngineOptions {
        store: Some(store.clone()),
        tuned: true,
        threads: Some(2),
        ..EngineOptions::default()
    };
    let engine = Engine::open("cpu", options).expect("a C compiler");
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let plans = engine.tilings(&spec, None).expect("a plan");
    let untuned = Untuned::new(plans.first().clone());
    let choice = &Tuning::choices(&untuned.plan)[0];
    let found = [(8, true), (300, false)].map(|(tokens, other)| TunedTimes {
        tokens,
        tuning: if other {
            Tuning::default().with(choice.knob, choice.others[0])
        } else {
            Tuning::default()
        },
        gain: 1.1,
    });
    let kept = untuned.tuned(&found, engine.machine()).expect("a tuning");
    store.keep_tuned(&kept).expect("the directory is ours");
    layer(&engine)
}

fn check(layer: &Layer, what: &str) {
    const TOKENS: usize = 300;
    let x = vec![0.5; TOKENS * MODEL_DIM];
    let mut y = vec![0.0; TOKENS * MODEL_DIM];
    let first = count(layer, &x, &mut y, TOKENS);
    assert!(first > 0, "the counter counts");
    for tokens in [TOKENS, 8, 1, 0] {
        let later = count(layer, &x, &mut y, tokens);
        assert_eq!(later, 0, "{what}, {tokens} tokens");
    }
}

/// A checkpoint of a layer whose weights are large, 96 MiB in bf16, as Qwen3's, and
/// what imports it.
fn checkpoint(dir: &Path, dtype: DType) -> (Checkpoint, hf::Import) {
    let config = r#"{ "model_type": "qwen3_moe", "hidden_size": 512, "moe_intermediate_size": 512,
        "num_experts": 64, "num_experts_per_tok": 2, "num_hidden_layers": 1,
        "torch_dtype": "bfloat16" }"#;
    let mlp = "model.layers.0.mlp";
    let matrix = Tensor::zeros(dtype, &[512, 512]);
    let mut tensors = Tensors::new();
    tensors.insert(
        format!("{mlp}.gate.weight"),
        Tensor::zeros(dtype, &[64, 512]),
    );
    for expert in 0..64 {
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let name = format!("{mlp}.experts.{expert}.{name}.weight");
            tensors.insert(name, matrix.lend());
        }
    }
    let path = dir.join("model.safetensors");
    write_safetensors(&path, &tensors).expect("a file");
    let import = hf::import(config, 0).expect("a model");
    (Checkpoint::open(&path).expect("a checkpoint"), import)
}

/// The most that is held while a layer is made, over the bytes of its weights, and
/// what is left then.
fn peak(make: impl FnOnce() -> Layer) -> [f64; 2] {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let layer = make();
    let bytes = weight_bytes(&layer);
    let now = HELD.load(Ordering::Relaxed);
    let most = MOST.load(Ordering::Relaxed);
    [most, now].map(|held| held.saturating_sub(before) as f64 / bytes as f64)
}

fn weight_bytes(layer: &Layer) -> u64 {
    let tensors = layer.plan().tensors.iter();
    let weights = tensors.filter(|t| t.role == TensorRole::Weight);
    weights.map(|tensor| tensor.bytes(0)).sum()
}

/// Each of three weights is a third of the layer, so one more of them would show.
#[test]
fn a_layer_is_in_memory_once_while_it_is_made() {
    let _turn = turn();
    let engine = Engine::cpu().expect("a C compiler");
    let dir = tempfile::tempdir().expect("a directory");
    for (stored, wanted) in [
        (DType::Bf16, DType::Bf16),
        (DType::F32, DType::Bf16),
        (DType::Bf16, DType::F32),
    ] {
        let (file, mut import) = checkpoint(dir.path(), stored);
        import.spec.precision.weights = wanted;
        import.spec.precision.activations = wanted;
        let options = LoadOptions {
            narrow: true,
            ..LoadOptions::default()
        };
        let reader = LayerReader::of_import(&import, &file, options).expect("its weights");
        let layers: [&dyn Fn() -> Layer; 2] = [
            &|| engine.layer(&import.spec, &reader).expect("a layer"),
            &|| {
                let training = Training::default();
                let layer = engine.training_layer(&import.spec, &reader, training);
                layer.expect("a layer")
            },
        ];
        let [twice, _] = peak(|| {
            let all = reader.load().expect("its weights");
            engine.layer(&import.spec, &all).expect("a layer")
        });
        assert!(
            twice > 1.9,
            "what is read at once is there twice: {twice:.3}"
        );
        for (make, what) in layers.iter().zip(["evaluates", "trains"]) {
            let [most, left] = peak(make);
            let what = format!("{stored} to {wanted}, {what}: {most:.3} at most, {left:.3} left");
            assert!(left >= 1.0 && most <= 1.15, "{what}");
        }
    }
}

/// A name, type and shape in a quantized checkpoint.
type Stored = (String, Dtype, Vec<usize>);

/// A layer as DeepSeek-V3 is published: FP8 in tiles of 128 x 128.
fn fp8() -> (&'static str, Vec<Stored>) {
    let config = r#"{ "model_type": "qwen3_moe", "hidden_size": 512, "moe_intermediate_size": 512,
        "num_experts": 128, "num_experts_per_tok": 2, "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
        "quantization_config": { "quant_method": "fp8", "weight_block_size": [128, 128] } }"#;
    let mlp = "model.layers.0.mlp";
    let mut stored = vec![(format!("{mlp}.gate.weight"), Dtype::BF16, vec![128, 512])];
    for expert in 0..128 {
        for name in ["gate_proj", "up_proj", "down_proj"] {
            let name = format!("{mlp}.experts.{expert}.{name}.weight");
            stored.push((format!("{name}_scale_inv"), Dtype::F32, vec![4, 4]));
            stored.push((name, Dtype::F8_E4M3, vec![512, 512]));
        }
    }
    (config, stored)
}

/// A layer as gpt-oss is published: MXFP4, gate and up in one tensor by turns, so that both are put
/// together in memory, some MiB at a time. Next to 200 MiB of codes those are little.
fn mxfp4() -> (&'static str, Vec<Stored>) {
    let config = r#"{ "model_type": "gpt_oss", "hidden_size": 1024, "intermediate_size": 1024,
        "num_local_experts": 128, "num_experts_per_tok": 2, "num_hidden_layers": 1,
        "torch_dtype": "bfloat16", "quantization_config": { "quant_method": "mxfp4" } }"#;
    let mlp = "model.layers.0.mlp";
    let mut stored = vec![
        (format!("{mlp}.router.weight"), Dtype::BF16, vec![128, 1024]),
        (format!("{mlp}.router.bias"), Dtype::BF16, vec![128]),
    ];
    for (name, rows) in [("gate_up_proj", 2048), ("down_proj", 1024)] {
        let name = format!("{mlp}.experts.{name}");
        stored.push((format!("{name}_blocks"), Dtype::U8, vec![128, rows, 32, 16]));
        stored.push((format!("{name}_scales"), Dtype::U8, vec![128, rows, 32]));
        stored.push((format!("{name}_bias"), Dtype::BF16, vec![128, rows]));
    }
    (config, stored)
}

/// Writes zeros of those types and shapes. Returns the bytes of all.
fn write_zeros(path: &Path, stored: &[Stored]) -> usize {
    let size = |(_, dtype, shape): &Stored| {
        let elements: usize = shape.iter().product();
        elements * dtype.bitsize() / 8
    };
    let zeros = vec![0; stored.iter().map(size).max().unwrap_or_default()];
    let views = stored.iter().map(|tensor| {
        let (name, dtype, shape) = tensor;
        let view = TensorView::new(*dtype, shape.clone(), &zeros[..size(tensor)]);
        (name, view.expect("as many bytes as elements"))
    });
    safetensors::serialize_to_file(views, None, path).expect("a file");
    stored.iter().map(size).sum()
}

/// Codes are packed from the mapped file, so a layer of codes needs no more memory than they do.
#[test]
fn a_layer_of_codes_takes_the_memory_of_its_codes_while_it_is_made() {
    let _turn = turn();
    let engine = Engine::cpu().expect("a C compiler");
    let dir = tempfile::tempdir().expect("a directory");
    for (what, (config, stored)) in [("FP8", fp8()), ("MXFP4", mxfp4())] {
        let path = dir.path().join(format!("{what}.safetensors"));
        let published = write_zeros(&path, &stored);
        let file = Checkpoint::open(&path).expect("a checkpoint");
        let mut import = hf::import(config, 0).expect("a model");
        let options = LoadOptions::default();
        let formats = set_expert_formats(&mut import, &file, options);
        assert!(formats.up.is_some() && formats.down.is_some(), "{what}");
        let reader = LayerReader::of_import(&import, &file, options).expect("its weights");
        let mut bytes = 0;
        let [most, left] = peak(|| {
            let layer = engine.layer(&import.spec, &reader).expect("a layer");
            bytes = weight_bytes(&layer);
            layer
        });
        let share = bytes as f64 / published as f64;
        let what = format!("{what}: {most:.3} at most, {left:.3} left, {share:.3} of the file");
        assert!(left >= 1.0 && most <= 1.1, "{what}");
        assert!(most * share <= 1.1, "{what}");
    }
}
