"""Compiled layers by the text of their spec, and where their weights lie."""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from ._changes import Copies
from ._devices import CPU, Place, place_of
from ._native import BoundLayer, InvalidError, Layer, Spec

DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
FLOATS = ("f32", "f16", "bf16")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Compiled:
    """A spec in the element types of a call: its layer, and the tensors that it takes."""

    def __init__(self, text: str, spec: Spec, layer: Any, place: Place = CPU) -> None:
        self.spec, self.place = spec, place
        self.layer = layer
        whole = read_spec(text)
        # The names of weights, in the order in which operations take them.
        self.order = tuple(name for name, _, _ in whole.weights)
        # Experts that have weights, which the router counts first.
        self.weighted = next(s[0] for name, _, s in whole.weights if name == "experts.up.weight")
        # What calls of the text may bring, though this one, without losses, does not read it.
        self.allowed = frozenset(name for name, _, _ in whole.inputs)
        # Read once: each look at a property of the extension builds its lists anew.
        self.weights = {name: TORCH_DTYPES[dtype] for name, dtype, _ in spec.weights}
        self.inputs = {name: TORCH_DTYPES[dtype] for name, dtype, _ in spec.inputs}
        self.shapes = {name: tuple(shape) for name, _, shape in spec.inputs}
        # The dtypes of gradients by the names of their weights.
        self.trained = {name: TORCH_DTYPES[dtype] for name, dtype in spec.trained}
        self.external = "topk_ids" in self.inputs
        self.model_dim, self.output_dim = spec.model_dim, spec.output_dim
        self.top_k, self.experts = spec.top_k, spec.experts
        self.losses, self.rescales, self.draws = spec.losses, spec.rescales, spec.draws
        self._bindings: dict[tuple[str, ...], _Binding] = {}

    def check_device(self, name: str, tensor: torch.Tensor) -> None:
        """Refuses a tensor of another device than the layer's."""
        place = self.place
        if tensor.is_cpu if place is CPU else tensor.get_device() == place.ordinal:
            return
        own = "the CPU" if place is CPU else f"GPU {place.ordinal}"
        raise InvalidError(f"tensor `{name}` is on {tensor.device}, its layer on {own}")

    def binding(self, names: tuple[str, ...]) -> "_Binding":
        """Returns what binds weights for calls that bring tensors of these names."""
        found = self._bindings.get(names)
        if found is None:
            found = self._bindings[names] = _Binding(self, names)
        return found


class _Binding:
    """Weights that are bound to a layer, for calls that bring tensors of the same names.

    Looking at a weight's name, type and shape costs as much as a call of a small layer, so what was
    seen at an address is not looked at again.
    """

    # More layers of one spec than a model has: beyond, the weights of each call lie elsewhere.
    MOST = 1024

    def __init__(self, of: Compiled, names: tuple[str, ...]) -> None:
        self._of, self._names = of, names
        # An evaluation has no weights of the noise.
        self.used = [at for at, name in enumerate(of.order) if name in of.weights]
        self._found: dict[int, tuple[BoundLayer, list[tuple[int, torch.dtype, int]]]] = {}

    def bind(self, weights: Sequence[torch.Tensor]) -> tuple[BoundLayer, Any]:
        """Returns the layer with these weights, and what must outlive its call beside them."""
        if len(self.used) != len(weights):
            weights = [weights[at] for at in self.used]
        bound = self._seen(weights)
        if bound is not None:
            return bound, None
        names = [self._of.order[at] for at in self.used]
        own = [converted(w, self._of.weights[name]) for name, w in zip(names, weights)]
        bound = self._seen(own)
        return bound or self._bind(names, own), own

    def _seen(self, weights: Sequence[torch.Tensor]) -> Optional[BoundLayer]:
        found = self._found.get(weights[0].data_ptr())
        if found is None or len(weights) != len(found[1]):
            return None
        for weight, (address, dtype, count) in zip(weights, found[1]):
            # All of them: `weight.data = ..` keeps the object and its version.
            if not (
                weight.data_ptr() == address
                and weight.dtype is dtype
                and weight.numel() == count
                and weight.is_contiguous()
            ):
                return None
        return found[0]

    def _bind(self, names: Sequence[str], own: Sequence[torch.Tensor]) -> BoundLayer:
        for name, tensor in zip(names, own):
            self._of.check_device(name, tensor)
        described = [given(name, tensor) for name, tensor in zip(names, own)]
        bound = self._of.layer.bind(described, self._names)
        if len(self._found) >= self.MOST:
            self._found.clear()
        seen = [(w.data_ptr(), w.dtype, w.numel()) for w in own]
        self._found[seen[0][0]] = bound, seen
        return bound


@functools.lru_cache(maxsize=None)
def read_spec(text: str) -> Spec:
    """Reads a spec's text, once."""
    return Spec(text)


@functools.lru_cache(maxsize=None)
def variant(text: str, weights: str, activations: str, training: bool) -> Spec:
    spec = read_spec(text)
    spec = spec if training else spec.evaluation()
    # In torch a gradient has the dtype of its weight; codes have none.
    return spec.with_precision(weights, activations, None if spec.quantized else weights)


class Family:
    """The layers of a spec's text by element types of experts and of x, training, and place."""

    def __init__(self, text: str) -> None:
        self._text = text
        # The names of weights, in the order in which operations take them.
        self.names: tuple[str, ...] = tuple(name for name, _, _ in read_spec(text).weights)
        # A weight in the type of the experts.
        self._at = self.names.index("experts.up.weight")
        self._found: dict[tuple[torch.dtype, torch.dtype, bool, Place], Compiled] = {}

    def compiled(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], training: bool
    ) -> Compiled:
        """Returns the layer in the dtypes of its experts and of x, where x is."""
        place = place_of(x)
        key = (weights[self._at].dtype, x.dtype, training, place)
        found = self._found.get(key)
        if found is None:
            spec = variant(self._text, *self.precision(x, weights), training)
            layer = Layer(spec, place)
            found = self._found[key] = Compiled(self._text, spec, layer, place)
        return found

    def precision(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[str, str]:
        """Returns the dtypes of a call: that of its experts and that of x."""
        dtypes = weights[self._at].dtype, x.dtype
        for dtype in dtypes:
            if DTYPES.get(dtype) not in FLOATS:
                raise InvalidError(
                    f"a layer computes in f32, f16 and bf16, not in {dtype}: convert x and the "
                    "module"
                )
        return DTYPES[dtypes[0]], DTYPES[dtypes[1]]


@functools.lru_cache(maxsize=None)
def family(text: str) -> Family:
    """Returns the layers of a spec's text."""
    return Family(text)


def given(name: str, tensor: torch.Tensor) -> tuple[str, int, str, tuple[int, ...]]:
    """Returns what the extension takes of a tensor, which must outlive the call."""
    if not tensor.is_contiguous():
        raise InvalidError(f"tensor `{name}` has strides {tensor.stride()}, expected contiguous")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidError(f"tensor `{name}` is {tensor.dtype}, which no layer has")
    return (name, tensor.data_ptr(), dtype, tensor.shape)


def taken(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    # A view with a negative bit has its numbers' negatives in memory.
    return tensor.detach().resolve_neg().to(dtype).contiguous()


# Weights in the types of their layers, such as a bf16 module's router in f32.
CONVERTED = Copies()


def converted(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `taken`, of a weight: it is converted again when it has changed."""
    if weight.dtype == dtype and weight.is_contiguous():
        return weight
    return CONVERTED.get(weight, (dtype,), lambda own: [taken(own, dtype)])[0]


def only_autograd() -> bool:
    """Returns whether nobody but autograd looks at operations: no compiler, no mode of torch."""
    return not (is_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active())


class Plain:
    """The last evaluation of a module of x alone: its bound layer, and where the weights lay.

    Names are imported rather than looked up, and functions not split: a call like the last costs a
    few microseconds beside the layer. It is empty in a copy of the module.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Any = None

    def __deepcopy__(self, memo: dict) -> "Plain":
        return Plain()

    def __reduce__(self) -> Any:
        return Plain, ()

    def evaluate(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Evaluates x [.., d] to y [.., d_out]; None unless all is as in the last call."""
        if is_compiling() or type(x) is not Tensor or self._last is None:
            return None
        dtype, width, output, run, seen = self._last
        if (
            x.dtype is not dtype
            or not (x.is_cpu and x.is_contiguous())
            or x.is_neg()
            or _len_torch_dispatch_stack()
            or _are_functorch_transforms_active()
        ):
            return None
        try:
            if x.shape[-1] != width:
                return None
            for parameters, name, address, dtype, size in seen:
                weight = parameters[name]
                # All of these: `weight.data = ..` keeps the object and its version.
                if (
                    weight.data_ptr() != address
                    or weight.dtype is not dtype
                    or weight.nbytes != size
                    or not weight.is_contiguous()
                ):
                    return None
        except LookupError:  # x is one number, or a weight is gone
            return None
        if is_grad_enabled() and (x.requires_grad or any(p[n].requires_grad for p, n, *_ in seen)):
            return None
        y = empty_like(x) if output == width else x.new_empty((*x.shape[:-1], output))
        run(x.numel() // width, x.data_ptr(), y.data_ptr())
        return y

    def see(
        self,
        of: Compiled,
        x: torch.Tensor,
        owners: Sequence[tuple[torch.nn.Module, str]],
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Keeps what an evaluation of x like this one needs, if its weights are read in place."""
        self._last = None
        if of.place is not CPU:
            return
        binding, seen = of.binding(("x", "y")), []
        for at in binding.used:
            (owner, name), weight = owners[at], weights[at]
            own = weight.dtype is of.weights[of.order[at]] and weight.is_contiguous()
            if not own or owner._parameters.get(name) is not weight:
                return
            seen.append((owner._parameters, name, weight.data_ptr(), weight.dtype, weight.nbytes))
        bound, _ = binding.bind(weights)
        self._last = x.dtype, of.model_dim, of.output_dim, bound.evaluate, seen
