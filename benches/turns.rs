//! A layer of moesaic that takes turns with the peers of `benches/peers/quantized.py`, as one of its
//! cells: it makes the layer, and then times calls as lines on stdin ask for.
//!
//! ```sh
//! cargo bench -p moesaic-benches --bench turns --no-run
//! python benches/peers/quantized.py --all --shape qwen3 \
//!     --also moesaic:mxfp4 "target/release/deps/turns-… --shape 2048,768,128,8 --format mxfp4"
//! ```
//!
//! Ids and weights are given, those of the script. `--format` is `bf16` or one of a spec, and
//! `--rows int8` or `fp8` quantizes activations. x and y are bf16.

use moesaic::half::bf16;
use moesaic::reference::{Random, Skew};
use moesaic::spec::canonical_tensors;
use moesaic::spec::format::ScaleType;
use moesaic::target::{Buffer, Device, Ptr};
use moesaic::tensor::Bytes;
use moesaic::{DType, Engine, EngineOptions, Layer, LayerSpec, RawCall, Tensor, Tensors};
use std::collections::BTreeMap;
use std::error::Error;
use std::io::BufRead;
use std::time::{Duration, Instant};

/// Seed of the script's draw of experts.
const SEED: u64 = 5;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    /// model_dim, hidden_dim, experts, top_k.
    shape: [usize; 4],
    format: String,
    rows: Option<String>,
    threads: usize,
    target: String,
    tokens: Vec<usize>,
    /// Inputs with a routing each, which take turns so that few tokens find no weights in caches.
    draws: usize,
}

impl Options {
    fn parse() -> Result<Options> {
        let mut options = Options {
            shape: [2048, 768, 128, 8],
            format: "bf16".to_string(),
            rows: None,
            threads: 2,
            target: "cpu".to_string(),
            tokens: vec![1, 8, 64, 512],
            draws: 1,
        };
        let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} takes a value"));
            match word.as_str() {
                "--shape" => {
                    let numbers = numbers(&value()?)?;
                    options.shape = numbers.try_into().map_err(|_| "--shape d,h,E,K")?;
                }
                "--format" => options.format = value()?,
                "--rows" => options.rows = Some(value()?),
                "--threads" => options.threads = value()?.parse()?,
                "--target" => options.target = value()?,
                "--draws" => options.draws = value()?.parse()?,
                "--tokens" => options.tokens = numbers(&value()?)?,
                _ => return Err(format!("{word} is no option").into()),
            }
        }
        Ok(options)
    }

    fn spec(&self) -> Result<LayerSpec> {
        let [d, h, experts, top_k] = self.shape;
        let mut precision = r#"weights = "bf16", activations = "bf16""#.to_string();
        if self.format != "bf16" {
            precision += &format!(", experts = \"{}\"", self.format);
        }
        if let Some(rows) = &self.rows {
            precision += &format!(", expert_activations = \"{rows}\"");
        }
        let text = format!(
            "shape = {{ model_dim = {d}, hidden_dim = {h}, experts = {experts}, top_k = {top_k} }}\n\
             router = {{ kind = \"external\" }}\n\
             precision = {{ {precision} }}\n"
        );
        Ok(LayerSpec::from_toml(&text)?)
    }
}

fn numbers(text: &str) -> Result<Vec<usize>> {
    Ok(text
        .split(',')
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()?)
}

/// Weights whose outputs are of the order of one: codes of all kinds but NaN, and scales about as
/// large as they should be.
fn weights(spec: &LayerSpec) -> Tensors<'static> {
    let mut random = Random::new(SEED);
    let made = canonical_tensors(spec).into_iter().map(|tensor| {
        let count: usize = tensor.shape.iter().product();
        let end = tensor.name.rsplit('.').next().unwrap_or_default();
        let scale = spec.precision.experts.map(|format| format.scale);
        let mut words = |least: u64, mask: u64| -> Vec<u8> {
            let all = |byte: u64| byte * 0x0101_0101_0101_0101;
            let word = |_| (random.bits() & all(mask)) + all(least);
            let words: Vec<u64> = (0..count.div_ceil(2)).map(word).collect();
            bytemuck::cast_slice(&words)[..count * 4].to_vec()
        };
        let bytes = match (tensor.dtype, end, scale) {
            (DType::I32, "weight", _) => words(0, 0xbf),
            (DType::I32, "scale", Some(ScaleType::E8m0)) => words(116, 3),
            (DType::I32, "scale", Some(ScaleType::E4m3)) => words(8, 7),
            (DType::I32, _, _) => words(1, 15),
            (dtype, _, _) => {
                let size = if end == "weight" { 0.03 } else { 1e-3 };
                let mut bytes = Vec::with_capacity(count * dtype.size());
                for _ in 0..count {
                    let number = random.signed() * size;
                    let number = if end == "weight" {
                        number
                    } else {
                        number.abs()
                    };
                    let mut one = [0; 4];
                    moesaic::tensor::write_float(dtype, number, &mut one[..dtype.size()]);
                    bytes.extend(&one[..dtype.size()]);
                }
                bytes
            }
        };
        let tensor_of = Tensor {
            dtype: tensor.dtype,
            shape: tensor.shape,
            data: Bytes::from(bytes),
        };
        (tensor.name, tensor_of)
    });
    made.collect()
}

/// The tensors of a call, which stay where they are.
struct Call {
    tokens: usize,
    tensors: BTreeMap<&'static str, Buffer>,
}

impl Call {
    /// Prepares the call of these experts, `[tokens, top_k]`.
    fn new(spec: &LayerSpec, ids: &[i32], device: &dyn Device) -> Result<Call> {
        let shape = &spec.shape;
        let tokens = ids.len() / shape.top_k;
        let mut random = Random::new(SEED + 1);
        let x: Vec<bf16> = (0..tokens * shape.model_dim)
            .map(|_| bf16::from_f64(random.signed()))
            .collect();
        let weights = vec![1.0 / shape.top_k as f32; ids.len()];
        let y = vec![bf16::ZERO; x.len()];
        let mut call = Call {
            tokens,
            tensors: BTreeMap::new(),
        };
        let all: [(_, &[u8]); 4] = [
            ("x", bytemuck::cast_slice(&x)),
            ("y", bytemuck::cast_slice(&y)),
            ("topk_ids", bytemuck::cast_slice(ids)),
            ("topk_weights", bytemuck::cast_slice(&weights)),
        ];
        for (name, bytes) in all {
            let buffer = device.alloc(bytes.len())?;
            device.upload(bytes, &buffer, 0)?;
            call.tensors.insert(name, buffer);
        }
        Ok(call)
    }

    fn run(&self, layer: &Layer) -> Result {
        let tensors = self
            .tensors
            .iter()
            .map(|(name, buffer)| (*name, buffer.ptr()));
        let tensors: Vec<(&str, Ptr)> = tensors.collect();
        // SAFETY: the tensors are as long as the spec and the number of tokens say, and a CPU is
        // done with them when the call returns.
        let call = unsafe { RawCall::new(self.tokens, &tensors) };
        layer.forward(call)?;
        Ok(())
    }

    /// Sees that y is finite, and not all zero.
    fn check(&self, device: &dyn Device) -> Result {
        let buffer = &self.tensors["y"];
        let mut bytes = vec![0u8; buffer.bytes()];
        device.download(buffer, 0, &mut bytes)?;
        let y: &[bf16] = bytemuck::cast_slice(&bytes);
        if y.iter().any(|y| !y.is_finite()) || y.iter().all(|y| *y == bf16::ZERO) {
            return Err("y is not finite, or zero".into());
        }
        Ok(())
    }
}

/// Calls until so many seconds have passed, in milliseconds. The first one warms up, and counts only
/// where it alone has taken as long.
fn turn(calls: &[Call], layer: &Layer, seconds: f64) -> Result<Vec<f64>> {
    let timed = |call: &Call| -> Result<f64> {
        let start = Instant::now();
        call.run(layer)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    let first = timed(&calls[0])?;
    if seconds > 0.0 && seconds * 1e3 <= first {
        return Ok(vec![first]);
    }
    let (mut times, end) = (
        Vec::new(),
        Instant::now() + Duration::from_secs_f64(seconds),
    );
    for call in calls.iter().cycle() {
        times.push(timed(call)?);
        if Instant::now() >= end {
            break;
        }
    }
    Ok(times)
}

fn main() -> Result {
    let options = Options::parse()?;
    let spec = options.spec()?;
    let engine = Engine::open(
        &options.target,
        EngineOptions {
            threads: Some(options.threads),
            ..EngineOptions::default()
        },
    )?;
    let layer = engine.layer(&spec, &weights(&spec))?;
    let shape = &spec.shape;
    let device = &**engine.device();
    let mut calls: BTreeMap<usize, Vec<Call>> = BTreeMap::new();
    for tokens in &options.tokens {
        let all = Skew::Uniform.draw(shape.experts, shape.top_k, tokens * options.draws, SEED);
        for ids in all.chunks(tokens * shape.top_k) {
            let call = Call::new(&spec, ids, device)?;
            call.run(&layer)?;
            call.check(device)?;
            calls.entry(*tokens).or_default().push(call);
        }
    }
    let version = format!(
        "moesaic {} ({})",
        env!("CARGO_PKG_VERSION"),
        engine.target()
    );
    println!(
        "{}",
        serde_json::json!({ "version": version, "errors": {} })
    );
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (tokens, seconds) = line.split_once(' ').ok_or("TOKENS SECONDS")?;
        let calls = calls
            .get(&tokens.parse()?)
            .ok_or("other tokens were prepared")?;
        let times = turn(calls, &layer, seconds.trim().parse()?)?;
        println!("{}", serde_json::json!({ "times": times }));
    }
    Ok(())
}
