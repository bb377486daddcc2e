//! Gradients as other projects' autograd gives them: one fixture on one engine.
//! `tools/gpu-smoke` runs them on hardware.

use super::layers::{Tutel, import};
use moesaic::spec::hf::TensorParts;
use moesaic::spec::{LayerSpec, Loss};
use moesaic::weights::{Checkpoint, LoadOptions, load_import};
use moesaic::{Engine, Recompute, RngKey, Tensor, Tensors, Training};
use std::path::Path;

/// Everything that a forward and a backward pass give, by name.
struct Trained {
    what: String,
    found: Tensors<'static>,
}

impl Trained {
    fn run(
        what: String,
        engine: &Engine,
        spec: &LayerSpec,
        weights: &Tensors<'_>,
        [x, dy]: [&Tensor<'_>; 2],
    ) -> Trained {
        let training = Training {
            recompute: Recompute::None,
        };
        let layer = engine.training_layer(spec, weights, training).unwrap();
        let mut input = moesaic::Input {
            tokens: x.shape[0],
            ..moesaic::Input::default()
        };
        input.insert("x", x.clone());
        let losses = spec.losses.iter().map(loss_name);
        let losses: Vec<String> = losses.collect();
        let names: Vec<&str> = ["y"]
            .into_iter()
            .chain(losses.iter().map(String::as_str))
            .collect();
        let (output, saved) = layer
            .forward_train(input.reading(&names), RngKey::default())
            .unwrap();
        let gradients = layer.backward(&saved, dy, false).unwrap();
        let mut found = output.into_tensors();
        found.extend(gradients.into_tensors());
        let of_weights = layer.gradients().unwrap().into_iter();
        found.extend(of_weights.map(|(name, g)| (format!("grad.{name}"), g)));
        Trained { what, found }
    }

    /// Within `tolerance` of `want`, relative to its largest element.
    fn close(&self, name: &str, want: &[f64], tolerance: f64) {
        self.sum_close(name, 1, want, tolerance);
    }

    /// As `close`, of the sum of `count` stacked tensors.
    fn sum_close(&self, name: &str, count: usize, want: &[f64], tolerance: f64) {
        let what = &self.what;
        let found = self.found.get(name);
        let found = found
            .unwrap_or_else(|| panic!("{what}: no {name}"))
            .to_f32();
        assert_eq!(found.len(), want.len() * count, "{what}: length of {name}");
        let scale = want.iter().fold(0f64, |most, v| most.max(v.abs()));
        for (i, want) in want.iter().enumerate() {
            let stack = found.iter().skip(i).step_by(found.len() / count);
            let found: f64 = stack.map(|&v| f64::from(v)).sum();
            assert!(
                (found - want).abs() <= tolerance * scale,
                "{what}: {name}[{i}] is {found}, expected {want}"
            );
        }
    }
}

fn loss_name(loss: &Loss) -> String {
    format!("loss.{}", loss.kind.name())
}

/// A tensor of a block as transformers holds it in memory, under our names.
fn canonical(name: &str, tensor: &Tensor<'_>) -> Vec<(String, Vec<f64>)> {
    let values = tensor.to_f64();
    let one = |to: &str| vec![(to.to_string(), values.clone())];
    // gpt_oss multiplies from the other side and interleaves gate and up.
    let interleaved = name.starts_with("experts.gate_up_proj")
        && tensor.shape.len() == 3
        && tensor.shape[2] > tensor.shape[1];
    match name {
        "gate.weight" | "router.weight" => one("router.weight"),
        "router.bias" => one("router.bias"),
        "shared_expert_gate.weight" => one("shared.0.router.weight"),
        "experts.gate_up_proj" if interleaved => {
            let turned = turned(&values, tensor.shape[1], tensor.shape[2]);
            split_rows(&turned, tensor.shape[2], tensor.shape[1], true, "weight")
        }
        "experts.gate_up_proj" => {
            split_rows(&values, tensor.shape[1], tensor.shape[2], false, "weight")
        }
        "experts.gate_up_proj_bias" => split_rows(&values, tensor.shape[1], 1, true, "bias"),
        "experts.down_proj_bias" => one("experts.down.bias"),
        "experts.down_proj" => one("experts.down.weight"),
        _ => {
            let part = ["gate", "up", "down"].into_iter();
            let mut part = part.filter(|p| name.ends_with(&format!(".{p}_proj.weight")));
            let part = part.next().unwrap_or_else(|| panic!("what is {name}?"));
            one(&format!("shared.0.{part}.weight"))
        }
    }
}

/// Stacked matrices `[rows, columns]` turned to `[columns, rows]`.
fn turned(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let turn = |m: &[f64]| -> Vec<f64> {
        let at = |i: usize| m[i % rows * columns + i / rows];
        (0..rows * columns).map(at).collect()
    };
    values.chunks(rows * columns).flat_map(turn).collect()
}

/// Gate and up rows of stacked `[rows, width]` matrices: halves, or every other.
fn split_rows(
    values: &[f64],
    rows: usize,
    width: usize,
    interleaved: bool,
    kind: &str,
) -> Vec<(String, Vec<f64>)> {
    let side = |up: usize| -> Vec<f64> {
        let row = |i: usize| {
            if interleaved {
                2 * i + up
            } else {
                up * rows / 2 + i
            }
        };
        let matrix = |m: &[f64]| -> Vec<f64> {
            let rows = (0..rows / 2).flat_map(|i| m[row(i) * width..][..width].to_vec());
            rows.collect()
        };
        values.chunks(rows * width).flat_map(matrix).collect()
    };
    ["gate", "up"]
        .into_iter()
        .enumerate()
        .map(|(up, part)| (format!("experts.{part}.{kind}"), side(up)))
        .collect()
}

/// Gradients of a block of transformers.
pub fn hugging_face(engine: &Engine, dir: &Path) {
    let what = format!("{} on {}", dir.display(), engine.target());
    let import = import(dir);
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = load_import(&import, &checkpoint, LoadOptions::default()).unwrap();
    let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
    let [x, dy, dx] = ["x", "dy", "dx"].map(|name| block.read(name).unwrap());
    let trained = Trained::run(what.clone(), engine, &import.spec, &weights, [&x, &dy]);
    trained.close("dx", &dx.to_f64(), 2e-5);
    let names = block.names().filter_map(|name| name.strip_prefix("grad."));
    let mut checked = 0;
    for name in names {
        let tensor = block.read(&format!("grad.{name}")).unwrap();
        let mut tensor = tensor;
        if name == "experts.down_proj" && what.contains("gpt_oss") {
            let (rows, columns) = (tensor.shape[1], tensor.shape[2]);
            let values = turned(&tensor.to_f64(), rows, columns);
            let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            tensor = Tensor::copied(&[tensor.shape[0], columns, rows], &values);
        }
        for (ours, want) in canonical(name, &tensor) {
            trained.close(&format!("grad.{ours}"), &want, 2e-5);
            checked += 1;
        }
    }
    assert!(checked >= 4, "{what}: {checked} gradients");
}

/// Gradients of a fixture of `families`: a file of them has the names and shapes of the
/// checkpoint, so the recipe of a tensor is that of its gradient.
pub fn family(engine: &Engine, dir: &Path) {
    let what = format!("{} on {}", dir.display(), engine.target());
    let import = import(dir);
    let load = |file: &str| {
        let checkpoint = Checkpoint::open(dir.join(file)).unwrap();
        load_import(&import, &checkpoint, LoadOptions::default()).unwrap()
    };
    let block = Checkpoint::open(dir.join("block.safetensors")).unwrap();
    let [x, dy, dx] = ["x", "dy", "dx"].map(|name| block.read(name).unwrap());
    let weights = load("model.safetensors");
    let trained = Trained::run(what.clone(), engine, &import.spec, &weights, [&x, &dy]);
    trained.close("dx", &dx.to_f64(), 2e-5);
    let gradients = load("gradients.safetensors");
    let mut checked = 0;
    for source in &import.sources {
        let want = gradients[&source.name].to_f64();
        let name = format!("grad.{}", source.name);
        match &source.alternatives[0].parts {
            _ if source.name == "router.select_bias" => continue,
            TensorParts::Repeated { count, .. } => {
                let one = want.len() / count;
                trained.sum_close(&name, *count, &want[..one], 2e-5);
            }
            _ => trained.close(&name, &want, 2e-5),
        }
        checked += 1;
    }
    assert!(checked >= 4, "{what}: {checked} gradients");
}

/// Tutel's gradients of `sum(y · dy) + l_aux_wt · l_aux`.
pub fn tutel(engine: &Engine, file: &Path) {
    let what = format!("{} on {}", file.display(), engine.target());
    let tutel = Tutel::open(file);
    let [x, dy] = ["x", "dy"].map(|name| tutel.read(name));
    let trained = Trained::run(what, engine, &tutel.spec(), &tutel.weights(), [&x, &dy]);
    trained.close("y", &tutel.read("y").to_f64(), 1e-5);
    trained.close("dx", &tutel.read("grad.x").to_f64(), 1e-5);
    let loss = &tutel.spec().losses[0];
    trained.close(&loss_name(loss), &tutel.read("l_aux").to_f64(), 1e-5);
    let logits = tutel.read("grad.logits").to_f64();
    trained.close("grad.router.logits", &logits, 1e-5);
    for (name, want) in tutel.canonical("grad.") {
        trained.close(&format!("grad.{name}"), &want.to_f64(), 1e-5);
    }
}
