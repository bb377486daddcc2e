"""Makes the fixtures beside it: MoE layers as transformers computes them.

    python make.py [NAME…]      makes those, or all
    python make.py --folders    folders with MoE code that docs/FAMILIES.md does not name

Each case is a model of two layers with random weights. Only the block is ever
in memory: the model is built on the meta device, so that vision towers cost
nothing. README.md says what the files hold. Made with torch on the CPU, in f32,
and transformers 5.23, but for muse_spark, which is new in 5.24.
"""

import json
import pathlib
import re
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
TOKENS = 12

# Widths that every text model here has; a case adds its own keys.
TINY = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
NARROW = dict(moe_intermediate_size=6)
V3 = dict(**NARROW, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
SPARSE = dict(mlp_layer_types=["dense", "sparse"])


class Case:
    """A model, and the block of it that is run."""

    def __init__(
        self, family, model, config, block, layer=1, name=None, text=None, run=None, parts=("",),
        tokens=None, **keys,
    ):
        self.family, self.name = family, name or family
        self.model, self.config = model, config
        # The module, the names in it that belong to the block, and the layer by moesaic's count.
        self.block, self.parts, self.layer = block, parts, layer
        # Keys of the text model are those of the model unless a larger one nests it.
        self.keys = {**TINY, **keys} if text is None else keys
        if text in keys:
            self.keys = {**keys, text: {**TINY, **keys[text]}}
        self.run, self.tokens = run or run_block, tokens

    def tensors(self, model):
        """The block's parameters and buffers by their names in the module."""
        module = model.get_submodule(self.block)
        named = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor for name, tensor in named if name.startswith(self.parts)}

    def gradients(self, tensors):
        """What reading a checkpoint turns into gradients of our tensors.

        A recipe that multiplies by f gives f times the stored tensor, and the
        gradient of what it made is 1/f times that of the stored one.
        """
        grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in tensors.items()}
        if self.name == "cohere2_moe":
            grads["shared_experts.down_proj.weight"] /= 0.5**2
        if self.name == "muse_spark":
            grads["gate.weight"] /= MUSE_LOGITS**2
            for name in ("pre_expert_norm.weight", "experts.post_expert_norm.weight"):
                grads[name] -= 1  # a recipe that adds 1 adds it to the gradient, too
        if "router.scale" in tensors:
            vectors = ("router.scale", "pre_feedforward_layernorm_2.weight")
            scale, norm = (tensors[name].detach() for name in vectors)
            grads["router.proj.weight"] /= (scale / norm) ** 2 / len(scale)
            grads |= dict(zip(vectors, (scale, norm)))
        return grads


def run_block(model, case, x):
    """The output of the block, and the experts that it chose."""
    block = model.get_submodule(case.block)
    chosen = []

    def watch(_, arguments, named):
        tensors = [*arguments, *named.values()]
        chosen.extend(t for t in tensors if torch.is_tensor(t) and not t.is_floating_point())

    block.experts.register_forward_pre_hook(watch, with_kwargs=True)
    y = block(x[None])
    y = y[0] if isinstance(y, tuple) else y
    return y.reshape(x.shape[0], -1), chosen[0]


def fill(model, case, generator):
    """Random values for the block's tensors; all others stay on the meta device."""
    model.get_submodule(case.block).to_empty(device="cpu")
    for name, tensor in case.tensors(model).items():
        value = torch.randn(tensor.shape, generator=generator)
        leaf = name.rsplit(".", 1)[-1]
        if "norm" in name or leaf in ("per_expert_scale", "scale"):
            value = 1 + 0.3 * value
        elif "bias" in leaf or tensor.ndim == 1:
            value = 0.5 * value
        else:
            router = "gate." in name or "router" in name
            value = (2.6 if router else 1.3) * value / tensor.shape[-1] ** 0.5
        tensor.data.copy_(value)


def checkpoint(model, case, values):
    """`values` of the block's tensors as `save_pretrained` would write them."""
    state = {f"{case.block}.{name}": value for name, value in values.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state)
        config = (pathlib.Path(folder) / "config.json").read_text()
        (file,) = pathlib.Path(folder).glob("*.safetensors")
        saved = load_file(file)
    return config, {name: value.contiguous() for name, value in saved.items()}


def make(case):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))
    config = getattr(transformers, case.config)(**case.keys)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, case.model)._from_config(config)
    model.eval()
    model.set_experts_implementation("eager")
    fill(model, case, generator)
    x = torch.randn(TOKENS, 16, generator=generator)
    if case.tokens:
        x = case.tokens(model, case, generator)
    x.requires_grad_()
    dy = torch.randn(TOKENS, 16, generator=generator)
    y, ids = case.run(model, case, x)
    (y * dy).sum().backward()

    tensors = case.tensors(model)
    text, weights = checkpoint(model, case, {n: t.detach() for n, t in tensors.items()})
    _, gradients = checkpoint(model, case, case.gradients(tensors))

    folder = HERE / case.name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    memory = {f"{case.block}.{n}": list(t.shape) for n, t in tensors.items()}
    about = {"family": case.family, "layer": case.layer, "module": case.block, "memory": memory}
    (folder / "case.json").write_text(json.dumps(about, indent=1) + "\n")
    save_file(weights, folder / "model.safetensors")
    save_file(gradients, folder / "gradients.safetensors")
    ids = ids.sort(dim=1).values.to(torch.int32)
    block = {"x": x.detach(), "y": y.detach(), "dy": dy, "dx": x.grad, "topk_ids": ids}
    save_file({n: t.contiguous() for n, t in block.items()}, folder / "block.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{case.name}: {size} bytes; {', '.join(list(weights)[:4])}")


def decoder(family, stem, **keys):
    """A causal language model with the block at `model.layers.1.mlp`."""
    keys.setdefault("block", "model.layers.1.mlp")
    return Case(family, f"{stem}ForCausalLM", f"{stem}Config", **keys)


def nested(family, stem, text, block="model.language_model.layers.1.mlp", **keys):
    """A model that nests its language model, and that one's keys."""
    model = keys.pop("model", f"{stem}ForConditionalGeneration")
    return Case(family, model, f"{stem}Config", block, text="text_config", text_config=text, **keys)


def before_norm(model, case, x):
    """The block without the norm that the checkpoint keeps behind it."""
    model.get_submodule(case.block).post_mlp_layernorm = torch.nn.Identity()
    return run_block(model, case, x)


def with_zero_keys(model, case, generator):
    """Tokens of which half choose experts of dropped groups, whose keys are 0.

    Such keys are equal, so only tokens that take both or none of them are clear.
    """
    gate = model.get_submodule(case.block).gate
    x = torch.randn(1 << 16, 16, generator=generator)
    keys = gate.apply_group_scoring((x @ gate.weight.T).sigmoid() + gate.e_score_correction_bias)
    keys = keys.sort(dim=1, descending=True).values
    clear = keys[:, gate.top_k - 1] > keys[:, gate.top_k]
    zeros = (keys[:, : gate.top_k] == 0).any(dim=1)
    half = TOKENS // 2
    return torch.cat([x[clear & zeros][:half], x[clear & ~zeros][:half]])


def run_gemma(model, case, x):
    """The experts alone: `x` is what they read, the router reads it without the norm's weight."""
    layer = model.get_submodule(case.block)
    layer.router.norm = torch.nn.Identity()
    _, weights, ids = layer.router(x / layer.pre_feedforward_layernorm_2.weight.detach())
    return layer.experts(x, ids, weights), ids


def run_jetmoe(model, case, x):
    block = model.get_submodule(case.block)
    return block(x[None])[0], (x @ block.router.layer.weight.T).topk(block.router.top_k).indices


def run_vision(model, case, x):
    """The experts for images of a block with two sets."""
    block = model.get_submodule(case.block)
    ids = block.vision_moe.gate(x)[2]
    images = torch.ones(1, x.shape[0], dtype=torch.int32)
    return block(x[None], moe_mm_token_type_ids=images)[0][0], ids


def run_text(model, case, x):
    """The experts for text of a block with two sets."""
    block = model.get_submodule(case.block)
    return block(x[None])[0][0], block.text_moe.gate(x)[2]


def run_with_shared(model, case, x):
    """A block and the shared expert beside it."""
    layer = model.get_submodule(case.block)
    y = layer.block_sparse_moe(x[None])[0] + layer.shared_mlp(x)
    return y, layer.block_sparse_moe.router(x)[2]


E6 = dict(num_experts=6, num_experts_per_tok=3, **NARROW)
E6_WIDE = dict(num_experts=6, num_experts_per_tok=3, intermediate_size=6)
WIDE = dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=6)
KIMI = dict(**NARROW, num_experts=8, num_experts_per_token=3, num_expert_group=4, topk_group=2)
V2 = dict(**NARROW, n_routed_experts=6, num_experts_per_tok=3)
ERNIE_ROPE = dict(rope_type="default", rope_theta=5e5, mrope_section=[1, 1, 2])
ERNIE = dict(**SPARSE, moe_intermediate_size=[6, 4], moe_num_experts=6, moe_k=3, rope_parameters=ERNIE_ROPE)
GRANITE = dict(
    **WIDE, shared_intermediate_size=10, block="model.layers.1",
    parts=("block_sparse_moe", "shared_mlp"), run=run_with_shared,
)
GEMMA = dict(num_experts=6, top_k_experts=3, **NARROW)
ADAPTER = dict(adapter_out_dim=16)
DOTS = dict(**V3, **SPARSE, shared_experts_intermediate_size=10)
DOTS_EYES = dict(
    **ADAPTER, **NARROW, **SPARSE, adapter_in_dim=16, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_local_experts=5, num_experts_per_tok=3, router_scaling_factor=1.5,
)
MUSE_LOGITS = 0.7
MUSE = dict(
    **NARROW, **SPARSE, num_local_experts=8, num_experts_per_tok=3, moe_hidden_size=12,
    output_multiplier=MUSE_LOGITS, routed_scaling_factor=2.5, rms_norm_eps=0.02, post_norm_eps=0.01,
    head_dim=8,
)
OMNI = dict(
    thinker_config=dict(text_config=dict(**TINY, **E6)),
    talker_config=dict(
        thinker_hidden_size=16, spatial_merge_size=2,
        text_config=dict(**TINY, **E6, shared_expert_intermediate_size=10),
    ),
)

CASES = [
    # Softmax.
    decoder("flex_olmo", "FlexOlmo", **E6_WIDE, norm_topk_prob=True),
    nested("qwen3_vl_moe", "Qwen3VLMoe", E6),
    decoder("jetmoe", "JetMoe", **WIDE, run=run_jetmoe),
    Case(
        "openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig",
        "model.layers.1.mlp", **WIDE, swiglu_limit=0.8,
    ),
    # Softmax beside shared experts.
    nested("qwen3_5_moe", "Qwen3_5Moe", dict(**E6, shared_expert_intermediate_size=10)),
    nested("qwen4_exp", "Qwen4Exp", dict(**E6, shared_expert_intermediate_size=10, norm_topk_prob=False)),
    decoder("granitemoehybrid", "GraniteMoeHybrid", **GRANITE, mamba_n_heads=2, mamba_d_head=16),
    decoder("granitemoe_swa", "GraniteMoeSWA", **GRANITE),
    nested("aria", "Aria", dict(intermediate_size=6, moe_num_experts=6, moe_topk=3)),
    decoder("cohere2_moe", "Cohere2Moe", **E6_WIDE, num_shared_experts=2),
    decoder(
        "cohere2_moe", "Cohere2Moe", name="cohere2_moe_sigmoid", **E6_WIDE,
        num_shared_experts=1, expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum",
    ),
    nested("deepseek_ocr2", "DeepseekOcr2", dict(**V2, **SPARSE)),
    nested("unlimited_ocr", "UnlimitedOcr", dict(**V2, **SPARSE)),
    decoder("mistral4", "Mistral4", **V3),
    nested("mistral_large4", "MistralLarge4", dict(**V3, **SPARSE)),
    # Sigmoid.
    decoder("deepseek_v32", "DeepseekV32", **V3, **SPARSE),
    decoder("glm_moe_dsa", "GlmMoeDsa", **V3, **SPARSE),
    nested("glm4v_moe", "Glm4vMoe", dict(**V3, first_k_dense_replace=1)),
    decoder("glm4_moe_lite", "Glm4MoeLite", **V3, **SPARSE),
    decoder("solar_open", "SolarOpen", **V3),
    decoder("axk1", "AXK1", **V3, **SPARSE, run=before_norm),
    decoder(
        "axk2", "AXK2", **V3 | dict(num_experts_per_tok=5, topk_group=3), **SPARSE, tokens=with_zero_keys,
    ),
    decoder("bailing_hybrid", "BailingHybrid", **KIMI, **SPARSE),
    decoder("beam", "Beam", **E6 | dict(num_experts=8), n_group=4, topk_group=2, **SPARSE),
    nested("glm5_next", "Glm5Next", dict(**V3, **SPARSE, swiglu_limit=0.8)),
    decoder("hy_v3", "HYV3", **E6, **SPARSE, num_shared_experts=2),
    decoder("kimi_linear", "KimiLinear", **KIMI, **SPARSE),
    decoder("mimo_v2_flash", "MiMoV2Flash", **V3, **SPARSE),
    decoder("flint", "Flint", **E6, shared_expert_intermediate_size=10, mlp_only_layers=[0]),
    decoder(
        "laguna", "Laguna", **E6, **SPARSE, shared_expert_intermediate_size=10,
        moe_routed_scaling_factor=2.5,
    ),
    decoder(
        "laguna", "Laguna", name="laguna_softcap", **E6, **SPARSE, shared_expert_intermediate_size=10,
        moe_router_logit_softcapping=1.5,
    ),
    decoder(
        "kolibri1", "Kolibri1", **E6, shared_expert_intermediate_size=10, norm_topk_prob=True,
    ),
    nested(
        "minimax_m3_vl", "MiniMaxM3VL", dict(**WIDE, **SPARSE, shared_intermediate_size=10, swiglu_limit=0.8),
        model="MiniMaxM3SparseForConditionalGeneration",
    ),
    nested(
        "step3p7", "Step3p7",
        dict(**V2, **SPARSE, share_expert_dim=10, moe_router_scaling_factor=3.0, pad_token_id=1),
    ),
    decoder(
        "nemotron_h", "NemotronH", block="model.layers.1.mixer", name="nemotron_h_latent",
        **V3, layers_block_type=["mamba", "moe"], mlp_bias=True,
        moe_latent_size=12, moe_shared_expert_intermediate_size=10,
    ),
    nested("muse_spark", "MuseSpark", MUSE, audio_config=dict(out_hidden_size=16)),
    # Several stacks, and routers of their own.
    Case(
        "diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "DiffusionGemmaConfig",
        "model.decoder.layers.1", text="text_config", text_config=GEMMA, run=run_gemma,
        parts=("router", "experts", "pre_feedforward_layernorm_2"),
    ),
    nested("ernie4_5_vl_moe", "Ernie4_5_VLMoe", ERNIE, run=run_text),
    nested(
        "ernie4_5_vl_moe", "Ernie4_5_VLMoe", ERNIE, name="ernie4_5_vl_moe_vision", run=run_vision,
        layer=3,
    ),
    nested("dots3_note", "Dots3Note", DOTS, audio_config=ADAPTER, vision_config=DOTS_EYES),
    nested(
        "dots3_note", "Dots3Note", DOTS, "model.vision_tower.blocks.1.mlp",
        name="dots3_note_vision", layer=3, audio_config=ADAPTER, vision_config=DOTS_EYES,
    ),
    Case(
        "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeConfig",
        "thinker.model.language_model.layers.1.mlp", text="plain", **OMNI,
    ),
    Case(
        "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeConfig",
        "talker.model.layers.1.mlp", name="qwen3_omni_moe_talker", layer=3, text="plain", **OMNI,
    ),
]


def folders():
    """Folders of transformers' models that define a class of experts."""
    models = pathlib.Path(transformers.__file__).parent / "models"
    block = re.compile(r"^class \w*(Experts|ExpertGLU|MoE|MoeMLP|SparseMoe|NaiveMoe)\(", re.M)
    files = models.glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if block.search(file.read_text())})


def main():
    wanted = sys.argv[1:]
    if wanted == ["--folders"]:
        page = (HERE / "../../../docs/FAMILIES.md").read_text()
        found = folders()
        missing = [name for name in found if f"\n| {name} |" not in page]
        print(f"{len(found)} folders; not named: {missing}")
        return
    for case in CASES:
        if not wanted or case.name in wanted:
            make(case)


if __name__ == "__main__":
    main()
