"""Packs one matrix with each format's own library, for runtime/weights/tests/packers.rs.

Run it with the libraries that check.py names, then `python3 ../pack.py quantize`. Scales follow the
rule of the library; of two that choose otherwise, OCP's rule gives the E8M0 scales, and scales of
f16 and bf16 are rounded before codes are taken by them.
"""

import functools
import importlib.util
import pathlib
import sys
import types

import gguf
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
ROWS, COLUMNS = 32, 256


def bare(name):
    """Makes a package importable without its `__init__`, which needs an older transformers."""
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package


bare("auto_gptq")
bare("awq")


def matrix():
    """Nearly normal rows of different sizes, with outliers, as bf16."""
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(ROWS, COLUMNS, generator=generator)
    values *= 2.0 ** -torch.randint(0, 6, (ROWS, 1), generator=generator)
    values[5, 17] = 9.0
    values[6, 200] = -6.5
    # Halves and quarters lie in the middle between two codes.
    values[7] = torch.arange(COLUMNS) % 31 / 4 - 3.75
    return values.to(torch.bfloat16)


def by_compressed_tensors(weight, format, **settings):
    args = QuantizationArgs(symmetric=True, **settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    group = args.group_size
    parts = weight.reshape(ROWS, -1, group) if group else weight[:, None]
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    if args.scale_dtype == torch.uint8:
        most = parts.abs().amax(-1)
        largest = 8 if args.num_bits == 8 else 2
        state["weight_scale"] = 2.0 ** (torch.floor(torch.log2(most)) - largest)
    else:
        found = calculate_qparams(
            parts.amin(-1), parts.amax(-1), args, state.get("weight_global_scale")
        )
        state["weight_scale"] = found[0]
    if args.type == "int":
        # Checkpoints have scales of the model's type.
        state["weight_scale"] = state["weight_scale"].to(torch.bfloat16).float()
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, scheme)
    if args.type == "int":
        packed["weight_scale"] = packed["weight_scale"].to(torch.bfloat16)
    return packed


def by_torch(weight):
    """DeepSeek's blocks: the largest magnitude of 128 x 128 elements becomes 448."""
    most = weight.reshape(ROWS, -1, 128).abs().amax((0, 2))
    scales = (most / 448)[None]
    codes = (weight / scales.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def linear(weight):
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = weight
    return layer


def on_grid(weight, scales, zeros, group):
    """Numbers of the grid of scales and zero points, of one row for each group of columns."""
    scales, zeros = (part.t().repeat_interleave(group, 1) for part in (scales, zeros))
    codes = torch.clamp(torch.round(weight / scales) + zeros, 0, 15)
    return (codes - zeros) * scales


def by_gptq(weight, group=128):
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from auto_gptq.quantization.quantizer import Quantizer

    scales, zeros = [], []
    for part in weight.split(group, 1):
        quantizer = Quantizer()
        quantizer.configure(4, perchannel=True, sym=True, mse=False)
        quantizer.find_params(part, weight=True)
        scales.append(quantizer.scale.half().float())
        zeros.append(quantizer.zero)
    scales, zeros = torch.cat(scales, 1), torch.cat(zeros, 1)
    layer = QuantLinear(4, group, COLUMNS, ROWS, False)
    columns = torch.arange(COLUMNS, dtype=torch.int32) // group
    layer.pack(linear(on_grid(weight, scales.t(), zeros.t(), group)), scales, zeros, columns)
    return {
        "qweight": layer.qweight.int(),
        "qzeros": layer.qzeros.int(),
        "scales": scales.t().half(),
        "g_idx": layer.g_idx.int(),
    }


def by_awq(weight, group=128):
    from awq.modules.linear.gemm import WQLinear_GEMM

    parts = weight.reshape(ROWS, -1, group)
    # AutoAWQ's pseudo_quantize_tensor, with f16 scales.
    scales = ((parts.amax(-1) - parts.amin(-1)).clamp(min=1e-5) / 15).half().float()
    zeros = (-torch.round(parts.amin(-1) / scales)).clamp(0, 15)
    scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    grid = on_grid(weight, scales, zeros, group)
    layer = WQLinear_GEMM.from_linear(linear(grid), 4, group, False, scales, zeros)
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}


def main():
    source = matrix()
    weight = source.float()
    compressed = functools.partial(by_compressed_tensors, weight)
    e8m0 = dict(strategy="group", group_size=32, scale_dtype=torch.uint8)
    packed = {
        "fp8": by_torch(weight),
        "fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "mxfp8": compressed("mxfp8-quantized", num_bits=8, type="float", **e8m0),
        "mxfp6": compressed("mxfp6-pack-quantized", num_bits=6, type="float", **e8m0),
        "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", **e8m0),
        "nvfp4": compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
            group_size=16, scale_dtype=torch.float8_e4m3fn,
        ),
        "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int4": compressed(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=128
        ),
        "gptq": by_gptq(weight),
        "awq": by_awq(weight),
    }
    blocks = {}
    for name in ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"]:
        kind = gguf.GGMLQuantizationType[name]
        blocks[name] = torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind))
    save_file({"weight": source}, HERE / "matrix.safetensors")
    save_file(blocks, HERE / "gguf.safetensors")
    for name, tensors in packed.items():
        tensors = {f"a.{end}": part.contiguous() for end, part in tensors.items()}
        save_file(tensors, HERE / f"{name}.safetensors")


main()
