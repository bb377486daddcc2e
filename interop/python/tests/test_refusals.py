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
    # torch's own export would give the memory, with the other sign.
    packed = moe.pack()
    with pytest.raises(moesaic.InvalidError, match=r"negative bit, give its resolve_neg\(\)"):
        packed.forward(torch._neg_view(torch.ones(6, 16)))
    packed.forward(torch._neg_view(torch.ones(6, 16)).resolve_neg())


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


def test_inputs_that_cannot_be_say_what_to_change():
    external = MoE({**SPEC, "router": {"kind": "external"}})
    x, ids, chosen = torch.randn(2, 3, 16), torch.zeros(2, 3, 2).long(), torch.ones(2, 3, 2)
    ids[..., 1] = 3
    y = external(x, topk_ids=ids, topk_weights=chosen)
    flat = {"topk_ids": ids.view(6, 2), "topk_weights": chosen.view(6, 2)}
    assert torch.equal(external(x, **flat), y)
    given = {"topk_ids": ids, "topk_weights": chosen}
    assert torch.equal(external(x.view(6, 16), **given), y.view(6, 16))
    # These have as many numbers, of other tokens.
    for shape in ((3, 2, 2), (2, 2, 3), (12,)):
        with pytest.raises(moesaic.InvalidError, match=r"topk_ids has shape .* \(2, 3, 2\)"):
            external(x, topk_ids=ids.view(shape), topk_weights=chosen)
    with pytest.raises(moesaic.InvalidError, match=r"topk_ids has shape .* \(6, 2\)"):
        external(x.view(6, 16), topk_ids=ids.view(2, 6), topk_weights=chosen)
    for value in (ids.tolist(), ids.numpy()):
        with pytest.raises(moesaic.InvalidError, match="topk_ids is .*, expected a dense torch.Tensor"):
            external(x, topk_ids=value, topk_weights=chosen)
    for name in given:
        rest = {other: value for other, value in given.items() if other != name}
        for module in (external.train(), external.eval()):
            with pytest.raises(moesaic.InvalidError, match=f"`{name}` is missing.* of shape"):
                module(x, **rest)
    # A conversion to 32 bits would make experts 0 and 3 of them.
    with pytest.raises(moesaic.InvalidError, match=f"`topk_ids` has {2**32}"):
        external(x, topk_ids=ids + 2**32, topk_weights=chosen)
    table = MoE({**SPEC, "router": {"kind": "table", "table_rows": 8}})
    with pytest.raises(moesaic.InvalidError, match=f"`token_ids` has {2**32 + 1}"):
        table(x, token_ids=torch.full((2, 3), 2**32 + 1))


def test_records_of_any_integers_are_replayed():
    moe = MoE(SPEC)
    record = torch.tensor([[[0, 3]], [[1, 2]]])
    x, places = torch.randn(2, 16), torch.tensor([1, 0])
    wanted = moe.replay(record)(x, token_ids=places)
    kinds = [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64]
    for kind in kinds:
        assert torch.equal(moe.replay(record.to(kind))(x, token_ids=places), wanted)
    with pytest.raises(moesaic.InvalidError, match=f"`routed_experts` has {2**32}"):
        moe.replay(record + 2**32)


def test_numbers_of_threads_begin_at_one():
    for count in (0, -1):
        with pytest.raises(moesaic.InvalidError, match=f"{count} threads: take 1 or more"):
            moesaic.configure(threads=count)


def test_errors_of_state_dicts_name_no_file():
    with pytest.raises(moesaic.InvalidError, match="^the state dict, read as tutel's"):
        MoE(SPEC).load_foreign_state_dict({"a": torch.ones(2)}, "tutel")


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


def test_routers_take_the_inputs_that_a_layer_takes():
    spec = {**SPEC, "router": {"token_mask": True, "active_k": True}}
    gates = MultiGate(spec, 2)
    x, mask = torch.randn(2, 3, 16), torch.tensor([[True, False, True], [True, True, False]])
    for module in (gates.train(), gates.eval()):
        wanted = gates.experts(x, token_mask=mask, active_k=torch.tensor(1))
        for kind in (torch.bool, torch.int32, torch.int64):
            y = module(x, token_mask=mask.to(kind), active_k=torch.tensor([1]))
            torch.testing.assert_close(y[0], wanted)
    with pytest.raises(moesaic.InvalidError, match=r"token_mask has shape .* \(2, 3\)"):
        gates(x, token_mask=mask.T, active_k=torch.tensor(1))
    with pytest.raises(moesaic.InvalidError, match="token_mask is list, expected a dense"):
        gates(x, token_mask=mask.tolist(), active_k=torch.tensor(1))
    with pytest.raises(moesaic.InvalidError, match="router_ids is list"):
        gates(x, router_ids=mask.tolist())
    for value in (x.tolist(), x.numpy(), x.to_sparse()):
        with pytest.raises(moesaic.InvalidError, match="x is .*, expected a dense torch.Tensor"):
            gates(value)
    with pytest.raises(moesaic.InvalidError, match="experts_of is int"):
        MoE(SPEC, experts_of=1)
