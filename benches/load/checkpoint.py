"""Writes a checkpoint of one layer as Hugging Face models have it, of any size, and tokens for it.

    python3 benches/load/checkpoint.py DIR [--layout single|sharded|stacked] [--experts 114] [--dtype bf16|f32]

Shapes are Qwen3-235B-A22B's; 114 experts are 4.0 GiB in bf16. `single` and `sharded` have a tensor per
expert and matrix, in one file and in files of about 1 GB; `stacked` has gate and up of all experts in one
transposed tensor, as Qwen3-VL has. Needs nothing but Python.
"""

import argparse
import array
import json
import os
import random
import struct

WIDTHS = {"bf16": 2, "f32": 4}


def block(dtype, bytes_wanted):
    """Small random numbers, so that no output is infinite."""
    draw = random.Random(1)
    values = array.array("f", (draw.uniform(-0.03, 0.03) for _ in range(1 << 18)))
    raw = values.tobytes()
    if dtype == "bf16":
        raw = b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))
    return raw * (bytes_wanted // len(raw) + 2)


def tensors(args):
    """Names and shapes, in the order of the file."""
    d, h, experts = args.model, args.hidden, args.experts
    mlp = "model.layers.0.mlp"
    if args.layout == "stacked":
        mlp = "model.language_model.layers.0.mlp"
        yield f"{mlp}.gate.weight", [experts, d]
        yield f"{mlp}.experts.gate_up_proj", [experts, d, 2 * h]
        yield f"{mlp}.experts.down_proj", [experts, h, d]
        return
    yield f"{mlp}.gate.weight", [experts, d]
    for e in range(experts):
        yield f"{mlp}.experts.{e}.gate_proj.weight", [h, d]
        yield f"{mlp}.experts.{e}.up_proj.weight", [h, d]
        yield f"{mlp}.experts.{e}.down_proj.weight", [d, h]


def write(path, dtype, listed, random_bytes):
    """A safetensors file."""
    header, at = {}, 0
    for name, shape in listed:
        size = WIDTHS[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = at
        while left > 0:
            file.write(random_bytes[: min(left, len(random_bytes))])
            left -= len(random_bytes)
    return at


def files(args):
    """The tensors of each file."""
    if args.layout != "sharded":
        return {"model.safetensors": list(tensors(args))}
    shards, size, most = [[]], 0, 1 << 30
    for name, shape in tensors(args):
        own = WIDTHS[args.dtype]
        for n in shape:
            own *= n
        if size + own > most:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += own
    count = len(shards)
    return {f"model-{i + 1:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("--layout", choices=["single", "sharded", "stacked"], default="single")
    parser.add_argument("--dtype", choices=WIDTHS, default="bf16")
    parser.add_argument("--experts", type=int, default=114)
    parser.add_argument("--model", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    os.makedirs(args.dir, exist_ok=True)
    text = {
        "hidden_size": args.model,
        "moe_intermediate_size": args.hidden,
        "num_experts": args.experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 1,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16" if args.dtype == "bf16" else "float32",
    }
    config = {"model_type": "qwen3_moe", **text}
    if args.layout == "stacked":
        config = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", **text}}
    with open(os.path.join(args.dir, "config.json"), "w") as file:
        json.dump(config, file)
    random_bytes = block(args.dtype, 64 << 20)
    total, index = 0, {}
    for name, listed in files(args).items():
        total += write(os.path.join(args.dir, name), args.dtype, listed, random_bytes)
        index.update({tensor: name for tensor, _ in listed})
    if args.layout == "sharded":
        with open(os.path.join(args.dir, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)
    x = [("x", [args.tokens, args.model])]
    write(os.path.join(args.dir, "x.safetensors"), args.dtype, x, random_bytes)
    print(total)


if __name__ == "__main__":
    main()
