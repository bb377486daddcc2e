//! Configurations of quantized checkpoints: the formats they describe, and those refused.

use crate::hf::error;
use moesaic_spec::format::ScaleBlock;
use moesaic_spec::hf::{TensorStep, import};

/// Every alternative of a quantized checkpoint may hold codes, and the element type is bf16.
#[test]
fn published_deepseek_v3_is_quantized() {
    let config = r#"{"model_type": "deepseek_v3",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}"#;
    let got = import(config, 5).unwrap();
    let Some(TensorStep::Dequantize(codes)) = got.sources[0].alternatives[0].steps.first() else {
        panic!("{:?}", got.sources[0]);
    };
    let stored = codes.stored[0];
    assert_eq!(stored.format.block, ScaleBlock::Tile([128, 64]));
    let alternatives = got.sources.iter().flat_map(|source| &source.alternatives);
    let first: Vec<_> = alternatives.map(|a| a.steps.first()).collect();
    assert!(
        first
            .iter()
            .all(|step| *step == Some(&TensorStep::Dequantize(codes.clone())))
    );
    assert_eq!(got.spec.precision.weights.name(), "bf16");
    assert_eq!(got.spec.precision.activations.name(), "bf16");
    assert_eq!(
        got.notes,
        [
            "the checkpoint's weights are quantized and become the layer's type when they are read; \
          activations are not quantized"
        ]
    );
    let scales = stored.names.scales("a.weight");
    let names = [
        "a.weight_scale_inv",
        "a.weight_scale",
        "a.scale",
        "a.qscale_weight",
        "a.weight_weight_scale",
    ];
    assert_eq!(scales, names);
    let every = codes.names("a.weight");
    assert!(every.contains(&"a.weight".to_string()) && every.contains(&names[0].to_string()));
}

/// Pairs of a `quantization_config` and the codes read from it.
#[test]
fn quantizations_that_are_read() {
    let codes = |config: &str| {
        let config = format!(
            r#"{{"model_type": "qwen3_moe", "torch_dtype": "float32",
                "quantization_config": {config}}}"#
        );
        let got = import(&config, 0).unwrap_or_else(|e| panic!("{config}: {e}"));
        assert_eq!(
            got.spec.precision.weights.name(),
            "f32",
            "the type that is named"
        );
        match &got.sources[0].alternatives[0].steps[0] {
            TensorStep::Dequantize(codes) => format!("{codes:?}"),
            _ => panic!("{config}"),
        }
    };
    let fp8 = |rest: &str| codes(&format!(r#"{{"quant_method": "fp8"{rest}}}"#));
    let fp4 = "mxfp4, Tile([1, 32])";
    assert_eq!(
        fp8(""),
        format!("Codes(fp8-block, Tile([128, 128]); {fp4})")
    );
    let whole = fp8(r#", "fmt": "float8_e4m3fn", "weight_block_size": null"#);
    assert_eq!(whole, format!("Codes(fp8, MatrixOrRow; {fp4})"));
    let group = |format: &str, bits: u8, kind: &str, weights: &str| {
        codes(&format!(
            r#"{{"quant_method": "compressed-tensors", "format": "{format}",
                "transform_config": {{}}, "config_groups": {{"a": {{"weights":
                {{"num_bits": {bits}, "type": "{kind}", {weights}}}}}, "b": {{"weights": null}}}}}}"#
        ))
    };
    let float = |weights: &str| group("float-quantized", 8, "float", weights);
    assert_eq!(float(r#""strategy": "channel""#), "Codes(fp8, MatrixOrRow)");
    assert_eq!(float(r#""strategy": "tensor""#), "Codes(fp8, MatrixOrRow)");
    let block = float(r#""strategy": "block", "block_structure": [64, 32]"#);
    assert_eq!(block, "Codes(fp8, Tile([64, 32]))");
    let spelt = float(r#""strategy": "block", "block_structure": "64x32""#);
    assert_eq!(spelt, block, "as compressed-tensors once spelt it");
    let by = r#""strategy": "group", "group_size": 64"#;
    for (format, bits, kind, expected) in [
        ("pack-quantized", 4, "int", "pack-quantized of 4 bits"),
        ("pack-quantized", 3, "int", "pack-quantized of 3 bits"),
        ("pack-quantized", 8, "int", "pack-quantized of 8 bits"),
        ("int-quantized", 8, "int", "int-quantized"),
        ("int-quantized", 4, "int", "int-quantized"),
        ("nvfp4-pack-quantized", 4, "float", "nvfp4-pack-quantized"),
        ("mxfp4-pack-quantized", 4, "float", "mxfp4"),
        ("mxfp6-pack-quantized", 6, "float", "mxfp6-pack-quantized"),
        ("mxfp8-quantized", 8, "float", "mxfp8"),
    ] {
        let expected = format!("Codes({expected}, Tile([1, 64]))");
        assert_eq!(group(format, bits, kind, by), expected);
    }
    for (config, expected) in [
        (
            r#"{"quant_method": "gptq", "bits": 4, "group_size": -1,
                "dynamic": {"-:a": {}, "b": {"bits": 8, "group_size": 32}}}"#,
            "Codes(gptq of 4 bits, Row; gptq of 8 bits, Tile([1, 32]))",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2"}"#,
            "Codes(gptq_v2 of 3 bits, Tile([1, 128]))",
        ),
        (
            r#"{"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}"#,
            "Codes(awq of 4 bits, Tile([1, 64]))",
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "group_size": 32,
                "packing_format": "auto_round:auto_awq",
                "extra_config": {"a": {"bits": 16}, "b": {"group_size": 64, "bits": 4}}}"#,
            "Codes(awq of 4 bits, Tile([1, 32]); awq of 4 bits, Tile([1, 64]))",
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": false,
                "packing_format": "auto_round", "rotation_config": null}"#,
            "Codes(gptq_v2 of 4 bits, Tile([1, 32]))",
        ),
        (
            r#"{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3",
                "qscheme": "per_block", "block_size": [64, 32]}}, "layer_quant_config": {
                "a": {"weight": {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1,
                "group_size": 32, "scale_format": "e8m0"}}, "b": {"weight": null}}}"#,
            "Codes(mxfp4, Tile([1, 32]); fp8-block, Tile([64, 32]))",
        ),
        (
            r#"{"quant_method": "mxfp8", "scale_fmt": "ue8m0"}"#,
            "Codes(mxfp8, Tile([1, 32]); mxfp4, Tile([1, 32]))",
        ),
        (
            r#"{"quant_method": "fbgemm_fp8"}"#,
            "Codes(fp8, MatrixOrRow)",
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}"#,
            "Codes(nvfp4, Tile([1, 16]); nvfp4 by rows, Tile([16, 1]))",
        ),
        (
            r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "MXFP8"},
                "c": {"quant_algo": "FP8"}}}}"#,
            "Codes(fp8, MatrixOrRow; mxfp8, Tile([1, 32]))",
        ),
        (
            r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32},
                "b": {"quant_algo": "W8A16"},
                "c": {"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32}}}}"#,
            "Codes(nvfp4, Tile([1, 32]); nvfp4 by rows, Tile([32, 1]); \
             int-quantized, MatrixOrRow; mxfp4, Tile([1, 32]))",
        ),
        (r#"{"quant_method": "w8a8_fp8"}"#, "Codes(fp8, MatrixOrRow)"),
        (
            r#"{"quant_method": "w8a8_int8", "is_dynamic": true}"#,
            "Codes(int-quantized, MatrixOrRow)",
        ),
        (
            r#"{"quant_method": "blockwise_int8", "weight_block_size": [128, 64]}"#,
            "Codes(int-quantized, Tile([128, 64]))",
        ),
    ] {
        assert_eq!(codes(config), expected);
    }
    let nested = r#"{"model_type": "x", "quantization_config": {"quant_method": "fp8"},
                     "text_config": {"model_type": "qwen3_moe"}}"#;
    let steps = &import(nested, 0).unwrap().sources[0].alternatives[0].steps;
    assert_eq!(steps.len(), 1, "said around the text model");
}

#[test]
fn quantizations_that_are_refused() {
    let refused = |model: &str, config: &str| {
        let config = format!(r#"{{"model_type": "{model}", "quantization_config": {config}}}"#);
        error(&config, 5)
    };
    let rest = "; supported are fp8, mxfp8, fbgemm_fp8, w8a8_fp8, w8a8_int8, blockwise_int8, \
                gpt_oss's mxfp4, gptq, awq (gemm), auto-round, modelopt's FP8, MXFP8, MXFP4, \
                NVFP4 and W8A16, quark's FP8 and MXFP4, and compressed-tensors' float-, int- and \
                pack-quantized, mxfp4, mxfp6, mxfp8 and nvfp4: use such a checkpoint, or one in \
                f32, f16 or bf16";
    let compressed = |rest: &str| format!(r#"{{"quant_method": "compressed-tensors", {rest}}}"#);
    let weights = |weights: &str| {
        compressed(&format!(
            r#""format": "float-quantized", "config_groups": {{"a": {{"weights": {weights}}}}}"#
        ))
    };
    for (config, method) in [
        (
            r#"{"quant_method": "gptq", "bits": 5}"#.to_string(),
            "gptq of 5 bits",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}"#.to_string(),
            "gptq, marlin",
        ),
        (
            r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#.to_string(),
            "awq, version gemv",
        ),
        (
            r#"{"quant_method": "awq", "bits": 4, "format": "gemv_fast"}"#.to_string(),
            "awq, version gemv_fast",
        ),
        (
            r#"{"quant_method": "awq", "bits": 4, "version": "gemm", "checkpoint_format": "gemv"}"#
                .to_string(),
            "awq, version gemv",
        ),
        (
            r#"{"quant_method": "awq", "bits": 4, "backend": "llm-awq"}"#.to_string(),
            "awq, llm-awq",
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"}"#
                .to_string(),
            "auto-round, auto_round:fp8 of int",
        ),
        (
            r#"{"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq",
                "rotation_config": {"hadamard_type": "quarot"}}"#
                .to_string(),
            "auto-round, rotation_config",
        ),
        (
            r#"{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4",
                "qscheme": "per_group"}}}"#
                .to_string(),
            "quark, int4 per_group",
        ),
        (
            r#"{"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "int4"}]}}"#
                .to_string(),
            "quark, weights quantized twice",
        ),
        (
            r#"{"quant_method": "quark", "algo_config": [{"name": "rotation"}]}"#.to_string(),
            "quark, weights that were rotated",
        ),
        (
            r#"{"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3",
                "qscheme": "per_channel", "ch_axis": 1}}}"#
                .to_string(),
            "quark, fp8_e4m3 per_channel",
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#.to_string(),
            "modelopt, NVFP4_AWQ",
        ),
        (
            r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}}}}"#
                .to_string(),
            "modelopt, W8A8_SQ_PER_CHANNEL",
        ),
        (
            compressed(
                r#""format": "mxfp6-pack-quantized", "config_groups": {"a": {"weights": {"type":
                "float", "num_bits": 8, "strategy": "channel"}}}"#,
            ),
            "compressed-tensors, mxfp6-pack-quantized: weights of 8 bits, float, symmetric, by channel",
        ),
        (
            r#"{"quant_method": "bitsandbytes"}"#.to_string(),
            "bitsandbytes",
        ),
        (
            r#"{"quant_method": "fp8", "fmt": "e3m4"}"#.to_string(),
            "fp8, e3m4",
        ),
        (r#"{"quant_method": "mxfp4"}"#.to_string(), "mxfp4"),
        (r#"{"bits": 4}"#.to_string(), "no quant_method"),
        (r#""fp8""#.to_string(), "no quant_method"),
        (
            r#"{"group_size": 64, "bits": 4, "mode": "affine"}"#.to_string(),
            "no quant_method, as MLX writes",
        ),
        (
            compressed(
                r#""format": "marlin-24", "config_groups": {"a": {"weights": {"strategy": "channel"}}}"#,
            ),
            "compressed-tensors, marlin-24",
        ),
        (
            compressed(r#""format": "float-quantized""#),
            "compressed-tensors, no group with weights",
        ),
        (
            compressed(r#""format": "float-quantized", "transform_config": {"a": 1}"#),
            "compressed-tensors, weights that were transformed",
        ),
        (
            weights(r#"{"num_bits": 8, "type": "int", "strategy": "channel"}"#),
            "compressed-tensors, float-quantized: weights of 8 bits, int, symmetric, by channel",
        ),
        (
            weights(r#"{"num_bits": 8, "type": "float", "strategy": "group", "symmetric": false}"#),
            "compressed-tensors, float-quantized: weights of 8 bits, float, asymmetric, by group",
        ),
    ] {
        let expected = format!("qwen3_moe: the quantization is not supported ({method}){rest}");
        assert_eq!(refused("qwen3_moe", &config), expected);
    }
    let alone = r#"{"model_type": "qwen3_moe", "quantization": {"group_size": 64, "bits": 4}}"#;
    let said = error(alone, 5);
    assert!(said.contains("(no quant_method, as MLX writes)"), "{said}");
    for size in [
        "[128]",
        "[0, 128]",
        "128",
        "[128, 128, 1]",
        "[1.5, 2]",
        "[-1, 2]",
    ] {
        let config = format!(r#"{{"quant_method": "fp8", "weight_block_size": {size}}}"#);
        assert_eq!(
            refused("deepseek_v3", &config),
            format!(
                "deepseek_v3: `quantization_config.weight_block_size` is {}, expected rows and \
                 columns of a block, both above zero",
                size.replace(", ", ",")
            )
        );
    }
}
