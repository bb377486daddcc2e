"""FastMoE's layers over ranks: rows to the experts of all and back, capacities of all, slices."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .._native import InvalidError


def checked(world_size: int, group: Any) -> Any:
    """Returns the group of the ranks that hold different experts, `world_size` of them."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidError(f"world_size = {world_size} needs torch.distributed.init_process_group")
    group = dist.group.WORLD if group is None else group
    if dist.get_world_size(group) != world_size:
        raise InvalidError(
            f"world_size = {world_size}, and moe_group has {dist.get_world_size(group)} ranks"
        )
    return group


class Over:
    """moesaic's layers over the ranks of a group, by their text."""

    def __init__(self, group: Any) -> None:
        self._group, self._made = group, {}

    def __deepcopy__(self, memo: dict) -> "Over":
        return Over(self._group)

    def run(self, text: str, x, ids, scores, tensors: dict) -> torch.Tensor:
        """Computes x [T, d] by the experts of all ranks, of which `tensors` has this rank's."""
        from .. import ops
        from ..distributed import Over as Ranks

        if text not in self._made:
            # As long as torch's own groups wait.
            seconds = default_pg_timeout.total_seconds()
            self._made[text] = Ranks(text, self._group, 1, None, "sum", seconds)
        ordered = [tensors[name] for name in ops.weight_names(text)]
        inputs = [ids.to(torch.int32), scores.float()]
        names = ["topk_ids", "topk_weights"]
        return self._made[text].run(x, names, inputs, ordered, False, (), None)[0]


def _exchanged(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Any):
    # As bytes, because gloo has neither bf16 nor integers of two bytes.
    y = x.new_empty(sum(receives), *x.shape[1:])
    out, into = x.contiguous().view(torch.uint8), y.view(torch.uint8)
    dist.all_to_all_single(into, out, list(receives), list(sends), group=group)
    return y


class _Rows(torch.autograd.Function):
    """`sends` rows of x to each rank, in order; `receives` come from each."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, sends: Any, receives: Any, group: Any) -> torch.Tensor:
        ctx.counts, ctx.group = (receives, sends), group
        return _exchanged(x, sends, receives, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _exchanged(gradient, *ctx.counts, ctx.group), None, None, None


def by_experts(module: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor):
    """Returns the weighted sum of each token's experts, which are modules on the ranks."""
    group, world, own = module.moe_group, module.world_size, module.num_expert
    token, slot = torch.where(ids >= 0)
    order = ids[token, slot].argsort(stable=True)
    token, slot = token[order], slot[order]
    sent = torch.bincount(ids[token, slot], minlength=world * own).view(world, own)
    came = _exchanged(sent, [1] * world, [1] * world, group)
    sends, receives = sent.sum(1).tolist(), came.sum(1).tolist()
    rows = _Rows.apply(x[token], sends, receives, group)
    # They come by rank; each expert takes those of all ranks at once.
    expert = torch.arange(own).repeat(world).repeat_interleave(came.flatten())
    place = expert.argsort(stable=True)
    parts = rows[place].split(came.sum(0).tolist())
    out = torch.cat([
        each(part, torch.tensor([len(part)])) for each, part in zip(module.experts, parts)
    ])
    out = torch.zeros_like(out).index_copy(0, place, out)
    back = _Rows.apply(out, receives, sends, group)
    back = back * scores[token, slot, None].to(back.dtype)
    return back.new_zeros(x.shape[0], back.shape[1]).index_add(0, token, back)


def quota(counts: torch.Tensor, limit: int, group: Optional[Any]) -> torch.Tensor:
    """Returns how many of this rank's assignments [E] each expert takes: of `limit`, what the ranks
    before it leave."""
    if group is None:
        return counts.clamp(max=limit)
    every = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, counts, group=group)
    before = sum(every[: dist.get_rank(group)], torch.zeros_like(counts))
    return (limit - before).clamp(min=0).minimum(counts)


class Slice(torch.autograd.Function):
    """This rank's part of the rows that all ranks of a group have alike."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        world = dist.get_world_size(group)
        if x.shape[0] % world:
            raise InvalidError(f"{x.shape[0]} rows in slices for {world} ranks: pad them")
        ctx.group = group
        return x.chunk(world)[dist.get_rank(group)]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _gathered(gradient, ctx.group), None


class Gather(torch.autograd.Function):
    """Undoes `Slice`: the rows of all ranks, in their order."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        world = dist.get_world_size(ctx.group)
        return gradient.chunk(world)[dist.get_rank(ctx.group)], None


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.cat(every)


class DistributedGroupedDataParallel(torch.nn.Module):
    """A module whose gradients `allreduce_params` averages over the ranks of a group for each
    parameter's `dp_comm`: by default `dp`; `gate`, `moe` and `world` too; `none` stays.

    Groups are arguments such as dp_group; one that is not given has all ranks.
    """

    def __init__(
        self, module: torch.nn.Module, auto_allreduce: bool = False, need_sync: bool = True,
        **groups: Any,
    ) -> None:
        super().__init__()
        if auto_allreduce:
            raise InvalidError("auto_allreduce is not there: call allreduce_params after backward")
        for name in groups:
            if not name.endswith("_group"):
                raise InvalidError(f"{name}: expected groups, such as dp_group")
        self.module = module
        given = {name.removesuffix("_group"): group for name, group in groups.items()}
        every = {**dict.fromkeys(("dp", "gate", "moe", "world")), **given}
        self.comms = {name: group or dist.group.WORLD for name, group in every.items()}
        if need_sync:
            for group, tensors in self._grouped(lambda parameter: parameter.data):
                for tensor in tensors:
                    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    def _grouped(self, of: Any):
        found: dict[str, list[torch.Tensor]] = {}
        for parameter in self.module.parameters():
            name, tensor = getattr(parameter, "dp_comm", "dp"), of(parameter)
            if name in self.comms and tensor is not None:
                found.setdefault(name, []).append(tensor)
        return [(self.comms[name], tensors) for name, tensors in found.items()]

    def allreduce_params(
        self, no_scale: bool = False, reduce_after: bool = False, fp32_allreduce: bool = False
    ) -> None:
        """Averages gradients; `no_scale` sums them, `reduce_after` divides after the sum."""
        for group, tensors in self._grouped(lambda parameter: parameter.grad):
            for tensor in tensors:
                total = tensor.float() if fp32_allreduce else tensor.clone()
                share = 1 if no_scale else dist.get_world_size(group)
                total /= 1 if reduce_after else share
                dist.all_reduce(total, group=group)
                tensor.copy_(total / share if reduce_after else total)

    allreduce_gradients = allreduce_params

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)
