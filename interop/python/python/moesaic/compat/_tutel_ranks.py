"""Tutel's layer over ranks, on moesaic's."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from .. import ops
from ..distributed import Over as Ranks


class Over:
    """The layers over ranks that a module makes as calls need them, by their text."""

    def __init__(self, shards: int) -> None:
        self._shards, self._made = shards, {}
        self._pieces: Any = None

    def __deepcopy__(self, memo: dict) -> "Over":
        return Over(self._shards)

    def run(
        self, module: Any, text: str, x: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Computes x [T, d], this rank's tokens, by the experts of all ranks; differentiable."""
        overlap = module.a2a_ffn_overlap_degree
        found = self._made.get((text, overlap))
        if found is None:
            seconds = float(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", 86400))
            strategy = f"overlap_degree={overlap}" if overlap > 1 else None
            found = Ranks(text, module.group, self._shards, strategy, "sum", seconds)
            self._made[text, overlap] = found
        if self._shards > 1 and hasattr(module.experts, "W_fc1"):
            tensors = self._gathered(module)
        else:
            tensors = module.experts.tensors()
        bias = tensors.get("experts.down.bias")
        if bias is not None and self._shards > 1:
            model = (module.experts.sizes[2], module.num_global_experts)
            tensors["experts.down.bias"] = _Shard.apply(bias, *model, self._shards, module.group)
        names = ["topk_ids", "topk_weights"]
        inputs = [ids.to(torch.int32), chosen.float()]
        ordered = [tensors[name] for name in ops.weight_names(text)]
        return found.run(x, names, inputs, ordered, False, (), None)[0]


    def _gathered(self, module: Any) -> dict[str, torch.Tensor]:
        """Returns this rank's shard of an expert whose flat weights lie in pieces on the ranks of
        its shards, which know nothing of rows and columns."""
        experts, shards = module.experts, self._shards
        number = dist.get_rank(module.group) % shards
        if self._pieces is None:
            first = dist.get_rank(module.group) - number
            ranks = [dist.get_global_rank(module.group, first + at) for at in range(shards)]
            # The ranks of the others' experts have groups of their own.
            self._pieces = dist.new_group(ranks, use_local_synchronization=True)
        model, hidden, _, count = experts.sizes
        flat = (experts.W_fc1, experts.W_fc2, experts.W_fc3)
        whole = experts.named(
            *(_Pieces.apply(own, count * model * hidden, self._pieces) for own in flat)
        )
        width = hidden // shards
        return {
            name: weight.narrow(2 if ".down." in name else 1, number * width, width)
            for name, weight in whole.items()
        }


class _Pieces(torch.autograd.Function):
    """A flat weight from the pieces of a group's ranks. The gradient of a piece is the sum of what
    the ranks have there."""

    @staticmethod
    def forward(ctx, piece: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.group, ctx.piece = group, piece.numel()
        every = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, piece.contiguous(), group=group)
        return torch.cat(every)[:count]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        every = gradient.new_zeros(ctx.piece * dist.get_world_size(ctx.group))
        every[: gradient.numel()] = gradient
        dist.all_reduce(every, group=ctx.group)
        first = ctx.piece * dist.get_rank(ctx.group)
        return every[first : first + ctx.piece], None, None


class _Exchange(torch.autograd.Function):
    """Part r of x [ranks, ..] goes to rank r, whose parts come back in the ranks' order."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _Exchange.apply(gradient, ctx.group), None


def through_experts(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns what the caller's own experts of all ranks make of this rank's rows [E, rows, d].

    Shards of an expert each get a part of its rows, or, with an adaptive degree above 1, so many
    shards the same ones, whose results are added. With degree 0 rows stay, and the experts of all
    ranks are here.
    """
    degree, shards = module.adaptive_degree, module.sharded_count
    if degree == 0:
        return module.experts(rows, module)
    experts = rows.shape[0]
    if shards > 1:
        rows = rows.repeat(1, degree, 1).view(module.world_size, -1, rows.shape[-1])
    y = to_tokens(module.experts(to_experts(rows, module.group), module), module.group)
    return y.view(experts, degree, -1, y.shape[-1]).sum(1) if shards > 1 else y


def to_experts(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows [E of this rank, ranks * rows, d] for its experts, of all ranks' [E, rows,
    d] for the experts of all."""
    world = dist.get_world_size(group)
    came = _Exchange.apply(rows.view(world, -1, *rows.shape[1:]), group)
    return came.transpose(0, 1).flatten(1, 2)


def to_tokens(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Undoes `to_experts`: returns this rank's rows [E, rows, d] of the experts of all ranks."""
    world = dist.get_world_size(group)
    parts = rows.view(rows.shape[0], world, -1, rows.shape[-1]).transpose(0, 1)
    return _Exchange.apply(parts, group).flatten(0, 1)


class _Shard(torch.autograd.Function):
    """A shard of an expert's last bias [1, n] as a whole bias that is zero elsewhere: a layer adds
    those of all shards. Its gradient is that of the first shard, which alone has one."""

    @staticmethod
    def forward(ctx, shard, width: int, experts: int, shards: int, group):
        expert, number = divmod(dist.get_rank(group), shards)
        first = number * shard.shape[1]
        ctx.place = (expert, first, min(width, first + shard.shape[1]))
        ctx.sizes, ctx.group = (experts, width, shard.shape[1]), group
        whole = shard.new_zeros(1, width)
        whole[0, first : ctx.place[2]] = shard[0, : ctx.place[2] - first]
        return whole

    @staticmethod
    def backward(ctx, gradient):
        (expert, first, last), (experts, width, own) = ctx.place, ctx.sizes
        every = gradient.new_zeros(experts, width)
        every[expert] = gradient[0]
        dist.all_reduce(every, group=ctx.group)
        shard = gradient.new_zeros(1, own)
        shard[0, : last - first] = every[expert, first:last]
        return shard, None, None, None, None
