"""Makes the models beside it, and their logits as transformers computes them.

    python make.py [NAME…]      makes those, or all

Each folder is a model with random weights as `save_pretrained` writes it, with a tokenizer of
words `w0`, `w1`, … and `logits.safetensors`: the `tokens` of a text, and the `logits` of each of
them. The logits of the last ones come from calls of one token with a cache, and this program checks
that they equal those of one call. Quantized models are computed with the numbers that their codes
stand for. Made with transformers 5.24 and torch on the CPU, in f32.
"""

import json
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
TOKENS, DECODED, WORDS = 14, 6, 48
# The edge of blocks that share a scale in FP8. Published models have 128.
BLOCK = 16

TINY = dict(
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    vocab_size=WORDS,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=WORDS - 1,
    tie_word_embeddings=False,
)
QWEN = dict(head_dim=16, moe_intermediate_size=12, num_experts=6)
# A context of 8 that YaRN makes longer, and a window of 5: both matter within 14 tokens.
YARN = dict(
    rope_type="yarn", rope_theta=1e3, factor=4.0, beta_fast=2.0, beta_slow=0.25, truncate=False,
    original_max_position_embeddings=8,
)
OSS = dict(
    head_dim=16, intermediate_size=32, num_local_experts=4, sliding_window=5, rope_parameters=YARN,
)
CASES = {
    "qwen3_moe": dict(
        QWEN, num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True,
    ),
    "qwen3_moe_fp8": QWEN,
    "mixtral": dict(num_local_experts=5, sliding_window=6),
    "olmoe": dict(num_experts=6, clip_qkv=1.5),
    "gpt_oss": OSS,
    "gpt_oss_mxfp4": OSS,
}


def drawn(model, generator):
    """Sets every parameter to random numbers."""
    for name, parameter in model.named_parameters():
        shape, leaf = parameter.shape, name.rsplit(".", 1)[-1]
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif leaf.endswith("bias") or leaf == "sinks":
            values = 0.5 * values
        else:
            # Experts of gpt-oss are transposed.
            fan_in = shape[-2] if "gpt" in model.config.model_type and len(shape) == 3 else shape[-1]
            values = 1.3 * values / fan_in**0.5
        parameter.data.copy_(values)


def mxfp4(state, generator):
    """Random codes in place of the experts, and the numbers that they stand for."""
    coded, numbers = {}, {}
    for name, tensor in state.items():
        if ".experts." not in name or name.endswith("bias"):
            # What is no expert is bf16 in such a checkpoint.
            coded[name] = tensor.to(torch.bfloat16)
            numbers[name] = coded[name].float()
            continue
        experts, rows, columns = tensor.shape
        sizes = (experts, columns, rows // 32)
        codes = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, sizes, generator=generator, dtype=torch.uint8)
        coded[f"{name}_blocks"], coded[f"{name}_scales"] = codes, scales
        numbers[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).contiguous()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return coded, numbers, dict(quant_method="mxfp4", modules_to_not_convert=kept)


def fp8(state, _generator):
    """The projections in FP8 with a scale for each block, and the numbers that they stand for."""
    coded, numbers = {}, {}
    for name, tensor in state.items():
        if not name.endswith("proj.weight"):
            coded[name] = tensor.to(torch.bfloat16)
            numbers[name] = coded[name].float()
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        whole = torch.zeros(rows * BLOCK, columns * BLOCK)
        whole[: tensor.shape[0], : tensor.shape[1]] = tensor
        scale = whole.reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
        each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        each = each[: tensor.shape[0], : tensor.shape[1]]
        coded[name] = (tensor / each).to(torch.float8_e4m3fn)
        coded[f"{name}_scale_inv"] = scale
        numbers[name] = coded[name].float() * each
    settings = dict(activation_scheme="dynamic", fmt="e4m3", weight_block_size=[BLOCK, BLOCK])
    return coded, numbers, dict(quant_method="fp8", **settings)


def logits(model, tokens):
    """The logits of all tokens, the last ones from calls of one token."""
    with torch.no_grad():
        whole = model(tokens).logits[0]
        step = model(tokens[:, :-DECODED], use_cache=True)
        parts = [step.logits[0]]
        for at in range(TOKENS - DECODED, TOKENS):
            step = model(tokens[:, at : at + 1], past_key_values=step.past_key_values)
            parts.append(step.logits[0])
    parts = torch.cat(parts)
    assert torch.allclose(parts, whole, atol=1e-4 * whole.abs().max()), "the cache differs"
    return parts


def make(name, keys):
    """Writes one folder."""
    folder = HERE / name
    quantize = dict(mxfp4=mxfp4, fp8=fp8).get(name.rsplit("_", 1)[-1])
    family = "_".join(name.split("_")[:2]) if quantize else name
    generator = torch.Generator().manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(family, **{**TINY, **keys}, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    drawn(model, generator)
    if quantize:
        with tempfile.TemporaryDirectory() as plain:
            model.save_pretrained(plain)
            path = pathlib.Path(plain) / "model.safetensors"
            coded, numbers, settings = quantize(load_file(path), generator)
            save_file(numbers, path, {"format": "pt"})
            described = json.loads((path.parent / "config.json").read_text())
            settings = dict(quantization_config=settings, dtype="bfloat16")
            model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager")
        folder.mkdir(exist_ok=True)
        described = json.dumps({**described, **settings}, indent=2)
        (folder / "config.json").write_text(described + "\n")
        save_file(coded, folder / "model.safetensors", {"format": "pt"})
    else:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, WORDS - 1, (1, TOKENS), generator=generator)
    found = logits(model.eval(), tokens)
    results = {"tokens": tokens[0].to(torch.int32), "logits": found.contiguous()}
    save_file(results, folder / "logits.safetensors")
    words = models.WordLevel({f"w{at}": at for at in range(WORDS)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


for name in sys.argv[1:] or CASES:
    make(name, CASES[name])
