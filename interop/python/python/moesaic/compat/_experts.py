"""Experts behind a decision that torch made."""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch

from .. import ops
from .._native import InvalidError, Spec
from ..transformers import ACTIVATIONS


@torch.no_grad()
def activation_name(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Finds the activation of a spec that a function is, by its values."""
    probe = torch.linspace(-6.0, 6.0, 97)
    wanted = function(probe.clone())
    for name, known in ACTIVATIONS.items():
        if torch.allclose(known(probe), wanted, rtol=1e-5, atol=1e-6):
            return name
    raise InvalidError(f"activation {function} is none of {', '.join(ACTIVATIONS)}")


@functools.lru_cache(maxsize=None)
def external_spec(
    model: int,
    hidden: int,
    output: int,
    experts: int,
    top_k: int,
    form: str,
    capacity: bool,
    weight_on: str = "output",
) -> str:
    """Returns the text of a layer whose caller routes; with `capacity`, by Tutel's factor."""
    mode = 'capacity = { mode = "factor" }\n' if capacity else ""
    spec = Spec(
        'name = "compat"\n'
        f"shape = {{ model_dim = {model}, hidden_dim = {hidden}, output_dim = {output}, "
        f"experts = {experts}, top_k = {top_k} }}\n"
        f'router = {{ kind = "external", weight_on = "{weight_on}" }}\n'
        f"{mode}experts = {form}\n"
    )
    return spec.toml


def run(
    text: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    capacity_factor: Optional[float] = None,
) -> torch.Tensor:
    """Computes x [T, d] by the experts of ids [T, K] (negative: none), weighted; differentiable."""
    ordered = [tensors[name] for name in ops.weight_names(text)]
    names, inputs = ["topk_ids", "topk_weights"], [ids.to(torch.int32), weights.float()]
    return ops.layer(text, x, names, inputs, ordered, False, (), capacity_factor)[0]
