"""Tensors of a call as its caller has them: their sizes, and their integers."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Sequence

import torch

from ._native import InvalidError


def dense(name: str, tensor: Any) -> torch.Tensor:
    """Returns what is a dense tensor of torch."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
        return tensor
    tensors = isinstance(tensor, torch.Tensor)
    found = f"a {tensor.layout} tensor" if tensors else type(tensor).__name__
    raise InvalidError(f"{name} is {found}, expected a dense torch.Tensor")


def check_x(x: Any, width: int) -> None:
    """Refuses what is not x [.., width]."""
    dense("x", x)
    if x.dim() == 0 or x.shape[-1] != width:
        raise InvalidError(f"x has shape {tuple(x.shape)}, expected [.., {width}]")


def per_token(
    name: str, tensor: Any, leading: Sequence[int], tail: Sequence[int] = ()
) -> torch.Tensor:
    """Returns an input with a value per token as [T, ..]: its leading sizes are those of x. Those of
    one or the other may be flattened already."""
    expected, flat = (*leading, *tail), (math.prod(leading), *tail)
    shape = tuple(dense(name, tensor).shape)
    same = shape in (expected, flat)
    if not same and len(leading) == 1:
        at = len(shape) - len(tail)
        same = at >= 0 and shape[at:] == tuple(tail) and tensor.numel() == math.prod(flat)
    if not same:
        raise InvalidError(f"{name} has shape {shape}, expected {expected}")
    return tensor.reshape(flat)


def _per_call(name: str, tensor: Any, size: int) -> torch.Tensor:
    is_number = dense(name, tensor).dim() == 0 and size == 1
    return per_token(name, tensor.reshape(1) if is_number else tensor, (size,))


def further_inputs(
    given: Mapping[str, Optional[torch.Tensor]], leading: Sequence[int], top_k: int, experts: int
) -> dict[str, torch.Tensor]:
    """Returns the inputs of a call beside x that are given, each in the shape of its operation."""
    sizes = {"active_k": 1, "global_counts": experts, "global_tokens": 1}
    tails = {"topk_ids": (top_k,), "topk_weights": (top_k,)}
    found = {}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if name in sizes:
            found[name] = _per_call(name, tensor, sizes[name])
        else:
            found[name] = per_token(name, tensor, leading, tails.get(name, ()))
    return found


def narrowed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns integers on the CPU as i32. A larger number is an error, because a conversion would
    keep its lower bits: those of another expert."""
    own = tensor.to(torch.int32)
    if tensor.dtype.itemsize >= 4 and tensor.dtype is not torch.int32:
        wide = tensor.to(torch.int64)
        beyond = wide[own.to(torch.int64) != wide]
        if beyond.numel():
            raise InvalidError(
                f"`{name}` has {beyond[0].item()}, expected numbers of 32 bits with a sign"
            )
    return own
