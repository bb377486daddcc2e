"""`FMoE` and `FMoETransformerMLP` with the arguments of FastMoE, in one process or over ranks.

Gates are torch modules with FastMoE's contract: `gate(x)` returns ids [T, K], -1 where a slot is
dropped, and scores [T, K]. The experts of `FMoETransformerMLP` are moesaic's. Over ranks each has
`num_expert` experts of its own, and the gates of all choose among those of all.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import nn
from torch.nn import functional

from .._native import InvalidError
from . import _experts, _fastmoe_ranks
from ._fastmoe_ranks import DistributedGroupedDataParallel


class BaseGate(nn.Module):
    """A gate over `num_expert * world_size` experts, with a side channel for its loss."""

    def __init__(self, num_expert: int, world_size: int) -> None:
        super().__init__()
        self.world_size, self.num_expert = world_size, num_expert
        self.tot_expert = world_size * num_expert
        self.loss: Optional[torch.Tensor] = None
        # The ranks whose experts these are, which the layer tells; None is one process.
        self.moe_group: Any = None

    def set_loss(self, loss: torch.Tensor) -> None:
        """Keeps the loss of a call."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Optional[torch.Tensor]:
        """Returns the loss of the last call."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether a call left a loss."""
        return self.loss is not None


class NaiveGate(BaseGate):
    """The K best logits of a linear map, weighted by their softmax."""

    def __init__(
        self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True
    ) -> None:
        super().__init__(num_expert, world_size)
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and scores [T, K] of x [T, d]."""
        values, ids = self.gate(x).topk(self.top_k, -1)
        return ids, values.softmax(-1)


class SwitchGate(NaiveGate):
    """The best expert by a softmax over all, with noise in training and the Switch loss.

    FastMoE's capacity is honoured: each expert takes the first ceil(rate * T) tokens, the rate
    being that of training or of evaluation.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        gate_bias: bool = True,
    ) -> None:
        if topk != 1:
            raise InvalidError(f"topk = {topk}: a Switch gate chooses one expert")
        super().__init__(d_model, num_expert, world_size, 1, gate_bias)
        self.switch_eps, self.capacity = switch_eps, capacity

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and scores [T, 1] of x [T, d]."""
        logits = self.gate(x)
        if self.training:
            eps = self.switch_eps
            # To the bit as FastMoE, in the type of x.
            noise = torch.rand_like(logits)
            logits = logits + (noise * 2 * eps + 1.0 - eps)
        scores = logits.float().softmax(-1)
        best, ids = scores.topk(1, -1)
        rate = self.capacity[0 if self.training else 1]
        limit = math.ceil(rate * x.shape[0] / self.num_expert)
        ids = _limited(ids, self.tot_expert, limit, self.moe_group)
        kept = ids[ids >= 0]
        count = max(1, kept.numel())
        share = torch.bincount(kept, minlength=self.tot_expert) / count
        self.set_loss((share * scores.sum(0) / count).sum() * self.tot_expert)
        return ids, best.to(x.dtype)


class GShardGate(NaiveGate):
    """The two best experts, with a capacity, the GShard loss, and a second one kept by chance."""

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
    ) -> None:
        if topk != 2:
            raise InvalidError(f"topk = {topk}: a GShard gate chooses two experts")
        super().__init__(d_model, num_expert, world_size, 2, gate_bias)
        self.capacity, self.random_routing = capacity, random_routing

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and scores [T, 2] of x [T, d]."""
        logits = self.gate(x)
        values, ids = logits.topk(2, -1)
        scores = values.softmax(-1)
        first = torch.bincount(ids[:, 0], minlength=self.tot_expert) / max(1, x.shape[0])
        mean = logits.softmax(-1).mean(0)
        self.set_loss((first * mean).mean() * self.num_expert**2)
        rate = self.capacity[0 if self.training else 1]
        limit = math.ceil(rate * x.shape[0]) * 2 // self.tot_expert
        ids = _limited(ids, self.tot_expert, limit)
        if self.random_routing:
            drop = 2 * scores[:, 1].detach() < torch.rand(x.shape[0])
            ids = torch.stack([ids[:, 0], ids[:, 1].masked_fill(drop, -1)], 1)
        return ids, scores


def _limited(ids: torch.Tensor, experts: int, limit: int, group: Any = None) -> torch.Tensor:
    """Drops the assignments of each expert beyond the limit, in the order of tokens; with a group,
    the limit is that of all ranks, and the first ranks come first."""
    flat = ids.reshape(-1)
    chosen = functional.one_hot(flat, experts)
    ranks = chosen.cumsum(0).gather(1, flat[:, None])[:, 0]
    limits = _fastmoe_ranks.quota(chosen.sum(0), limit, group)
    return flat.masked_fill(ranks > limits[flat], -1).view_as(ids)


class FMoE(nn.Module):
    """A layer of experts of your own: a callable of `d_model`, or a list of callables or modules.

    Each is called as `expert(rows, count)` on the rows of its tokens. moesaic computes experts of
    `FMoETransformerMLP`; modules of your own run as they are.

    `mask` has a number for each token: experts compute those of 0 alone. `mask_dict` has a constant
    for each other number, the output of every slot: a number, or a tensor that broadcasts to
    [tokens, top_k, d]; without `mask_dict` nothing is masked. With `slice_group` the mask is of
    this rank's slice, or of all rows.
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Any = None,
        slice_group: Any = None,
        moe_group: Any = None,
        top_k: int = 2,
        gate: Callable[..., nn.Module] = NaiveGate,
        expert: Union[Callable[[int], nn.Module], Sequence[Any], None] = None,
        gate_hook: Optional[Callable] = None,
        mask: Optional[torch.Tensor] = None,
        mask_dict: Optional[dict] = None,
        gate_bias: bool = True,
    ) -> None:
        super().__init__()
        self.world_size, self.moe_group, self.over = world_size, None, None
        if world_size > 1:
            self.moe_group = _fastmoe_ranks.checked(world_size, moe_group)
            self.over = _fastmoe_ranks.Over(self.moe_group)
        # Ranks that have the same tokens compute a part of them each. `mp_group` is its old name.
        self.slice_group = slice_group if mp_group is None else mp_group
        if self.slice_group is not None and self.slice_group.size() == 1:
            self.slice_group = None
        if isinstance(expert, (list, tuple, nn.ModuleList)):
            num_expert = len(expert)
            made = [e if isinstance(e, nn.Module) else e(d_model) for e in expert]
            self.experts = nn.ModuleList(made)
        elif expert is not None:
            self.experts = nn.ModuleList([expert(d_model) for _ in range(num_expert)])
        self.num_expert, self.d_model, self.top_k = num_expert, d_model, top_k
        self.gate_hook, self.mask, self.mask_dict = gate_hook, mask, mask_dict
        # As FastMoE: a gate of somebody's own knows no gate_bias.
        naive = isinstance(gate, type) and issubclass(gate, NaiveGate)
        options = {"gate_bias": gate_bias} if naive else {}
        self.gate = gate(d_model, num_expert, world_size, top_k, **options)
        self.gate.moe_group = self.moe_group

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Marks parameters by the group that averages their gradients."""
        for part, name in ((self.experts, expert_dp_comm), (self.gate, "gate")):
            for parameter in part.parameters():
                parameter.dp_comm = name

    def expert_fn(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts of each token."""
        if self.world_size > 1:
            return _fastmoe_ranks.by_experts(self, x, ids, scores)
        y = None
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out = expert(x[token], torch.tensor([token.numel()]))
            out = out * scores[token, slot, None].to(out.dtype)
            y = x.new_zeros(x.shape[0], out.shape[-1]) if y is None else y
            y = y.index_add(0, token, out)
        return y

    def forward(self, moe_inp: torch.Tensor) -> torch.Tensor:
        """Computes moe_inp [T, d_model]; masked tokens get the constants of mask_dict."""
        if self.slice_group is None:
            return self._own(moe_inp)
        y = self._own(_fastmoe_ranks.Slice.apply(moe_inp, self.slice_group))
        return _fastmoe_ranks.Gather.apply(y, self.slice_group)

    def _own(self, moe_inp: torch.Tensor) -> torch.Tensor:
        """Computes this rank's part of the tokens."""
        ids, scores = self.gate(moe_inp)
        scores = scores.reshape(ids.shape)
        if self.gate_hook is not None:
            self.gate_hook(ids, scores, None)
        mask = self._own_mask(moe_inp.shape[0])
        if mask is None:
            return self.expert_fn(moe_inp, ids, scores)
        y = self.expert_fn(moe_inp, ids.masked_fill((mask != 0)[:, None], -1), scores)
        return self._with_constants(y, mask, scores)

    def _own_mask(self, tokens: int) -> Optional[torch.Tensor]:
        """Returns the mask of this rank's tokens: 0 for those that experts compute."""
        # As FastMoE: without constants there is no mask.
        if self.mask is None or self.mask_dict is None:
            return None
        mask = self.mask.reshape(-1)
        slices = 1 if self.slice_group is None else self.slice_group.size()
        if slices > 1 and mask.shape[0] == slices * tokens:
            # FastMoE takes the mask of a slice alone.
            mask = mask.chunk(slices)[self.slice_group.rank()]
        if mask.shape[0] != tokens:
            raise InvalidError(f"mask has {mask.shape[0]} numbers for {tokens} tokens of a rank")
        return mask

    def _with_constants(
        self, y: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Puts the constants of masked tokens, for each slot, in the place of experts' outputs."""
        for value, constant in self.mask_dict.items():
            token = torch.where(mask == value)[0]
            slots = y.new_empty(len(token), scores.shape[1], y.shape[1])
            # A number, or a tensor that broadcasts to these sizes and may have a gradient.
            slots[:] = constant
            own = torch.bmm(scores[token, None].to(y.dtype), slots)[:, 0]
            y = y.index_copy(0, token, own)
        return y


class _MLP(nn.Module):
    """The weights of two linear maps of every expert."""

    def __init__(self, num_expert: int, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.htoh4 = _Linear(num_expert, d_model, d_hidden)
        self.h4toh = _Linear(num_expert, d_hidden, d_model)


class _Linear(nn.Module):
    """FastMoE's FMoELinear: weight [E, out, in] and bias [E, out]."""

    def __init__(self, num_expert: int, in_feat: int, out_feat: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_feat)
        weight = torch.empty(num_expert, out_feat, in_feat).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(num_expert, out_feat))


class FMoETransformerMLP(FMoE):
    """The MoE of a Transformer block: two linear maps with an activation between, per expert."""

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        d_hidden: int = 4096,
        activation: Callable[[torch.Tensor], torch.Tensor] = nn.GELU(),
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_expert=num_expert, d_model=d_model, **kwargs)
        self.experts = _MLP(num_expert, d_model, d_hidden)
        name = _experts.activation_name(activation)
        form = f'{{ form = "plain", activation = "{name}", bias = true }}'
        self._shape = (d_model, d_hidden, d_model, num_expert * self.world_size)
        self._form = form
        self.mark_parallel_comm(expert_dp_comm)

    def expert_fn(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        up, down = self.experts.htoh4, self.experts.h4toh
        text = _experts.external_spec(*self._shape, ids.shape[1], self._form, False)
        tensors = {
            "experts.up.weight": up.weight, "experts.up.bias": up.bias,
            "experts.down.weight": down.weight, "experts.down.bias": down.bias,
        }
        run = _experts.run if self.over is None else self.over.run
        return run(text, x, ids, scores, tensors)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Computes inp [.., d_model]."""
        return super().forward(inp.reshape(-1, self.d_model)).reshape(inp.shape)


__all__ = [
    "BaseGate", "DistributedGroupedDataParallel", "FMoE", "FMoETransformerMLP", "GShardGate",
    "NaiveGate", "SwitchGate",
]
