"""Makes the fixtures beside it: layers packed by Quark, AutoRound, compressed-tensors and ModelOpt.

    python make.py

Each is a layer (number 1 of two) of a tiny model with random weights, as `../formats` has them.
README.md says what the cases are. Made with amd-quark 0.13, auto-round 0.16.1, compressed-tensors
0.20.1, nvidia-modelopt 0.47, transformers 5.24 and torch 2.15.
"""

import importlib.util
import json
import math
import pathlib
import sys
import types

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from transformers import Llama4TextConfig, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock


def package(name, **members):
    """Makes a package importable without its `__init__`, which needs a GPU or much else."""
    made = types.ModuleType(name)
    found = importlib.util.find_spec(name)
    made.__path__ = list(found.submodule_search_locations or []) if found else []
    made.__dict__.update(members)
    sys.modules[name] = made


for name in ["auto_round", "quark", "quark.torch", "quark.torch.quantization", "quark.torch.utils"]:
    package(name)
package("auto_round.utils", get_packing_device=lambda device=None: "cpu")
package("quark.torch.quantization.config")
package("quark.torch.quantization.config.type", Dtype=None, QSchemeType=None, ZeroPointType=None)
package("quark.torch.quantization.constants", PER_GROUP_INT_TRANSPOSE_DTYPES=[])
package("quark.torch.quantization.utils", get_dtype_params=None)
from auto_round_extension.torch import qlinear_torch
from quark.torch.utils.pack import Pack_fp4

HERE = pathlib.Path(__file__).parent
LAYER, TOKENS = 1, 9
MODEL, HIDDEN, EXPERTS, TOP_K = 64, 96, 4, 2
E4M3 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix(rows, columns, seed):
    """Random numbers with rows of their own size."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator) * 1.3 / math.sqrt(columns)
    sizes = torch.exp(torch.randn(rows, 1, generator=generator) * 0.4)
    return (numbers * sizes).bfloat16().float()


def quark_fp4(weight):
    groups = weight.reshape(weight.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scale = torch.exp2(exponent)
    numbers = groups / scale[..., None]
    nearest = (numbers.abs()[..., None] - FP4).abs().argmin(-1)
    numbers = (FP4[nearest] * numbers.sign()).reshape(weight.shape)
    pack = Pack_fp4("per_group", "fp4")
    packed = pack.pack(numbers, True)
    unpacked = pack.unpack(packed, True) * scale.repeat_interleave(32, 1)
    return {"weight": packed, "weight_scale": (exponent + 127).to(torch.uint8)}, unpacked


def fp8_rows(weight):
    scale = weight.abs().amax(1) / 448
    codes = (weight / scale[:, None]).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def mxfp8(weight):
    """Codes and exponents, unpacked by transformers."""
    groups = weight.reshape(weight.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 8
    codes = (groups / torch.exp2(exponent)[..., None]).clamp(-448, 448).to(E4M3)
    packed = {"weight": codes.reshape(weight.shape)}
    packed["weight_scale_inv"] = (exponent + 127).to(torch.uint8)
    unpack = Fp8Dequantize(None)._dequantize_one
    return packed, unpack(*packed.values(), output_dtype=torch.float32)


def compressed(kind, settings, scales):
    """compressed-tensors' compressor of that name, with scales of its own observer's rule."""
    settings = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings, format=kind)
    compressor = BaseCompressor.get_value_from_registry(kind)

    def pack(weight):
        down, across = settings.block_structure or [1, settings.group_size]
        tiles = weight.reshape(weight.shape[0] // down, down, -1, across)
        scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), settings)
        if settings.scale_dtype is torch.uint8:
            own = {"weight": weight, "weight_scale": scale.float()}
            packed = compressor.compress(own, scheme)
            return packed, compressor.decompress(packed, scheme)["weight"].float()
        own = {"weight": weight, "weight_scale": scale.to(scales).float()}
        own["weight_zero_point"] = zero.to(torch.int8)
        packed = compressor.compress(own, scheme)
        unpacked = compressor.decompress(packed, scheme)["weight"]
        packed["weight_scale"] = packed["weight_scale"].to(scales)
        return packed, unpacked

    return pack


def nvfp4(size, largest):
    """ModelOpt's packer in groups of `size`; the second scale is the largest weight / `largest`."""

    def pack(weight):
        second = weight.abs().amax() / largest
        tensor, scale, _ = NVFP4QTensor.quantize(weight, size, None, second)
        packed = {"weight": tensor._quantized_data, "weight_scale": scale}
        packed["weight_scale_2"] = second
        unpacked = tensor.dequantize(
            torch.float32, scale=scale, double_scale=second, block_sizes={-1: size}
        )
        return packed, unpacked

    return pack


def int8_rows(weight):
    """ModelOpt's integers of W8A16."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale[:, None]


def autoround(weight):
    """AutoRound's packer for zero points as they are."""
    groups = weight.reshape(weight.shape[0], -1, 32)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = torch.round(-low / scale).clamp(0, 15)
    wide = [part.repeat_interleave(32, 1) for part in (scale, zero)]
    numbers = torch.clamp(torch.round(weight / wide[0]) + wide[1], 0, 15) - wide[1]
    rows, columns = weight.shape
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = numbers * wide[0]
    layer = qlinear_torch.QuantLinear(4, 32, columns, rows, False)
    layer.__dict__["device"] = "cpu"
    layer.pack(linear, scale, zero, None, "cpu")
    packed = {name: getattr(layer, name) for name in ["qweight", "qzeros", "scales"]}
    unpacked = layer(torch.eye(columns).half()).float().t()
    assert (unpacked - linear.weight).abs().max() < 1e-2
    return packed, linear.weight.data


def store(name, family, packer, config, tensors, block, x):
    """Writes a folder; `block` has the unpacked weights."""
    block = block.double()
    with torch.no_grad():
        found = block(x[None].double())
    y = (found[0] if isinstance(found, tuple) else found).reshape(x.shape).float()
    router = tensors[next(n for n in tensors if n.endswith(("gate.weight", "router.weight")))]
    top_k = config["num_experts_per_tok"]
    ids = (x.double() @ router.double().t()).topk(top_k).indices.sort().values
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    save_file({"x": x, "y": y, "topk_ids": ids.int()}, folder / "block.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    case = {"layer": LAYER, "family": family, "packed_by": packer, "tolerance": {"f32": 2e-5}}
    (folder / "case.json").write_text(json.dumps(case, indent=1))


def tokens(seed):
    numbers = torch.randn(TOKENS, MODEL, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().float()


def qwen(name, packer, pack, quantization, seed):
    """`pack` makes tensors and unpacked numbers of a matrix; it may differ by matrix."""
    config = dict(
        model_type="qwen3_moe", hidden_size=MODEL, moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, hidden_act="silu",
        num_hidden_layers=2, torch_dtype="bfloat16", quantization_config=quantization,
    )
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**config))
    router = matrix(EXPERTS, MODEL, seed)
    block.gate.weight.data = router
    tensors = {f"model.layers.{LAYER}.mlp.gate.weight": router.bfloat16()}
    numbers = {}
    sizes = {"gate_proj": (HIDDEN, MODEL), "up_proj": (HIDDEN, MODEL), "down_proj": (MODEL, HIDDEN)}
    for expert in range(EXPERTS):
        for at, (part, size) in enumerate(sizes.items()):
            weight = matrix(*size, seed + 1 + 3 * expert + at)
            own = pack[part] if isinstance(pack, dict) else pack
            packed, numbers[expert, part] = own(weight)
            base = f"model.layers.{LAYER}.mlp.experts.{expert}.{part}"
            tensors.update({f"{base}.{end}": tensor for end, tensor in packed.items()})
    stack = lambda part: torch.stack([numbers[expert, part] for expert in range(EXPERTS)])
    fused = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
    block.experts.gate_up_proj.data = fused
    block.experts.down_proj.data = stack("down_proj")
    store(name, "qwen3_moe", packer, config, tensors, block, tokens(seed))


def fbgemm(stacked):
    scale = stacked.abs().amax(1, keepdim=True) / 448
    codes = (stacked / scale).to(E4M3)
    return {"": codes, "_scale": scale}, codes.float() * scale


def nvfp4_stacked(stacked):
    """A stack as ModelOpt exports Llama 4's: packed along inputs and then turned back."""
    packed, unpacked = nvfp4(16, 448 * 6)(stacked.transpose(1, 2).contiguous())
    packed = {name: part.transpose(1, 2) if part.dim() else part for name, part in packed.items()}
    named = {"" if name == "weight" else "_" + name: part for name, part in packed.items()}
    return named, unpacked.transpose(1, 2)


def llama(name, packer, pack, quantization, seed, pack_linear=None):
    """Stacks `[E, in, out]`, as transformers' modules have them. Hidden and model sizes are equal,
    so that no shape tells rows from columns. `pack_linear` packs the shared expert."""
    config = dict(
        model_type="llama4_text", hidden_size=MODEL, intermediate_size=MODEL,
        num_local_experts=EXPERTS, num_experts_per_tok=1, interleave_moe_layer_step=1,
        num_hidden_layers=2, torch_dtype="bfloat16", hidden_act="silu",
    )
    block = Llama4TextMoe(Llama4TextConfig(**config))
    config["quantization_config"] = quantization
    base = f"model.layers.{LAYER}.feed_forward."
    tensors = {}
    for at, (part, weight) in enumerate(block.named_parameters()):
        if not part.startswith("experts."):
            numbers = matrix(*weight.shape, seed + at)
            tensors[base + part] = numbers.bfloat16()
            if pack_linear and part.startswith("shared_expert."):
                packed, numbers = pack_linear(numbers)
                module = base + part.removesuffix(".weight")
                tensors.update({f"{module}.{end}": tensor for end, tensor in packed.items()})
            weight.data = numbers
            continue
        experts, inputs, outputs = weight.shape
        each = [matrix(outputs, inputs, seed + 10 * at + 100 + e) for e in range(experts)]
        packed, weight.data = pack(torch.stack(each).transpose(1, 2).contiguous())
        tensors.update({base + part + end: tensor for end, tensor in packed.items()})
    store(name, "llama4_text", packer, config, tensors, block, tokens(seed))


def quark(weight, layers):
    layers = {name: {"weight": own, "input_tensors": None} for name, own in layers.items()}
    return dict(
        quant_method="quark", global_quant_config={"weight": weight, "input_tensors": None},
        layer_quant_config=layers, layer_type_quant_config={}, exclude=["lm_head", "*mlp.gate"],
        algo_config=None, quant_mode="eager_mode", version="0.13",
        export={"pack_method": "reorder", "weight_format": "real_quantized"},
    )


def compressed_tensors(kind, settings):
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None, "format": kind}
    return dict(
        quant_method="compressed-tensors", format=kind, quantization_status="compressed",
        config_groups={"group_0": group}, ignore=["lm_head", "re:.*mlp.gate$"],
    )


def modelopt(algorithm, layers=None):
    config = dict(quant_algo=algorithm, group_size=16, exclude_modules=["lm_head", "*gate"])
    if layers:
        config["quantized_layers"] = layers
    return dict(quant_method="modelopt", producer={"name": "modelopt"}, quantization=config)


def by_quark():
    mxfp4 = dict(
        dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0",
        is_dynamic=False,
    )
    rows = dict(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0, is_dynamic=False)
    parts = {"gate_proj": quark_fp4, "up_proj": quark_fp4, "down_proj": fp8_rows}
    qwen("quark_mxfp4", "amd-quark 0.13", quark_fp4, quark(mxfp4, {}), 10)
    mixed = quark({}, {"*.experts.*": mxfp4, "*down_proj": rows})
    qwen("quark_mixed", "amd-quark 0.13", parts, mixed, 30)


def by_compressed_tensors():
    def case(name, kind, settings, scales, seed):
        pack = compressed(kind, settings, scales)
        described = {key: str(value) if key == "scale_dtype" else value
                     for key, value in settings.items()}
        qwen(name, "compressed-tensors 0.20.1", pack, compressed_tensors(kind, described), seed)

    four = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    case("ct_int4_bytes", "int-quantized", four, torch.bfloat16, 50)
    block = dict(num_bits=8, type="float", strategy="block", block_structure="32x16")
    case("ct_fp8_block", "float-quantized", block, torch.float32, 70)
    three = dict(four, num_bits=3)
    case("ct_int3_asym", "pack-quantized", three, torch.bfloat16, 150)
    six = dict(four, num_bits=6, symmetric=True)
    case("ct_int6", "pack-quantized", six, torch.bfloat16, 170)
    floats = dict(num_bits=6, type="float", strategy="group", group_size=32, symmetric=True)
    floats["scale_dtype"] = torch.uint8
    case("ct_mxfp6", "mxfp6-pack-quantized", floats, None, 190)


def by_modelopt():
    library = "nvidia-modelopt 0.47"
    parts = {"gate_proj": nvfp4(32, 448), "up_proj": nvfp4(32, 448), "down_proj": int8_rows}
    base, layers = f"model.layers.{LAYER}.mlp.experts", {}
    for expert in range(EXPERTS):
        for part in ["gate_proj", "up_proj"]:
            own = {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}
            layers[f"{base}.{expert}.{part}"] = own
        layers[f"{base}.{expert}.down_proj"] = {"quant_algo": "W8A16"}
    qwen("modelopt_mixed", library, parts, modelopt("MIXED_PRECISION", layers), 210)
    linear = nvfp4(16, 448 * 6)
    llama("modelopt_llama4", library, nvfp4_stacked, modelopt("NVFP4"), 230, linear)


def by_others():
    asymmetric = dict(
        quant_method="auto-round", packing_format="auto_round", bits=4, group_size=32, sym=False,
        data_type="int", autoround_version="0.16.1",
    )
    qwen("autoround_asym", "auto-round 0.16.1", autoround, asymmetric, 90)
    ours = "torch " + torch.__version__
    blocks = dict(quant_method="mxfp8", weight_block_size=[1, 32], scale_fmt="ue8m0", fmt="e4m3")
    blocks.update(activation_scheme="dynamic", ignored_layers=["lm_head"])
    qwen("mxfp8", ours, mxfp8, blocks, 130)
    scaled = dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0)
    llama("fbgemm_llama4", ours, fbgemm, {**scaled, "modules_to_not_convert": ["lm_head"]}, 110)


if __name__ == "__main__":
    by_quark()
    by_compressed_tensors()
    by_modelopt()
    by_others()
