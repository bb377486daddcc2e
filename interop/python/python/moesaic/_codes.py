"""Experts of a transformers' model as the codes that its folder stores."""

from __future__ import annotations

import os
import re
from typing import Any, Iterator, NoReturn

import torch
from torch.nn import functional

from ._layers import DTYPES
from ._native import InvalidError, PackedLayer

# The attribute of a module whose experts are codes.
ATTRIBUTE = "_moesaic_codes"

# The number of a layer in the name of a module.
NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# How far y of codes may be from that of the numbers that transformers made of them, as a share of
# the largest: those were rounded to the model's type.
ALLOWED = 0.05


class Codes:
    """The experts of a module as codes, which calls multiply as they are."""

    def __init__(self, model: str, layer: int, dtype: torch.dtype) -> None:
        self.model = model
        self._dtype = dtype
        self._layer = PackedLayer.experts_of(model, layer, DTYPES[dtype])
        spec = self._layer.spec
        self.experts, self.top_k, self.quantized = spec.experts, spec.top_k, spec.quantized

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Evaluates x [T, d] with ids [T, K] i32, -1 for none, and weights [T, K] f32."""
        rows = x.detach().to(self._dtype).contiguous()
        chosen = weights.detach().contiguous()
        call = self._layer.forward(rows, topk_ids=ids, topk_weights=chosen)
        return torch.from_dlpack(call["y"]).to(x.dtype)

    def refuse(self, what: str) -> NoReturn:
        raise InvalidError(
            f"the experts are codes of {self.model}, {what}: load the model again without "
            "`keep_codes`"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.refuse("which no other module can share")

    def __reduce__(self) -> NoReturn:
        self.refuse("which no pickle holds")


def keep_codes(
    model: torch.nn.Module, path: str | os.PathLike[str], compare: bool = True
) -> int:
    """Has the experts of a model computed as the codes that its folder or GGUF file stores.

    transformers makes numbers of quantized experts when it loads them on a CPU. This reads the codes,
    compares the two on a few rows of each layer, and drops the numbers. From then on the model is for
    inference: it has no gradients of x through its experts, no copies, and cannot be saved. Returns
    the number of layers whose experts are codes now. If a layer is refused, those before it are codes
    already and the others stay as they were.

        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moesaic")
        moesaic.transformers.keep_codes(model, folder)

    Without `compare` the numbers are not looked at: for a folder whose experts transformers reports
    as missing, such as one of compressed-tensors.
    """
    changed = 0
    for name, module in list(_experts(model)):
        number = NUMBER.search(name)
        if number is None:
            raise InvalidError(f"module {name}: its name does not say which layer it is of")
        dtype = module.down_proj.dtype
        codes = Codes(os.fspath(path), int(number[1]), dtype)
        if not codes.quantized:
            continue
        if compare:
            _check(name, module, codes)
        _drop(module, codes)
        changed += 1
    if changed == 0:
        raise InvalidError(
            f"{os.fspath(path)} has no quantized experts for this model, or has them with widths "
            "that no kernel multiplies: it runs as it is"
        )
    return changed


def _experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the modules that transformers' interface of experts drives, with their names."""
    for name, module in model.named_modules():
        own = isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)
        if own and hasattr(module, "has_gate") and not hasattr(module, ATTRIBUTE):
            yield name, module


@torch.no_grad()
def _check(name: str, module: torch.nn.Module, codes: Codes) -> None:
    """Compares the codes of the first and last expert with the numbers of the module."""
    generator = torch.Generator().manual_seed(0)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    dtype = module.down_proj.dtype
    x = torch.randn(2, width, generator=generator).to(dtype)
    ids = torch.tensor([[0], [codes.experts - 1]], dtype=torch.int32)
    top_k = codes.top_k
    ids = torch.cat([ids, torch.full((2, top_k - 1), -1, dtype=torch.int32)], 1)
    weights = torch.ones(2, top_k)
    wanted = torch.stack([_one(module, row, int(e)) for row, e in zip(x, ids[:, 0])]).float()
    found = codes.forward(x, ids, weights).float()
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not error <= ALLOWED:
        raise InvalidError(
            f"module {name}: experts of {codes.model} differ from the model's by {error:.2g} of the "
            "largest output: give the folder or file that the model was loaded from, or "
            "compare=False if transformers reported its experts as missing"
        )


def _one(module: torch.nn.Module, row: torch.Tensor, expert: int) -> torch.Tensor:
    """Returns one expert's output for a row, by the module's own numbers."""

    def product(name: str, row: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, name)[expert]
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return functional.linear(row, weight.T if module.is_transposed else weight, bias)

    hidden = product("gate_up_proj" if module.has_gate else "up_proj", row[None])
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    return product("down_proj", hidden)[0]


def _drop(module: torch.nn.Module, codes: Codes) -> None:
    """Puts codes in place of a module's numbers."""
    for name, weight in list(module.named_parameters(recurse=False)):
        empty = torch.empty(0, dtype=weight.dtype)
        setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
    setattr(module, ATTRIBUTE, codes)
    module.register_state_dict_pre_hook(lambda *_: codes.refuse("which no state dict holds"))
