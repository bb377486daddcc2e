//! Random weights and tokens, generated on all cores because the weights of real layers are
//! gigabytes.

use crate::failure::{Failure, Result};
use crate::units;
use moesaic::cpu::CpuDevice;
use moesaic::half::{bf16, f16};
use moesaic::spec::format::ScaleType;
use moesaic::spec::{Chooser, LossKind, TensorSpec, canonical_tensors};
use moesaic::target::Device;
use moesaic::{DType, Init, Input, LayerSpec, Tensor, Tensors};
use std::thread;

/// Refuses weights that this machine has no memory for: an allocation that fails would end the
/// process.
fn check_room(spec: &LayerSpec) -> Result {
    let Some(free) = CpuDevice::new().free_bytes() else {
        return Ok(());
    };
    let bytes = |tensor: TensorSpec| {
        let elements = tensor.shape.iter().map(|&size| size as u64);
        elements.product::<u64>() * tensor.dtype.size() as u64
    };
    let needed: u64 = canonical_tensors(spec).into_iter().map(bytes).sum();
    if needed <= free {
        return Ok(());
    }
    Err(Failure::input(format!(
        "random weights of this layer take {} of memory, {} are free",
        units::bytes(needed),
        units::bytes(free)
    ))
    .hint("take a layer with fewer or smaller experts"))
}

/// Returns every tensor of the layer in its own type, scaled by its fan-in so that outputs are of
/// the order of one.
pub fn weights(spec: &LayerSpec) -> Result<Tensors<'static>> {
    check_room(spec)?;
    let tensors = canonical_tensors(spec).into_iter().zip(0..);
    let one = |(tensor, seed): (TensorSpec, u64)| {
        let made = weight(spec, &tensor, seed);
        (tensor.name, made)
    };
    Ok(tensors.map(one).collect())
}

/// Returns the weights that [`Init::Linear`] draws from a seed, and the tables and codes that it
/// leaves out.
pub fn drawn_weights(spec: &LayerSpec, seed: u64) -> Result<Tensors<'static>> {
    check_room(spec)?;
    let mut weights = Init::Linear.weights(spec, seed);
    for (tensor, at) in canonical_tensors(spec).into_iter().zip(0..) {
        if !weights.contains_key(&tensor.name) {
            weights.insert(&tensor.name, weight(spec, &tensor, seed.wrapping_add(at)));
        }
    }
    Ok(weights)
}

fn weight(spec: &LayerSpec, tensor: &TensorSpec, seed: u64) -> Tensor<'static> {
    match tensor.dtype {
        DType::I32 if tensor.name.starts_with("experts.") => {
            codes(&tensor.shape, Byte::of(&tensor.name, spec), seed)
        }
        DType::I32 => table(&tensor.shape, spec),
        dtype => {
            let fan_in = if tensor.shape.len() > 1 {
                tensor.shape[tensor.shape.len() - 1]
            } else {
                1
            };
            let scale = match tensor.name.as_str() {
                // A larger bias would send all tokens to the same experts.
                "router.select_bias" => 0.01,
                // Codes are tens and have both signs, so the scale brings them to the order of
                // one.
                name if name.ends_with(".scale") => 1e-3,
                name if name.ends_with(".scale_2") => 1e-3 / Byte::of(name, spec).typical,
                name if name.ends_with(".offset") => 8e-3,
                name if name.ends_with(".offset_2") => 1e-3,
                _ => (3.0 / fan_in.max(1) as f32).sqrt(),
            };
            floats(dtype, &tensor.shape, scale, seed)
        }
    }
}

/// Returns random tokens, with the other inputs that the router and, in training, the losses need.
pub fn input(spec: &LayerSpec, tokens: usize) -> Input<'static> {
    let (d, k) = (spec.shape.model_dim, spec.shape.top_k);
    let dtype = spec.precision.activations;
    let mut input = Input {
        tokens,
        ..Input::default()
    };
    input.insert("x", rows(dtype, tokens, d, 1 << 20));
    match spec.router.kind.chooser() {
        Chooser::Table => {
            let rows = spec.router.table_rows.unwrap_or(1).max(1);
            let ids = (0..tokens).map(|t| (t * 7919 % rows) as i32).collect();
            input.insert("token_ids", Tensor::owned(&[tokens], ids));
        }
        Chooser::Caller => {
            let experts = spec.routed_experts();
            let ids = (0..tokens * k)
                .map(|slot| (slot % experts) as i32)
                .collect();
            input.insert("topk_ids", Tensor::owned(&[tokens, k], ids));
            input.insert(
                "topk_weights",
                Tensor::owned(&[tokens, k], vec![1.0 / k as f32; tokens * k]),
            );
        }
        Chooser::Scores => {}
    }
    if spec.router.token_mask {
        let mask = vec![1; tokens];
        input.insert("token_mask", Tensor::owned(&[tokens], mask));
    }
    if spec.router.active_k {
        input.insert("active_k", Tensor::owned(&[1], vec![k as i32]));
    }
    groups(spec, &mut input);
    input
}

/// Adds the inputs of losses over sequences and over larger groups: a few sequences, and balanced
/// counts for a group that holds these tokens alone.
fn groups(spec: &LayerSpec, input: &mut Input<'_>) {
    let (tokens, experts) = (input.tokens, spec.routed_experts());
    for loss in &spec.losses {
        match (loss.kind, loss.sequence_length) {
            (LossKind::Sequence, None) => {
                let ids = (0..tokens).map(|t| (t * 4 / tokens) as i32).collect();
                input.insert("sequence_ids", Tensor::owned(&[tokens], ids));
            }
            (LossKind::Global, _) => {
                let slots = (tokens * spec.shape.top_k) as i64;
                let share = |e: i64| (slots + e) / experts as i64;
                let counts = (0..experts as i64).map(share).collect();
                input.insert("global_counts", Tensor::owned(&[experts], counts));
                let tokens = Tensor::owned(&[1], vec![tokens as i64]);
                input.insert("global_tokens", tokens);
            }
            _ => {}
        }
    }
}

/// Returns the tensor with each value replaced by `value` of its index and the old value.
pub fn changed(tensor: &Tensor<'_>, value: impl Fn(usize, f32) -> f32) -> Tensor<'static> {
    let values = tensor.to_f32().into_iter().enumerate();
    let values: Vec<f32> = values.map(|(i, v)| value(i, v)).collect();
    Tensor::rounded(tensor.dtype, &tensor.shape, &values).into_static()
}

/// Returns a random gradient of the output.
pub fn output_gradient(spec: &LayerSpec, tokens: usize) -> Tensor<'static> {
    rows(
        spec.precision.activations,
        tokens,
        spec.output_dim(),
        1 << 21,
    )
}

fn rows(dtype: DType, tokens: usize, width: usize, seed: u64) -> Tensor<'static> {
    floats(dtype, &[tokens, width], 1.7, seed)
}

/// Returns the expert table of a table router: each row continues where the previous one ended.
fn table(shape: &[usize], spec: &LayerSpec) -> Tensor<'static> {
    let (elements, experts) = (
        shape.iter().product::<usize>(),
        spec.routed_experts().max(1),
    );
    Tensor::owned(shape, (0..elements).map(|i| (i % experts) as i32).collect())
}

/// The bytes that a tensor of words may have: those of `mask`, and `least` added.
#[derive(Clone, Copy)]
struct Byte {
    least: u8,
    mask: u8,
    /// The number that such a scale is about.
    typical: f32,
}

impl Byte {
    /// Returns the bytes of a tensor of codes, or of that with the first scales.
    fn of(name: &str, spec: &LayerSpec) -> Byte {
        let format = spec.precision.format_of(name);
        let byte = |least, mask, typical| Byte {
            least,
            mask,
            typical,
        };
        match format.map(|format| format.scale) {
            // One bit is zero, because NaN has all exponent and mantissa bits set in E4M3.
            _ if name.ends_with(".weight") => byte(0, 0xbf, 1.0),
            _ if name.ends_with(".offset") => byte(0, 7, 1.0),
            Some(ScaleType::E8m0) => byte(116, 3, 1e-3),
            Some(ScaleType::E4m3) => byte(8, 7, 2e-2),
            _ => byte(1, 31, 16.0),
        }
    }
}

/// Returns every kind of these bytes.
fn codes(shape: &[usize], byte: Byte, seed: u64) -> Tensor<'static> {
    let mut made = floats(DType::F32, shape, 1.0, seed).into_static();
    for one in made.data.to_mut().iter_mut() {
        *one = (*one & byte.mask) + byte.least;
    }
    Tensor {
        dtype: DType::I32,
        ..made
    }
}

/// Returns uniform values in `(-scale, scale)` in a float type.
fn floats(dtype: DType, shape: &[usize], scale: f32, seed: u64) -> Tensor<'static> {
    const CHUNK: usize = 1 << 20;
    let mut made = Tensor::zeros(dtype, shape);
    let bytes = made.data.to_mut();
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let mut chunks: Vec<(u64, &mut [u8])> = (seed << 32..)
        .zip(bytes.chunks_mut(CHUNK * dtype.size()))
        .collect();
    let share = chunks.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        for own in chunks.chunks_mut(share) {
            scope.spawn(move || {
                own.iter_mut()
                    .for_each(|(seed, part)| fill(dtype, part, scale, *seed))
            });
        }
    });
    made
}

fn fill(dtype: DType, bytes: &mut [u8], scale: f32, seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for element in bytes.chunks_exact_mut(dtype.size()) {
        // xorshift64 is fast, and random enough for matrix products.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale;
        match dtype {
            DType::F16 => element.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => element.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            _ => element.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic::kernel::CpuIsa;
    use moesaic::plan::{PlanOptions, TensorRole, plan};
    use moesaic::spec::testing;
    use moesaic::{Target, Training};
    use std::collections::BTreeSet;

    /// Layers that between them take everything that a layer can take.
    fn layers() -> Vec<LayerSpec> {
        let shape = "shape = { model_dim = 8, hidden_dim = 8, experts = 4, top_k = 2 }\n";
        let texts = [
            "router = { token_mask = true, active_k = true }",
            "losses = [{ kind = \"sequence\", coefficient = 1 }]",
            "losses = [{ kind = \"global\", coefficient = 1 }]",
        ];
        let parsed = texts.map(|text| LayerSpec::from_toml(&format!("{shape}{text}")).unwrap());
        let samples = (0..200).map(testing::sample);
        parsed.into_iter().chain(samples).collect()
    }

    /// Every input of every plan is there, as the plan wants it.
    #[test]
    fn calls_have_all_that_layers_take() {
        let mut seen = BTreeSet::new();
        for spec in layers() {
            let target = Target::Cpu(CpuIsa::Portable);
            let plan = plan(&spec, target, &PlanOptions::training(Training::default())).unwrap();
            for tokens in [0, 5] {
                let call = input(&spec, tokens);
                let wanted = plan.tensors.iter().filter(|t| t.role == TensorRole::Input);
                for tensor in wanted {
                    let what = format!("{} of {}", tensor.name, spec.to_toml());
                    let found = call.tensors.get(&tensor.name);
                    let found = found.unwrap_or_else(|| panic!("no {what}"));
                    assert_eq!(found.dtype, tensor.dtype, "{what}");
                    let shape = tensor.shape.iter();
                    let shape: Vec<usize> = shape
                        .map(|size| size.eval(tokens as u64) as usize)
                        .collect();
                    assert_eq!(found.shape, shape, "{what}");
                    assert_eq!(
                        found.data.len() as u64,
                        tensor.bytes(tokens as u64),
                        "{what}"
                    );
                    seen.insert(tensor.name.clone());
                }
            }
        }
        let known = [
            "active_k",
            "global_counts",
            "global_tokens",
            "sequence_ids",
            "token_ids",
            "token_mask",
            "topk_ids",
            "topk_weights",
            "x",
        ];
        assert_eq!(
            seen.iter().collect::<Vec<_>>(),
            known.iter().collect::<Vec<_>>()
        );
    }

    #[test]
    fn values_are_spread_and_the_same_every_time() {
        let made = floats(DType::F32, &[10_000], 2.0, 3);
        assert_eq!(made, floats(DType::F32, &[10_000], 2.0, 3));
        let values = made.to_f64();
        let mean = values.iter().sum::<f64>() / 1e4;
        let square = values.iter().map(|v| v * v).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.05, "{mean}");
        assert!((square - 4.0 / 3.0).abs() < 0.05, "{square}");
        assert!(values.iter().all(|v| v.abs() <= 2.0));
    }
}
