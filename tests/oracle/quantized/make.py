"""Makes the fixtures beside it: quantized checkpoints, and what transformers reads them as.

    python make.py

Each is a model of two layers with random weights whose checkpoint is quantized as the
published ones of its family are, and is then loaded with `dequantize=True` on the CPU. README.md
says what the files hold. Made with transformers 5.24, torch 2.15 and compressed-tensors 0.20.
"""

import json
import math
import pathlib
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
LAYER, TOKENS = 1, 12
BLOCK = [8, 16]

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
DEEPSEEK = dict(
    **TINY,
    intermediate_size=48,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
GPT_OSS = dict(
    **{**TINY, "hidden_size": 64},
    head_dim=16,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
)
QWEN = dict(
    **TINY,
    head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8(tensors, name):
    """Replaces a matrix by codes of E4M3 and a scale for each block."""
    weight = tensors[name].float()
    rows, columns = weight.shape
    down, across = BLOCK
    blocks = weight.reshape(rows // down, down, columns // across, across)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns)
    tensors[name] = codes.to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] = scale


def mxfp4(tensors, name):
    """Replaces experts `[E, in, out]` by codes of E2M1 in groups of 32 and their exponents."""
    weight = tensors.pop(name).float().transpose(1, 2)
    groups = weight.reshape(*weight.shape[:2], -1, 32)
    exponent = groups.abs().amax(-1).log2().floor() - 2
    sizes = (groups.abs() / torch.exp2(exponent)[..., None])[..., None]
    codes = (sizes - CODES).abs().argmin(-1) + 8 * (groups < 0)
    tensors[name + "_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    tensors[name + "_scales"] = (exponent + 127).to(torch.uint8)


def quantized_deepseek(tensors):
    kept = ("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight")
    for name in list(tensors):
        if name.endswith(".weight") and not name.endswith(kept):
            fp8(tensors, name)
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": BLOCK,
    }


def quantized_gpt_oss(tensors):
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            mxfp4(tensors, name)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}


def quantized_qwen(tensors):
    """As llm-compressor's FP8_DYNAMIC: a scale in bf16 for each row."""
    for name in list(tensors):
        if name.endswith("proj.weight"):
            weight = tensors[name].float()
            scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
            tensors[name] = (weight / scale.float()).to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = scale
    fp8 = dict(num_bits=8, type="float", symmetric=True)
    group = dict(
        targets=["Linear"],
        weights=dict(**fp8, strategy="channel", dynamic=False),
        input_activations=dict(**fp8, strategy="token", dynamic=True),
        output_activations=None,
    )
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def randomise(model):
    generator = torch.Generator().manual_seed(7)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" in name or name.endswith("norm.weight"):
            continue
        std = 1.3 / math.sqrt(model.config.hidden_size) if tensor.dim() > 1 else 0.5
        tensor.data.normal_(0, std, generator=generator)


def make(name, family, config, quantize, loading):
    here = HERE / name
    here.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config = getattr(transformers, family + "Config")(**config, dtype="bfloat16")
        model = getattr(transformers, family + "ForCausalLM")(config).to(torch.bfloat16)
        randomise(model)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        text = json.loads((folder / "config.json").read_text())
        text["quantization_config"] = quantize(tensors)
        (folder / "config.json").write_text(json.dumps(text, indent=2))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=loading
        )
    block = model.model.layers[LAYER].mlp
    under = f"model.layers.{LAYER}.mlp."
    loaded = {under + name: tensor for name, tensor in block.state_dict().items()}
    assert all(t.dtype in (torch.bfloat16, torch.float32) for t in loaded.values()), loaded
    (here / "config.json").write_text(json.dumps(text, indent=2) + "\n")
    save_file({n: t for n, t in tensors.items() if n.startswith(under)}, here / "model.safetensors")
    save_file({n: t.contiguous() for n, t in loaded.items()}, here / "dequantized.safetensors")
    x = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        y = block.float()(x)
    y = y[0] if isinstance(y, tuple) else y
    save_file({"x": x[0], "y": y.reshape(TOKENS, -1).contiguous()}, here / "block.safetensors")


make(
    "deepseek_v3", "DeepseekV3", DEEPSEEK, quantized_deepseek,
    transformers.FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True),
)
make("gpt_oss", "GptOss", GPT_OSS, quantized_gpt_oss, transformers.Mxfp4Config(dequantize=True))
make(
    "qwen3_moe", "Qwen3Moe", QWEN, quantized_qwen,
    transformers.CompressedTensorsConfig(dequantize=True),
)
