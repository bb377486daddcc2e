"""Layers whose experts are spread over the ranks of a `torch.distributed` process group.

`MoE(spec, group=group)` holds this rank's experts; calls exchange rows between the ranks. The group
only introduces the ranks to each other: rows travel by TCP connections of moesaic's own, so any
backend of torch will do, gloo for one.

Every rank makes the same calls in the same order, backward passes too. A rank that does not is found
by the deadline of an exchange, `timeout`, and the call fails on all ranks.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import socket
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn

from . import ops
from ._changes import Stamps
from ._once import once
from ._native import InvalidError, Mesh, RankLayer, Ranks, Spec
from ._native import Listener as _Listener
from .module import MoE

_NUMBERS = itertools.count()

_JOINED: dict[tuple[Any, float], Ranks] = {}


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _own_address() -> str:
    """Returns the address of this machine that leads to the first rank's."""
    chosen = os.environ.get("MOESAIC_ADDRESS")
    if chosen:
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system only chooses the way.
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 9))
        return probe.getsockname()[0]


def join(group: dist.ProcessGroup, timeout: float = 60.0) -> Ranks:
    """Connects the ranks of a group, once. All ranks of the group call it.

    timeout: the seconds in which ranks must come, and each exchange end.
    """
    found = _JOINED.get((group, timeout))
    if found is not None:
        return found
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidError("this process is none of the group's: make layers on its ranks alone")
    one_host = len(set(_gather(socket.gethostname(), group))) == 1
    host = "127.0.0.1" if one_host else _own_address()
    listener = _Listener(host)
    told = _gather((f"{host}:{listener.port}", secrets.token_bytes(16)), group)
    addresses, keys = zip(*told)
    ranks = Ranks(listener, rank, list(addresses), keys[0], timeout)
    _JOINED[group, timeout] = ranks
    # A process that ends with unread bytes would take its last messages back.
    atexit.register(ranks.leave)
    return ranks


class _Results(NamedTuple):
    """What a call gives beside y."""

    ids: torch.Tensor
    chosen: torch.Tensor
    counts: torch.Tensor
    losses: torch.Tensor


class Over:
    """The layers of a module over the ranks of a group: one for each choice of dtypes and mode."""

    def __init__(
        self,
        text: str,
        group: dist.ProcessGroup,
        expert_tp: int,
        strategy: Optional[str],
        gradients: str,
        timeout: float,
    ) -> None:
        outside = group is dist.GroupMember.NON_GROUP_MEMBER  # `join` says so
        if not outside and not isinstance(group, dist.ProcessGroup):
            raise InvalidError(f"group = {group!r}: give a process group of torch.distributed")
        if gradients not in ("mean", "sum"):
            raise InvalidError(f"gradients = {gradients!r}: take 'mean' or 'sum'")
        self.group, self.size = group, dist.get_world_size(group)
        self.expert_tp = expert_tp
        self.mesh: Mesh = join(group, timeout).mesh(expert_tp)
        self._timeout = timeout
        self._text, self.strategy, self._gradients = text, strategy, gradients
        self._layers: dict[tuple[str, str, bool], tuple[ops.Compiled, Stamps]] = {}
        # Ranks draw the same noise: by the first one's seed, the number of the layer in the process
        # and that of the call. Nothing is drawn from torch's generator, which goes on as it would in
        # one process.
        self._seed: int = _gather(torch.initial_seed(), group)[0] % 2**64
        self._number, self._step = next(_NUMBERS), 0

    def __deepcopy__(self, memo: dict) -> "Over":
        copy = object.__new__(Over)
        copy.__dict__.update(self.__dict__, _layers={})
        return copy

    def __reduce__(self) -> Any:
        raise InvalidError("a layer over ranks is not pickled: save its state_dict on each rank")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of another layer over the same ranks."""
        return {
            "group": self.group, "expert_tp": self.expert_tp, "strategy": self.strategy,
            "gradients": self._gradients, "timeout": self._timeout,
        }

    def next_key(self) -> tuple[int, int, int, int]:
        """Returns the key of another training call, the same on all ranks."""
        self._step += 1
        return self._seed, self._step - 1, self._number, 0

    def averaged(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a weight's gradient, divided by the ranks where it sums over the tokens of all."""
        if self._gradients == "mean" and not self.mesh.is_replicated(name):
            gradient /= self.size
        return gradient

    def share(self, name: str, tensor: torch.Tensor) -> None:
        """Makes a weight that every rank has the first rank's."""
        if self.mesh.is_replicated(name):
            dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a weight of the whole layer."""
        return torch.from_dlpack(self.mesh.part(name, whole.detach().contiguous()))

    def _layer(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], training: bool
    ) -> ops.Compiled:
        family = ops.family(self._text)
        (own, tokens), names = family.precision(x, weights), family.names
        found = self._layers.get((own, tokens, training))
        if found is None:
            spec = ops.variant(self._text, own, tokens, training)
            dtypes = {name: ops.TORCH_DTYPES[kind] for name, kind, _ in spec.weights}
            own_weights = [(name, w) for name, w in zip(names, weights) if name in dtypes]
            given = {name: ops.taken(w, dtypes[name]).detach() for name, w in own_weights}
            layer = RankLayer(self.mesh, spec, given)
            if self.strategy is not None:
                layer.set_strategy(self.strategy)
            found = ops.Compiled(self._text, spec, layer), Stamps()
            self._layers[own, tokens, training] = found
            for name, weight in zip(names, weights):
                found[1].changed(name, weight)
            return found[0]
        of, stamps = found
        changed = ops.Call()
        for name, weight in zip(names, weights):
            if name in of.weights and stamps.changed(name, weight):
                of.check_device(name, weight)
                changed.add(name, ops.taken(weight, of.weights[name]))
        if changed.names:
            of.layer.set_weights(changed.given)
        return of

    def run(
        self,
        x: torch.Tensor,
        names: Sequence[str],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        training: bool,
        rng_key: Sequence[int],
        capacity_factor: Optional[float],
    ) -> tuple[torch.Tensor, ...]:
        """Runs the layer of x [T, d], this rank's tokens: as `ops.layer`."""
        of = self._layer(x, weights, training)
        if training and not rng_key:
            rng_key = self.next_key()
        call = _Pass(self, of, list(names), tuple(rng_key) or (0, 0, 0, 0), capacity_factor)
        tensors = (x, *inputs, *weights)
        if training or torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            y, *rest = _Run.apply(call, len(inputs), *tensors)
        else:
            y, rest = call.forward(x, inputs, None)
        return (y, *rest)


class _Pass:
    """One call: what its backward needs beside tensors."""

    def __init__(self, over, of, names, key, capacity_factor) -> None:
        self.over, self.of, self.names, self.key = over, of, names, key
        self.capacity_factor = capacity_factor
        self.state: Any = None
        self.alive: list[torch.Tensor] = []

    def forward(self, x, inputs, train) -> tuple[torch.Tensor, _Results]:
        of, call = self.of, ops.Call()
        call.add_inputs(of, x, self.names, inputs)
        y, *routing = ops.outputs(of, call, x)
        losses = torch.empty(len(of.losses) if train else 0)
        if not train:
            of.layer.forward(x.shape[0], call.given, self.capacity_factor)
            return y, _Results(*routing, losses)
        for at, kind in enumerate(of.losses):
            call.add(f"loss.{kind}", losses[at : at + 1])
        self.state = of.layer.forward_train(
            x.shape[0], call.given, self.key, self.capacity_factor
        )
        # Backward reads these where they lie. Not y: that would keep itself alive.
        self.alive = [tensor for tensor in call.alive if tensor is not y]
        return y, _Results(*(tensor.clone() for tensor in routing), losses)

    def backward(self, dy, x, inputs, weights) -> tuple[Any, list[Any], list[Any]]:
        of, call, found = self.of, ops.Call(), ops.Call()
        call.add("dy", ops.taken(dy, x.dtype))
        dx = call.add("dx", torch.empty_like(x, memory_format=torch.contiguous_format))
        dtopk = None
        if of.external:
            dtopk = call.add("grad.topk_weights", torch.empty((x.shape[0], of.top_k)))
        names = ops.weight_names(self.over._text)
        gradients: list[Any] = []
        for name, weight in zip(names, weights):
            dtype = of.trained.get(name)
            empty = None if dtype is None else torch.empty(tuple(weight.shape), dtype=dtype)
            gradients.append(None if empty is None else found.add(f"grad.{name}", empty))
        of.layer.backward(self.state, call.given, found.given)
        for at, name in enumerate(names):
            if gradients[at] is None:
                continue
            gradients[at] = self.over.averaged(name, gradients[at]).to(weights[at].dtype)
        dinputs = [
            dtopk.to(tensor.dtype) if name == "topk_weights" else None
            for name, tensor in zip(self.names, inputs)
        ]
        return dx, dinputs, gradients


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Pass, count: int, x: torch.Tensor, *tensors: torch.Tensor):
        y, results = call.forward(x, tensors[:count], True)
        ctx.call, ctx.count = call, count
        ctx.save_for_backward(x, *tensors)
        ctx.mark_non_differentiable(*results)
        return (y, *results)

    @staticmethod
    @once
    def backward(ctx, dy, *_):
        x, *tensors = ctx.saved_tensors
        inputs, weights = tensors[: ctx.count], tensors[ctx.count :]
        dx, dinputs, gradients = ctx.call.backward(dy, x, inputs, weights)
        return (None, None, dx, *dinputs, *gradients)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Returns the parameters of a model that ranks do not have alike, with their names.

    `FSDP(model, ignored_states=[p for _, p in expert_parameters(model)])` leaves them alone.
    """
    for path, module in model.named_modules():
        if not isinstance(module, MoE) or module._over is None:
            continue
        for name, weight in module.weights().items():
            if not module._over.mesh.is_replicated(name):
                yield f"{path}.{name}" if path else name, weight


def ignore_experts(model: nn.Module) -> nn.Module:
    """Has DistributedDataParallel leave the experts' parameters alone; call it before you wrap.

    DDP averages all other gradients over the ranks. With `MoE(.., gradients="mean")` those of
    experts are averages too, as they come out of backward.
    """
    names = [name for name, _ in expert_parameters(model)]
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*own, *names]
    )
    return model


__all__ = ["expert_parameters", "ignore_experts", "join"]
