"""Small random models of transformers, with moesaic's experts and with their own."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import moesaic
import moesaic.transformers

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)
MODELS = {
    "Mixtral": dict(intermediate_size=48, num_local_experts=6, num_experts_per_tok=2),
    "Qwen3Moe": dict(
        intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3
    ),
    "Olmoe": dict(intermediate_size=24, num_experts=8, num_experts_per_tok=3),
    "GptOss": dict(
        intermediate_size=24, num_local_experts=6, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], sliding_window=16,
    ),
    "DeepseekV3": dict(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    ),
}


def models(name, **options):
    moesaic.transformers.register()
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **options})
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    eager = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0.0, 0.2)
    ours = copy.deepcopy(eager)
    ours.set_experts_implementation("moesaic")
    return eager, ours


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_large_weights_are_packed_in_place(name, tokens, monkeypatch):
    monkeypatch.setattr(moesaic.ops, "LARGE", 1)
    eager, ours = models(name, num_experts_per_tok=2)
    ids = torch.randint(3, 64, (1, tokens))
    for model in (eager, ours):
        model(ids).logits.square().sum().backward()
    pairs = dict(ours.named_parameters())
    for key, parameter in eager.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                pairs[key].grad, parameter.grad, rtol=1e-3, atol=1e-3, msg=lambda m: f"{key}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_gradients_do_not_depend_on_memory_that_calls_gave_back(
    name, tokens, dtype, monkeypatch, poison_kept_memory
):
    _, model = models(name)
    model.to(dtype)
    ids = torch.randint(3, 64, (1, tokens))

    def gradients():
        model.zero_grad()
        model(ids).logits.float().square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = [gradient.clone() for gradient in gradients()]
    monkeypatch.setattr(moesaic.ops, "LARGE", 1)
    for _ in range(2):
        poison_kept_memory()
        found = gradients()
        assert len(found) == len(wanted) > 0
        assert all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name):
    eager, ours = models(name)
    ids = torch.randint(3, 64, (2, 11))
    found, wanted = ours(ids, labels=ids), eager(ids, labels=ids)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=2e-4, atol=2e-5)
    found.loss.backward()
    wanted.loss.backward()
    pairs = dict(ours.named_parameters())
    for key, parameter in eager.named_parameters():
        if parameter.grad is None:
            assert pairs[key].grad is None or not pairs[key].grad.any(), key
            continue
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(
            pairs[key].grad, parameter.grad, rtol=1e-3, atol=float(1e-4 * scale + 1e-7), msg=key
        )


@pytest.mark.parametrize("name", MODELS)
def test_inference_follows_weights_that_change(name):
    eager, ours = (model.eval() for model in models(name))
    ids = torch.randint(3, 64, (1, 5))
    with torch.no_grad():
        for _ in range(2):
            found, wanted = ours(ids).logits, eager(ids).logits
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
            for model in (ours, eager):
                for key, parameter in model.named_parameters():
                    if "experts" in key:
                        parameter.data.mul_(1.25)


@pytest.mark.parametrize("name", MODELS)
def test_bf16(name):
    eager, ours = (model.eval().to(torch.bfloat16) for model in models(name))
    ids = torch.randint(3, 64, (2, 11))
    with torch.no_grad():
        found, wanted = ours(ids).logits.float(), eager(ids).logits.float()
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    found = ours(ids, labels=ids)
    found.loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_eager(name):
    eager, ours = (model.eval() for model in models(name))
    ids = torch.randint(3, 64, (1, 5))
    made = [
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for model in (ours, eager)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_loads_with_our_experts(name, tmp_path):
    eager, ours = (model.eval() for model in models(name))
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path, experts_implementation="moesaic").eval()
    assert again.config._experts_implementation == "moesaic"
    ids = torch.randint(3, 64, (2, 7))
    with torch.no_grad():
        found, wanted = again(ids).logits, eager(ids).logits
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


def test_inference_mode():
    with torch.inference_mode():
        eager, ours = (model.eval() for model in models("Mixtral"))
        ids = torch.randint(3, 64, (1, 5))
        torch.testing.assert_close(ours(ids).logits, eager(ids).logits, rtol=2e-4, atol=2e-5)


def test_experts_of_older_releases_run():
    eager, ours = models("Mixtral")
    for module in ours.modules():
        vars(module).pop("has_post_expert_norm", None)
    ids = torch.randint(3, 64, (1, 5))
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, rtol=2e-4, atol=2e-5)


def test_a_norm_between_an_expert_and_its_weight():
    modeling = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    config = transformers.models.muse_spark.configuration_muse_spark.MuseSparkTextConfig(
        hidden_size=32, moe_hidden_size=16, moe_intermediate_size=24, num_local_experts=6,
        num_experts_per_tok=3, num_attention_heads=4, num_key_value_heads=4,
    )
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    eager = modeling.MuseSparkExperts(config)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0.0, 0.3)
    ours = copy.deepcopy(eager)
    ours.config._experts_implementation = "moesaic"
    moesaic.transformers.register()
    # The id beyond the experts masks a choice.
    ids, weights = torch.tensor([[0, 5, 2], [1, 6, 0], [4, 3, 5]]), torch.rand(3, 3)
    leaves = [torch.randn(3, 16).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        leaves[1].copy_(leaves[0])
        torch.testing.assert_close(ours(leaves[1], ids, weights), eager(leaves[0], ids, weights))
    for experts, x in zip((eager, ours), leaves):
        experts(x, ids, weights).square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=2e-4, atol=2e-5)
    for wanted, found in zip(eager.parameters(), ours.parameters()):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=2e-4, atol=2e-5)


def test_compile_of_a_whole_model():
    eager, ours = models("Qwen3Moe")
    ids = torch.randint(3, 64, (2, 11))
    fast = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(ids).logits, eager(ids).logits, rtol=2e-4, atol=2e-5)


def test_models_without_a_spec_are_refused_by_name():
    _, ours = models("Mixtral")
    experts = next(m for m in ours.modules() if hasattr(m, "gate_up_proj"))
    experts.act_fn = torch.nn.Softplus()
    with pytest.raises(moesaic.InvalidError, match="MixtralExperts.*Softplus"):
        ours(torch.ones(1, 3, dtype=torch.long))
