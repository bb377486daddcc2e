//! `moesaic run --grad` against outside data and the reference.

use crate::common::*;
use moesaic::reference::{self, Input};
use moesaic::spec::canonical_tensors;
use moesaic::weights::Checkpoint;
use moesaic::{DType, LayerSpec, Tensor, Tensors};

/// The small layer with a loss.
const LOSSES: &str = "\
name = \"small\"
shape = { model_dim = 20, hidden_dim = 12, experts = 5, top_k = 2 }
router = { renormalize = \"sum\" }
[[losses]]
kind = \"z\"
coefficient = 0.01
";

/// The small layer's input with the gradient of its output.
fn input() -> Tensors<'static> {
    let mut tensors = small_input();
    tensors.insert("dy".to_string(), tensor(&[7, 20], 6));
    tensors
}

fn close(name: &str, found: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(found.len(), wanted.len(), "{name}");
    let scale = wanted.iter().fold(0f64, |most, v| most.max(v.abs()));
    let pairs = found.iter().zip(wanted);
    let worst = pairs.fold(0f64, |most, (f, w)| most.max((f - w).abs()));
    assert!(worst <= tolerance * scale, "{name}: {:.1e}", worst / scale);
}

#[test]
fn gradients_are_written() {
    let small = Small::of(LOSSES);
    save(small.dir.path(), "x.safetensors", &input());
    small.run(&["--grad"]).ok();
    let (spec, tensors) = (LayerSpec::from_toml(LOSSES).unwrap(), input());
    let call = Input {
        tokens: 7,
        x: tensors["x"].to_f64(),
        ..Input::default()
    };
    let weights = reference::Weights::from(&small_weights());
    let wanted = reference::backward(&spec, &weights, &call, &tensors["dy"].to_f64());
    let (dtype, shape, dx) = load(&small.output, "dx");
    assert_eq!((dtype, shape), (DType::F32, vec![7, 20]));
    close("dx", &dx, &wanted.x, 1e-5);
    for (name, wanted) in wanted.weights {
        let (dtype, shape, found) = load(&small.output, &format!("grad.{name}"));
        assert_eq!((dtype, shape), (DType::F32, wanted.shape), "{name}");
        close(&name, &found, &wanted.data, 1e-5);
    }
    let losses = reference::losses(&spec, &weights, &call);
    let (_, shape, loss) = load(&small.output, "loss.z");
    assert_eq!(shape, [1]);
    close("loss.z", &loss, &[losses["loss.z"]], 1e-5);
    assert_eq!(load(&small.output, "y").1, [7, 20]);
}

/// Experts of codes keep them: everything else has gradients, and a note says so.
#[test]
fn matrices_of_codes_have_no_gradients() {
    let text = LOSSES.replace("router", "precision = { experts = \"mxfp4\" }\nrouter");
    let small = Small::of(&text);
    let spec = LayerSpec::from_toml(&text).unwrap();
    let random = reference::Weights::random(&spec, 3).rounded(&spec);
    let stored = canonical_tensors(&spec).into_iter().map(|t| {
        let values = random.get(&t.name).data.iter();
        let floats: Vec<f32> = values.clone().map(|v| *v as f32).collect();
        let tensor = match t.dtype {
            DType::I32 => Tensor::owned(&t.shape, values.map(|v| *v as i32).collect()),
            dtype => Tensor::rounded(dtype, &t.shape, &floats).into_static(),
        };
        (t.name, tensor)
    });
    let stored: Tensors<'static> = stored.collect();
    save(small.dir.path(), "w.safetensors", &stored);
    save(small.dir.path(), "x.safetensors", &input());
    let ran = small.run(&["--grad"]);
    let note = "have no gradients; --dequantize f32";
    assert!(ran.stderr.contains(note), "{}", ran.stderr);
    ran.ok();
    let (spec, weights) = reference::numbers(&spec, &random);
    let tensors = input();
    let call = Input {
        tokens: 7,
        x: tensors["x"].to_f64(),
        ..Input::default()
    };
    let wanted = reference::backward(&spec, &weights, &call, &tensors["dy"].to_f64());
    close("dx", &load(&small.output, "dx").2, &wanted.x, 1e-5);
    let router = load(&small.output, "grad.router.weight").2;
    close(
        "router",
        &router,
        &wanted.weights["router.weight"].data,
        1e-5,
    );
    let written = Checkpoint::open(&small.output).unwrap();
    assert!(!written.names().any(|name| name.starts_with("grad.experts")));
}

#[test]
fn what_is_computed_again_is_the_same() {
    let small = Small::of(LOSSES);
    save(small.dir.path(), "x.safetensors", &input());
    let all = |more: &[&str]| {
        small.run(&[&["--grad"], more].concat()).ok();
        std::fs::read(&small.output).unwrap()
    };
    let kept = all(&[]);
    assert_eq!(all(&["--recompute", "hidden"]), kept);
    assert_eq!(all(&["--recompute", "all"]), kept);
    assert_eq!(all(&["--threads", "1"]), kept);
}

/// A Hugging Face model's gradients by canonical names.
#[test]
fn a_hugging_face_layer() {
    let (dir, scratch) = (repository("tests/oracle/hf/mixtral"), scratch());
    let (block, output) = (
        dir.join("block.safetensors"),
        scratch.path().join("y.safetensors"),
    );
    let mut call = command();
    call.args(["run", "--grad", "--target", "cpu", "--layer", "1", "--hf"]);
    call.arg(&dir).arg("--input").arg(&block);
    finish(call.arg("--output").arg(&output)).ok();
    for (ours, theirs) in [
        ("dx", "dx"),
        ("grad.router.weight", "grad.gate.weight"),
        ("grad.experts.down.weight", "grad.experts.down_proj"),
    ] {
        let (found, wanted) = (load(&output, ours), load(&block, theirs));
        assert_eq!(found.1, wanted.1, "{ours}");
        close(ours, &found.2, &wanted.2, 2e-5);
    }
}

#[test]
fn bad_gradients_are_refused() {
    let small = Small::new();
    small.refuses(&["--grad"], &["has no tensor `dy`"]);
    small.refuses(&["--seed", "3"], &["--grad"]);
    let mut wrong = input();
    wrong.insert("dy".to_string(), tensor(&[6, 20], 6));
    save(small.dir.path(), "x.safetensors", &wrong);
    small.refuses(&["--grad"], &["`dy`", "[6, 20]", "[7, 20]"]);
}
