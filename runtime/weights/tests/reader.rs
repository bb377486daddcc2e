//! Weights that a checkpoint lends without a copy, and weights that it converts.

use half::bf16;
use moesaic_kernel::DType;
use moesaic_spec::hf::{Alternative, TensorParts, TensorSource, TensorStep, canonical_sources};
use moesaic_spec::{GateLayout, LayerSpec, canonical_tensors};
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use moesaic_weights::*;

const SPEC: &str = "shape = { model_dim = 4, hidden_dim = 6, experts = 3, top_k = 1 }";

/// Returns a spec, and its tensors with elements that count through all of them.
fn layer() -> (LayerSpec, Tensors<'static>) {
    let spec = LayerSpec::from_toml(SPEC).unwrap();
    let mut next = 0;
    let tensors = canonical_tensors(&spec).into_iter().map(|tensor| {
        let count: usize = tensor.shape.iter().product();
        let values: Vec<f32> = (next..next + count).map(|i| i as f32).collect();
        next += count;
        (tensor.name, Tensor::owned(&tensor.shape, values))
    });
    let tensors = tensors.collect();
    (spec, tensors)
}

fn written(dir: &tempfile::TempDir, tensors: &Tensors<'_>) -> Checkpoint {
    let path = dir.path().join("w.safetensors");
    write_safetensors(&path, tensors).unwrap();
    Checkpoint::open(&path).unwrap()
}

#[test]
fn what_lies_as_it_should_is_lent() {
    let (spec, weights) = layer();
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    let reader = LayerReader::canonical(&spec, &file, LoadOptions::default()).unwrap();
    for (name, tensor) in &weights {
        let shape = tensor.shape.clone();
        assert_eq!(reader.describe(name), Some((DType::F32, shape)));
        for rows in [0..1, 1..3, 0..3] {
            let read = reader.rows(name, rows.clone()).unwrap();
            assert!(read.data.is_mapped(), "{name}");
            assert_eq!(read, tensor.rows(rows).unwrap(), "{name}");
        }
    }
    let all = reader.load().unwrap();
    assert!(all.values().all(|tensor| tensor.data.is_mapped()));
    drop(file);
    assert_eq!(all, weights, "what was lent stays when the checkpoint goes");
    assert_eq!(reader_of_nothing(&spec), "the layer has no weight `x`");
}

fn reader_of_nothing(spec: &LayerSpec) -> String {
    let (_, weights) = layer();
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    let reader = LayerReader::canonical(spec, &file, LoadOptions::default()).unwrap();
    assert_eq!(reader.describe("x"), None);
    reader
        .rows("x", 0..1)
        .expect_err("there is none")
        .to_string()
}

/// All mismatches are reported at once, but of missing tensors only the first. Rounding is reported
/// only if nothing else is wrong.
#[test]
fn every_tensor_that_does_not_fit_is_named() {
    let (mut spec, mut weights) = layer();
    spec.precision.weights = DType::Bf16;
    for (name, shape) in [
        ("router.weight", [3, 5, 1]),
        ("experts.down.weight", [3, 6, 4]),
    ] {
        let elements = shape.iter().product();
        weights.insert(name, Tensor::owned(&shape, vec![0f32; elements]));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors").display().to_string();
    let refused = |weights: &Tensors<'_>| {
        let file = written(&dir, weights);
        let refused = LayerReader::canonical(&spec, &file, LoadOptions::default());
        refused.expect_err("it does not fit").to_string()
    };
    let expected = format!(
        "several tensors do not fit:\n  `router.weight` in {path} has shape [3, 5, 1], expected [3, 4]\n  \
         `experts.down.weight` in {path} has shape [3, 6, 4], expected [3, 4, 6]"
    );
    assert_eq!(refused(&weights), expected);
    for name in ["experts.gate.weight", "experts.up.weight"] {
        weights.remove(name);
    }
    let missing = format!("\n  {path} has no tensor for `experts.gate.weight`\n");
    let said = refused(&weights);
    assert!(said.contains(&missing), "{said}");
    assert_eq!(said.lines().count(), 4, "{said}");
}

/// A recipe with another number of experts than the layer is refused.
#[test]
fn a_recipe_has_a_tensor_for_each_expert() {
    let (spec, weights) = layer();
    let dir = tempfile::tempdir().unwrap();
    let mut each = weights.clone();
    for expert in 0..4 {
        let down = Tensor::owned(&[4, 6], vec![0f32; 24]);
        each.insert(format!("down.{expert}"), down);
    }
    let file = written(&dir, &each);
    let sources = |count| {
        let name = "experts.down.weight";
        let parts = TensorParts::PerExpert {
            before: "down.".to_string(),
            after: String::new(),
            first: 0,
            count,
        };
        let mut sources = canonical_sources(&spec);
        let down = sources.iter_mut().find(|source| source.name == name);
        down.unwrap().alternatives = vec![Alternative {
            parts,
            steps: Vec::new(),
        }];
        sources
    };
    for count in [2, 4] {
        let made = LayerReader::of_sources(&spec, &sources(count), &file, LoadOptions::default());
        let expected = format!(
            "the recipe for `experts.down.weight` has {count} tensors, one for each of 3 is needed"
        );
        assert_eq!(made.expect_err("too few or many").to_string(), expected);
    }
    assert!(LayerReader::of_sources(&spec, &sources(3), &file, LoadOptions::default()).is_ok());
}

#[test]
fn other_types_are_converted_piece_by_piece() {
    let (mut spec, weights) = layer();
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    spec.precision.weights = DType::Bf16;
    let strict = LayerReader::canonical(&spec, &file, LoadOptions::default());
    assert!(matches!(strict, Err(WeightsError::Narrowing { .. })));
    let options = LoadOptions {
        narrow: true,
        ..LoadOptions::default()
    };
    let reader = LayerReader::canonical(&spec, &file, options).unwrap();
    let name = "experts.down.weight";
    let read = reader.rows(name, 1..3).unwrap();
    assert!(!read.data.is_mapped());
    let wide = weights[name].rows(1..3).unwrap().to_f32();
    let expected: Vec<bf16> = wide.into_iter().map(bf16::from_f32).collect();
    assert_eq!(read.to_vec::<bf16>().unwrap(), expected);
    assert_eq!(read.shape, [2, 4, 6]);
}

/// Fused gate and up of one expert are contiguous, those of two are not.
#[test]
fn halves_of_fused_tensors_are_lent_expert_by_expert() {
    let (mut spec, mut weights) = layer();
    let whole = weights.clone();
    let [gate, up] =
        ["gate", "up"].map(|m| weights.remove(&format!("experts.{m}.weight")).unwrap());
    let each = (0..3).flat_map(|e| [gate.rows(e..e + 1), up.rows(e..e + 1)]);
    let values: Vec<f32> = each.flat_map(|half| half.unwrap().to_f32()).collect();
    weights.insert("experts.gate_up.weight", Tensor::owned(&[3, 12, 4], values));
    spec.experts.layout = GateLayout::Concat;
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    let reader = LayerReader::canonical(&spec, &file, LoadOptions::default()).unwrap();
    for name in ["experts.gate.weight", "experts.up.weight"] {
        for first in 0..3 {
            let read = reader.rows(name, first..3).unwrap();
            assert!(read.data.is_mapped(), "{name}");
            assert_eq!(read, whole[name].rows(first..first + 1).unwrap());
        }
    }
    assert_eq!(reader.load().unwrap(), whole);
}

/// Column factors apply to the requested elements, even if each row is one element.
#[test]
fn columns_are_scaled_in_pieces_as_at_once() {
    let toml =
        "shape = { model_dim = 4, hidden_dim = 6, experts = 3, top_k = 1 }\nrouter.bias = true";
    let spec = LayerSpec::from_toml(toml).unwrap();
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(&spec) {
        let count = tensor.shape.iter().product::<usize>();
        let values: Vec<f32> = (1..=count).map(|i| i as f32).collect();
        weights.insert(&tensor.name, Tensor::owned(&tensor.shape, values));
    }
    weights.insert("by", Tensor::owned(&[3], vec![2.0f32, 3.0, 5.0]));
    let each = [4.0f32, 8.0, 16.0].iter().enumerate();
    for (e, value) in each {
        weights.insert(format!("one.{e}"), Tensor::owned(&[1], vec![*value]));
    }
    let per_expert = TensorParts::PerExpert {
        before: "one.".to_string(),
        after: String::new(),
        first: 0,
        count: 3,
    };
    let whole = TensorParts::One("router.bias".to_string());
    let scale = TensorStep::MulColumns("by".to_string());
    for (parts, steps, expected) in [
        (whole.clone(), vec![scale.clone()], [2.0, 6.0, 15.0]),
        (whole.clone(), vec![TensorStep::Plus(0.5)], [1.5, 2.5, 3.5]),
        (
            whole,
            vec![TensorStep::Plus(1.0), scale.clone()],
            [3.0, 7.0, 16.0],
        ),
        (
            per_expert,
            vec![TensorStep::Reshape(vec![]), scale],
            [8.0, 24.0, 80.0],
        ),
    ] {
        let mut sources = moesaic_spec::hf::canonical_sources(&spec);
        let source = sources.iter_mut().find(|s| s.name == "router.bias");
        source.unwrap().alternatives = vec![Alternative { parts, steps }];
        let dir = tempfile::tempdir().unwrap();
        let file = written(&dir, &weights);
        let reader = LayerReader::of_sources(&spec, &sources, &file, LoadOptions::default());
        let reader = reader.unwrap();
        for rows in [0..3, 1..3, 2..3] {
            let read = reader.rows("router.bias", rows.clone()).unwrap();
            assert_eq!(read.to_f32(), expected[rows]);
        }
    }
}

/// A recipe for fewer or more experts does not fit the layer.
#[test]
fn recipes_have_a_tensor_for_each_expert() {
    let (spec, whole) = layer();
    let mut weights = whole.clone();
    let down = weights.remove("experts.down.weight").unwrap();
    for e in 0..4 {
        let expert = down.rows(e % 3..e % 3 + 1).unwrap().to_f32();
        weights.insert(format!("down.{e}"), Tensor::owned(&[4, 6], expert));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    for count in [0, 2, 4] {
        let mut sources = moesaic_spec::hf::canonical_sources(&spec);
        let source = sources.iter_mut().find(|s| s.name == "experts.down.weight");
        let parts = TensorParts::PerExpert {
            before: "down.".to_string(),
            after: String::new(),
            first: 0,
            count,
        };
        let steps = Vec::new();
        source.unwrap().alternatives = vec![Alternative { parts, steps }];
        let reader = LayerReader::of_sources(&spec, &sources, &file, LoadOptions::default());
        let error = reader.expect_err("it is for other experts").to_string();
        let expected = format!(
            "the recipe for `experts.down.weight` has {count} tensors, one for each of 3 is needed"
        );
        assert_eq!(error, expected);
    }
}

/// Without this check, the system would end a process that reads beyond the end.
#[test]
fn a_file_that_was_cut_short_is_an_error() {
    let (spec, weights) = layer();
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    let reader = LayerReader::canonical(&spec, &file, LoadOptions::default()).unwrap();
    let path = dir.path().join("w.safetensors");
    let open = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    open.set_len(100).unwrap();
    let expected = format!(
        "{} is damaged: it was cut short since it was opened",
        path.display()
    );
    let error = reader.rows("router.weight", 0..1).err().unwrap();
    assert_eq!(error.to_string(), expected);
    assert_eq!(reader.load().err().unwrap().to_string(), expected);
    let error = file.read("router.weight").err().unwrap();
    assert_eq!(error.to_string(), expected);
}

/// Transposed tensors of single experts: rows are assembled on request.
#[test]
fn experts_are_put_together_as_far_as_asked() {
    let (spec, whole) = layer();
    let mut weights = whole.clone();
    let down = weights.remove("experts.down.weight").unwrap();
    for e in 0..3 {
        let expert = down.rows(e..e + 1).unwrap().to_f32();
        let turned = (0..6).flat_map(|c| (0..4).map(move |r| r * 6 + c));
        let values = turned.map(|i| expert[i]).collect();
        weights.insert(format!("down.{e}"), Tensor::owned(&[6, 4], values));
    }
    let mut sources = moesaic_spec::hf::canonical_sources(&spec);
    let source = sources.iter_mut().find(|s| s.name == "experts.down.weight");
    *source.unwrap() = TensorSource {
        name: "experts.down.weight".to_string(),
        alternatives: vec![Alternative {
            parts: TensorParts::PerExpert {
                before: "down.".to_string(),
                after: String::new(),
                first: 0,
                count: 3,
            },
            steps: vec![TensorStep::Transpose],
        }],
    };
    let dir = tempfile::tempdir().unwrap();
    let file = written(&dir, &weights);
    let reader = LayerReader::of_sources(&spec, &sources, &file, LoadOptions::default()).unwrap();
    let read = reader.rows("experts.down.weight", 1..3).unwrap();
    assert_eq!(read, down.rows(1..3).unwrap());
    assert_eq!(reader.load().unwrap(), whole);
}
