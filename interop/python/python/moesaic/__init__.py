"""moesaic: Mixture-of-Experts layers, compiled for this machine.

Without torch: `Spec`, `PackedLayer`, `Layer`, `read_hf`, which take and give arrays by DLPack.
With torch: `MoE`, an `nn.Module`; `moesaic.transformers.register()`; `moesaic.compat`;
`moesaic.distributed`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._native import (
    Array,
    Error,
    InvalidError,
    Layer,
    PackedLayer,
    Spec,
    __version__,
    configure,
    engine_info,
    read_hf,
    read_state_dict,
)

__all__ = [
    "Array",
    "Error",
    "InvalidError",
    "Layer",
    "MoE",
    "PackedLayer",
    "Spec",
    "__version__",
    "compat",
    "configure",
    "distributed",
    "engine_info",
    "read_hf",
    "read_state_dict",
    "transformers",
]


def __getattr__(name: str) -> Any:
    # torch is imported with the first of these names: arrays do without it.
    if name == "MoE":
        return importlib.import_module(".module", __name__).MoE
    if name in ("compat", "distributed", "transformers", "ops"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
