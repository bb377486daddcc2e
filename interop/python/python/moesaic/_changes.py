"""Copies of weights in another layout, made again when the weights change."""

from __future__ import annotations

import weakref
from typing import Callable, Optional

import torch

# Elements of each expert that are compared: `weight.data.mul_(2)` changes values, and neither the
# version nor the address.
SAMPLED = 4


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode count no versions: their sample tells alone.
    return 0 if tensor.is_inference() else tensor._version


class Stamp:
    """The state of a tensor's values, as far as a cheap look tells."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = _version(tensor)
        self._address = tensor.data_ptr()
        self._sample = self._look(tensor).clone()

    @staticmethod
    def _look(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.dim() < 2 or not tensor.is_contiguous():
            return tensor
        rows = tensor.view(tensor.shape[0], -1)
        step = max(1, rows.shape[1] // SAMPLED)
        return rows[:, step // 2 :: step]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor is as it was."""
        same = self._version == _version(tensor) and self._address == tensor.data_ptr()
        return same and torch.equal(self._sample, self._look(tensor))


class Copies:
    """Derived tensors by the tensor that they are made of, while that is alive."""

    def __init__(self) -> None:
        self._kept: dict[tuple, tuple[weakref.ref, Stamp, list[torch.Tensor]]] = {}

    def get(
        self, tensor: torch.Tensor, kind: tuple, make: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Returns what `make` makes of the tensor, or made of it before it last changed."""
        key = (id(tensor), *kind)
        found = self._kept.get(key)
        if found is not None and found[0]() is tensor and found[1].holds(tensor):
            return found[2]
        made = make(tensor.detach())

        def forget(_: object, key: tuple = key) -> None:
            self._kept.pop(key, None)

        self._kept[key] = (weakref.ref(tensor, forget), Stamp(tensor), made)
        return made

    def clear(self) -> None:
        """Forgets every copy."""
        self._kept.clear()


class Stamps:
    """Stamps of several tensors by name."""

    def __init__(self) -> None:
        self._kept: dict[str, Optional[Stamp]] = {}

    def changed(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor differs from the last call's, and keeps its stamp."""
        stamp = self._kept.get(name)
        if stamp is not None and stamp.holds(tensor):
            return False
        self._kept[name] = Stamp(tensor)
        return True
