"""Experts of transformers' models, computed by moesaic.

    import moesaic.transformers
    moesaic.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moesaic")

The model's router decides, moesaic computes the experts of the decision, forward and backward. A
model whose gate or activation no spec describes is refused with its name.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch
from torch.nn import functional

from . import ops
from ._codes import ATTRIBUTE, Codes, keep_codes
from ._changes import Copies, Stamps
from ._layers import CONVERTED
from ._native import InvalidError, PackedLayer, Spec
from ._once import once

NAME = "moesaic"

# The activations of specs, which `act_fn` is held against.
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


class Form(NamedTuple):
    """The function of an expert between its two GEMMs."""

    gated: bool
    activation: str
    interleaved: bool = False
    alpha: float = 1.0
    clamp: Optional[float] = None
    up_offset: float = 0.0

    def __call__(self, pre: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return ACTIVATIONS[self.activation](pre)
        if self.interleaved:
            gate, up = pre[..., 0::2], pre[..., 1::2]
        else:
            gate, up = pre.chunk(2, -1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        if self.activation == "silu":
            gate = gate * torch.sigmoid(self.alpha * gate)
        else:
            gate = ACTIVATIONS[self.activation](gate)
        return gate * (up + self.up_offset)

    def toml(self, bias: bool) -> str:
        """Returns the keys of `experts`."""
        keys = [f'form = "{"gated" if self.gated else "plain"}"']
        keys += [f'activation = "{self.activation}"', f"bias = {str(bias).lower()}"]
        if self.alpha != 1.0:
            keys.append(f"alpha = {self.alpha!r}")
        if self.clamp is not None:
            keys.append(f"clamp = {self.clamp!r}")
        if self.up_offset != 0.0:
            keys.append(f"up_offset = {self.up_offset!r}")
        return "{ " + ", ".join(keys) + " }"


def _numbers(experts: torch.nn.Module, words: tuple[str, ...]) -> Iterator[float]:
    """Numbers among a module's attributes, and its config's, whose names have one of the words."""
    for owner in (experts, getattr(experts, "config", None)):
        for name, value in vars(owner).items() if owner is not None else ():
            named = any(word in name for word in words)
            if named and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield float(value)


def _candidates(experts: torch.nn.Module) -> Iterator[Form]:
    """Forms that an expert may have, likely ones first."""
    if not experts.has_gate:
        yield from (Form(False, name) for name in ACTIVATIONS)
        return
    orders = (not experts.is_concatenated, experts.is_concatenated)
    clamps = [None, *dict.fromkeys(_numbers(experts, ("limit", "clamp")))]
    alphas = dict.fromkeys([1.0, *_numbers(experts, ("alpha", "beta")), 1.702])
    for interleaved, clamp, offset in itertools.product(orders, clamps, (0.0, 1.0)):
        if clamp is not None and clamp <= 0.0:
            continue
        for alpha in (alpha for alpha in alphas if alpha > 0.0):
            yield Form(True, "silu", interleaved, alpha, clamp, offset)
        for name in ACTIVATIONS:
            yield Form(True, name, interleaved, 1.0, clamp, offset)


@torch.no_grad()
def _form(experts: torch.nn.Module) -> Form:
    """Finds the form of an expert by its values on numbers small and large."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 1.0, 30.0, 3000.0]).repeat_interleave(8)[:, None]
    pre = scale * torch.randn(32, 16, generator=generator)
    own = experts._apply_gate if experts.has_gate else experts.act_fn
    try:
        wanted = own(pre.clone())
    except Exception as error:
        raise InvalidError(f"{_name(experts)}: its gate cannot be looked at: {error}") from error
    for form in _candidates(experts):
        found = form(pre)
        same = found.shape == wanted.shape
        if same and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6):
            return form
    act = getattr(experts, "act_fn", None)
    raise InvalidError(
        f"{_name(experts)} has a gate (`_apply_gate`, act_fn = {act}) that no spec of moesaic "
        f"describes; the activations are {', '.join(ACTIVATIONS)}, with clamp, alpha and "
        f'up_offset: run this model with experts_implementation="eager"'
    )


def _name(experts: torch.nn.Module) -> str:
    return f"{type(experts).__module__}.{type(experts).__qualname__}"


class _Plan(NamedTuple):
    """The spec of a module's experts for one K."""

    text: str
    gated: bool
    interleaved: bool
    transposed: bool
    bias: bool
    names: tuple[str, ...]


_plans: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, _Plan]] = weakref.WeakKeyDictionary()


def _plan(experts: torch.nn.Module, top_k: int) -> _Plan:
    own = _plans.setdefault(experts, {})
    if top_k not in own:
        own[top_k] = _new_plan(experts, top_k)
    return own[top_k]


def _new_plan(experts: torch.nn.Module, top_k: int) -> _Plan:
    form = _form(experts)
    count, first, second = experts.down_proj.shape
    model, hidden = (second, first) if experts.is_transposed else (first, second)
    spec = Spec(
        'name = "experts"\n'
        f"shape = {{ model_dim = {model}, hidden_dim = {hidden}, experts = {count}, "
        f"top_k = {top_k} }}\n"
        'router = { kind = "external" }\n'
        f"experts = {form.toml(bool(experts.has_bias))}\n"
    )
    return _Plan(
        spec.toml,
        form.gated,
        form.interleaved,
        bool(experts.is_transposed),
        bool(experts.has_bias),
        tuple(ops.weight_names(spec.toml)),
    )


# ---- Weights in the layout of moesaic


_copies = Copies()


def refresh() -> None:
    """Has every copy of a weight made again, those of `MoE` in other types among them.

    Copies follow changes by themselves, unless somebody changes few elements of a weight through
    `.data`, past torch's version counter.
    """
    _copies.clear()
    _packed.clear()
    CONVERTED.clear()


def _parts(weight: torch.Tensor, fused: bool, interleaved: bool, transposed: bool):
    """Views of a weight as matrices [E, out, in]: gate and up of a fused one."""
    weight = weight.transpose(1, 2) if transposed else weight
    if not fused:
        return [weight]
    if interleaved:
        return [weight[:, 0::2], weight[:, 1::2]]
    return list(weight.chunk(2, 1))


def _unpack(
    weight: torch.Tensor, fused: bool, interleaved: bool, transposed: bool
) -> list[torch.Tensor]:
    kind = (fused, interleaved, transposed)
    dense = torch.contiguous_format
    copies = _copies.get(
        weight, kind, lambda w: [part.clone(memory_format=dense) for part in _parts(w, *kind)]
    )
    return [copy.detach() for copy in copies]


def _unpack_fake(weight, fused, interleaved, transposed):
    parts = _parts(weight, fused, interleaved, transposed)
    return [part.new_empty(part.shape) for part in parts]


def _unpack_setup(ctx, inputs, output) -> None:
    weight, *ctx.kind = inputs
    ctx.shape, ctx.dtype = weight.shape, weight.dtype


def _unpack_backward(ctx, gradients):
    fused, interleaved, transposed = ctx.kind
    if not fused:
        whole = gradients[0]
    elif interleaved:
        whole = torch.stack(gradients, 2).flatten(1, 2)
    else:
        whole = torch.cat(gradients, 1)
    whole = whole.transpose(1, 2).contiguous() if transposed else whole
    return whole, None, None, None


def _pack(
    gradients: list[torch.Tensor], like: torch.Tensor, kind: tuple, few: Optional[list[int]]
) -> torch.Tensor:
    """Returns the gradient of a weight from those of its parts; all but `few` experts' are zero."""
    whole = ops.for_gradient(like, like.dtype, few)
    for part, gradient in zip(_parts(whole, *kind), gradients):
        ops.copy_experts(part, gradient, few)
    return whole


torch.library.define(
    "moesaic::unpack",
    "(Tensor weight, bool fused, bool interleaved, bool transposed) -> Tensor[]",
)
for _device in ("CPU", "CUDA"):
    torch.library.impl("moesaic::unpack", _device, _unpack)
torch.library.register_fake("moesaic::unpack", _unpack_fake)
torch.library.register_autograd("moesaic::unpack", _unpack_backward, setup_context=_unpack_setup)


def _weights(experts: torch.nn.Module, plan: _Plan) -> list[torch.Tensor]:
    """The weights of the spec, in its order; differentiable."""
    unpack = torch.ops.moesaic.unpack
    named: dict[str, torch.Tensor] = {}
    if plan.gated:
        gate, up = unpack(experts.gate_up_proj, True, plan.interleaved, plan.transposed)
        named |= {"experts.gate.weight": gate, "experts.up.weight": up}
    else:
        up = experts.up_proj
        named["experts.up.weight"] = unpack(up, False, False, True)[0] if plan.transposed else up
    down = experts.down_proj
    named["experts.down.weight"] = unpack(down, False, False, True)[0] if plan.transposed else down
    if plan.bias:
        named |= _biases(experts, plan)
    return [named[name] for name in plan.names]


def _biases(experts: torch.nn.Module, plan: _Plan) -> dict[str, torch.Tensor]:
    named = {"experts.down.bias": experts.down_proj_bias}
    if not plan.gated:
        return named | {"experts.up.bias": experts.up_proj_bias}
    both = experts.gate_up_proj_bias
    gate, up = (both[:, 0::2], both[:, 1::2]) if plan.interleaved else both.chunk(2, 1)
    return named | {"experts.gate.bias": gate, "experts.up.bias": up}


def _is_halves(like: torch.Tensor, kind: tuple) -> bool:
    """Returns whether a gradient is packed in place: a large one, whose second copy would cost more
    than the kernels that compute it."""
    return kind == (True, False, False) and like.numel() >= ops.LARGE


def _halves(whole: torch.Tensor) -> torch.Tensor:
    """Returns the memory of [E, 2 h, d] as [2, E, h, d]: gates of all experts before ups of all."""
    experts, both, width = whole.shape
    return whole.view(2, experts, both // 2, width)


def _alternate(whole: torch.Tensor) -> torch.Tensor:
    """Moves each expert's up behind its gate, within the memory that `_halves` gave."""
    experts = whole.shape[0]
    matrices = _halves(whole).flatten(0, 1)
    moved = [False] * len(matrices)
    for first in range(len(matrices)):
        if moved[first]:
            continue
        to, kept = first, matrices[first].clone()
        while True:
            moved[to] = True
            place = to // 2 + (to % 2) * experts
            if place == first:
                matrices[to].copy_(kept)
                break
            matrices[to].copy_(matrices[place])
            to = place
    return whole


# ---- Calls


def _kinds(plan: _Plan) -> list[tuple[str, tuple[bool, bool, bool], list[str]]]:
    """Returns parameters of a module: name, how it is unpacked, the weights that it becomes."""
    fused, turned = plan.gated, plan.transposed
    first = "gate_up_proj" if fused else "up_proj"
    up = ["experts.gate.weight", "experts.up.weight"] if fused else ["experts.up.weight"]
    return [
        (first, (fused, fused and plan.interleaved, turned), up),
        ("down_proj", (False, False, turned), ["experts.down.weight"]),
    ]


class _Experts(torch.autograd.Function):
    """The experts of a decision, differentiable: weights are copied and gradients packed in one."""

    @staticmethod
    def forward(ctx, plan, experts, x, ids, chosen, *sources):
        kinds = _kinds(plan)
        named = _biases(experts, plan) if plan.bias else {}
        for source, (_, kind, names) in zip(sources, kinds):
            parts = _unpack(source, *kind) if any(kind) else [source]
            named.update(zip(names, parts))
        weights = [named[name] for name in plan.names]
        options = ops.Options(plan.text, ("topk_ids", "topk_weights"))
        y, state, *_ = ops.forward(options, x, [ids, chosen], weights, False)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.options, ctx.kinds = plan, options, kinds
        # Shared copies, not this call's.
        ctx.weights = weights
        ctx.save_for_backward(x, state, ids, chosen, *sources)
        ops.keep_state(ctx, state)
        return y

    @staticmethod
    @once
    def backward(ctx, dy):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, state, ids, chosen, *sources = ctx.saved_tensors
        plan, weights, inputs = ctx.plan, ctx.weights, [ids, chosen]
        of = ops.family(plan.text).compiled(x, weights, False)
        few, whole, into = ops.few_experts(of, ids, weights), None, {}
        if few is None and _is_halves(sources[0], ctx.kinds[0][1]):
            whole = ops.empty(sources[0].shape, sources[0].dtype, x.device)
            into = dict(zip(ctx.kinds[0][2], _halves(whole)))
        copied = [name for _, kind, names in ctx.kinds if any(kind) for name in names]
        dx, dchosen, found = ops.gradient_sums(
            of, ctx.options.names, dy, state, x, inputs, weights, [], few, into, copied
        )
        named = dict(zip(plan.names, found))
        packed = []
        for source, (_, kind, names) in zip(sources, ctx.kinds):
            parts = [named[name] for name in names]
            if whole is not None and len(parts) == 2:
                packed.append(_alternate(whole))
            else:
                packed.append(_pack(parts, source, kind, few) if any(kind) else parts[0])
        packed += _bias_gradients(plan, named, sources[len(ctx.kinds) :])
        return (None, None, dx, None, dchosen, *packed)


def _bias_gradients(
    plan: _Plan, named: dict[str, torch.Tensor], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    if not plan.bias:
        return []
    first, down = named["experts.up.bias"], named["experts.down.bias"]
    if plan.gated:
        both = [named["experts.gate.bias"], first]
        first = torch.stack(both, 2).flatten(1) if plan.interleaved else torch.cat(both, 1)
    return [gradient.to(source.dtype) for gradient, source in zip((first, down), like)]


class _Packed:
    """A layer for inference of a module's experts, whose weights follow the module's."""

    def __init__(self, experts: torch.nn.Module, plan: _Plan, dtypes: tuple[str, str]) -> None:
        self._stamps = Stamps()
        self._plan = plan
        for name, tensor in self._sources(experts):
            self._stamps.changed(name, tensor)
        spec = Spec(plan.text).with_precision(*dtypes)
        self._layer = PackedLayer(spec, dict(self._tensors(experts, None)))

    def _sources(self, experts: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        names = ["gate_up_proj" if self._plan.gated else "up_proj", "down_proj"]
        if self._plan.bias:
            names += [f"{name}_bias" for name in names]
        return [(name, getattr(experts, name)) for name in names]

    def _tensors(
        self, experts: torch.nn.Module, changed: Optional[set[str]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self._plan
        for source, tensor in self._sources(experts):
            if changed is not None and source not in changed:
                continue
            part = "down" if source.startswith("down") else "up"
            if source.endswith("_bias"):
                named = {k: v for k, v in _biases(experts, plan).items() if _of(k, part)}
                yield from ((name, bias.detach().contiguous()) for name, bias in named.items())
                continue
            fused = plan.gated and part == "up"
            parts = _parts(tensor.detach(), fused, plan.interleaved, plan.transposed)
            names = ["gate", "up"] if fused else [part]
            for name, matrix in zip(names, parts):
                yield f"experts.{name}.weight", matrix.contiguous()

    def forward(
        self, experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        sources = self._sources(experts)
        changed = {name for name, tensor in sources if self._stamps.changed(name, tensor)}
        if changed:
            for name, tensor in self._tensors(experts, changed):
                self._layer.set_weight(name, tensor)
        call = self._layer.forward(x, topk_ids=ids, topk_weights=weights)
        return torch.from_dlpack(call["y"])


def _of(name: str, part: str) -> bool:
    return (name.split(".")[1] == "down") == (part == "down")


_packed: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, _Packed]] = (
    weakref.WeakKeyDictionary()
)


def _inference(
    experts: torch.nn.Module,
    plan: _Plan,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    dtypes = (ops.DTYPES[experts.down_proj.dtype], ops.DTYPES[x.dtype])
    key = (plan.text, dtypes, experts.down_proj.shape)
    own = _packed.setdefault(experts, {})
    if key not in own:
        own.clear()  # one copy of the weights at a time
        own[key] = _Packed(experts, plan, dtypes)
    return own[key].forward(experts, x, ids, weights)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes the experts of a decision, as transformers' own implementations do.

    hidden_states [T, d]; top_k_index [T, K], in which an id beyond the experts masks a slot;
    top_k_weights [T, K]. Returns [T, d].
    """
    # Older releases of transformers 5 have no such attribute.
    if getattr(self, "has_post_expert_norm", False):
        return _normalized(self, hidden_states, top_k_index, top_k_weights)
    return _computed(self, hidden_states, top_k_index, top_k_weights)


def _normalized(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes experts with a norm of torch's between the output of each and its weight: every choice
    is a row of its own, so that the norm has the output of one expert."""
    width, top_k = hidden_states.shape[-1], top_k_index.shape[-1]
    rows = hidden_states.reshape(-1, width).repeat_interleave(top_k, 0)
    ids = top_k_index.reshape(-1, 1)
    outputs = _computed(experts, rows, ids, torch.ones_like(ids, dtype=top_k_weights.dtype))
    outputs = experts.post_expert_norm(outputs)
    chosen = ids < experts.down_proj.shape[0]
    weighted = torch.where(chosen, outputs * top_k_weights.reshape(-1, 1), 0.0)
    summed = weighted.reshape(-1, top_k, width).sum(1)
    return summed.to(hidden_states.dtype).reshape(hidden_states.shape)


def _computed(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    codes: Optional[Codes] = getattr(experts, ATTRIBUTE, None)
    count = experts.down_proj.shape[0] if codes is None else codes.experts
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    ids = top_k_index.reshape(x.shape[0], -1)
    ids = torch.where(ids < count, ids, -1).to(torch.int32)
    chosen = top_k_weights.reshape(ids.shape).float()
    if codes is not None:
        return _of_codes(codes, x, ids, chosen).reshape(hidden_states.shape)
    plan = _Plan(*_plan_of(experts, top_k_index.shape[-1]))
    differentiated = torch.compiler.is_compiling() or _is_differentiated(experts, x, chosen)
    if not differentiated and x.is_cpu:
        y = _inference(experts, plan, x.detach().contiguous(), ids, chosen.detach().contiguous())
    elif differentiated and ops.only_autograd() and type(x) is torch.Tensor:
        sources = [getattr(experts, name) for name, _, _ in _kinds(plan)]
        if plan.bias:
            sources += [experts.gate_up_proj_bias if plan.gated else experts.up_proj_bias]
            sources += [experts.down_proj_bias]
        y = _Experts.apply(plan, experts, x, ids, chosen, *sources)
    else:
        names = ["topk_ids", "topk_weights"]
        weights = _weights(experts, plan)
        y = ops.layer(plan.text, x, names, [ids, chosen], weights, False)[0]
    return y.reshape(hidden_states.shape)


class _OfCodes(torch.autograd.Function):
    """Experts that are codes; a backward pass through them is an error."""

    @staticmethod
    def forward(ctx, codes: Codes, x, ids, weights):
        ctx.codes = codes
        return codes.forward(x, ids, weights)

    @staticmethod
    def backward(ctx, _dy):
        ctx.codes.refuse("which have no gradients")


@torch.compiler.disable
def _of_codes(
    codes: Codes, x: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    return _OfCodes.apply(codes, x, ids, chosen)


def _is_differentiated(experts: torch.nn.Module, *tensors: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (*tensors, *experts.parameters(recurse=False)))


@torch.compiler.assume_constant_result
def _plan_of(experts: torch.nn.Module, top_k: int) -> tuple:
    # A plain tuple: torch.compile takes no other kind as a constant.
    return tuple(_plan(experts, top_k))


def register(name: str = NAME) -> None:
    """Adds moesaic to transformers' experts: `experts_implementation="moesaic"` from now on."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise InvalidError(
            "transformers 5 has the interface of experts that moesaic registers with: "
            "pip install 'transformers>=5'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
