"""Layers with the arguments of Tutel and FastMoE beside loops of torch."""

import math

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional

import moesaic
from moesaic.compat.fastmoe import FMoE, FMoETransformerMLP, GShardGate, SwitchGate
from moesaic.compat.tutel import moe_layer


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def tutel(**options):
    torch.manual_seed(0)
    experts = {
        "type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 24,
        "activation_fn": lambda x: functional.relu(x), **options.pop("experts", {}),
    }
    gate = {"type": "top", "k": 2, "capacity_factor": 1.0, **options.pop("gate", {})}
    return moe_layer(gate_type=gate, model_dim=16, experts=experts, **options)


def tutel_loop(layer, x, factor, k=2, prioritized=False):
    """Encode, experts and decode as loops: capacity and the order in which slots are served."""
    e = layer.experts
    scores = layer.gates[0](x).softmax(1)
    chosen, ids = scores.topk(k, 1)
    if k > 1:
        chosen = chosen / chosen.sum(1, keepdim=True)
    count = scores.shape[1]
    limit = k * int(factor * math.ceil(x.shape[0] / count)) if factor > 0 else x.shape[0]
    best = scores.amax(1).argsort(descending=True, stable=True).tolist()
    order = best if prioritized else list(range(x.shape[0]))
    taken, rows = [0] * count, [[] for _ in range(x.shape[0])]
    for slot in range(k):
        for t in order:
            expert = int(ids[t, slot])
            if taken[expert] < limit:
                hidden = torch.relu(e.batched_fc1_w[expert] @ x[t] + e.batched_fc1_bias[expert])
                out = hidden @ e.batched_fc2_w[expert] + e.batched_fc2_bias[expert]
                rows[t].append(chosen[t, slot] * out)
            taken[expert] += 1
    zero = x.new_zeros(e.sizes[2])
    first = functional.one_hot(ids[:, 0], count).float()
    l_aux = count / x.shape[0] ** 2 * (scores.sum(0) * first.sum(0)).sum()
    return torch.stack([sum(row, zero) for row in rows]), l_aux


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prioritized", [False, True])
def test_tutels_layer_is_a_loop(factor, prioritized):
    layer = tutel(batch_prioritized_routing=prioritized, experts={"output_dim": 12})
    x = torch.randn(30, 16, requires_grad=True)
    y = layer(x.view(5, 6, 16), capacity_factor=factor)
    wanted, l_aux = tutel_loop(layer, x, factor, prioritized=prioritized)
    assert y.shape == (5, 6, 12)
    close(y.view(30, 12), wanted)
    close(y.l_aux, l_aux)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(y.square().sum() + 0.1 * y.l_aux, inputs)
    expected = torch.autograd.grad(wanted.square().sum() + 0.1 * l_aux, inputs)
    for one, other in zip(found, expected):
        close(one, other)


def test_tutels_names_options_and_refusals():
    layer = tutel(scan_expert_func=lambda name, p: setattr(p, "skip_allreduce", True))
    assert sorted(dict(layer.named_parameters())) == [
        "experts.batched_fc1_bias", "experts.batched_fc1_w", "experts.batched_fc2_bias",
        "experts.batched_fc2_w", "gates.0.wg.weight",
    ]
    assert all(p.skip_allreduce for _, p in layer.get_parameter_iterator("local_experts"))
    close(layer(torch.ones(3, 16), top_k=1), tutel_loop(layer, torch.ones(3, 16), 1.0, k=1)[0])
    y, l_aux = tutel(result_func=lambda y: (y, y.l_aux))(torch.randn(3, 16))
    assert l_aux.requires_grad
    cosine = tutel(gate={"type": "cosine_top", "proj_dim": 8})
    cosine(torch.randn(3, 16)).sum().backward()
    assert cosine.gates[0].temperature.grad is not None
    with pytest.raises(moesaic.InvalidError, match="num_experts_per_device"):
        tutel(experts={"num_experts_per_device": -2})
    with pytest.raises(moesaic.InvalidError, match="gate 'top'.*unknown"):
        tutel(gate={"unknown": 1})
    with pytest.raises(moesaic.InvalidError, match="activation"):
        tutel(experts={"activation_fn": torch.sin})


def test_tutels_llama_experts():
    torch.manual_seed(0)
    layer = moe_layer(
        gate_type={"type": "top", "k": 1, "capacity_factor": 0.0}, model_dim=16,
        experts={"type": "llama_ffn", "num_experts_per_device": 3, "hidden_size_per_expert": 8},
    )
    x = torch.randn(7, 16)
    e = layer.experts
    one, two = (w.view(3, 16, 8) for w in (e.W_fc1, e.W_fc2))
    best, ids = layer.gates[0](x).softmax(1).max(1)
    for t in range(7):
        hidden = functional.silu(x[t] @ one[ids[t]]) * (x[t] @ two[ids[t]])
        close(layer(x)[t], best[t] * (hidden @ e.W_fc3.view(3, 8, 16)[ids[t]]))


@pytest.mark.parametrize("training", [False, True])
def test_tutels_importance_and_load(training):
    layer = tutel(gate={"gate_noise": 0.5}, is_gshard_loss=False).train(training)
    x = torch.randn(30, 16)
    torch.manual_seed(1)
    found = layer(x).l_aux
    torch.manual_seed(1)
    clean = layer.gates[0](x)
    noisy = clean + 0.5 * torch.randn_like(clean) / 4 if training else clean
    # The second-best noisy logit is the least that was chosen.
    least = noisy.sort(1, descending=True).values[:, 1]
    tail = [[torch.special.ndtr((p - least[t]) / (0.5 / 4)) for p in row]
            for t, row in enumerate(clean.softmax(1))]
    load = torch.stack([torch.stack(row) for row in tail]).sum(0)
    wanted = sum(v.var() / v.mean() ** 2 for v in (clean.softmax(1).sum(0), load)) / 2
    close(found, wanted)
    pairs = (torch.autograd.grad(loss, layer.gates[0].wg.weight)[0] for loss in (found, wanted))
    close(*pairs)
    with pytest.raises(moesaic.InvalidError, match="gate_noise"):
        tutel(is_gshard_loss=False)(x)


def test_fastmoes_mlp_is_a_loop():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(num_expert=4, d_model=16, d_hidden=24, top_k=2)
    x = torch.randn(3, 5, 16, requires_grad=True)
    ids, scores = layer.gate(x.view(-1, 16))
    e, rows = layer.experts, []
    for t, row in enumerate(x.view(-1, 16)):
        total = 0.0
        for expert, score in zip(ids[t], scores[t]):
            hidden = functional.gelu(e.htoh4.weight[expert] @ row + e.htoh4.bias[expert])
            total = total + score * (e.h4toh.weight[expert] @ hidden + e.h4toh.bias[expert])
        rows.append(total)
    y, wanted = layer(x), torch.stack(rows).view(3, 5, 16)
    close(y, wanted)
    inputs = [x, *layer.parameters()]
    pairs = zip(*(torch.autograd.grad(z.square().sum(), inputs) for z in (y, wanted)))
    for one, other in pairs:
        close(one, other)
    assert e.htoh4.weight.dp_comm == "none" and layer.gate.gate.weight.dp_comm == "gate"


@pytest.mark.parametrize("gate", [SwitchGate, GShardGate])
def test_fastmoes_gates_have_losses(gate):
    k = 1 if gate is SwitchGate else 2
    layer = FMoETransformerMLP(num_expert=4, d_model=16, d_hidden=24, top_k=k, gate=gate)
    y = layer(torch.randn(40, 16))
    assert layer.gate.has_loss
    (y.sum() + layer.gate.get_loss()).backward()
    assert layer.gate.gate.weight.grad.any() and not layer.gate.has_loss


def test_fastmoes_own_experts_and_masks():
    torch.manual_seed(0)

    class Scale(torch.nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.randn(1))

        def forward(self, rows, count):
            return rows * self.factor

    mask = torch.tensor([0, 1, 0, 2])
    slots = torch.randn(2, 8, requires_grad=True)
    layer = FMoE(num_expert=3, d_model=8, expert=Scale, mask=mask, mask_dict={1: 0.5, 2: slots})
    x = torch.randn(4, 8)
    y = layer(x)
    ids, scores = layer.gate(x)
    close(y[1], (scores[1].sum() * 0.5).expand(8))
    close(y[3], scores[3] @ slots)
    (found,) = torch.autograd.grad(y[3].sum(), slots, retain_graph=True)
    close(found, scores[3, :, None].expand(2, 8))
    factors = torch.stack([expert.factor for expert in layer.experts])[ids[0], 0]
    close(y[0], (scores[0] * factors).sum() * x[0])
    # A number that no constant has gives zeros; without constants there is no mask.
    layer.mask = torch.tensor([0, 0, 9, 0])
    close(layer(x)[2], torch.zeros(8))
    layer.mask_dict, layer.mask = None, torch.ones(4)
    close(layer(x)[0], y[0])
    layer.mask_dict, layer.mask = {}, torch.ones(5)
    with pytest.raises(moesaic.InvalidError, match="5 numbers for 4 tokens"):
        layer(x)
    with pytest.raises(moesaic.InvalidError, match="world_size"):
        FMoE(world_size=2)


def test_tutel_counts_the_experts_of_one_process():
    from moesaic.compat.tutel import moe_layer

    assert moe_layer.global_expert_count(2, group=None) == 2
    with pytest.raises(moesaic.InvalidError, match="-2 of 1 ranks"):
        moe_layer.global_expert_count(-2)


class Linear(torch.nn.Module):
    def __init__(self, model_dim, local_experts, sharded_count):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(local_experts, model_dim, model_dim))

    def forward(self, rows, ctx):
        return rows @ self.w


@pytest.mark.parametrize("overlap, limit", [(1, 2), (5, 5)])
def test_tutels_experts_of_the_callers_own(overlap, limit):
    torch.manual_seed(0)
    layer = moe_layer(
        gate_type={"type": "top", "k": 2, "capacity_factor": 1.0}, model_dim=16,
        experts={"type": "custom", "module": Linear, "num_experts_per_device": 9},
        a2a_ffn_overlap_degree=overlap,
    )
    x = torch.randn(9, 16)
    chosen, ids = layer.gates[0](x).softmax(1).topk(2, 1)
    chosen = chosen / chosen.sum(1, keepdim=True)
    wanted, taken = torch.zeros(9, 16), [0] * 9
    for slot in range(2):
        for t, expert in enumerate(ids[:, slot].tolist()):
            # Two rows of a factor, or what overlap rounds them up to.
            if taken[expert] < limit:
                wanted[t] += chosen[t, slot] * (x[t] @ layer.experts.w[expert])
            taken[expert] += 1
    close(layer(x), wanted)


def test_tutels_parts_are_its_layer():
    from moesaic.compat import tutel as parts

    layer = tutel()
    x, e = torch.randn(30, 16), layer.experts
    critical, l_aux = parts.top_k_routing(layer.gates[0](x).softmax(1), 2)
    rows = parts.fast_encode(x, critical)
    hidden = torch.relu(rows @ e.batched_fc1_w.mT + e.batched_fc1_bias[:, None])
    out = hidden @ e.batched_fc2_w + e.batched_fc2_bias[:, None]
    y = layer(x)
    close(parts.fast_decode(out, critical), y)
    close(l_aux, y.l_aux)


def test_tutels_seeds_draw_its_weights():
    layer = tutel(seeds=(1, 3, 1))
    torch.manual_seed(3)
    for at in range(4):
        one, two = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        assert torch.equal(layer.experts.batched_fc1_w[at], one.weight)
        assert torch.equal(layer.experts.batched_fc2_w[at], two.weight.T)
        assert torch.equal(layer.experts.batched_fc2_bias[at], two.bias)
