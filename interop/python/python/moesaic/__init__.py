"""moesaic: Mixture-of-Experts layers, compiled for this machine.

Without torch: `Spec`, `PackedLayer`, `GateLayer`, `Layer`, `read_hf`, which take and give arrays by
DLPack. With torch: `MoE` and `MultiGate`, each an `nn.Module`; `moesaic.transformers.register()`;
`moesaic.compat`; `moesaic.distributed`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._native import (
    Array,
    Error,
    GateLayer,
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
    "GateLayer",
    "InvalidError",
    "Layer",
    "MoE",
    "MultiGate",
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
    try:
        return _of_torch(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"moesaic.{name} needs torch: pip install torch", name="torch"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _of_torch(name: str) -> Any:
    if name == "MoE":
        return importlib.import_module(".module", __name__).MoE
    if name == "MultiGate":
        return importlib.import_module(".gates", __name__).MultiGate
    if name in ("compat", "distributed", "transformers", "ops"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
