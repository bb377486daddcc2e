"""Masks of `moesaic.compat.fastmoe` beside FastMoE's own layers, in one process and over ranks.

MOESAIC_FASTMOE is the folder of FastMoE's repository, https://github.com/laekov/fastmoe.
"""

import os
import sys

import pytest

FOLDER = os.environ.get("MOESAIC_FASTMOE")
if FOLDER is None and __name__ != "__main__":
    pytest.skip("MOESAIC_FASTMOE names no folder", allow_module_level=True)

torch = pytest.importorskip("torch")
dist = torch.distributed
from fastmoe_original import original
from moesaic.compat import fastmoe
from test_distributed import Widening, close, run_ranks

WIDTH = 24
MASK = torch.tensor([0, 2, 0, 1, 1, 0, 0, 3, 2, 0, 0, 0])
SLOTS = torch.linspace(-1, 1, 2 * 48).view(2, 48)
# Numbers, one for each slot and column, and of 3, which no constant has, zeros.
CONSTANTS = {"widening": {1: 0.5, 2: SLOTS}, "mlp": {1: -2.0, 2: SLOTS[:, :WIDTH]}}


def layers(theirs, kind, **options):
    """FastMoE's layer and ours, of the same weights."""
    sizes = dict(num_expert=2, d_model=WIDTH, mask_dict=CONSTANTS[kind], **options)
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    if kind == "widening":
        pair = [module.FMoE(expert=Widening, **sizes) for module in (theirs, fastmoe)]
        pair[1].load_state_dict(pair[0].state_dict())
        return pair
    pair = [module.FMoETransformerMLP(d_hidden=40, **sizes) for module in (theirs, fastmoe)]
    state = pair[0].state_dict()
    # FastMoE has a module for each expert.
    joined = {
        f"experts.{name}": torch.cat([state[f"experts.{at}.{name}"] for at in range(2)])
        for name in ("htoh4.weight", "htoh4.bias", "h4toh.weight", "h4toh.bias")
    }
    gate = {name: value for name, value in state.items() if name.startswith("gate.")}
    pair[1].load_state_dict({**gate, **joined})
    return pair


def beside(pair, x, mask):
    """Compares y and every gradient of a call with a mask."""
    found = []
    for layer in pair:
        layer.mask = mask
        own = x.clone().requires_grad_()
        y = layer(own)
        y.square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append((y.detach(), own.grad, joined(gradients)))
    (y, dx, gradients), (our_y, our_dx, ours) = found
    close(our_y, y)
    close(our_dx, dx)
    assert ours.keys() == gradients.keys()
    for name, gradient in ours.items():
        close(gradient, gradients[name])


def joined(gradients):
    """Gradients by name, those of FastMoE's modules of one expert each in one tensor as ours."""
    parts, rest = {}, {}
    for name, value in gradients.items():
        if "htoh4" in name or "h4toh" in name:
            name = ".".join(part for part in name.split(".") if not part.isdigit())
            parts.setdefault(name, []).append(value)
        else:
            rest[name] = value
    return {**rest, **{name: torch.cat(each) for name, each in parts.items()}}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_masks_of_one_process(monkeypatch, kind):
    pair = layers(original(monkeypatch, FOLDER), kind)
    x = torch.randn(12, WIDTH)
    for mask in (MASK, MASK.view(3, 4), torch.zeros(12), torch.ones(12)):
        beside(pair, x, mask)
    # Without constants FastMoE masks nothing.
    for layer in pair:
        layer.mask_dict = None
    beside(pair, x, MASK)


@pytest.mark.parametrize("world", [2, 4])
def test_masks_over_ranks(world):
    run_ranks("masks", __file__, world)


def masks(group, rank):
    world = dist.get_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        theirs = original(monkeypatch, FOLDER)
        # Ranks of a slice group have the same tokens; of a moe group, different experts.
        slices = [dist.new_group([at, at + 1]) for at in range(0, world, 2)][rank // 2]
        apart = [dist.new_group(list(range(at, world, 2))) for at in range(2)][rank % 2]
        ways = [
            dict(world_size=world, moe_group=group),
            dict(world_size=world, moe_group=group, slice_group=slices),
            dict(world_size=world // 2, moe_group=apart, slice_group=slices),
        ]
        for kind in CONSTANTS:
            for way in ways:
                pair = layers(theirs, kind, **way)
                sliced = "slice_group" in way
                torch.manual_seed(rank // 2 if sliced else rank)
                x, mask = torch.randn(12, WIDTH), MASK.roll(rank // 2)
                if not sliced:
                    beside(pair, x, mask)
                    continue
                own = mask.chunk(2)[rank % 2]
                beside(pair, x, own)
                # The same as that of all rows, which FastMoE does not take.
                pair[1].mask = own
                wanted = pair[1](x)
                pair[1].mask = mask
                assert torch.equal(pair[1](x), wanted)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.group.WORLD, dist.get_rank())
    dist.destroy_process_group()
