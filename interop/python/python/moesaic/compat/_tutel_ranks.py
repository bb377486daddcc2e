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
        tensors = module.experts.tensors()
        bias = tensors.get("experts.down.bias")
        if bias is not None and self._shards > 1:
            model = (module.experts.sizes[2], module.num_global_experts)
            tensors["experts.down.bias"] = _Shard.apply(bias, *model, self._shards, module.group)
        names = ["topk_ids", "topk_weights"]
        inputs = [ids.to(torch.int32), chosen.float()]
        ordered = [tensors[name] for name in ops.weight_names(text)]
        return found.run(x, names, inputs, ordered, False, (), None)[0]


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
