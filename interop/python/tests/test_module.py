"""`moesaic.MoE` beside the same layer as a loop of torch."""

import copy
import io
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import moesaic
from moesaic import MoE

SPEC = """
name = "tests"
shape = { model_dim = 24, hidden_dim = 40, experts = 5, top_k = 2 }
router = { renormalize = "sum" }
"""


def loop(moe, x):
    """The layer of SPEC, expert by expert."""
    w = moe.weights()
    scores = torch.softmax(x.float() @ w["router.weight"].float().T, -1)
    chosen, ids = scores.topk(2, -1)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(5):
        token, slot = torch.where(ids == e)
        rows = x[token]
        hidden = torch.nn.functional.silu(rows @ w["experts.gate.weight"][e].T)
        hidden = hidden * (rows @ w["experts.up.weight"][e].T)
        out = (hidden @ w["experts.down.weight"][e].T) * chosen[token, slot, None].to(x.dtype)
        y = y.index_add(0, token, out)
    return y


def seeded(seed=0, spec=SPEC, **options):
    torch.manual_seed(seed)
    return MoE(spec, **options)


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("training", [False, True])
def test_output_and_gradients_are_those_of_a_loop(tokens, training):
    moe = seeded().train(training)
    x = torch.randn(tokens, 24, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    y, expected = moe(x), loop(moe, twin)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(expected)
    found = torch.autograd.grad(y, [x, *moe.parameters()], dy)
    wanted = torch.autograd.grad(expected, [twin, *moe.parameters()], dy, allow_unused=True)
    for one, other in zip(found, wanted):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), y.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 33])
def test_gradients_do_not_depend_on_memory_that_calls_gave_back(
    tokens, dtype, monkeypatch, poison_kept_memory
):
    moe = seeded(spec=SPEC + "shared = [{ hidden_dim = 8 }]\n").to(dtype)
    x, dy = torch.randn(2, tokens, 24, dtype=dtype)
    x.requires_grad_()

    def gradients():
        return torch.autograd.grad(moe(x), [x, *moe.parameters()], dy)

    wanted = gradients()
    monkeypatch.setattr(moesaic.ops, "LARGE", 1)
    for _ in range(2):
        poison_kept_memory()
        assert all(torch.equal(*pair) for pair in zip(gradients(), wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_kernels_round_gradients_as_torch_does(tokens, dtype, monkeypatch):
    spec = SPEC + "shared = [{ hidden_dim = 8 }]\n"
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    seen = []

    def gradients(spec):
        moe = seeded(spec=spec).to(dtype)
        x, dy = torch.randn(2, tokens, 24, dtype=dtype)
        x.requires_grad_()
        y = moe(x)
        of = moesaic.ops.family(moe._text).compiled(x, list(moe.weights().values()), True)
        seen.append(of.trained["experts.up.weight"])
        found = torch.autograd.grad(y, [x, *moe.parameters()], dy)
        assert all(gradient.dtype is dtype for gradient in found)
        return found

    found = gradients(spec)
    # Kernels that write f32, which torch then rounds.
    variant = moesaic._layers.variant
    wide = lambda *words: variant(*words).with_precision(expert_gradients="f32")
    monkeypatch.setattr(moesaic._layers, "variant", wide)
    wanted = gradients(spec.replace("tests", f"wide_{name}"))
    assert seen == [dtype, torch.float32]
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("kind", ["identity", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_may_choose_experts_without_weights(kind, dtype, monkeypatch):
    moe = seeded(spec=SPEC + f"experts = {{ {kind} = 4 }}\n").to(dtype)
    with torch.no_grad():
        moe.router.weight.zero_()[5:7] = 1.0
    x = torch.ones(1, 24, dtype=dtype, requires_grad=True)
    y, routing = moe(x, return_routing=True)
    assert routing.ids.min() >= 5
    wanted = torch.autograd.grad(y.sum(), [x, *moe.parameters()])
    monkeypatch.setattr(moesaic.ops, "LARGE", 1)
    found = torch.autograd.grad(moe(x).sum(), [x, *moe.parameters()])
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("return_routing", [False, True])
def test_gradients_of_a_few_experts_of_the_callers_choice(dtype, return_routing, monkeypatch):
    spec = SPEC.replace('{ renormalize = "sum" }', '{ kind = "external" }')
    moe = seeded(spec=spec).to(dtype)
    x, dy = torch.randn(2, 1, 24, dtype=dtype)
    x.requires_grad_()
    choice = {"topk_ids": torch.tensor([[3, 1]]), "topk_weights": torch.tensor([[0.7, 0.3]])}

    def gradients():
        y = moe(x, return_routing=return_routing, **choice)
        y = y[0] if return_routing else y
        return torch.autograd.grad(y, [x, *moe.parameters()], dy)

    wanted = gradients()
    assert all(gradient.any() for gradient in wanted)
    monkeypatch.setattr(moesaic.ops, "LARGE", 1)
    assert all(torch.equal(*pair) for pair in zip(gradients(), wanted))


def test_leading_sizes_strides_and_odd_widths():
    moe = seeded(spec="shape = { model_dim = 7, hidden_dim = 13, experts = 3, top_k = 2 }").eval()
    x = torch.randn(7, 3, 5).transpose(0, 2)  # [5, 3, 7], not contiguous
    y = moe(x)
    assert y.shape == (5, 3, 7)
    torch.testing.assert_close(y, moe(x.contiguous()))
    y, routing = moe(x, return_routing=True)
    assert routing.ids.shape == routing.weights.shape == (5, 3, 2)
    assert routing.counts.sum() == 30


def test_gradcheck():
    moe = seeded(spec=SPEC.replace("24", "4").replace("40", "6"))
    x = torch.randn(3, 4, requires_grad=True)
    names = [name for name, _ in moe.named_parameters()]

    def call(x, *weights):
        return torch.func.functional_call(moe, dict(zip(names, weights)), (x,))

    weights = [w.detach().clone().requires_grad_() for w in moe.parameters()]
    assert torch.autograd.gradcheck(
        call, (x, *weights), eps=1e-2, atol=2e-3, rtol=2e-2, nondet_tol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    moe = seeded().to(dtype)
    assert moe.experts.up.weight.dtype == dtype
    x = torch.randn(33, 24, dtype=dtype, requires_grad=True)
    y = moe(x)
    assert y.dtype == dtype
    whole = copy.deepcopy(moe).float()
    torch.testing.assert_close(y.float(), whole(x.float()), rtol=5e-2, atol=5e-2)
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == dtype for p in moe.parameters())


def test_autocast_keeps_masters_in_f32():
    moe = seeded()
    x = torch.randn(9, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(torch.nn.Linear(24, 24)(x))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert moe.experts.up.weight.grad.dtype == torch.float32


def test_changed_weights_are_seen_however_they_change():
    moe, x = seeded().eval(), torch.randn(4, 24)
    with torch.no_grad():
        before = moe(x)
        moe.experts.down.weight.data.mul_(2.0)  # bumps no version
        torch.testing.assert_close(moe(x), 2 * before)
        moe.experts.down.weight.data = moe.experts.down.weight.data * 0.5
        torch.testing.assert_close(moe(x), before)


def test_an_evaluation_like_the_last_sees_other_weights():
    square = SPEC.replace("40", "24")
    moe, x = seeded(spec=square).eval(), torch.randn(4, 24)
    other = seeded(1, spec=square).eval()
    up = moe.experts.up
    with torch.no_grad():
        before = [moe(x) for _ in range(2)][1]
        torch.testing.assert_close(before, loop(moe, x), rtol=1e-5, atol=1e-6)
        up.weight.data = up.weight.data.transpose(1, 2)  # the same address, version and size
        torch.testing.assert_close(moe(x), loop(moe, x), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(moe(x), before)
        up.weight.data = up.weight.data.transpose(1, 2)
        assert torch.equal(moe(x), before) and torch.equal(moe(x), before)
        swapped = torch.func.functional_call(moe, dict(other.named_parameters()), (x,))
        assert torch.equal(swapped, other(x)) and torch.equal(moe(x), before)
        up.weight = other.experts.up.weight
        torch.testing.assert_close(moe(x), loop(moe, x), rtol=1e-5, atol=1e-6)
        moe.load_state_dict(other.state_dict())
        assert torch.equal(moe(x), other(x)) and torch.equal(moe(x), other(x))
        half = moe.to(torch.bfloat16)(x.bfloat16())
        assert half.dtype == torch.bfloat16 and torch.equal(half, moe(x.bfloat16()))
        assert moe(x[None, :2]).shape == (1, 2, 24)
        with pytest.raises(moesaic.InvalidError, match=r"\[\.\., 24\]"):
            moe(torch.tensor(1.0).bfloat16())
    assert moe(x.bfloat16()).requires_grad  # with grad mode on again
    moe.float()
    with torch.no_grad():
        y = [moe(x) for _ in range(2)][1]
        for copied in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
            copied.experts.down.weight.zero_()
            assert not copied(x).any() and torch.equal(moe(x), y)


def test_modes_of_torch_see_the_operation():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    moe, x = seeded(), torch.randn(3, 24)
    for training in (True, False):
        moe.train(training)
        with torch.set_grad_enabled(training):
            assert torch.equal(moe(x), moe(x))
            with Mode():
                moe(x)
    assert seen.count("moesaic.layer.default") == 2


def test_an_evaluation_takes_what_only_losses_read():
    text = SPEC + '[[losses]]\nkind = "global"\ncoefficient = 0.5\n'
    moe, x = seeded(spec=text), torch.randn(9, 24)
    more = {"global_counts": torch.ones(5).long(), "global_tokens": torch.tensor([9])}
    moe(x, **more).sum().backward()
    assert torch.equal(moe.eval()(x, **more), moe(x))


def test_it_learns():
    moe, x = seeded(), torch.randn(64, 24)
    wanted = torch.tanh(x.roll(1, -1))
    adam = torch.optim.Adam(moe.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        adam.zero_grad()
        loss = (moe(x) - wanted).square().mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_copies_pickles_and_state_dicts():
    moe, x = seeded().eval(), torch.randn(4, 24)
    y = moe(x)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        torch.testing.assert_close(other(x), y, rtol=0, atol=0)
    assert sorted(moe.state_dict()) == [
        "experts.down.weight", "experts.gate.weight", "experts.up.weight", "router.weight",
    ]
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    other = seeded(1).eval()
    other.load_state_dict(torch.load(file))
    torch.testing.assert_close(other(x), y, rtol=0, atol=0)


NOISY = """
shape = { model_dim = 24, hidden_dim = 40, experts = 5, top_k = 2 }
router = { noise = 1.0, noise_kind = "learned", jitter = 0.1 }
[[losses]]
kind = "switch"
coefficient = 0.01
[[losses]]
kind = "z"
coefficient = 0.001
"""


def test_noise_follows_torchs_generator_and_losses_are_there():
    moe, x = seeded(spec=NOISY), torch.randn(16, 24)
    torch.manual_seed(3)
    first, second = moe(x), moe(x)
    torch.manual_seed(3)
    assert torch.equal(moe(x), first) and not torch.equal(first, second)
    assert torch.equal(moe(x, rng_key=(1, 2, 3, 4)), moe(x, rng_key=(1, 2, 3, 4)))
    assert set(moe.losses) == {"switch", "z"} and not moe.losses["z"].requires_grad
    moe(x).sum().backward()
    assert moe.router.noise.weight.grad.abs().sum() > 0
    moe.eval().zero_grad()
    y = moe(x)
    assert torch.equal(y, moe(x))
    y.sum().backward()  # of an evaluation
    assert moe.router.noise.weight.grad is None or not moe.router.noise.weight.grad.any()


def test_gradients_of_losses_are_added():
    text = SPEC + '[[losses]]\nkind = "z"\ncoefficient = 0.5\n'
    moe, plain = seeded(spec=text), seeded()
    x = torch.randn(9, 24)
    moe(x).sum().backward()
    plain(x).sum().backward()
    z = torch.logsumexp(x @ plain.router.weight.T, -1).square().mean()
    torch.testing.assert_close(moe.losses["z"], z.detach(), rtol=1e-5, atol=1e-6)
    (added,) = torch.autograd.grad(0.5 * z, plain.router.weight)
    torch.testing.assert_close(
        moe.router.weight.grad, plain.router.weight.grad + added, rtol=1e-4, atol=1e-5
    )


def test_external_routing_is_differentiable():
    spec = SPEC.replace('renormalize = "sum"', 'kind = "external"')
    moe, x = seeded(spec=spec), torch.randn(6, 24)
    ids = torch.randint(0, 5, (6, 2))
    weights = torch.rand(6, 2, requires_grad=True)
    y, routing = moe(x, topk_ids=ids, topk_weights=weights, return_routing=True)
    assert routing.counts.tolist() == torch.bincount(ids.flatten(), minlength=5).tolist()
    y.sum().backward()
    with torch.no_grad():
        more = moe(x, topk_ids=ids, topk_weights=weights * 1.5)
    torch.testing.assert_close(more, 1.5 * y.detach())
    torch.testing.assert_close((weights.grad * weights).sum(), y.detach().sum())
    with pytest.raises(moesaic.InvalidError, match="topk_ids.*has 5"):
        moe(x, topk_ids=ids * 0 + 5, topk_weights=weights)


def dropping_loop(moe, x, ids, weights, rows):
    """The layer of an external router: `rows` tokens an expert, weights over what is left."""
    w = moe.weights()
    taken, kept = [0] * 5, torch.zeros(ids.shape, dtype=torch.bool)
    for slot in range(ids.shape[1]):
        for t in range(ids.shape[0]):
            expert = int(ids[t, slot])
            kept[t, slot] = taken[expert] < rows
            taken[expert] += 1
    left = weights * kept
    left = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
    y = torch.zeros_like(x)
    for t, slot in kept.nonzero().tolist():
        e = ids[t, slot]
        gate, up = w["experts.gate.weight"][e] @ x[t], w["experts.up.weight"][e] @ x[t]
        out = w["experts.down.weight"][e] @ (torch.nn.functional.silu(gate) * up)
        y = y.index_add(0, torch.tensor([t]), (left[t, slot] * out)[None])
    return y, left


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_over_what_was_not_dropped_are_differentiable(compiled):
    spec = SPEC.replace('renormalize = "sum"', 'kind = "external"')
    spec += 'capacity = { mode = "fixed", rows = 3, renormalize_after_drop = true }'
    moe, x = seeded(spec=spec), torch.randn(9, 24, requires_grad=True)
    # Some tokens keep both of their experts, some one, some none.
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [3, 0], [0, 2], [0, 1], [1, 0], [4, 3]])
    weights = (torch.rand(9, 2) + 0.1).requires_grad_()
    before = weights.detach().clone()
    wanted, left = dropping_loop(moe, x, ids, weights, 3)
    run = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiled else moe
    if compiled:
        y = run(x, topk_ids=ids, topk_weights=weights)
    else:
        y, routing = run(x, topk_ids=ids, topk_weights=weights, return_routing=True)
        torch.testing.assert_close(routing.weights, left.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    inputs, dy = [x, weights, *moe.parameters()], torch.randn(9, 24)
    found = torch.autograd.grad(y, inputs, dy)
    for one, other in zip(found, torch.autograd.grad(wanted, inputs, dy)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(weights.detach(), before)


@pytest.mark.parametrize("training", [False, True])
def test_weights_in_another_type_are_converted_when_they_change(training, monkeypatch):
    moe = seeded().to(torch.bfloat16).train(training)
    x = torch.randn(7, 24, dtype=torch.bfloat16)
    converted, take = [], moesaic._layers.taken

    def counted(tensor, dtype):
        if tensor.dtype != dtype:
            converted.append(tensor.shape)
        return take(tensor, dtype)

    monkeypatch.setattr(moesaic._layers, "taken", counted)

    def step():
        converted.clear()
        with torch.set_grad_enabled(training):
            y = moe(x)
            if training:
                y.float().square().sum().backward()
        return y.detach(), [shape for shape in converted if shape == moe.router.weight.shape]

    assert len(step()[1]) == 1
    y, again = step()
    assert again == []
    with torch.no_grad():
        moe.router.weight.neg_()
    other, changed = step()
    assert len(changed) == 1 and not torch.equal(other, y)
    moe.router.weight.data.neg_()
    back, changed = step()
    assert len(changed) == 1 and torch.equal(back, y)


def test_compile_and_export_see_one_operation():
    moe, x = seeded(), torch.randn(33, 24, requires_grad=True)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(moe, fullgraph=True, backend=backend)(x)
    assert [name for name in seen if "moesaic" in name] == ["moesaic.layer"]
    fast = torch.compile(moe, fullgraph=True, backend="aot_eager")
    y = fast(x)
    torch.testing.assert_close(y, moe(x), rtol=0, atol=0)
    found = torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])
    wanted = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    fast(torch.randn(7, 24))  # another number of tokens
    moe.eval()
    exported = torch.export.export(moe, (x.detach(),))
    nodes = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert [n for n in nodes if "moesaic" in n] == ["moesaic.layer.default"]
    torch.testing.assert_close(exported.module()(x.detach()), moe(x), rtol=0, atol=0)


def test_opcheck():
    moe, x = seeded(), torch.randn(3, 24, requires_grad=True)
    weights = list(moe.weights().values())
    arguments = (moe.spec.toml, x, "", [], weights, True, [], None)
    torch.library.opcheck(
        torch.ops.moesaic.layer, arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_checkpointing_and_many_states():
    from torch.utils.checkpoint import checkpoint

    moe, x = seeded(spec=NOISY), torch.randn(8, 24, requires_grad=True)
    torch.manual_seed(1)
    (plain,) = torch.autograd.grad(moe(x).sum(), x)
    torch.manual_seed(1)
    (again,) = torch.autograd.grad(checkpoint(moe, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(plain, again)
    before = moesaic.Layer.states()
    outputs = [moe(x) for _ in range(3)]
    assert moesaic.Layer.states() == before + 3
    sum(y.sum() for y in reversed(outputs)).backward()
    del outputs
    assert moesaic.Layer.states() == before


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="an older torch does not say which hooks there are",
)
@pytest.mark.parametrize("tokens", [1, 8])
def test_backward_follows_hooks_that_copy_what_is_saved(tokens):
    from torch.utils.checkpoint import checkpoint

    moe, x = seeded(), torch.randn(tokens, 24, requires_grad=True)
    wanted = torch.autograd.grad(moe(x).sum(), [x, *moe.parameters()])
    before = moesaic.Layer.states()
    with torch.autograd.graph.save_on_cpu():
        y = moe(x)
    found = torch.autograd.grad(y.sum(), [x, *moe.parameters()])
    assert all(torch.equal(*pair) for pair in zip(found, wanted))
    del y
    # Checkpointing's hooks keep nothing.
    y = checkpoint(moe, x, use_reentrant=False)
    assert moesaic.Layer.states() == before
    found = torch.autograd.grad(y.sum(), [x, *moe.parameters()])
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def test_errors_name_what_is_wrong():
    with pytest.raises(moesaic.Error, match="num_experts"):
        MoE("shape = { num_experts = 8 }")
    with pytest.raises(ValueError):
        MoE({"shape": {"model_dim": 0, "hidden_dim": 1, "experts": 1, "top_k": 1}})
    moe = seeded()
    with pytest.raises(moesaic.InvalidError, match=r"\[\.\., 24\]"):
        moe(torch.randn(3, 25))
    with pytest.raises(moesaic.InvalidError, match="float64"):
        moe(torch.randn(3, 24, dtype=torch.float64))
    with pytest.raises(moesaic.InvalidError, match="token_mask"):
        moe(torch.randn(3, 24), token_mask=torch.ones(3))
    with pytest.raises(moesaic.InvalidError, match="capacity"):
        moe(torch.randn(3, 24), capacity_factor=2.0)
    y = moe(torch.randn(3, 24))
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        moe.experts.up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_dicts_and_packed_layers():
    spec = {
        "name": "tests",
        "shape": {"model_dim": 24, "hidden_dim": 40, "experts": 5, "top_k": 2},
        "router": {"renormalize": "sum"},
    }
    moe = MoE(spec).eval()
    assert moe.spec == moesaic.Spec(SPEC)
    x = torch.randn(4, 24)
    with torch.no_grad():
        expected = moe(x)
    y = torch.from_dlpack(moe.pack().forward(x)["y"])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


FORKED = """
import os, signal, torch
from moesaic import MoE
moe, x = MoE({spec!r}).eval(), torch.randn(64, 24)
moe(x).sum().backward()
with torch.no_grad():
    y = moe(x)
child = os.fork()
if child == 0:
    signal.alarm(60)
    with torch.no_grad():
        os._exit(0 if torch.equal(moe(x), y) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_opens_its_own_engine():
    program = [sys.executable, "-c", FORKED.format(spec=SPEC)]
    subprocess.run(program, check=True, timeout=120)


def test_threads_take_turns():
    import threading

    moe, results = seeded(), []

    def work(seed):
        x = torch.randn(17, 24, generator=torch.Generator().manual_seed(seed))
        y = moe(x)
        y.sum().backward()
        results.append(torch.allclose(y, loop(moe, x), rtol=1e-4, atol=1e-5))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [True] * 8
