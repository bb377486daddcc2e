"""The operations `moesaic::layer` and `moesaic::layer_backward` of torch.

A layer is one operation of its spec's text and of tensors, weights among them, so that autograd,
`torch.compile` and `torch.export` see one node. Kernels read weights where torch has them and write
gradients where torch wants them.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence

import torch

from ._native import Error, InvalidError, Layer, Spec

DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
FLOATS = ("f32", "f16", "bf16")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

# What a call returns beside y where the layer routes by itself.
ROUTING = ("topk_ids", "topk_weights", "counts")


class Compiled:
    """A spec in the element types of a call: its layer, and the tensors that it takes."""

    def __init__(self, spec: Spec, layer: Any) -> None:
        self.spec = spec
        self.layer = layer
        # Read once: each look at a property of the extension builds its lists anew.
        self.weights = {name: TORCH_DTYPES[dtype] for name, dtype, _ in spec.weights}
        self.inputs = {name: TORCH_DTYPES[dtype] for name, dtype, _ in spec.inputs}
        self.trained = frozenset(spec.trained)
        self.external = "topk_ids" in self.inputs
        self.output_dim, self.top_k, self.experts = spec.output_dim, spec.top_k, spec.experts
        self.losses, self.rescales = spec.losses, spec.rescales


@functools.lru_cache(maxsize=None)
def read_spec(text: str) -> Spec:
    """Reads a spec's text, once."""
    return Spec(text)


@functools.lru_cache(maxsize=None)
def variant(text: str, weights: str, activations: str, training: bool) -> Spec:
    spec = read_spec(text)
    spec = spec if training else spec.evaluation()
    return spec.with_precision(weights, activations)


@functools.lru_cache(maxsize=None)
def _compiled(text: str, weights: str, activations: str, training: bool) -> Compiled:
    spec = variant(text, weights, activations, training)
    return Compiled(spec, Layer(spec))


def precision(text: str, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[str, str]:
    """Returns the dtypes of a call: that of its experts and that of x."""
    at = _expert_weight(text)
    own, tokens = DTYPES.get(weights[at].dtype), DTYPES.get(x.dtype)
    for found, dtype in ((own, weights[at].dtype), (tokens, x.dtype)):
        if found not in FLOATS:
            raise InvalidError(
                f"a layer computes in f32, f16 and bf16, not in {dtype}: convert x and the module"
            )
    return own, tokens


def compiled(
    text: str, x: torch.Tensor, weights: Sequence[torch.Tensor], training: bool
) -> Compiled:
    """Returns the layer in the dtypes of its experts and of x."""
    return _compiled(text, *precision(text, x, weights), training)


def given(name: str, tensor: torch.Tensor) -> tuple[str, int, str, tuple[int, ...]]:
    """Returns what the extension takes of a tensor, which must outlive the call."""
    if not tensor.is_cpu:
        raise InvalidError(
            f"tensor `{name}` is on {tensor.device}: this package runs layers on the CPU"
        )
    if not tensor.is_contiguous():
        raise InvalidError(f"tensor `{name}` has strides {tensor.stride()}, expected contiguous")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidError(f"tensor `{name}` is {tensor.dtype}, which no layer has")
    return (name, tensor.data_ptr(), dtype, tensor.shape)


def taken(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(dtype).contiguous()


class Call:
    """The tensors of a call by name, in the layer's dtypes, alive for the call."""

    def __init__(self) -> None:
        self.given: list[tuple[str, int, str, tuple[int, ...]]] = []
        self.alive: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(given(name, tensor))
        self.alive.append(tensor)
        return tensor

    def add_weights(
        self, of: Compiled, names: Sequence[str], weights: Sequence[torch.Tensor]
    ) -> None:
        for name, weight in zip(names, weights):
            # An evaluation has no weights of the noise.
            if name in of.weights:
                self.add(name, taken(weight, of.weights[name]))

    def add_inputs(
        self, of: Compiled, names: Sequence[str], inputs: Sequence[torch.Tensor]
    ) -> None:
        for name, tensor in zip(names, inputs):
            if name not in of.inputs:
                if name in read_spec_inputs(str(of.spec)):
                    continue
                known = ", ".join(of.inputs)
                raise InvalidError(f"the layer reads no `{name}`, only {known}")
            dtype = of.inputs[name]
            if tensor.dtype.is_floating_point != dtype.is_floating_point:
                raise InvalidError(f"input `{name}` is {tensor.dtype}, expected {dtype}")
            own = taken(tensor, dtype)
            if name == "topk_weights" and of.rescales:
                own = own.clone()
            self.add(name, own)


@functools.lru_cache(maxsize=None)
def read_spec_inputs(text: str) -> frozenset[str]:
    """Returns the names of a spec's inputs."""
    return frozenset(name for name, _, _ in read_spec(text).inputs)


@functools.lru_cache(maxsize=None)
def weight_names(text: str) -> tuple[str, ...]:
    """Returns the names of a spec's weights, in the order in which operations take them."""
    return tuple(name for name, _, _ in read_spec(text).weights)


@functools.lru_cache(maxsize=None)
def _expert_weight(text: str) -> int:
    """Returns the place of a weight in the dtype of the experts."""
    return weight_names(text).index("experts.up.weight")


def outputs(
    of: Compiled, call: Call, x: torch.Tensor, routing: bool = True
) -> list[torch.Tensor]:
    tokens, k = x.shape[0], of.top_k
    y = call.add("y", x.new_empty((tokens, of.output_dim)))
    if of.external:
        return [y, *_no_routing(x)]
    if not routing:
        return [y, None, None, None]
    shapes = [((tokens, k), torch.int32), ((tokens, k), torch.float32)]
    shapes += [((of.experts,), torch.int64)]
    routing = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for name, tensor in zip(ROUTING, routing):
        call.add(name, tensor)
    return [y, *routing]


def _no_routing(x: torch.Tensor) -> list[torch.Tensor]:
    dtypes = (torch.int32, torch.float32, torch.int64)
    return [x.new_empty((0,), dtype=dtype) for dtype in dtypes]


def evaluate(
    text: str,
    x: torch.Tensor,
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    capacity_factor: Optional[float],
    routing: bool = True,
) -> list[torch.Tensor]:
    """Evaluates x [T, d] to y [T, d_out], topk_ids, topk_weights and counts, without autograd.

    Without `routing` the last three are None.
    """
    of, call = compiled(text, x, weights, False), Call()
    call.add("x", x.contiguous())
    call.add_inputs(of, names, inputs)
    call.add_weights(of, weight_names(text), weights)
    results = outputs(of, call, x, routing)
    of.layer.forward(x.shape[0], call.given, capacity_factor)
    return results


def _layer(
    spec: str,
    x: torch.Tensor,
    names: str,
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    training: bool,
    rng_key: list[int],
    capacity_factor: Optional[float],
) -> tuple[torch.Tensor, ...]:
    of, call = compiled(spec, x, weights, training), Call()
    call.add("x", x.contiguous())
    call.add_inputs(of, names.split(), inputs)
    call.add_weights(of, weight_names(spec), weights)
    results = outputs(of, call, x)
    losses = torch.empty(len(of.losses))
    for at, kind in enumerate(of.losses):
        call.add(f"loss.{kind}", losses[at : at + 1])
    key = rng_key or _draw(of, training)
    state = of.layer.forward_train(x.shape[0], call.given, tuple(key), capacity_factor)
    y, *routing = results
    return (y, torch.from_dlpack(state), *routing, losses)


def _draw(of: Compiled, training: bool) -> list[int]:
    # torch's generator, so that `torch.manual_seed` repeats a run and activation checkpointing
    # repeats a call.
    if not (training and of.spec.draws):
        return [0, 0, 0, 0]
    seed, step = torch.randint(0, 2**62, (2,)).tolist()
    return [seed, step, 0, 0]


def _layer_fake(
    spec, x, names, inputs, weights, training, rng_key, capacity_factor
) -> tuple[torch.Tensor, ...]:
    of = read_spec(spec)
    y = x.new_empty((x.shape[0], of.output_dim))
    state = x.new_empty((1,), dtype=torch.int64)
    losses = x.new_empty((len(of.losses) if training else 0,), dtype=torch.float32)
    if "topk_ids" in names.split():
        routing = _no_routing(x)
    else:
        shape = (x.shape[0], of.top_k)
        routing = [x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)]
        routing += [x.new_empty((of.experts,), dtype=torch.int64)]
    return (y, state, *routing, losses)


def _layer_backward(
    spec: str,
    dy: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    names: str,
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    routing: list[torch.Tensor],
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    of, call = compiled(spec, x, weights, training), Call()
    call.add("x", x.contiguous())
    call.add("dy", taken(dy, x.dtype))
    call.add_inputs(of, names.split(), inputs)
    call.add_weights(of, weight_names(spec), weights)
    if not of.external:
        for name, tensor in zip(ROUTING, routing):
            call.add(name, tensor.contiguous())
    dx = call.add("dx", torch.empty_like(x, memory_format=torch.contiguous_format))
    dtopk = torch.empty((0,))
    if of.external:
        dtopk = call.add("grad.topk_weights", torch.empty((x.shape[0], of.top_k)))
    gradients = []
    for name, weight in zip(weight_names(spec), weights):
        if name in of.trained:
            shape = tuple(weight.shape)
            gradients.append(call.add(f"grad.{name}", torch.empty(shape, dtype=torch.float32)))
        else:
            gradients.append(torch.zeros(weight.shape, dtype=torch.float32))
    of.layer.backward(int(state), call.given)
    pairs = zip(gradients, weights)
    rounded = [g.to(w.dtype) if w.is_floating_point() else g for g, w in pairs]
    return dx, dtopk, rounded


def _layer_backward_fake(spec, dy, state, x, names, inputs, weights, routing, training):
    of = read_spec(spec)
    external = "topk_ids" in names.split()
    dtopk = x.new_empty((x.shape[0], of.top_k) if external else (0,), dtype=torch.float32)
    gradients = [w if w.is_floating_point() else w.float() for w in weights]
    dense = torch.contiguous_format
    dweights = [torch.empty_like(g, memory_format=dense) for g in gradients]
    return torch.empty_like(x, memory_format=dense), dtopk, dweights


def _setup(ctx, inputs, output) -> None:
    spec, x, names, tensors, weights, training, rng_key, _ = inputs
    _, state, ids, chosen, counts, losses = output
    ctx.mark_non_differentiable(state, ids, counts, losses, chosen)
    ctx.spec, ctx.names, ctx.training = spec, names, training
    ctx.count, ctx.key = len(tensors), [None] * len(rng_key)
    ctx.save_for_backward(x, state, ids, chosen, counts, *tensors, *weights)


def _backward(ctx, dy, *_):
    x, state, ids, chosen, counts, *rest = ctx.saved_tensors
    tensors, weights = rest[: ctx.count], rest[ctx.count :]
    dx, dtopk, dweights = torch.ops.moesaic.layer_backward(
        ctx.spec, dy, state, x, ctx.names, tensors, weights, [ids, chosen, counts], ctx.training
    )
    names = ctx.names.split()
    dinputs = [
        dtopk.to(t.dtype) if name == "topk_weights" else None for name, t in zip(names, tensors)
    ]
    dweights = [d if w.is_floating_point() else None for d, w in zip(dweights, weights)]
    return None, dx, None, dinputs, dweights, None, ctx.key, None


def _define() -> None:
    library = torch.library
    library.define(
        "moesaic::layer",
        "(str spec, Tensor x, str names, Tensor[] inputs, Tensor[] weights, bool training, "
        "SymInt[] rng_key, float? capacity_factor) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    library.define(
        "moesaic::layer_backward",
        "(str spec, Tensor dy, Tensor state, Tensor x, str names, Tensor[] inputs, "
        "Tensor[] weights, Tensor[] routing, bool training) -> (Tensor, Tensor, Tensor[])",
    )
    library.impl("moesaic::layer", "CPU", _layer)
    library.impl("moesaic::layer_backward", "CPU", _layer_backward)
    library.register_fake("moesaic::layer", _layer_fake)
    library.register_fake("moesaic::layer_backward", _layer_backward_fake)
    library.register_autograd("moesaic::layer", _backward, setup_context=_setup)


_define()


def layer(
    text: str,
    x: torch.Tensor,
    names: Sequence[str],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    training: bool,
    rng_key: Sequence[int] = (),
    capacity_factor: Optional[float] = None,
    routing: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Runs a layer of x [T, d]: y [T, d_out], topk_ids, topk_weights, counts and losses.

    A call that nobody differentiates, of a layer in evaluation, goes past torch's dispatcher; it
    has no losses, and without `routing` y alone.
    """
    if not training and not torch.compiler.is_compiling():
        wanted = torch.is_grad_enabled() and any(
            t.requires_grad for t in (x, *inputs, *weights)
        )
        if not wanted and type(x) is torch.Tensor:
            results = evaluate(text, x, names, inputs, weights, capacity_factor, routing)
            return (*results, None)
    y, _, ids, chosen, counts, losses = torch.ops.moesaic.layer(
        text, x, " ".join(names), list(inputs), list(weights), training, list(rng_key),
        capacity_factor,
    )
    return y, ids, chosen, counts, losses


__all__ = ["Error", "InvalidError", "evaluate", "layer", "weight_names"]
