"""Where a call runs: the device of its tensors, and torch's stream there."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from ._native import InvalidError


class Place(NamedTuple):
    """A backend, such as "cpu" or "cuda", the number of its GPU, and the handle of the stream."""

    backend: str
    ordinal: int = 0
    stream: int = 0


CPU = Place("cpu")


def place_of(tensor: torch.Tensor) -> Place:
    """Returns where a call of a tensor runs: on a GPU it is on torch's current stream."""
    if tensor.is_cpu:
        return CPU
    if not tensor.is_cuda:
        raise InvalidError(
            f"x is on {tensor.device}: layers run on the CPU, and on GPUs of CUDA and ROCm"
        )
    if torch.cuda.is_current_stream_capturing():
        raise InvalidError(
            "a layer is no part of a CUDA graph that torch captures: it may compile, and has "
            "memory of its own, which the graph would outlive. Leave the layer out of the graph"
        )
    device = tensor.get_device()
    backend = "cuda" if torch.version.hip is None else "rocm"
    return Place(backend, device, torch.cuda.current_stream(device).cuda_stream)


def selected(place: Place) -> Any:
    """Returns a context that ends with the GPU that torch had selected.

    The extension selects the one of its layer.
    """
    return contextlib.nullcontext() if place is CPU else torch.cuda.device(place.ordinal)
