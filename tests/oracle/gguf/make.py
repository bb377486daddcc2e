"""Makes the fixtures of README.md with gguf 0.19: `python3 make.py`, then `python3 ../pack.py gguf`.

gguf writes the files, names their tensors and keys, and turns blocks into numbers. `y` is computed
here in f64 from those numbers, step by step as llama.cpp's build_moe_ffn and the file of each
architecture in its src/models do.
"""

import dataclasses
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
LAYER = 1
FLOATS = (Type.F32, Type.F16, Type.BF16)
# Every type of blocks, and where a block has f16 scales. MXFP4 has the exponent of one.
SCALES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
    Type.Q6_K: (208,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.MXFP4: (),
}
# gguf cannot quantize to these, so codes of layers are random.
ONLY_READ = (Type.Q2_K, Type.Q3_K, Type.IQ4_XS)


@dataclasses.dataclass
class Layer:
    """One fixture: an architecture, the types of its experts, and what its model file states."""

    arch: gguf.MODEL_ARCH
    up: Type
    down: Type
    model: int = 12
    hidden: int = 6
    experts: int = 3
    top_k: int = 2
    tokens: int = 5
    gating: str = "softmax"
    # Whether llama.cpp makes the chosen weights sum to 1 for this architecture.
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: tuple = (1, 1)
    # Width and type of a shared expert, and whether it has a gate.
    shared: int = 0
    shared_type: Type = Type.F16
    shared_gate: bool = False
    fused: bool = False
    # Keys that the convert script writes for it, by the writer's method.
    keys: dict = dataclasses.field(default_factory=dict)


A = gguf.MODEL_ARCH
SIGMOID = {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
OF_V3 = dict(gating="sigmoid", bias=True)
WIDE = dict(model=256, hidden=32, experts=2, tokens=2)
BLOCKS = dict(model=32, hidden=32)
LAYERS = {
    "dbrx": Layer(A.DBRX, Type.F16, Type.F16),
    "deepseek": Layer(
        A.DEEPSEEK, Type.BF16, Type.BF16, normalize=False, shared=12,
        keys={"expert_shared_count": 2, "expert_weights_scale": 1.0},
    ),
    "deepseek2_greedy": Layer(
        A.DEEPSEEK2, Type.F32, Type.F32, normalize=False, shared=6,
        keys={
            "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": False,
            "expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX,
        },
    ),
    "deepseek2_groups": Layer(
        A.DEEPSEEK2, Type.F16, Type.BF16, experts=4, groups=(2, 1), scale=2.5, shared=6, **OF_V3,
        keys={
            "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
            "expert_group_count": 2, "expert_group_used_count": 1, **SIGMOID,
        },
    ),
    "dots1": Layer(
        A.DOTS1, Type.F16, Type.F16, scale=2.5, shared=6, **OF_V3,
        keys={
            "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
            **SIGMOID,
        },
    ),
    "glm4moe": Layer(
        A.GLM4_MOE, Type.BF16, Type.F16, shared=6, **OF_V3,
        keys={
            "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True,
            "expert_group_count": 1, "expert_group_used_count": 1, **SIGMOID,
        },
    ),
    "granitemoe": Layer(A.GRANITE_MOE, Type.Q3_K, Type.Q4_0, **WIDE),
    "granitemoe_shared": Layer(
        A.GRANITE_MOE, Type.F16, Type.F16, shared=12,
        keys={"expert_shared_feed_forward_length": 12},
    ),
    "llama": Layer(A.LLAMA, Type.IQ4_XS, Type.MXFP4, **WIDE),
    "minimax_m2": Layer(A.MINIMAXM2, Type.BF16, Type.BF16, **OF_V3, keys=SIGMOID),
    "olmoe": Layer(A.OLMOE, Type.Q2_K, Type.Q4_0, normalize=False, **WIDE),
    "qwen2moe": Layer(
        A.QWEN2MOE, Type.F16, Type.F16, normalize=False, shared=12, shared_gate=True,
        keys={"expert_shared_feed_forward_length": 12},
    ),
    "qwen35moe": Layer(
        A.QWEN35MOE, Type.Q4_1, Type.Q5_1, shared=32, shared_type=Type.Q8_0, shared_gate=True,
        fused=True, keys={"expert_shared_feed_forward_length": 32}, **BLOCKS,
    ),
    "qwen3next": Layer(
        A.QWEN3NEXT, Type.F16, Type.F16, shared=6, shared_type=Type.BF16, shared_gate=True,
        keys={"expert_shared_feed_forward_length": 6},
    ),
    "qwen3vlmoe": Layer(A.QWEN3VLMOE, Type.BF16, Type.F16),
}


def random_blocks(rng, kind, rows, columns):
    """Random codes with finite f16 scales."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.normal(0, 1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks


def scaled_blocks(rng, kind, rows, columns, size):
    """Random codes whose numbers have a standard deviation of about `size`."""
    blocks = random_blocks(rng, kind, rows, columns)
    found = gguf.dequantize(blocks.reshape(rows, -1), kind).std()
    for at in SCALES[kind]:
        scales = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        scales = (scales * (size / found)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def tensor(rng, kind, shape):
    """Codes or floats as a file holds them, and the numbers that gguf makes of them in f64."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    size = 1.3 / np.sqrt(columns)
    if kind in ONLY_READ:
        stored = scaled_blocks(rng, kind, rows, columns, size)
    else:
        values = rng.normal(0, size, (rows, columns)).astype(np.float32)
        stored = gguf.quantize(values, kind)
    values = gguf.dequantize(stored, kind).astype(np.float64)
    assert np.isfinite(values).all()
    return stored.reshape(*shape[:-1], -1), values.reshape(shape)


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def scores(layer, logits):
    if layer.gating == "sigmoid":
        return sigmoid(logits)
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()


def choose(layer, select):
    """The experts with the highest scores, of the groups whose two best sum highest."""
    groups, kept = layer.groups
    best = np.sort(select.reshape(groups, -1), 1)[:, -2:].sum(1)
    select = select.copy()
    for group in np.argsort(-best)[kept:]:
        select.reshape(groups, -1)[group] = -np.inf
    order = np.argsort(-select)
    chosen, others = order[: layer.top_k], order[layer.top_k :]
    gap = select[chosen].min() - select[others].max(initial=-np.inf)
    assert gap > 1e-3, "a choice is too close to call in f32"
    return np.sort(chosen)


def token(layer, weights, x):
    """One token's row of `y`, and its experts."""
    probabilities = scores(layer, weights["ffn_gate_inp"] @ x)
    ids = choose(layer, probabilities + weights.get("exp_probs_b", 0))
    factors = probabilities[ids]
    if layer.normalize:
        factors = factors / factors.sum()
    y = np.zeros(layer.model)
    for expert, factor in zip(ids, factors * layer.scale):
        gate, up, down = (weights[f"ffn_{part}_exps"][expert] for part in ("gate", "up", "down"))
        y += factor * (down @ (silu(gate @ x) * (up @ x)))
    if layer.shared:
        gate, up, down = (weights[f"ffn_{part}_shexp"] for part in ("gate", "up", "down"))
        out = down @ (silu(gate @ x) * (up @ x))
        if layer.shared_gate:
            out = out * sigmoid(weights["ffn_gate_inp_shexp"] @ x)
        y += out
    return y, ids


def tensors(rng, layer):
    """Kinds and shapes of a layer's tensors, by the name behind the layer's number."""
    model, hidden, experts, shared = layer.model, layer.hidden, layer.experts, layer.shared
    kinds = {
        "ffn_gate_inp": (Type.F32, (experts, model)),
        "ffn_gate_exps": (layer.up, (experts, hidden, model)),
        "ffn_up_exps": (layer.up, (experts, hidden, model)),
        "ffn_down_exps": (layer.down, (experts, model, hidden)),
    }
    if layer.bias:
        kinds["exp_probs_b"] = (Type.F32, (experts,))
    if shared:
        kinds["ffn_gate_shexp"] = (layer.shared_type, (shared, model))
        kinds["ffn_up_shexp"] = (layer.shared_type, (shared, model))
        kinds["ffn_down_shexp"] = (layer.shared_type, (model, shared))
    if layer.shared_gate:
        kinds["ffn_gate_inp_shexp"] = (Type.F32, (model,))
    return {name: (kind, *tensor(rng, kind, shape)) for name, (kind, shape) in kinds.items()}


def known(arch):
    """The names that gguf has for the tensors of an architecture."""
    return {gguf.TENSOR_NAMES[kind].format(bid=LAYER) for kind in gguf.MODEL_TENSORS[arch]}


def write(path, layer, made):
    """Writes the model file with gguf's writer."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[layer.arch])
    writer.add_block_count(LAYER + 1)
    writer.add_embedding_length(layer.model)
    writer.add_expert_count(layer.experts)
    writer.add_expert_used_count(layer.top_k)
    if layer.arch in (A.DBRX, A.GRANITE_MOE, A.LLAMA, A.OLMOE):
        writer.add_feed_forward_length(layer.hidden)
    else:
        writer.add_expert_feed_forward_length(layer.hidden)
    for key, value in layer.keys.items():
        getattr(writer, f"add_{key}")(value)
    stored = {name: (kind, codes) for name, (kind, codes, _) in made.items()}
    if layer.fused:
        gate, up = stored.pop("ffn_gate_exps"), stored.pop("ffn_up_exps")
        stored["ffn_gate_up_exps"] = (gate[0], np.concatenate([gate[1], up[1]], 1))
    for name, (kind, codes) in stored.items():
        name = f"blk.{LAYER}.{name}"
        assert name in known(layer.arch), name
        end = ".bias" if name.endswith("exp_probs_b") else ".weight"
        writer.add_tensor(name + end, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(name, layer, seed):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    made = tensors(rng, layer)
    write(folder / "model.gguf", layer, made)
    x = rng.normal(0, 1, (layer.tokens, layer.model)).astype(np.float32)
    weights = {name: values for name, (_, _, values) in made.items()}
    rows = [token(layer, weights, row) for row in x.astype(np.float64)]
    block = {
        "x": x,
        "y": np.array([y for y, _ in rows]).astype(np.float32),
        "topk_ids": np.array([ids for _, ids in rows]).astype(np.int32),
    }
    save_file(block, folder / "block.safetensors")
    kinds = {kind.name for kind, _, _ in made.values()} - {kind.name for kind in FLOATS}
    case = {
        "layer": LAYER,
        "architecture": gguf.MODEL_ARCH_NAMES[layer.arch],
        "types": sorted(kinds),
        "file": "model.gguf",
        "seed": seed,
        "tolerance": {"f32": 2e-5},
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")


def types():
    """Blocks of every type with random bits, and gguf's numbers of them."""
    rng = np.random.default_rng(300)
    made = {}
    for kind in SCALES:
        blocks = random_blocks(rng, kind, 1, 256).reshape(1, -1)
        made[f"{kind.name}.blocks"] = blocks
        made[f"{kind.name}.values"] = gguf.dequantize(blocks, kind)
    save_file(made, HERE / "types.safetensors")


types()
for index, (name, layer) in enumerate(LAYERS.items()):
    make(name, layer, 301 + index)
