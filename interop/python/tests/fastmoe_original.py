"""FastMoE's own Python files over a stand-in for its CUDA extension, as an oracle on the CPU.

`fmoe/layers.py`, `functions.py`, `linear.py`, `transformer.py` and the gates run as they stand in
the folder MOESAIC_FASTMOE. The functions of `fmoe_cuda` are loops of torch here, and its exchanges
go over gloo.
"""

import importlib
import os
import sys
import types

import torch
import torch.distributed as dist

# The group of the last `ensure_nccl`, as in the extension.
GROUP = None


def ensure_nccl(group, tensor):
    global GROUP
    GROUP = group


def expert_count(gate, counts):
    flat = gate.reshape(-1)
    counts += torch.bincount(flat[flat >= 0], minlength=len(counts)).to(counts.dtype)


def exchanged(x, sends, receives):
    y = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), receives, sends, group=GROUP)
    return y


def expert_exchange(counts, num_expert, world):
    return exchanged(counts.view(world, num_expert), [1] * world, [1] * world).view(-1)


def assign_pos(cumulated, gate, pos):
    flat = gate.reshape(-1)
    order = flat.argsort(stable=True)
    pos.copy_(order[flat[order] >= 0])


def by_expert(counts, world):
    """The order that puts rows, which are by rank and then by expert, by expert and then rank."""
    own = len(counts) // world
    expert = torch.arange(own).repeat(world).repeat_interleave(counts)
    return expert.argsort(stable=True)


def sums(counts, world):
    return counts.view(world, -1).sum(1).tolist()


def global_scatter(rows, local, everywhere, batch, world):
    came = exchanged(rows, sums(local, world), sums(everywhere, world))
    return came[by_expert(everywhere, world)]


def global_gather(rows, local, everywhere, batch, world):
    by_rank = torch.empty_like(rows).index_copy_(0, by_expert(everywhere, world), rows)
    return exchanged(by_rank, sums(everywhere, world), sums(local, world))


def linear_forward(rows, counts, weight, bias):
    parts = rows.split(counts.tolist())
    return torch.cat([part @ w.T + b for part, w, b in zip(parts, weight, bias)])


def linear_backward(gradient, rows, counts, weight, bias):
    sizes = counts.tolist()
    every = list(zip(gradient.split(sizes), rows.split(sizes), weight))
    drows = torch.cat([g @ w for g, _, w in every])
    dweight = torch.stack([g.T @ x for g, x, _ in every])
    return drows, dweight, torch.stack([g.sum(0) for g, *_ in every])


def original(monkeypatch, folder):
    """Imports FastMoE's package `fmoe` of a folder."""
    cuda = types.ModuleType("fmoe_cuda")
    for function in (
        ensure_nccl, expert_count, expert_exchange, assign_pos, global_scatter, global_gather,
        linear_forward, linear_backward,
    ):
        setattr(cuda, function.__name__, function)
    tree = types.ModuleType("tree")
    tree.map_structure, tree.flatten = lambda function, tensor: function(tensor), lambda one: [one]
    for module in (cuda, tree):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in [name for name in sys.modules if name.split(".")[0] == "fmoe"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.syspath_prepend(os.path.abspath(folder))
    return importlib.import_module("fmoe")
