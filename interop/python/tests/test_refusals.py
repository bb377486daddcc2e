"""What a layer cannot do is one clear error, and never a silent number."""

import pathlib

import pytest

torch = pytest.importorskip("torch")
import moesaic
from moesaic import MoE, MultiGate

SPEC = {
    "shape": {"model_dim": 16, "hidden_dim": 32, "experts": 4, "top_k": 2},
    "router": {"renormalize": "sum"},
}


def test_a_second_derivative_is_refused():
    moe = MoE(SPEC)
    x = torch.randn(6, 16, requires_grad=True)
    for module in (moe, MultiGate(SPEC, 2)):
        # In the first the incoming gradient is a constant, where torch's own decorator is silent.
        for loss in (module(x).sum(), module(x).square().sum()):
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            with pytest.raises(moesaic.Error, match="second derivative"):
                dx.square().sum().backward()
    for transform in (torch.func.jacrev(moe), torch.vmap(moe)):
        with pytest.raises(moesaic.InvalidError, match="torch.func"):
            transform(x.detach())
    with pytest.raises(moesaic.InvalidError, match="torch.func"):
        torch.func.jvp(moe, (x.detach(),), (x.detach(),))


def test_views_of_negated_memory_are_read_as_numbers():
    moe = MoE(SPEC)
    x = torch.randn(6, 16)
    assert torch.equal(moe(torch._neg_view(x)), moe(-x))
    moe.eval()
    with torch.no_grad():
        moe(x)
        assert torch.equal(moe(torch._neg_view(x)), moe(-x))
    x.requires_grad_()
    wanted = torch.autograd.grad(moe(x), x, -torch.ones(6, 16))
    found = torch.autograd.grad(moe(x), x, torch._neg_view(torch.ones(6, 16)))
    assert torch.equal(*found, *wanted)


def test_arguments_that_cannot_be_say_what_to_change(tmp_path):
    moe = MoE(SPEC)
    x = torch.randn(6, 16)
    for key in ((1, 2), (-1, 0, 0, 0), (0, 0, 0, 2**64)):
        with pytest.raises(moesaic.InvalidError, match="rng_key is"):
            moe(x, rng_key=key)
    for value in ([1.0], x.numpy(), x.to_sparse()):
        with pytest.raises(moesaic.InvalidError, match="expected a dense"):
            moe(value)
    for group in (1, "world"):
        with pytest.raises(moesaic.InvalidError, match="a process group of torch.distributed"):
            MoE(SPEC, group=group)
    with pytest.raises(moesaic.InvalidError, match="pathlib.Path"):
        MoE("layer.toml")
    path = pathlib.Path(tmp_path, "layer.toml")
    with pytest.raises(moesaic.InvalidError, match="No such file"):
        moesaic.Spec(path)
    path.write_text(str(moe.spec))
    assert moesaic.Spec(path) == moesaic.Spec(SPEC) == moe.spec
    assert "MoE" in dir(moesaic)


def test_a_record_is_replayed_with_the_same_parameters():
    torch.manual_seed(0)
    moe = MoE(SPEC)
    x = torch.randn(6, 16)
    y, routing = moe(x, return_routing=True)
    record = torch.stack([routing.ids.flip(0), routing.ids], 1).to(torch.uint8)
    state = torch.get_rng_state()
    replayed = moe.replay(record, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert replayed.router.weight is moe.router.weight
    places = torch.tensor([3, 0, 5])
    found = replayed(x[places], token_ids=places)
    torch.testing.assert_close(found, y[places])
    g = torch.autograd.grad(found.sum(), [moe.router.weight, moe.experts.up.weight])
    w = torch.autograd.grad(y[places].sum(), [moe.router.weight, moe.experts.up.weight])
    torch.testing.assert_close(g, w)
    # Layer 0 of the record has other experts.
    assert not torch.allclose(moe.replay(record, 0)(x, token_ids=torch.arange(6)), y)
    with pytest.raises(moesaic.InvalidError, match="layers 0 to 1"):
        moe.replay(record, 2)
    with pytest.raises(moesaic.InvalidError, match="expert 4"):
        moe.replay(record + 3, 1)


def test_each_token_has_a_router_of_its_own():
    torch.manual_seed(0)
    module = MultiGate(SPEC, 3)
    x = torch.randn(2, 4, 16, requires_grad=True)
    ids = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    each = module(x)
    wanted = each.gather(0, ids[None, ..., None].expand(1, 2, 4, 16))[0]
    y = module(x, router_ids=ids)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    inputs = [x, *(weight for _, _, weight in module.weights())]
    for found, want in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy)
    ):
        torch.testing.assert_close(found, want)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x, router_ids=ids), wanted)
    for wrong in (ids + 1, ids - 1, ids + 2**40):
        with pytest.raises(moesaic.InvalidError, match="router_ids"):
            module(x, router_ids=wrong)
