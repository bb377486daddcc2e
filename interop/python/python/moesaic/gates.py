"""`moesaic.MultiGate`: several routers over one set of experts, as an `nn.Module`."""

from __future__ import annotations

import threading
from typing import Any, Optional, Sequence

import torch
from torch import nn

from . import ops
from ._changes import Stamps
from ._inputs import check_x, further_inputs, per_token
from ._native import GateLayer, InvalidError
from ._once import once
from .module import MoE, SpecLike


class MultiGate(nn.Module):
    """Layers that differ in their routers and share experts: x [.., model_dim] to y [G, ..,
    output_dim], one for each of `gates` routers (MMoE).

    `experts`, an `MoE`, has the weights of the first router and all that routers have in common;
    `routers` has those of the further routers, such as `routers.0.weight [E, d]`.

    One pass over the experts runs all routers where their spec allows it (`in_one_pass`). For that
    the layer holds a copy of its weights, made again when they change. It is no single node for
    `torch.compile`.

    `ranks` are the arguments of an `MoE` over ranks, such as `group`. Each router then exchanges
    rows of its own.
    """

    def __init__(
        self,
        spec: SpecLike,
        gates: int,
        *,
        device: Optional[torch.device] = None,
        dtype: Optional[torch.dtype] = None,
        **ranks: Any,
    ) -> None:
        super().__init__()
        if gates < 1:
            raise InvalidError(f"{gates} gates: take 1 or more")
        self.experts = MoE(spec, device=device, dtype=dtype, **ranks)
        self.spec, self.gates = self.experts.spec, gates
        self._of_router = [n for n in self.experts.weights() if n.startswith("router.")]
        if not self._of_router:
            raise InvalidError("the spec's router has no weights, so all routers would be alike")
        self.routers = nn.ModuleList()
        for _ in range(gates - 1):
            router = MoE(
                self.spec, device=device, dtype=dtype, experts_of=self.experts, **ranks
            )
            self.routers.append(router.router)
        self._losses: Optional[torch.Tensor] = None
        self._held = _Held(self.experts._over)

    def weights(self) -> list[tuple[int, str, torch.Tensor]]:
        """Returns the weights by number of the router and canonical name; those that all routers
        have in common are the first's."""
        common = self.experts.weights()
        each = [(0, name, weight) for name, weight in common.items()]
        for at, router in enumerate(self.routers):
            for name in self._of_router:
                *path, last = name.split(".")[1:]
                each.append((at + 1, name, getattr(router.get_submodule(".".join(path)), last)))
        return each

    @property
    def in_one_pass(self) -> Optional[bool]:
        """Whether the last call ran all routers in one pass over the experts."""
        return self._held.in_one_pass

    @property
    def losses(self) -> dict[str, torch.Tensor]:
        """The auxiliary losses of the last training call by kind [G], without coefficients."""
        if self._losses is None:
            return {}
        return dict(zip(self.spec.losses, self._losses.unbind(1)))

    def forward(
        self,
        x: torch.Tensor,
        *,
        router_ids: Optional[torch.Tensor] = None,
        capacity_factor: Optional[float] = None,
        rng_key: tuple[int, ...] = (),
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Runs every layer on x [.., model_dim] and returns y [G, .., output_dim].

        With `router_ids` [..], integers, each token runs by that router alone, such as one for
        each modality, and y is [.., output_dim]; `losses` then are sums over the routers.

        `inputs` are the further inputs that `MoE.forward` takes, the same for all routers; no
        gradient flows into them.
        """
        width = self.spec.model_dim
        check_x(x, width)
        weights = self.weights()
        tensors = [weight for _, _, weight in weights]
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *tensors))
        text = self.spec.toml
        dtypes = ops.family(text).precision(x, [*self.experts.weights().values()])
        spec = ops.variant(text, *dtypes, self.training)
        over = self.experts._over
        trains = self.training or grad
        layer = self._held.layer(spec, weights, trains)
        rows = x.reshape(-1, width)
        given = self._given(spec, inputs, x.shape[:-1])
        if router_ids is not None:
            router_ids = per_token("router_ids", router_ids, x.shape[:-1])
            if router_ids.is_floating_point():
                raise InvalidError(f"router_ids is {router_ids.dtype}, expected integers")
            clamped = router_ids.reshape(-1).clamp(-1, self.gates)
            given["router_ids"] = clamped.to(torch.int32).contiguous()
        if over is not None and self.training and not rng_key:
            rng_key = over.next_key()
        call = _Call(layer, spec, weights, given, tuple(rng_key), capacity_factor, over)
        if trains:
            y, losses = _Run.apply(call, self.training, rows, *tensors)
            self._losses = losses if self.training else self._losses
        else:
            y = call.evaluate(rows)
        leading = (self.gates,) if router_ids is None else ()
        return y.reshape(*leading, *x.shape[:-1], y.shape[-1])

    def _given(
        self, spec: Any, inputs: dict[str, torch.Tensor], leading: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Returns further inputs as the layer of `spec` takes them: those that it reads."""
        if not inputs:
            return {}
        known, whole = ({n: d for n, d, _ in s.inputs} for s in (spec, self.spec))
        for name in inputs:
            if name not in whole:
                raise InvalidError(f"the layer reads no `{name}`, only {', '.join(whole)}")
        found = further_inputs(inputs, leading, self.spec.top_k, self.spec.experts)
        return {
            name: ops.as_input(name, tensor.detach(), ops.TORCH_DTYPES[known[name]])
            for name, tensor in found.items()
            if name in known
        }

    def extra_repr(self) -> str:
        return f"gates={self.gates}"


class _Held:
    """The layers of a module, by spec and by whether they train; none in a copy of the module."""

    def __init__(self, over: Any = None) -> None:
        self._over = over
        self._layers: dict[tuple[str, bool], tuple[GateLayer, Stamps]] = {}
        self.in_one_pass: Optional[bool] = None

    def __deepcopy__(self, memo: dict) -> "_Held":
        return _Held(self._over)

    def __reduce__(self) -> Any:
        return _Held, (self._over,)

    def layer(self, spec: Any, weights: list[tuple[int, str, torch.Tensor]], trains: bool) -> Any:
        over = self._over
        # All ranks make one layer, though x may have a gradient on some of them alone.
        trains = trains or over is not None
        dtypes = {name: ops.TORCH_DTYPES[kind] for name, kind, _ in spec.weights}
        used = [(gate, name, weight) for gate, name, weight in weights if name in dtypes]
        found = self._layers.get((spec.toml, trains))
        if found is None:
            routers: list[dict[str, torch.Tensor]] = [{}]
            common, stamps = {}, Stamps()
            placed = () if over is None else (over.mesh, over.strategy)
            for gate, name, weight in used:
                routers += [{}] if gate == len(routers) else []
                to = routers[gate] if name.startswith("router.") else common
                to[name] = ops.taken(weight.detach(), dtypes[name])
                stamps.changed(f"{gate} {name}", weight)
            found = GateLayer(spec, common, routers, trains, *placed), stamps
            self._layers[spec.toml, trains] = found
        layer, stamps = found
        for gate, name, weight in used:
            if stamps.changed(f"{gate} {name}", weight):
                layer.set_weight(gate, name, ops.taken(weight.detach(), dtypes[name]))
        self.in_one_pass = layer.in_one_pass
        return layer


# A layer keeps the gradients of its last backward pass: no second one before they are read.
_BACKWARD = threading.Lock()


class _Call:
    """A call, and what its backward needs beside tensors."""

    def __init__(self, layer, spec, weights, inputs, key, capacity_factor, over) -> None:
        self.over = over
        self.layer, self.spec = layer, spec
        self.of = [(gate, name) for gate, name, _ in weights]
        self.inputs, self.key, self.capacity_factor = inputs, key, capacity_factor
        self.state: Any = None

    def evaluate(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().contiguous()
        each = self.layer.forward(rows, ["y"], self.capacity_factor, **self.inputs)
        return torch.stack([torch.from_dlpack(one["y"]) for one in each])

    def train(self, rows: torch.Tensor, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = [f"loss.{kind}" for kind in self.spec.losses]
        key = self.key
        if not key and training and self.spec.draws:
            seed, step = torch.randint(0, 2**62, (2,)).tolist()
            key = seed, step, 0, 0
        each, self.state = self.layer.forward_train(
            rows.detach().contiguous(), ["y", *kinds], key or (0, 0, 0, 0), self.capacity_factor,
            **self.inputs,
        )
        y = torch.stack([torch.from_dlpack(one["y"]) for one in each])
        losses = [[torch.from_dlpack(one[kind]).reshape(()) for kind in kinds] for one in each]
        flat = [loss for own in losses for loss in own]
        return y, torch.stack(flat).view(len(each), -1) if flat else torch.empty(len(each), 0)

    def backward(
        self, dy: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[Optional[torch.Tensor]]]:
        trained, found = dict(self.spec.trained), []
        with _BACKWARD:
            every = [one.contiguous() for one in dy.detach().unbind()]
            each = self.layer.backward(self.state, every)
            for (gate, name), weight in zip(self.of, weights):
                gradient = None
                if name in trained:
                    gradient = torch.from_dlpack(self.layer.gradient(gate, name))
                    if self.over is not None:
                        gradient = self.over.averaged(name, gradient)
                    gradient = gradient.to(weight.dtype)
                found.append(gradient)
        parts = [torch.from_dlpack(one["dx"]) for one in each]
        return torch.stack(parts).float().sum(0).to(parts[0].dtype), found


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, training: bool, rows: torch.Tensor, *weights: torch.Tensor):
        y, losses = call.train(rows, training)
        ctx.call = call
        ctx.save_for_backward(*weights)
        ctx.mark_non_differentiable(losses)
        return y, losses

    @staticmethod
    @once
    def backward(ctx, dy, _):
        dx, gradients = ctx.call.backward(dy, ctx.saved_tensors)
        return (None, None, dx, *gradients)


__all__ = ["MultiGate"]
