"""The operations `moesaic::layer` and `moesaic::layer_backward` of torch.

A layer is one operation of its spec's text and of tensors, weights among them, so that autograd,
`torch.compile` and `torch.export` see one node. Kernels read weights where torch has them and write
gradients where torch wants them. Where nothing but autograd looks on, a call goes past torch's
dispatcher, which takes longer than a small layer.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Container, Mapping, NamedTuple, Optional, Sequence

import torch
from torch._C import _are_functorch_transforms_active
from torch.compiler import is_compiling

from . import _native
from ._devices import CPU, selected
from ._inputs import narrowed
from ._layers import (
    DTYPES,
    TORCH_DTYPES,
    Compiled,
    Plain,
    family,
    given,
    only_autograd,
    read_spec,
    taken,
    variant,
)
from ._native import BoundLayer, Error, InvalidError
from ._once import once, without_second

# Elements of a tensor that does not come from a heap's used pages.
LARGE = 1 << 18

# What says which hooks see saved tensors; torch 2.6 has no such function.
saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)

# Tensors of other types mean something of their own by an operation.
PLAIN = {torch.Tensor, torch.nn.Parameter}

# What a call returns beside y where the layer routes by itself.
ROUTING = ("topk_ids", "topk_weights", "counts")


def weight_names(text: str) -> tuple[str, ...]:
    """Returns the names of a spec's weights, in the order in which operations take them."""
    return family(text).names


def as_input(name: str, tensor: torch.Tensor, dtype: torch.dtype, place: Any = CPU) -> torch.Tensor:
    """Returns an input beside x in the type of its layer: integers from integers alone."""
    if tensor.dtype.is_floating_point != dtype.is_floating_point:
        raise InvalidError(f"input `{name}` is {tensor.dtype}, expected {dtype}")
    # On a GPU to look is to wait.
    own = narrowed(name, tensor) if dtype is torch.int32 and place is CPU else tensor
    return taken(own, dtype)


class Call:
    """The tensors of a call by name, in the layer's dtypes, alive for the call."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.alive: list[torch.Tensor] = []

    @property
    def given(self) -> list[tuple[str, int, str, tuple[int, ...]]]:
        return [given(name, tensor) for name, tensor in zip(self.names, self.alive)]

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.names.append(name)
        self.alive.append(tensor)
        return tensor

    def add_inputs(
        self,
        of: Compiled,
        x: torch.Tensor,
        names: Sequence[str] = (),
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """Adds x and further inputs; those are converted, x has the layer's type."""
        tokens = x.shape[0]
        self.add_checked(of, "x", taken(x, x.dtype), (tokens, of.model_dim))
        for name, tensor in zip(names, inputs):
            if name not in of.inputs:
                if name in of.allowed:
                    continue
                known = ", ".join(of.inputs)
                raise InvalidError(f"the layer reads no `{name}`, only {known}")
            dtype = of.inputs[name]
            own = as_input(name, tensor, dtype, of.place)
            if name == "topk_weights" and of.rescales:
                own = own.clone()
            shape = [tokens if size < 0 else size for size in of.shapes[name]]
            self.add_checked(of, name, own, tuple(shape))
        if len(self.names) < len(of.inputs):
            missing = next(name for name in of.inputs if name not in self.names)
            shape = tuple(tokens if size < 0 else size for size in of.shapes[missing])
            raise InvalidError(
                f"input `{missing}` is missing: the layer reads it beside x, {of.inputs[missing]} "
                f"of shape {shape}"
            )

    def add_checked(
        self, of: Compiled, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
    ) -> None:
        """Adds a tensor of somebody else, which the extension takes at its word."""
        of.check_device(name, tensor)
        if tensor.shape != shape:
            found = tuple(tensor.shape)
            raise InvalidError(f"tensor `{name}` has shape {found}, expected {shape}")
        self.add(name, tensor)

    def bind(
        self, of: Compiled, weights: Sequence[torch.Tensor]
    ) -> tuple[BoundLayer, Any]:
        """Returns the layer with these weights for this call, and what must outlive it."""
        return of.binding(tuple(self.names)).bind(weights)

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.alive]


def outputs(
    of: Compiled, call: Call, x: torch.Tensor, routing: bool = True
) -> list[torch.Tensor]:
    tokens, k = x.shape[0], of.top_k
    y = call.add("y", x.new_empty((tokens, of.output_dim)))
    if of.external and of.rescales and "topk_weights" in call.names:
        # The call rescales its copy of the weights in place, and backward reads it.
        ids, _, counts = _no_routing(x)
        return [y, ids, call.alive[call.names.index("topk_weights")], counts]
    if not routing:
        return [y, None, None, None]
    if of.external:
        return [y, *_no_routing(x)]
    shapes = [((tokens, k), torch.int32), ((tokens, k), torch.float32)]
    shapes += [((of.experts,), torch.int64)]
    routing = [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
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
    of = family(text).compiled(x, weights, False)
    call = Call()
    call.add_inputs(of, x, names, inputs)
    results = outputs(of, call, x, routing)
    bound, _kept = call.bind(of, weights)
    with selected(of.place):
        bound.forward(x.shape[0], call.addresses(), capacity_factor)
    return results


def _is_differentiated(x: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any([tensor.requires_grad for tensor in others])


class Options(NamedTuple):
    """What a call has beside its tensors."""

    text: str
    names: Sequence[str] = ()
    training: bool = False
    rng_key: Sequence[int] = ()
    capacity_factor: Optional[float] = None


def forward(
    options: Options,
    x: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    routing: bool = True,
) -> tuple[Any, ...]:
    """Runs a call that backward may follow: y, state, the routing, and losses if there are any."""
    of = family(options.text).compiled(x, weights, options.training)
    call = Call()
    call.add_inputs(of, x, options.names, inputs)
    # A backward pass asks which experts they are.
    routing = routing or (not of.external and _has_few_experts(of, x.shape[0], weights))
    y, *decision = outputs(of, call, x, routing)
    losses = torch.empty(len(of.losses), device=x.device) if of.losses else None
    for at, kind in enumerate(of.losses):
        call.add(f"loss.{kind}", losses[at : at + 1])
    key = tuple(options.rng_key) or _draw(of, options.training)
    bound, _kept = call.bind(of, weights)
    with selected(of.place):
        state = bound.forward_train(x.shape[0], call.addresses(), key, options.capacity_factor)
    return (y, torch.from_dlpack(state), *decision, losses)


def _has_few_experts(of: Compiled, tokens: int, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether most experts have no token, and gradients are large, on a CPU."""
    if of.place is not CPU or 2 * tokens * of.top_k > of.experts:
        return False
    return max(weight.numel() for weight in weights) >= LARGE


def few_experts(
    of: Compiled, topk_ids: Optional[torch.Tensor], weights: Sequence[torch.Tensor]
) -> Optional[list[int]]:
    """Returns the experts that have tokens, where most have none and gradients are large: those of
    the others are zeros that nobody has to compute. None otherwise, and on GPUs."""
    if topk_ids is None or not _has_few_experts(of, topk_ids.shape[0], weights):
        return None
    # Identity and zero experts have the last numbers, and no weights.
    return [expert for expert in topk_ids.unique().tolist() if 0 <= expert < of.weighted]


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device = torch.device("cpu")
) -> torch.Tensor:
    """Returns memory. On the CPU large memory is seldom new to the process."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _memory(shape, dtype)[0]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros on the CPU."""
    tensor, is_zero = _memory(shape, dtype)
    return tensor if is_zero else tensor.zero_()


def _memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Returns memory on the CPU, and whether it holds zeros."""
    count = math.prod(shape)
    if count < LARGE:
        return torch.empty(shape, dtype=dtype), False
    capsule, is_zero = _native.memory(-(-count * dtype.itemsize // 4))
    return torch.from_dlpack(capsule).view(dtype)[:count].view(shape), is_zero


def gradients(
    options: Options,
    dy: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    routing: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, Optional[torch.Tensor], list[Optional[torch.Tensor]]]:
    """Returns the gradients of x, of topk_weights and of weights, where there are any.

    `routing` is that of the call, unless the caller routes and nothing rescales the weights.
    """
    of = family(options.text).compiled(x, weights, options.training)
    # A choice of the caller's is an input.
    named = {**dict(zip(ROUTING, routing)), **dict(zip(options.names, inputs))}
    few = few_experts(of, named.get("topk_ids"), weights)
    dx, dtopk, sums = gradient_sums(of, options.names, dy, state, x, inputs, weights, routing, few)
    each = zip(sums, weights)
    return dx, dtopk, [None if g is None else _rounded(g, w) for g, w in each]


def gradient_sums(
    of: Compiled,
    names: Sequence[str],
    dy: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    routing: Sequence[torch.Tensor],
    few: Optional[list[int]],
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    copied: Container[str] = (),
) -> tuple[torch.Tensor, Optional[torch.Tensor], list[Optional[torch.Tensor]]]:
    """As `gradients`, but those of weights have the layer's dtypes. `into` has memory for those of
    some weights, which is used unless there are `few`. Those of the weights `copied` are not written
    where an expert is not among `few`."""
    if of.external:
        if of.rescales:
            rescaled = {"topk_weights": routing[1]}
            inputs = [rescaled.get(name, own) for name, own in zip(names, inputs)]
        routing = ()
    call = Call()
    call.add_inputs(of, x, names, inputs)
    call.add_checked(of, "dy", taken(dy, x.dtype), (x.shape[0], of.output_dim))
    shapes = ((x.shape[0], of.top_k), (x.shape[0], of.top_k), (of.experts,))
    for name, tensor, shape in zip(ROUTING, routing, shapes):
        call.add_checked(of, name, taken(tensor, tensor.dtype), shape)
    dx = call.add("dx", torch.empty_like(x, memory_format=torch.contiguous_format))
    dtopk = None
    if of.external:
        dtopk = call.add(
            "grad.topk_weights", torch.empty((x.shape[0], of.top_k), device=x.device)
        )
    found: list[Optional[torch.Tensor]] = [None] * len(weights)
    for at, (name, weight) in enumerate(zip(of.order, weights)):
        if name in of.trained:
            own = into.get(name) if few is None else None
            if own is None:
                own = _sums(weight, of.trained[name], few, name in copied)
            found[at] = call.add(f"grad.{name}", own)
    bound, _kept = call.bind(of, weights)
    with selected(of.place):
        bound.backward(int(state), x.shape[0], call.addresses(), few is not None)
    return dx, dtopk, found


def _sums(
    weight: torch.Tensor, dtype: torch.dtype, few: Optional[list[int]], copied: bool
) -> torch.Tensor:
    """Returns memory for a gradient, with zeros where kernels add to it: those of the experts `few`
    if they are copied, else all, because others are zeros of the result."""
    if few is None or not copied:
        return for_gradient(weight, dtype, few)
    sums = empty(weight.shape, dtype)
    for expert in few:
        sums[expert].zero_()
    return sums


def _rounded(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns a gradient in the dtype of its weight, which that of an expert's matrix has."""
    if gradient.dtype is weight.dtype:
        return gradient
    return empty(weight.shape, weight.dtype, weight.device).copy_(gradient)


def for_gradient(
    weight: torch.Tensor, dtype: torch.dtype, few: Optional[list[int]]
) -> torch.Tensor:
    """Returns memory for the gradient of a weight, of zeros if only `few` experts' is written."""
    if few is None:
        return empty(weight.shape, dtype, weight.device)
    return zeros(weight.shape, dtype)


def copy_experts(to: torch.Tensor, gradient: torch.Tensor, few: Optional[list[int]]) -> None:
    """Copies the gradient of all experts, or of `few`."""
    if few is None:
        to.copy_(gradient)
        return
    for expert in few:
        to[expert].copy_(gradient[expert])


def _draw(of: Compiled, training: bool) -> tuple[int, ...]:
    # torch's generator, so that `torch.manual_seed` repeats a run and activation checkpointing
    # repeats a call.
    if not (training and of.draws):
        return 0, 0, 0, 0
    seed, step = torch.randint(0, 2**62, (2,)).tolist()
    return seed, step, 0, 0


def keep_state(ctx: Any, state: torch.Tensor) -> None:
    """Keeps a state as long as its node where hooks copy what it saves, as `save_on_cpu` does: a
    copy of its number owns nothing. Those of checkpointing drop it, and run forward again."""
    hooks = saved_hooks(False)
    if hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        ctx.kept_state = state


class _Past(torch.autograd.Function):
    """A differentiable call past torch's dispatcher."""

    @staticmethod
    def forward(ctx, options: Options, routing: bool, x: torch.Tensor, *tensors: torch.Tensor):
        count = len(options.names)
        y, state, *rest = forward(options, x, tensors[:count], tensors[count:], routing)
        ctx.options = options
        decision = [tensor for tensor in rest[:-1] if tensor is not None]
        ctx.counts = len(decision), count
        ctx.save_for_backward(x, state, *decision, *tensors)
        keep_state(ctx, state)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor in rest if tensor is not None))
        return (y, *rest)

    @staticmethod
    @once
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, state, *tensors = ctx.saved_tensors
        decided, count = ctx.counts
        inputs, weights = tensors[decided : decided + count], tensors[decided + count :]
        dx, dtopk, dweights = gradients(
            ctx.options, dy, state, x, inputs, weights, tensors[:decided]
        )
        dinputs = _input_gradients(ctx.options.names, inputs, dtopk)
        return (None, None, dx, *dinputs, *dweights)


def _input_gradients(
    names: Sequence[str], inputs: Sequence[torch.Tensor], dtopk: Optional[torch.Tensor]
) -> list[Optional[torch.Tensor]]:
    return [
        dtopk.to(tensor.dtype) if name == "topk_weights" else None
        for name, tensor in zip(names, inputs)
    ]


# ---- Operations


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
    options = Options(spec, names.split(), training, rng_key, capacity_factor)
    *results, losses = forward(options, x, inputs, weights)
    # An operation returns tensors alone.
    return (*results, x.new_empty((0,), dtype=torch.float32) if losses is None else losses)


def _layer_fake(
    spec, x, names, inputs, weights, training, rng_key, capacity_factor
) -> tuple[torch.Tensor, ...]:
    of = read_spec(spec)
    y = x.new_empty((x.shape[0], of.output_dim))
    state = torch.empty((1,), dtype=torch.int64, device="cpu")
    losses = x.new_empty((len(of.losses) if training else 0,), dtype=torch.float32)
    if "topk_ids" in names.split():
        routing = _no_routing(x)
        if of.rescales:
            routing[1] = x.new_empty((x.shape[0], of.top_k), dtype=torch.float32)
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
    options = Options(spec, names.split(), training)
    dx, dtopk, found = gradients(options, dy, state, x, inputs, weights, routing)
    dtopk = torch.empty((0,), device=x.device) if dtopk is None else dtopk
    # An operation returns tensors alone.
    pairs = zip(found, weights)
    floats = [(g, w, w.dtype if w.is_floating_point() else torch.float32) for g, w in pairs]
    return dx, dtopk, [
        torch.zeros(w.shape, dtype=d, device=x.device) if g is None else g for g, w, d in floats
    ]


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
    if not is_compiling():
        keep_state(ctx, state)


def _backward(ctx, dy, *_):
    x, state, ids, chosen, counts, *rest = ctx.saved_tensors
    tensors, weights = rest[: ctx.count], rest[ctx.count :]
    dx, dtopk, dweights = torch.ops.moesaic.layer_backward(
        ctx.spec, dy, state, x, ctx.names, tensors, weights, [ids, chosen, counts], ctx.training
    )
    dinputs = _input_gradients(ctx.names.split(), tensors, dtopk)
    dweights = [d if w.is_floating_point() else None for d, w in zip(dweights, weights)]
    if not is_compiling() and only_autograd():
        dx, *rest = without_second([dx, *dinputs, *dweights])
        dinputs, dweights = rest[: ctx.count], rest[ctx.count :]
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
    for device in ("CPU", "CUDA"):  # torch's name for GPUs of ROCm, too
        library.impl("moesaic::layer", device, _layer)
        library.impl("moesaic::layer_backward", device, _layer_backward)
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
) -> tuple[Any, ...]:
    """Runs a layer of x [T, d]: y [T, d_out], topk_ids, topk_weights, counts and losses.

    Losses are None for a layer without any, and for one in evaluation that nobody differentiates.
    Without `routing` the decision may be None.
    """
    if not is_compiling() and _are_functorch_transforms_active():
        raise InvalidError(
            "torch.func's transforms, vmap, grad and jvp among them, do not reach into a layer: "
            "call it with all tokens, and differentiate by torch.autograd"
        )
    tensors = (x, *inputs, *weights)
    kinds = {type(tensor) for tensor in tensors}
    if only_autograd() and kinds <= PLAIN:
        if not training and not _is_differentiated(x, tensors):
            return (*evaluate(text, x, names, inputs, weights, capacity_factor, routing), None)
        options = Options(text, names, training, rng_key, capacity_factor)
        return _Past.apply(options, routing, *tensors)
    y, _, ids, chosen, counts, losses = torch.ops.moesaic.layer(
        text, x, " ".join(names), list(inputs), list(weights), training, list(rng_key),
        capacity_factor,
    )
    return y, ids, chosen, counts, losses


__all__ = ["Error", "InvalidError", "evaluate", "layer", "weight_names"]
