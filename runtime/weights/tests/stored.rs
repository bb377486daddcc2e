//! Codes of experts stand for the numbers that dequantizing gives, to the bit.

use crate::archive;
use crate::quantizer;
use crate::support::imported;
use moesaic_kernel::DType;
use moesaic_spec::format::StoredMatrix;
use moesaic_spec::hf::Import;
use moesaic_spec::{LayerSpec, WeightFormat};
use moesaic_tensor::{Tensor, Tensors, WeightSource};
use moesaic_weights::{
    Checkpoint, ExpertFormats, LayerReader, LoadOptions, load_import, set_expert_formats,
};
use safetensors::{Dtype, SafeTensors};
use std::fs;
use std::path::Path;

/// Returns every number of the matrices with a name, decoded from their codes.
fn decoded(codes: &Tensors<'_>, matrix: &str, format: WeightFormat, shape: &[usize]) -> Vec<f32> {
    let [experts, rows, columns] = [shape[0], shape[1], shape[2]];
    let mut all = vec![0f32; experts * rows * columns];
    for (expert, values) in all.chunks_mut((rows * columns).max(1)).enumerate() {
        let part = |end: &str| -> &[u8] {
            let Some(tensor) = codes.get(&format!("{matrix}.{end}")) else {
                return &[];
            };
            let size = tensor.data.len() / experts;
            &tensor.data[expert * size..(expert + 1) * size]
        };
        let stored = StoredMatrix {
            format,
            size: [rows, columns],
            codes: part("weight"),
            scales: part("scale"),
            scales_2: part("scale_2"),
            offsets: part("offset"),
            offsets_2: part("offset_2"),
        };
        for (row, values) in values.chunks_mut(columns.max(1)).enumerate() {
            stored.row(row, values);
        }
    }
    all
}

/// Returns the number of steps between two floats; NaNs are alike.
fn steps(a: f32, b: f32) -> u32 {
    if a.is_nan() && b.is_nan() {
        return 0;
    }
    a.to_bits().abs_diff(b.to_bits())
}

/// Checks the codes of an import, if it has any, against its numbers in f32: each is at most `most`
/// floats away. Chunks of experts are those of the whole.
pub fn check(what: &str, import: &Import, file: &Checkpoint, most: u32) -> ExpertFormats {
    let mut stored = import.clone();
    let formats = set_expert_formats(&mut stored, file, LoadOptions::default());
    let Some(up) = formats.up else {
        assert_eq!(stored.spec, import.spec, "{what}");
        return formats;
    };
    let mut plain = import.clone();
    plain.spec.precision.weights = DType::F32;
    let numbers = load_import(&plain, file, LoadOptions::default()).unwrap();
    let reader = LayerReader::of_import(&stored, file, LoadOptions::default()).unwrap();
    let codes = reader.load().unwrap();
    check_parts(what, &stored.spec, &reader, &codes);
    for matrix in ["experts.gate", "experts.up", "experts.down"] {
        let Some(wanted) = numbers.get(&format!("{matrix}.weight")) else {
            continue;
        };
        let format = match matrix {
            "experts.down" => formats.down.unwrap(),
            _ => up,
        };
        let found = decoded(&codes, matrix, format, &wanted.shape);
        let wanted = wanted.to_f32();
        assert_eq!(found.len(), wanted.len());
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let off = steps(*found, *wanted);
            assert!(off <= most, "{what}: {matrix} {at}: {found:e}, {wanted:e}");
        }
    }
    formats
}

/// Checks that every canonical tensor is there, and that its rows are those of the whole.
fn check_parts(what: &str, spec: &LayerSpec, reader: &LayerReader<'_>, codes: &Tensors<'_>) {
    let wanted = moesaic_spec::canonical_tensors(spec);
    assert_eq!(wanted.len(), codes.len(), "{what}");
    for wanted in wanted {
        let whole = &codes[&wanted.name];
        let kind = (wanted.dtype, wanted.shape);
        assert_eq!((whole.dtype, whole.shape.clone()), kind, "{what}");
        assert_eq!(reader.describe(&wanted.name), Some(kind), "{what}");
        let count = whole.shape[0];
        let mut first = 0;
        while first < count {
            let part = reader.rows(&wanted.name, first..count).unwrap();
            let next = first + part.shape[0];
            assert_eq!(part, whole.rows(first..next).unwrap(), "{what}");
            first = next;
        }
        if count > 1 {
            let last: Tensor<'_> = reader.rows(&wanted.name, count - 1..count).unwrap();
            assert_eq!(last, whole.rows(count - 1..count).unwrap(), "{what}");
        }
    }
}

/// The names of the formats in which published layers are held, up and down; `-` for numbers.
const HELD: [(&str, &str); 24] = [
    ("autoround_sym", "custom custom"),
    ("awq_g128", "uint4-g128 uint4-g128"),
    ("ct_fp8_channel", "custom custom"),
    ("ct_fp8_tensor", "custom custom"),
    ("ct_int4_g128_asym", "custom custom"),
    ("ct_int4_g32_kimi", "int4-g32 int4-g32"),
    ("ct_int8_channel", "custom custom"),
    ("ct_mxfp4", "mxfp4 mxfp4"),
    ("ct_mxfp8", "mxfp8 mxfp8"),
    ("ct_nvfp4", "nvfp4 nvfp4"),
    ("fp8_block_ds", "fp8 fp8"),
    ("gguf_ds2_q5_k", "q5_k custom"),
    ("gguf_gptoss", "mxfp4 mxfp4"),
    ("gguf_iq4_nl", "iq4_nl iq4_nl"),
    ("gguf_q4_0", "q4_0 q4_0"),
    ("gguf_q4_k", "q4_k q8_0"),
    ("gguf_q6_k", "q8_0 q6_k"),
    ("gguf_q8_0", "q8_0 q8_0"),
    ("gptoss_mxfp4", "mxfp4 mxfp4"),
    ("gptq_int4_act", "-"),
    ("gptq_int4_asym", "uint4-g32 uint4-g32"),
    ("gptq_int4_sym", "custom custom"),
    ("gptq_int8", "q8_0 q8_0"),
    ("modelopt_nvfp4", "nvfp4 nvfp4"),
];

/// The same of `formats_more`.
const HELD_MORE: [(&str, &str); 12] = [
    ("autoround_asym", "uint4-g32 uint4-g32"),
    ("ct_fp8_block", "custom custom"),
    ("ct_int3_asym", "custom custom"),
    ("ct_int4_bytes", "custom custom"),
    ("ct_int6", "custom custom"),
    ("ct_mxfp6", "mxfp8 mxfp8"),
    ("fbgemm_llama4", "fp8-row fp8-row"),
    ("modelopt_llama4", "nvfp4 nvfp4"),
    ("modelopt_mixed", "custom int8"),
    ("mxfp8", "mxfp8 mxfp8"),
    ("quark_mixed", "mxfp4 fp8-row"),
    ("quark_mxfp4", "mxfp4 mxfp4"),
];

/// The same of files that gguf-py wrote.
const HELD_BY_GGUF: [(&str, &str); 4] = [
    ("granitemoe", "custom q4_0"),
    ("llama", "iq4_xs mxfp4"),
    ("olmoe", "custom q4_0"),
    ("qwen35moe", "q4_1 custom"),
];

#[test]
fn published_layers_keep_their_codes() {
    check_held("formats", &HELD);
    check_held("formats_more", &HELD_MORE);
}

#[test]
fn layers_of_gguf_py_keep_their_codes() {
    check_held("gguf", &HELD_BY_GGUF);
}

fn check_held(archive: &str, all: &[(&str, &str)]) {
    let root = archive::folder(archive);
    let mut wrong = Vec::new();
    for (name, held) in all {
        let dir = root.join(name);
        let case: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.join("case.json")).unwrap()).unwrap();
        let (import, file) = imported(&dir, &case).unwrap();
        // Codes multiply by the inverse of compressed-tensors' second scale, and numbers divide.
        let formats = check(
            name,
            &import,
            &file,
            if *name == "ct_nvfp4" { 2 } else { 0 },
        );
        let named = |format: WeightFormat| match format.name {
            "" => "custom",
            name => name,
        };
        let found = match (formats.up, formats.down) {
            (Some(up), Some(down)) => format!("{} {}", named(up), named(down)),
            _ => "-".to_string(),
        };
        if found != *held || formats.dequantized.is_some() != (*held == "-") {
            wrong.push(format!("{name}: {found}, {formats:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Stacks the single experts' tensors of a layer, gate before up, with the sizes of a stack for one
/// of the two and those of a matrix for the other.
fn stacked(dir: &Path, to: &Path) -> Checkpoint {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (base, mut tensors) = ("model.layers.1.mlp", quantizer::Tensors::default());
    let router = file.tensor(&format!("{base}.gate.weight")).unwrap();
    let data = router.data().to_vec();
    tensors.put(
        &format!("{base}.gate.weight"),
        router.dtype(),
        router.shape(),
        data,
    );
    for (stack, parts) in [
        ("gate_up_proj", &["gate_proj", "up_proj"][..]),
        ("down_proj", &["down_proj"][..]),
    ] {
        for end in ["packed", "scale"] {
            let of = |expert, part| {
                let name = format!("{base}.experts.{expert}.{part}.weight_{end}");
                file.tensor(&name).unwrap()
            };
            let all = (0..4).flat_map(|e| parts.iter().map(move |part| (e, *part)));
            let data = all.flat_map(|(e, part)| of(e, part).data().to_vec());
            let (one, name) = (of(0, parts[0]), format!("{base}.experts.{stack}_{end}"));
            let shape = [4, one.shape()[0] * parts.len(), one.shape()[1]];
            tensors.put(&name, one.dtype(), &shape, data.collect());
        }
        let sizes: &[i64] = if parts.len() == 2 {
            &[4, 192, 64]
        } else {
            &[64, 96]
        };
        let data = sizes.iter().flat_map(|n| n.to_le_bytes()).collect();
        let name = format!("{base}.experts.{stack}_shape");
        tensors.put(&name, Dtype::I64, &[sizes.len()], data);
    }
    tensors.write(to)
}

/// Packed integers of stacked experts, as compressed-tensors packs a module with a stack.
#[test]
fn stacks_of_packed_integers_are_single_matrices() {
    let dir = archive::folder("formats_more").join("ct_int6");
    let (import, single) = imported(&dir, &serde_json::json!({"layer": 1})).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let stack = stacked(&dir, &folder.path().join("model.safetensors"));
    let [single, stack] = [&single, &stack].map(|file| {
        let mut import = import.clone();
        let formats = set_expert_formats(&mut import, file, LoadOptions::default());
        assert!(formats.up.is_some(), "{formats:?}");
        let reader = LayerReader::of_import(&import, file, LoadOptions::default());
        reader.unwrap().load().unwrap()
    });
    assert_eq!(single, stack);
}

/// Returns why a layer of `formats` is refused after a change to its tensors.
fn refusal_of(name: &str, change: &dyn Fn(&mut quantizer::Tensors)) -> String {
    let dir = archive::folder("formats").join(name);
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let mut tensors = quantizer::Tensors::default();
    for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let data = tensor.data().to_vec();
        tensors.put(name, tensor.dtype(), tensor.shape(), data);
    }
    change(&mut tensors);
    let folder = tempfile::tempdir().unwrap();
    let file = tensors.write(&folder.path().join("model.safetensors"));
    let case = serde_json::json!({"layer": 1});
    let (import, _) = imported(&dir, &case).unwrap();
    let reader = LayerReader::of_import(&import, &file, LoadOptions::default());
    let said = reader.expect_err("it is refused").to_string();
    said.replace(&folder.path().display().to_string(), "FOLDER")
}

/// Codes in an order that is lost, and codes of weights that activations are divided for.
#[test]
fn codes_that_say_something_else_are_refused() {
    let up = "model.layers.1.mlp.experts.0.up_proj";
    let said = refusal_of("gptq_int4_act", &|file| {
        drop(file.0.remove(&format!("{up}.g_idx")))
    });
    let expected = format!(
        "FOLDER/model.safetensors has no tensor for `experts.up.weight`; `{up}.qweight` is there, \
         the group of each column is not: looked for `{up}.g_idx`"
    );
    assert_eq!(said, expected);
    let factors = format!("{up}.pre_quant_scale");
    let said = refusal_of("modelopt_nvfp4", &|file| {
        file.bf16(&factors, &[64], &[2.0; 64])
    });
    let expected = format!(
        "`{factors}` in FOLDER/model.safetensors contradicts the configuration or another tensor: it \
         multiplies the activations of `{up}.weight`, which is not read"
    );
    assert_eq!(said, expected);
}
