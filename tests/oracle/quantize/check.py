"""Reads what `moesaic quantize` writes with each format's own library.

    python check.py PATH/TO/moesaic [FORMAT ...]

Small models with random weights are quantized to every format. The library unpacks every matrix,
scales widened to f32. Three numbers must agree: the error of the unpacked matrices with the one
that `moesaic quantize` printed; y of transformers' MoE block with the unpacked weights with y of
`moesaic run`; and, where transformers loads the format, its own weights with the unpacked ones.
Run with transformers 5.24, torch 2.15, compressed-tensors 0.20, gguf 0.19, auto-gptq 0.7.1 and
autoawq 0.2.9. CI does not run it; README.md has the result.
"""

import functools
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import types

import gguf
import numpy
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

def bare(name):
    """Makes a package importable without its `__init__`, which needs an older transformers."""
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package


bare("auto_gptq")
bare("awq")
# Its numbers are rounded to bf16 otherwise.
nvfp4.unpack_fp4_from_uint8 = functools.partial(unpack_fp4_from_uint8, dtype=torch.float32)

BIN = sys.argv[1]
LAYER, TOKENS = 1, 12
TINY = dict(
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=32,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    num_experts_per_tok=2,
)
QWEN = dict(
    **TINY, intermediate_size=96, moe_intermediate_size=256, num_experts=4, norm_topk_prob=True
)
GPT_OSS = dict(**TINY, intermediate_size=96, num_local_experts=4)
FOLDERS = [
    "fp8", "fp8-channel", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8", "int4", "int4/32", "int4/64",
    "gptq", "gptq/32", "awq", "awq/64",
]
# transformers 5.24 has no code for experts in these.
NOT_LOADED = ["mxfp8", "mxfp6", "nvfp4", "int8"]
BLOCKS = ["q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl", "mxfp4"]


def make(folder, family, config):
    """Writes a model in bf16, as several files."""
    config = getattr(transformers, family + "Config")(**config, dtype="bfloat16")
    model = getattr(transformers, family + "ForCausalLM")(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" in name or name.endswith("norm.weight"):
            continue
        std = 1.3 / math.sqrt(config.hidden_size) if tensor.dim() > 1 else 0.5
        tensor.data.normal_(0, std, generator=generator)
    model.save_pretrained(folder, max_shard_size="1MB")


def tensors_of(folder):
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def moesaic(*words):
    done = subprocess.run([BIN, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compressor_of(config, tensors, base):
    """compressed-tensors' class for a matrix, its settings, and the matrix's tensors."""
    read = QuantizationConfig.model_validate(config)
    scheme = read.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format or read.format)
    names = [n for n in tensors if n.startswith(base + ".weight")]
    state = {n[len(base) + 1:]: tensors[n] for n in names}
    if state["weight_scale"].dtype in (torch.bfloat16, torch.float16):
        state["weight_scale"] = state["weight_scale"].float()
    return compressor, scheme, state


def of_compressed_tensors(config, tensors, base):
    compressor, scheme, state = compressor_of(config, tensors, base)
    return compressor.decompress(state, scheme)["weight"].float()


def packed_by_compressed_tensors(config, tensors, base, weight):
    """Codes of the float weight at the stored scales, and scales of the library's own observer."""
    compressor, scheme, state = compressor_of(config, tensors, base)
    args, group = scheme.weights, scheme.weights.group_size
    scales = state["weight_scale"]
    if scales.dtype == torch.uint8:
        scales = 2.0 ** (scales.float() - 127)
    own = {"weight": weight, "weight_scale": scales.float()}
    if "weight_global_scale" in state:
        own["weight_global_scale"] = state["weight_global_scale"]
    packed = compressor.compress(own, scheme)
    codes = "weight_packed" if "weight_packed" in packed else "weight"
    rows = weight.reshape(weight.shape[0], -1, group) if group else weight[:, None]
    observed, _ = calculate_qparams(
        rows.amin(-1), rows.amax(-1), args, own.get("weight_global_scale")
    )
    stored = tensors[base + ".weight_scale"].dtype
    if stored != torch.uint8:
        observed = observed.to(stored)
    observed = observed.reshape(scales.shape).float()
    return (packed[codes], state[codes]), (observed, scales.float())


def packed_by_gptq(config, tensors, base, unpacked):
    """auto-gptq packs numbers that lie on the grid of scales and zero points."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    held = {end: tensors[f"{base}.{end}"] for end in ["qweight", "qzeros", "scales", "g_idx"]}
    scales = held["scales"].float()
    zeros = torch.full_like(scales, 8)
    linear = torch.nn.Linear(unpacked.shape[1], unpacked.shape[0], bias=False)
    linear.weight.data = unpacked.clone()
    layer = QuantLinear(config["bits"], config["group_size"], *reversed(unpacked.shape), False)
    layer.pack(linear, scales.t(), zeros.t(), held["g_idx"])
    pairs = [(layer.qweight, held["qweight"]), (layer.qzeros, held["qzeros"])]
    return [(a.to(torch.int32), b) for a, b in pairs]


def packed_by_awq(config, tensors, base, unpacked):
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import reverse_awq_order, unpack_awq

    bits = config["bits"]
    held = {end: tensors[f"{base}.{end}"] for end in ["qweight", "qzeros", "scales"]}
    codes, zeros = unpack_awq(held["qweight"], held["qzeros"], bits)
    _, zeros = reverse_awq_order(codes, zeros, bits)
    zeros = zeros.bitwise_and(2**bits - 1).float()
    linear = torch.nn.Linear(unpacked.shape[1], unpacked.shape[0], bias=False)
    linear.weight.data = unpacked.clone()
    layer = WQLinear_GEMM.from_linear(
        linear, bits, config["group_size"], False, held["scales"].float(), zeros
    )
    return [(layer.qweight, held["qweight"]), (layer.qzeros, held["qzeros"])]


def packed_by_fp8(tensors, base, weight):
    """E4M3 of torch at the stored scales, and scales of the blocks' largest magnitudes."""
    codes, scales = tensors[base + ".weight"], tensors[base + ".weight_scale_inv"]
    blocks = weight.reshape(scales.shape[0], 128, scales.shape[1], 128)
    most = blocks.abs().amax((1, 3))
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return [((weight / wide).to(torch.float8_e4m3fn), codes), (most / 448, scales)]


def packed(config, tensors, base, weight, unpacked):
    """Pairs of what the format's own library packs and what `moesaic quantize` wrote."""
    method = config["quant_method"]
    if method == "compressed-tensors":
        return packed_by_compressed_tensors(config, tensors, base, weight)
    if method == "fp8":
        return packed_by_fp8(tensors, base, weight)
    if method == "gptq":
        return packed_by_gptq(config, tensors, base, unpacked)
    return packed_by_awq(config, tensors, base, unpacked)


def equal(pairs):
    """The number of equal elements of each pair, and of all."""
    same = []
    for found, wanted in pairs:
        assert found.shape == wanted.shape, (found.shape, wanted.shape)
        if found.dtype == torch.float8_e4m3fn:
            found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
        same.append(((found == wanted).sum().item(), wanted.numel()))
    return same


def of_fp8(tensors, base):
    """Unpacks DeepSeek's blocks with transformers' own class."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = tensors[base + ".weight"], tensors[base + ".weight_scale_inv"]
    down, across = (s * 128 for s in scales.shape)
    assert (down, across) == tuple(codes.shape) and Fp8Dequantize
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * scales


def of_gptq(config, tensors, base):
    """Unpacks with auto-gptq: the rows of the identity pass through its layer."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    qweight = tensors[base + ".qweight"]
    inside, outside = qweight.shape[0] * 32 // config["bits"], qweight.shape[1]
    layer = QuantLinear(config["bits"], config["group_size"], inside, outside, False)
    layer.qweight, layer.qzeros = qweight, tensors[base + ".qzeros"]
    layer.scales, layer.g_idx = tensors[base + ".scales"].float(), tensors[base + ".g_idx"]
    layer.autogptq_cuda_available = False
    return layer(torch.eye(inside)).t().float().contiguous()


def of_awq(config, tensors, base):
    from awq.utils.packing_utils import reverse_awq_order, unpack_awq

    bits, group = config["bits"], config["group_size"]
    codes, zeros = unpack_awq(tensors[base + ".qweight"], tensors[base + ".qzeros"], bits)
    codes, zeros = reverse_awq_order(codes, zeros, bits)
    codes, zeros = (t.bitwise_and(2**bits - 1).float() for t in (codes, zeros))
    scales = tensors[base + ".scales"].float().repeat_interleave(group, 0)
    return ((codes - zeros.repeat_interleave(group, 0)) * scales).t().contiguous()


def unpacked(config, tensors, base):
    method = config["quant_method"]
    if method == "compressed-tensors":
        return of_compressed_tensors(config, tensors, base)
    if method == "fp8":
        return of_fp8(tensors, base)
    if method == "gptq":
        return of_gptq(config, tensors, base)
    return of_awq(config, tensors, base)


def relative_rms(found, wanted):
    return (((found - wanted).double() ** 2).sum() / (wanted.double() ** 2).sum()).sqrt().item()


def block_y(source, experts, x):
    """y of transformers' block in f32, with these weights for the experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    block = model.model.layers[LAYER].mlp.float()
    for name, weight in experts.items():
        getattr(block.experts, name).data.copy_(weight)
    with torch.no_grad():
        y = block(x[None])
    return (y[0] if isinstance(y, tuple) else y).reshape(TOKENS, -1)


def moesaic_y(model, x, folder):
    save_file({"x": x}, folder / "x.safetensors")
    kind = "--gguf" if str(model).endswith(".gguf") else "--hf"
    words = ["run", kind, model, "--layer", LAYER, "--precision", "f32", "--target", "cpu"]
    words += ["--input", folder / "x.safetensors", "--output", folder / "y.safetensors"]
    moesaic(*words)
    return load_file(folder / "y.safetensors")["y"]


def agree(what, found, wanted, most):
    off = (found - wanted).abs().max().item() / wanted.abs().max().item()
    assert off <= most, f"{what}: {off}"
    return off


def fused(weights):
    """The experts' matrices as transformers holds them."""
    per = [f"model.layers.{LAYER}.mlp.experts.{e}." for e in range(QWEN["num_experts"])]
    both = [torch.cat([weights[p + "gate_proj"], weights[p + "up_proj"]]) for p in per]
    down = torch.stack([weights[p + "down_proj"] for p in per])
    return {"gate_up_proj": torch.stack(both), "down_proj": down}


def loaded_by_transformers(folder, config, experts):
    """The largest difference of the weights that transformers itself loads."""
    choices = {
        "compressed-tensors": lambda: transformers.CompressedTensorsConfig(dequantize=True),
        "fp8": lambda: transformers.FineGrainedFP8Config(dequantize=True),
        "mxfp4": lambda: transformers.Mxfp4Config(dequantize=True),
    }
    if config["quant_method"] not in choices:
        return None
    loading = choices[config["quant_method"]]()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=loading
    )
    block = model.model.layers[LAYER].mlp.experts
    off = 0.0
    for name, weight in experts.items():
        found = getattr(block, name).data.float()
        # bf16 has 8 bits: rounding is off by 2^-9, and twice where scales are rounded, too.
        off = max(off, agree(name, found, weight, 2**-7))
    return off


def check_folder(source, name, out):
    name, _, group = name.partition("/")
    words = ["--group", group] if group else []
    said = moesaic("quantize", "--hf", source, "--format", name, *words, "--json", "-o", out)
    said = json.loads(said)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    before, after = tensors_of(source), tensors_of(out)
    weights, same = {}, []
    for matrix in said["matrices"]:
        base = matrix["name"].removesuffix(".weight")
        weights[base] = unpacked(config, after, base)
        error = relative_rms(weights[base], before[base + ".weight"].float())
        assert abs(error - matrix["relative_rms"]) < 2e-6, (base, error, matrix)
        float_weight = before[base + ".weight"].float()
        same.append(equal(packed(config, after, base, float_weight, weights[base])))
    kept = [n for n in before if n in after and after[n].dtype == before[n].dtype]
    assert all(torch.equal(before[n], after[n]) for n in kept)
    experts = fused(weights)
    loaded = None
    if name not in NOT_LOADED:
        loaded = loaded_by_transformers(out, config, experts)
    return said, experts, loaded, shares(same)


def shares(same):
    """Shares of equal codes and scales over all matrices, as text."""
    columns = [tuple(map(sum, zip(*pairs))) for pairs in zip(*same)]
    return ", ".join("all" if a == b else f"{a} of {b}" for a, b in columns)


def check_gpt_oss(source, out):
    said = moesaic("quantize", "--hf", source, "--format", "mxfp4", "--json", "-o", out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    after, root = tensors_of(out), f"model.layers.{LAYER}.mlp.experts."
    experts = {}
    for name in ["gate_up_proj", "down_proj"]:
        blocks, scales = (after[f"{root}{name}_{part}"] for part in ["blocks", "scales"])
        experts[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return json.loads(said), experts, loaded_by_transformers(out, config, experts), "-"


def check_gguf(source, name, out):
    said = moesaic("quantize", "--hf", source, "--format", name, "--json", "-o", out)
    tensors = {t.name: t for t in gguf.GGUFReader(out).tensors}
    before, weights, same = tensors_of(source), {}, []
    for part in ["gate", "up", "down"]:
        tensor = tensors[f"blk.{LAYER}.ffn_{part}_exps.weight"]
        assert tensor.tensor_type.name == name.upper(), tensor.tensor_type
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for e, matrix in enumerate(values):
            key = f"model.layers.{LAYER}.mlp.experts.{e}.{part}_proj"
            same += blocks_of_gguf(tensor, e, before[key + ".weight"].float().numpy(), matrix)
            weights[key] = torch.from_numpy(numpy.array(matrix, numpy.float32))
    return json.loads(said), fused(weights), None, shares([[pair] for pair in same]) or "-"


def blocks_of_gguf(tensor, expert, weight, unpacked):
    """Compares blocks with those of gguf's quantizer, where it has one. Errors of ours are at most
    as large, because our codes are nearest at the scales as stored."""
    try:
        theirs = gguf.quants.quantize(weight, tensor.tensor_type)
    except NotImplementedError:
        return []
    error = lambda values: ((values - weight).astype(numpy.float64) ** 2).sum()
    own = gguf.quants.dequantize(theirs, tensor.tensor_type)
    assert error(unpacked) <= error(own) * (1 + 1e-6), (tensor.name, error(unpacked), error(own))
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    ours = numpy.array(tensor.data[expert]).reshape(-1, size)
    return [(int((ours == theirs.reshape(-1, size)).all(1).sum()), len(ours))]


def line(folder, name, source, said, experts, loaded, same, x, model):
    y = block_y(source, experts, x)
    off = agree(name, moesaic_y(model, x, folder), y, 2e-5)
    full = block_y(source, {}, x)
    mean, error = said["mean_relative_rms"], relative_rms(y, full)
    loaded = "-" if loaded is None else f"{loaded:.1e}"
    print(f"| {name} | {mean:.4f} | {error:.4f} | {off:.1e} | {loaded} | {same} |", flush=True)


def main():
    wanted = sys.argv[2:]
    x = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(8))
    titles = ["format", "error of weights", "error of y", "y against the library's"]
    titles += ["weights loaded", "packed alike"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        qwen, gpt_oss = folder / "qwen", folder / "gpt_oss"
        make(qwen, "Qwen3Moe", QWEN)
        make(gpt_oss, "GptOss", GPT_OSS)
        for name in FOLDERS:
            if not wanted or name in wanted:
                out = folder / name.replace("/", "_")
                line(folder, name, qwen, *check_folder(qwen, name, out), x, out)
        if not wanted or "gpt-oss" in wanted:
            out = folder / "oss"
            line(folder, "mxfp4 of gpt-oss", gpt_oss, *check_gpt_oss(gpt_oss, out), x, out)
        for name in BLOCKS:
            if not wanted or name + ".gguf" in wanted:
                out = folder / f"{name}.gguf"
                line(folder, name + ".gguf", qwen, *check_gguf(qwen, name, out), x, out)


main()
