"""Makes the fixtures beside it: layers packed by Quark, AutoRound and compressed-tensors.

    python make.py

Each is a layer (number 1 of two) of a tiny model with random weights, as `../formats` has them.
README.md says what the cases are. Made with amd-quark 0.13, auto-round 0.16.1, compressed-tensors
0.20.1, transformers 5.24 and torch 2.15.
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
        own = {"weight": weight, "weight_scale": scale.to(scales).float()}
        own["weight_zero_point"] = zero.to(torch.int8)
        packed = compressor.compress(own, scheme)
        unpacked = compressor.decompress(packed, scheme)["weight"]
        packed["weight_scale"] = packed["weight_scale"].to(scales)
        return packed, unpacked

    return pack


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


def llama(name, packer, quantization, seed):
    """Stacks `[E, in, out]` of E4M3 with a scale for each output, as transformers' modules of
    fbgemm_fp8 have them. Hidden and model sizes are equal, so that no shape tells rows from
    columns."""
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
            weight.data = matrix(*weight.shape, seed + at)
            tensors[base + part] = weight.data.bfloat16()
            continue
        experts, inputs, outputs = weight.shape
        each = [matrix(outputs, inputs, seed + 10 * at + 100 + e) for e in range(experts)]
        stacked = torch.stack(each).transpose(1, 2).contiguous()
        scale = stacked.abs().amax(1, keepdim=True) / 448
        codes = (stacked / scale).to(E4M3)
        tensors[base + part] = codes
        tensors[base + part + "_scale"] = scale
        weight.data = codes.float() * scale
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


def main():
    mxfp4 = dict(
        dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0",
        is_dynamic=False,
    )
    rows = dict(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0, is_dynamic=False)
    parts = {"gate_proj": quark_fp4, "up_proj": quark_fp4, "down_proj": fp8_rows}
    qwen("quark_mxfp4", "amd-quark 0.13", quark_fp4, quark(mxfp4, {}), 10)
    mixed = quark({}, {"*.experts.*": mxfp4, "*down_proj": rows})
    qwen("quark_mixed", "amd-quark 0.13", parts, mixed, 30)
    library = "compressed-tensors 0.20.1"
    four = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    pack = compressed("int-quantized", four, torch.bfloat16)
    qwen("ct_int4_bytes", library, pack, compressed_tensors("int-quantized", four), 50)
    block = dict(num_bits=8, type="float", strategy="block", block_structure="32x16")
    pack = compressed("float-quantized", block, torch.float32)
    qwen("ct_fp8_block", library, pack, compressed_tensors("float-quantized", block), 70)
    asymmetric = dict(
        quant_method="auto-round", packing_format="auto_round", bits=4, group_size=32, sym=False,
        data_type="int", autoround_version="0.16.1",
    )
    qwen("autoround_asym", "auto-round 0.16.1", autoround, asymmetric, 90)
    ours = "torch " + torch.__version__
    blocks = dict(quant_method="mxfp8", weight_block_size=[1, 32], scale_fmt="ue8m0", fmt="e4m3")
    blocks.update(activation_scheme="dynamic", ignored_layers=["lm_head"])
    qwen("mxfp8", ours, mxfp8, blocks, 130)
    fbgemm = dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0)
    llama("fbgemm_llama4", ours, {**fbgemm, "modules_to_not_convert": ["lm_head"]}, 110)


main()
