"""Layers that share experts beside layers alone."""

import copy

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
import moesaic
from moesaic import MoE, MultiGate

SPEC = """
shape = { model_dim = 24, hidden_dim = 40, experts = 5, top_k = 2 }
router = { renormalize = "sum", bias = true }
"""
OTHER = """
shape = { model_dim = 24, hidden_dim = 40, experts = 5, top_k = 3 }
router = { score = "sigmoid" }
"""


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_modules_share_experts_and_their_gradient():
    torch.manual_seed(0)
    bank = MoE(SPEC)
    drawn = bank.experts.up.weight.detach().clone()
    layer = MoE(OTHER, experts_of=bank)
    assert layer.experts.up.weight is bank.experts.up.weight
    assert torch.equal(bank.experts.up.weight, drawn)
    # router.weight and router.bias of the bank, router.weight of the layer, three of experts.
    assert len({id(p) for module in (bank, layer) for p in module.parameters()}) == 6
    alone = [MoE(SPEC), MoE(OTHER)]
    for one, shared in zip(alone, (bank, layer)):
        one.load_state_dict(shared.state_dict())
    x = torch.randn(9, 24)
    sum(module(x).square().sum() for module in (bank, layer)).backward()
    for one, shared in zip(alone, (bank, layer)):
        assert torch.equal(one(x), shared(x))
        one(x).square().sum().backward()
        close(shared.router.weight.grad, one.router.weight.grad)
    gradients = [one.experts.down.weight.grad for one in alone]
    close(bank.experts.down.weight.grad, gradients[0] + gradients[1])
    with pytest.raises(moesaic.InvalidError, match="experts.gate.weight.*expected"):
        MoE(OTHER.replace("hidden_dim = 40", "hidden_dim = 32"), experts_of=bank)


def test_packed_layers_share_experts():
    torch.manual_seed(0)
    bank, other = MoE(SPEC), MoE(OTHER)
    packed = bank.pack()
    router = {"router.weight": other.router.weight.detach()}
    layer = moesaic.PackedLayer(moesaic.Spec(OTHER), router, bank=packed)
    other = MoE(OTHER, experts_of=bank)
    other.router.weight.data.copy_(router["router.weight"])
    x = torch.randn(9, 24)

    def follows():
        close(torch.from_dlpack(layer.forward(x)["y"]), other(x).detach())

    follows()
    with torch.no_grad():
        bank.experts.down.weight.mul_(2)
    # A weight of the bank is the layer's, too.
    packed.set_weight("experts.down.weight", bank.experts.down.weight.detach())
    follows()
    del packed
    follows()
    with pytest.raises(moesaic.InvalidError, match="experts.gate.weight"):
        moesaic.PackedLayer(moesaic.Spec(OTHER.replace("40", "32")), router, bank=layer)


def alone_of(module):
    """The layers of a MultiGate as modules by themselves."""
    each = [MoE(module.spec, experts_of=module.experts) for _ in range(module.gates)]
    for gate, name, weight in module.weights():
        if name.startswith("router."):
            each[gate]._weight(name).data.copy_(weight)
    return each


CAPACITY = 'capacity = { mode = "factor", factor = 1.0 }\n'


@pytest.mark.parametrize("gates", [1, 3])
@pytest.mark.parametrize("more", ["", CAPACITY, "[[shared]]\nhidden_dim = 8\n"])
def test_several_routers_are_layers_that_share_experts(gates, more):
    torch.manual_seed(0)
    module = MultiGate(SPEC + more, gates)
    x = torch.randn(2, 9, 24, requires_grad=True)
    y = module(x)
    assert module.in_one_pass == (gates > 1 and more != CAPACITY) and y.shape == (gates, 2, 9, 24)
    each = alone_of(module)
    for one in each:
        # Shared experts are common, and no parameters of `experts_of`.
        own = dict(module.experts.named_parameters())
        for name, weight in one.named_parameters():
            if name.startswith("shared."):
                weight.data.copy_(own[name])
    wanted = torch.stack([one(x) for one in each])
    close(y, wanted)
    dy = torch.randn_like(y)
    dx, *found = torch.autograd.grad(y, [x, *(w for _, _, w in module.weights())], dy)
    inputs = [x, *(w for one in each for w in one.parameters())]
    names = ["x", *(f"{at} {n}" for at, one in enumerate(each) for n, _ in one.named_parameters())]
    gradients = dict(zip(names, torch.autograd.grad(wanted, inputs, dy)))
    close(dx, gradients["x"])
    for (gate, name, _), one in zip(module.weights(), found):
        if name.startswith("shared."):
            close(one, sum(gradients[f"{at} {name}"] for at in range(gates)))
        else:
            # That of experts, one parameter of all, is the whole sum already.
            close(one, gradients[f"{gate} {name}"])
    with torch.no_grad():
        close(module(x), wanted.detach())
        for _, _, weight in module.weights():
            weight.mul_(1.5)
        assert not torch.allclose(module(x), wanted)
    twin = copy.deepcopy(module)
    close(twin(x), module(x))


def test_several_routers_in_bf16_with_losses():
    torch.manual_seed(0)
    module = MultiGate(SPEC + '[[losses]]\nkind = "z"\ncoefficient = 0.1\n', 2)
    x = torch.randn(9, 24)
    y = module(x)
    assert module.losses["z"].shape == (2,) and module.losses["z"][0] != module.losses["z"][1]
    module = module.to(torch.bfloat16)
    half = module(x.bfloat16())
    half.float().sum().backward()
    assert half.dtype == torch.bfloat16 and (half.float() - y).norm() < 0.05 * y.norm()
    assert module.routers[0].weight.grad.dtype == torch.bfloat16
    with pytest.raises(moesaic.InvalidError, match="has no weights"):
        MultiGate(SPEC.replace('renormalize = "sum", bias = true', 'kind = "external"'), 2)
    with pytest.raises(moesaic.InvalidError, match="width|shape"):
        module(torch.randn(3, 7))


def test_arrays_of_several_routers():
    spec = moesaic.Spec(SPEC)
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, _, s in spec.weights}
    routers = [{n: w * k for n, w in weights.items() if "router" in n} for k in (1.0, -0.5)]
    routers = [{n: w.astype(np.float32) for n, w in own.items()} for own in routers]
    layer = moesaic.GateLayer(spec, weights, routers, False)
    x = rng.standard_normal((7, 24)).astype(np.float32)
    for router, found in zip(routers, layer.forward(x)):
        alone = moesaic.PackedLayer(spec, {**weights, **router}).forward(x)
        assert (np.from_dlpack(found["y"]) == np.from_dlpack(alone["y"])).all()
    with pytest.raises(moesaic.InvalidError, match="0 routers"):
        moesaic.GateLayer(spec, weights, [], False)
    with pytest.raises(moesaic.InvalidError, match="there are 2"):
        layer.set_weight(2, "router.weight", routers[0]["router.weight"])
