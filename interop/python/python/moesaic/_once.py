"""Gradients that are not differentiable in turn."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Sequence

import torch

from ._native import Error


class _Refused(torch.autograd.Function):
    """Gradients as they are, in a graph that has no way back."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, *gradients: torch.Tensor):
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise Error(
            "a layer has no second derivative: its gradients, of create_graph=True, were "
            "differentiated"
        )


def without_second(gradients: Sequence[Optional[torch.Tensor]]) -> tuple[Any, ...]:
    """Returns gradients whose own backward is an error, where somebody keeps its graph."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    # torch's `once_differentiable` is silent where the incoming gradient is a constant: a penalty
    # on gradients would lose its part of the loss unseen.
    found = [gradient for gradient in gradients if gradient is not None]
    kept = iter(_Refused.apply(torch.ones((), requires_grad=True), *found))
    return tuple(None if gradient is None else next(kept) for gradient in gradients)


def once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Makes a backward pass of a `torch.autograd.Function` one that refuses another."""

    @functools.wraps(backward)
    def run(ctx, *gradients):
        with torch.no_grad():
            found = backward(ctx, *gradients)
        return without_second(found)

    return run
