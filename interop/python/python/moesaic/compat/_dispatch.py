"""Tutel's dispatch as operations of torch: capacities, locations, rows of experts and back.

Experts of a caller's own, which moesaic cannot compile, get and give rows by these.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch.nn import functional


def served(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the location of each assignment [T, K] within its expert, and the tokens of each
    expert [E]. First choices of all tokens come first."""
    flat = functional.one_hot(ids.T.reshape(-1), experts)
    places = flat.cumsum(0).gather(1, ids.T.reshape(-1, 1))[:, 0] - 1
    return places.view(ids.shape[1], -1).T, flat.sum(0)


def capacity(
    factor: float,
    top_k: int,
    tokens: int,
    experts: int,
    most: Callable[[], int],
    alignment: int = 1,
) -> int:
    """Returns the rows of each expert: of a factor, or up to `most`, the largest count."""
    each = -(-tokens // experts)
    if factor > 0:
        rows = top_k * int(factor * each)
    else:
        rows = most()
        rows = min(rows, top_k * int(-factor * each)) if factor < 0 else rows
    return -(-rows // alignment) * alignment


def encode(
    x: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    rows: int,
    experts: int,
    weights: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Returns the rows of experts [E, rows, d] of x [T, d], weighted by [T, K] if there are any."""
    y = x.new_zeros(experts * rows, x.shape[1])
    for slot in range(ids.shape[1]):
        token = torch.where(places[:, slot] < rows)[0]
        own = x[token] if weights is None else x[token] * weights[token, slot, None].to(x.dtype)
        y = y.index_add(0, ids[token, slot] * rows + places[token, slot], own)
    return y.view(experts, rows, -1)


def decode(
    y: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    weights: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Returns the sum over each token's rows in y [E, rows, d], weighted by [T, K] if any."""
    rows, flat = y.shape[1], y.reshape(-1, y.shape[-1])
    total = y.new_zeros(ids.shape[0], y.shape[-1])
    for slot in range(ids.shape[1]):
        token = torch.where(places[:, slot] < rows)[0]
        own = flat[ids[token, slot] * rows + places[token, slot]]
        own = own if weights is None else own * weights[token, slot, None].to(y.dtype)
        total = total.index_add(0, token, own)
    return total


def top_k_routing(
    scores: torch.Tensor,
    top_k: int,
    loss_fn: Optional[Callable[[torch.Tensor, torch.Tensor], Any]] = None,
    capacity_factor: float = 1.0,
    normalize_gate: bool = True,
    alignment: int = 1,
) -> tuple[Any, Any]:
    """Tutel's `extract_critical` in one process: what `fast_encode` and `fast_decode` take, and the
    loss, by default GShard's."""
    experts, k = scores.shape[1], min(top_k, scores.shape[1])
    chosen, ids = scores.topk(k, 1)
    if k > 1 and normalize_gate:
        chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).eps)
    places, counts = served(ids, experts)
    most = lambda: int(counts.max())  # noqa: E731
    rows = capacity(capacity_factor, k, scores.shape[0], experts, most, alignment)
    parts = (list(tensor.unbind(1)) for tensor in (ids, places, chosen))
    loss = (loss_fn or gshard_loss)(scores, ids)
    return (experts, *parts, rows, counts), loss


def gshard_loss(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns GShard's loss of scores [T, E] by the first choices of ids [T, K]."""
    tokens, experts = scores.shape
    first = torch.bincount(ids[:, 0], minlength=experts).to(scores.dtype)
    return (scores.sum(0) * first).sum() * (experts / (max(1, tokens) ** 2))


def fast_encode(data: torch.Tensor, critical: Any, is_postscore: bool = True) -> torch.Tensor:
    """Returns the rows of experts [E, rows, d] of data [T, d]."""
    experts, ids, places, chosen, rows, _ = critical
    weights = None if is_postscore else torch.stack(chosen, 1)
    return encode(data, torch.stack(ids, 1), torch.stack(places, 1), rows, experts, weights)


def fast_decode(data: torch.Tensor, critical: Any, is_postscore: bool = True) -> torch.Tensor:
    """Returns the sums [T, d] over each token's rows in data [E, rows, d]."""
    experts, ids, places, chosen, _, _ = critical
    weights = torch.stack(chosen, 1) if is_postscore else None
    data = data.reshape(experts, -1, data.shape[-1])
    return decode(data, torch.stack(ids, 1), torch.stack(places, 1), weights)
