//! Layers of models that transformers has no code for, against plain loops over the formulas of
//! the programs that serve them.

use moesaic_reference::{Input, Random, Weights, erf, forward};
use moesaic_spec::hf;
use moesaic_tensor::{Tensor, Tensors};
use moesaic_weights::{Checkpoint, LoadOptions, load_import, write_safetensors};

const TOKENS: usize = 9;
const MODEL: usize = 8;

/// A layer of a model, whose tensors are random.
struct Served {
    config: String,
    layer: usize,
    tensors: Tensors<'static>,
    random: Random,
}

impl Served {
    fn new(config: &str, layer: usize) -> Served {
        Served {
            config: config.to_string(),
            layer,
            tensors: Tensors::new(),
            random: Random::new(layer as u64),
        }
    }

    /// Adds a tensor to the file, and returns its numbers.
    fn add(&mut self, name: &str, shape: &[usize]) -> Vec<f64> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| self.random.signed() as f32).collect();
        let numbers = values.iter().map(|v| f64::from(*v)).collect();
        self.tensors.insert(name, Tensor::owned(shape, values));
        numbers
    }

    /// Compares the reference of the imported layer with `y_of`, which computes one token.
    fn check(mut self, y_of: impl Fn(&[f64]) -> Vec<f64>) {
        let import = hf::import(&self.config, self.layer).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        write_safetensors(&file, &self.tensors).unwrap();
        let checkpoint = Checkpoint::open(&file).unwrap();
        let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
        let x: Vec<f64> = (0..TOKENS * MODEL).map(|_| self.random.signed()).collect();
        let input = Input {
            tokens: TOKENS,
            x: x.clone(),
            ..Input::default()
        };
        let got = forward(&import.spec, &Weights::from(&weights), &input).y;
        let want: Vec<f64> = x.chunks(MODEL).flat_map(y_of).collect();
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < 1e-6, "y[{i}] is {got}, not {want}");
        }
    }
}

fn rows(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    let dot = |row: &[f64]| row.iter().zip(x).map(|(w, v)| w * v).sum();
    matrix.chunks(x.len()).map(dot).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// Returns the indices of the `k` largest values, the largest first.
fn best(values: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order[..k].to_vec()
}

fn glu(act: fn(f64) -> f64, offset: f64, [gate, up, down]: [&[f64]; 3], x: &[f64]) -> Vec<f64> {
    let (gate, up) = (rows(gate, x), rows(up, x));
    let inner: Vec<f64> = (gate.iter().zip(up))
        .map(|(g, u)| act(*g) * (u + offset))
        .collect();
    rows(down, &inner)
}

/// Grok 2: softmax over softly capped logits, experts with the exact gelu, dense ones beside them
/// with its approximation, and the sum of both over the square root of 2.
#[test]
fn grok_is_the_loop_of_sglang() {
    let config = r#"{"architectures": ["Grok1ForCausalLM"], "model_type": "git", "hidden_size": 8,
        "intermediate_size": 6, "moe_intermediate_size": 5, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "residual_moe": true,
        "router_logit_softcapping": 1.5}"#;
    let mut model = Served::new(config, 1);
    let at = "model.layers.1";
    let router = model.add(&format!("{at}.block_sparse_moe.gate.weight"), &[4, 8]);
    let experts: Vec<[Vec<f64>; 3]> = (0..4)
        .map(|e| {
            [("w1", [5, 8]), ("w3", [5, 8]), ("w2", [8, 5])].map(|(leaf, shape)| {
                model.add(
                    &format!("{at}.block_sparse_moe.experts.{e}.{leaf}.weight"),
                    &shape,
                )
            })
        })
        .collect();
    let dense = [("gate", [6, 8]), ("up", [6, 8]), ("down", [8, 6])]
        .map(|(part, shape)| model.add(&format!("{at}.mlp.{part}_proj.weight"), &shape));
    model.check(|x| {
        let logits = rows(&router, x);
        let capped: Vec<f64> = logits.iter().map(|z| 1.5 * (z / 1.5).tanh()).collect();
        let sum: f64 = capped.iter().map(|z| z.exp()).sum();
        let mut y = glu(gelu_tanh, 0.0, dense.each_ref().map(Vec::as_slice), x);
        for e in best(&capped, 2) {
            let own = glu(gelu, 0.0, experts[e].each_ref().map(Vec::as_slice), x);
            let weight = capped[e].exp() / sum;
            y.iter_mut().zip(own).for_each(|(y, v)| *y += weight * v);
        }
        y.iter().map(|v| v / 2f64.sqrt()).collect()
    });
}

/// Moondream 3: softmax over the chosen logits, which have a bias, and `gelu(gate) · (up + 1)`.
#[test]
fn moondream_is_the_loop_of_vllm() {
    let config = r#"{"model_type": "moondream3", "text_config": {"model_type": "moondream3_text",
        "hidden_size": 8, "moe_expert_inner_dim": 5, "moe_num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 6, "moe_start_layer": 4}}"#;
    let mut model = Served::new(config, 5);
    let at = "model.text.blocks.5.mlp";
    let router = model.add(&format!("{at}.router.weight"), &[4, 8]);
    let bias = model.add(&format!("{at}.router.bias"), &[4]);
    let gate_up = model.add(&format!("{at}.fc1.weight"), &[4, 10, 8]);
    let down = model.add(&format!("{at}.fc2.weight"), &[4, 8, 5]);
    model.check(|x| {
        let logits: Vec<f64> = rows(&router, x)
            .iter()
            .zip(&bias)
            .map(|(z, b)| z + b)
            .collect();
        let chosen = best(&logits, 2);
        let sum: f64 = chosen.iter().map(|e| logits[*e].exp()).sum();
        let mut y = vec![0.0; 8];
        for e in chosen {
            let (gate, up) = gate_up[e * 80..(e + 1) * 80].split_at(40);
            let own = glu(gelu, 1.0, [gate, up, &down[e * 40..(e + 1) * 40]], x);
            let weight = logits[e].exp() / sum;
            y.iter_mut().zip(own).for_each(|(y, v)| *y += weight * v);
        }
        y
    });
}

/// Intern-S2-Mobius: layer 5 of models with 4 banks has the experts and the router of bank 1, and a
/// shared expert of its own.
#[test]
fn mobius_is_the_loop_of_sglang() {
    let config = r#"{"model_type": "interns2_mobius", "text_config": {"hidden_size": 8,
        "model_type": "interns2_mobius_text", "moe_intermediate_size": 5, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 6, "num_blocks": 4,
        "shared_expert_intermediate_size": 6}}"#;
    let mut model = Served::new(config, 5);
    let (bank, own) = (
        "model.language_model.meta_mlp.1",
        "model.language_model.layers.5.mlp",
    );
    let router = model.add(&format!("{bank}.gate.weight"), &[4, 8]);
    let gate_up = model.add(&format!("{bank}.experts.gate_up_proj"), &[4, 10, 8]);
    let down = model.add(&format!("{bank}.experts.down_proj"), &[4, 8, 5]);
    let gate = model.add(&format!("{own}.shared_expert_gate.weight"), &[1, 8]);
    let shared = [("gate", [6, 8]), ("up", [6, 8]), ("down", [8, 6])]
        .map(|(part, shape)| model.add(&format!("{own}.shared_expert.{part}_proj.weight"), &shape));
    let silu = |x: f64| x / (1.0 + (-x).exp());
    model.check(|x| {
        let weight = 1.0 / (1.0 + (-rows(&gate, x)[0]).exp());
        let beside = glu(silu, 0.0, shared.each_ref().map(Vec::as_slice), x);
        let mut y: Vec<f64> = beside.iter().map(|v| weight * v).collect();
        let logits = rows(&router, x);
        let chosen = best(&logits, 2);
        let sum: f64 = chosen.iter().map(|e| logits[*e].exp()).sum();
        for e in chosen {
            let (gate, up) = gate_up[e * 80..(e + 1) * 80].split_at(40);
            let own = glu(silu, 0.0, [gate, up, &down[e * 40..(e + 1) * 40]], x);
            let weight = logits[e].exp() / sum;
            y.iter_mut().zip(own).for_each(|(y, v)| *y += weight * v);
        }
        y
    });
}
