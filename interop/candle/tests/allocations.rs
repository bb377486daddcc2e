//! A call of the layer for inference allocates its result, and copies neither weights nor tokens.
//! A program of its own, because its allocator counts.

use candle_core::{DType, Device, Module, Result, Tensor};
use moesaic::spec::canonical_tensors;
use moesaic::{Engine, LayerSpec};
use moesaic_candle::InferenceLayer;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator; counts the bytes that it is asked for.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SPEC: &str = "shape = { model_dim = 64, hidden_dim = 32, experts = 8, top_k = 2 }";

/// The bytes that candle and the layer may take beside elements: shapes, a tensor's handle, its
/// lock.
const BESIDE: usize = 2048;

#[test]
fn a_call_allocates_its_result_alone() -> Result<()> {
    let spec = LayerSpec::from_toml(SPEC).expect("a valid spec");
    let weights = canonical_tensors(&spec).into_iter().map(|tensor| {
        let values = Tensor::ones(tensor.shape, DType::F32, &Device::Cpu)?;
        Ok((tensor.name, values))
    });
    let weights = weights.collect::<Result<BTreeMap<String, Tensor>>>()?;
    let engine = Engine::cpu().expect("a C compiler");
    let layer = InferenceLayer::new(&engine, &spec, &weights)?;
    let x = Tensor::ones((300, 64), DType::F32, &Device::Cpu)?;
    layer.forward(&x)?;
    for tokens in [300, 8, 1] {
        let x = x.narrow(0, 0, tokens)?;
        let before = BYTES.load(Ordering::Relaxed);
        let y = layer.forward(&x)?;
        let bytes = BYTES.load(Ordering::Relaxed) - before;
        let result = y.elem_count() * size_of::<f32>();
        assert!(bytes >= result, "the counter counts: {bytes}");
        assert!(
            bytes <= result + BESIDE,
            "{tokens} tokens: {bytes} bytes for a result of {result}"
        );
    }
    Ok(())
}
