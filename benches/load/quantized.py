"""Writes a quantized checkpoint of one layer as it is published, with random codes, and tokens for it.

    python3 benches/load/quantized.py DIR deepseek-v3|gpt-oss [--experts N] [--tokens 8]

`deepseek-v3` is FP8 with f32 scales for 128 x 128, a tensor per expert and matrix: 32 experts are one rank's
share of eight. `gpt-oss` is MXFP4 with gate and up in alternating rows of one tensor: 32 experts are those of
gpt-oss-20b. Needs nothing but Python.
"""

import argparse
import json
import os
import random
import struct

DEEPSEEK = {
    "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": 7168, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "num_hidden_layers": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
GPT_OSS = {
    "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880, "intermediate_size": 2880,
    "num_experts_per_tok": 4, "num_hidden_layers": 1, "swiglu_limit": 7.0, "hidden_act": "silu",
    "quantization_config": {"quant_method": "mxfp4"},
}


def deepseek(experts):
    """Names, types and shapes."""
    d, h, mlp = 7168, 2048, "model.layers.0.mlp"
    yield f"{mlp}.gate.weight", "BF16", [experts, d]
    yield f"{mlp}.gate.e_score_correction_bias", "F32", [experts]
    for under in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        for part, size in [("gate", [h, d]), ("up", [h, d]), ("down", [d, h])]:
            yield f"{mlp}.{under}.{part}_proj.weight", "F8_E4M3", size
            yield f"{mlp}.{under}.{part}_proj.weight_scale_inv", "F32", [n // 128 for n in size]


def gpt_oss(experts):
    d, mlp = 2880, "model.layers.0.mlp"
    yield f"{mlp}.router.weight", "BF16", [experts, d]
    yield f"{mlp}.router.bias", "BF16", [experts]
    for part, rows in [("gate_up", 2 * d), ("down", d)]:
        yield f"{mlp}.experts.{part}_proj_blocks", "U8", [experts, rows, d // 32, 16]
        yield f"{mlp}.experts.{part}_proj_scales", "U8", [experts, rows, d // 32]
        yield f"{mlp}.experts.{part}_proj_bias", "BF16", [experts, rows]


WIDTHS = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def fillers():
    """Runs of bytes to write for each kind of tensor: no code is NaN, and no output infinite."""
    draw = random.Random(1)
    numbers = [draw.uniform(-0.03, 0.03) for _ in range(1 << 16)]
    return {
        "codes": bytes(b & 0xBF for b in draw.randbytes(1 << 20)),
        "powers": bytes(118 + b % 4 for b in draw.randbytes(1 << 16)),
        "F32": struct.pack(f"<{len(numbers)}f", *(abs(n) / 100 for n in numbers)),
        "BF16": b"".join(struct.pack("<f", n)[2:] for n in numbers),
    }


def write(path, listed):
    """Writes a safetensors file, and returns the bytes of its tensors."""
    header, at, fill = {}, 0, fillers()
    for name, dtype, shape in listed:
        size = WIDTHS[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, _ in listed:
            start, end = header[name]["data_offsets"]
            run = fill.get(dtype, fill["powers" if name.endswith("_scales") else "codes"])
            for first in range(0, end - start, len(run)):
                file.write(run[: end - start - first])
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("layer", choices=["deepseek-v3", "gpt-oss"])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    os.makedirs(args.dir, exist_ok=True)
    deep = args.layer == "deepseek-v3"
    count = "n_routed_experts" if deep else "num_local_experts"
    config = {**(DEEPSEEK if deep else GPT_OSS), count: args.experts}
    with open(os.path.join(args.dir, "config.json"), "w") as file:
        json.dump(config, file)
    listed = list((deepseek if deep else gpt_oss)(args.experts))
    total = write(os.path.join(args.dir, "model.safetensors"), listed)
    write(os.path.join(args.dir, "x.safetensors"), [("x", "BF16", [args.tokens, config["hidden_size"]])])
    print(total)


if __name__ == "__main__":
    main()
