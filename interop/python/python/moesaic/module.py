"""`moesaic.MoE`: a Mixture-of-Experts layer as an `nn.Module`."""

from __future__ import annotations

import os
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Union

import torch
from torch import nn
from torch.compiler import is_compiling

from . import ops
from ._inputs import check_x, further_inputs, narrowed
from ._native import InvalidError, PackedLayer, Spec, read_hf, read_state_dict

SpecLike = Union[str, Mapping[str, Any], Spec]


class Routing(NamedTuple):
    """The decision of a call, detached."""

    ids: torch.Tensor
    """Experts of each token [.., K], i32, best first; negative where a slot is masked."""
    weights: torch.Tensor
    """Weights of these experts [.., K], f32."""
    counts: torch.Tensor
    """Tokens that chose each expert [E], i64, dropped ones included."""


def read(spec: SpecLike) -> Spec:
    """Returns the spec of TOML text, of a dict of the same keys, or of the path of a TOML file."""
    return spec if isinstance(spec, Spec) else Spec(spec)


def _shared(
    bank: "MoE", name: str, shape: Sequence[int], group: Any, expert_tp: int
) -> torch.Tensor:
    """Returns an expert's weight of a bank, which must have the shape that a layer needs."""
    if not isinstance(bank, MoE):
        raise InvalidError(f"experts_of is {type(bank).__name__}, expected a moesaic.MoE")
    over = bank._over
    if (over and over.group) is not group or over is not None and over.expert_tp != expert_tp:
        raise InvalidError("experts_of is a layer over other ranks: give both the same group")
    found = tuple(bank._weight(name).shape) if name in bank._names else "not there"
    if found != tuple(shape):
        raise InvalidError(f"`{name}` of experts_of is {found}, expected {tuple(shape)}")
    return bank._weight(name)


class _Weights(nn.Module):
    """A part of a layer's weights under its canonical name."""

    def extra_repr(self) -> str:
        own = {**self._parameters, **self._buffers}
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in own.items())


class MoE(nn.Module):
    """A Mixture-of-Experts layer: x [.., model_dim] to y [.., output_dim].

    `spec` is TOML text, a dict of the same keys, or a `Spec`. Parameters have moesaic's canonical
    names, such as `experts.up.weight [E, h, d]`; what has no gradient is a buffer. The layer
    computes in the dtype of x and of its experts, f32, f16 or bf16: `.to` converts it.

    In training mode the layer draws the noise of its spec from torch's generator, and backward adds
    the gradient of every auxiliary loss, `coefficient * loss`; `losses` has the values of the last
    call, detached, to be logged. In evaluation it does neither, and is differentiable as well.

    With `group`, a process group of torch.distributed, its ranks share the experts: x and y are this
    rank's tokens, parameters this rank's part (`moesaic.distributed`). `expert_tp` is the number of
    shards of each expert, `strategy` says how ranks exchange rows, such as "overlap_degree=2".
    Gradients of experts come from the tokens of all ranks: divided by the number of ranks, as
    DistributedDataParallel divides all others, or with gradients="sum" as they are. An exchange that
    takes longer than `timeout` seconds fails. Equal seeds give the layer of one process.

    With `experts_of`, another MoE, the routed experts are its parameters: one tensor with one
    gradient, the sum over both. The specs may differ in all but the experts' sizes.
    """

    def __init__(
        self,
        spec: SpecLike,
        *,
        device: Optional[torch.device] = None,
        dtype: Optional[torch.dtype] = None,
        group: Any = None,
        expert_tp: int = 1,
        strategy: Optional[str] = None,
        gradients: str = "mean",
        timeout: float = 60.0,
        experts_of: Optional["MoE"] = None,
    ) -> None:
        super().__init__()
        self.spec = read(spec)
        if self.spec.quantized:
            raise InvalidError(
                "experts of `precision.experts` are codes, which torch has no dtype for: make a "
                "moesaic.PackedLayer of the spec"
            )
        self._text = self.spec.toml
        self._names = ops.weight_names(self._text)
        self._width, self._top_k = self.spec.model_dim, self.spec.top_k
        self._experts = self.spec.experts
        self._losses: Optional[torch.Tensor] = None
        self._over = None
        self._plain = None if group is not None else ops.Plain()
        if group is not None:
            from .distributed import Over

            self._over = Over(self._text, group, expert_tp, strategy, gradients, timeout)
        elif expert_tp != 1 or strategy is not None:
            raise InvalidError("expert_tp and strategy are for layers over ranks: give a group")
        # The owner of each weight, and its name there: walking the path costs more than the call.
        self._owners: list[tuple[nn.Module, str]] = []
        trained = dict(self.spec.trained)
        for name, kind, shape in self.spec.weights:
            own = ops.TORCH_DTYPES[kind]
            own = dtype if dtype is not None and own.is_floating_point else own
            if self._over is not None:
                shape = self._over.mesh.part_shape(name, shape)
            if experts_of is not None and name.startswith("experts."):
                self._hold(name, _shared(experts_of, name, shape, group, expert_tp), False)
                continue
            tensor = torch.empty(shape, dtype=own, device=device)
            self._hold(name, tensor, name in trained)
            if self._over is not None and not self._over.mesh.is_replicated(name):
                # The names of Tutel and of FastMoE for parameters that data parallelism leaves
                # alone.
                self._weight(name).skip_allreduce = True
                self._weight(name).dp_comm = "none"
        alone = experts_of is None
        self._draw(name for name in self._names if alone or not name.startswith("experts."))

    def _hold(self, name: str, tensor: torch.Tensor, trained: bool) -> None:
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, _Weights())
            owner = owner._modules[part]
        self._owners.append((owner, last))
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        elif trained:
            owner.register_parameter(last, nn.Parameter(tensor))
        else:
            owner.register_buffer(last, tensor)

    def _weight(self, name: str) -> torch.Tensor:
        owner, last = self._owners[self._names.index(name)]
        return getattr(owner, last)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights by canonical name, buffers among them."""
        return {name: self._weight(name) for name in self._names}

    def reset_parameters(self) -> None:
        """Draws new weights from the distributions of `Spec.initial`, by torch's generator."""
        self._draw(self._names)

    @torch.no_grad()
    def _draw(self, names: Iterable[str]) -> None:
        names = frozenset(names)
        shapes = {name: shape for name, _, shape in self.spec.weights}
        for name, kind, number in self.spec.initial:
            if name not in names:
                continue
            own = self._weight(name)
            if own.is_meta:
                continue
            # Over ranks the whole weight is drawn, so that every number is that of one process.
            tensor = own if self._over is None else own.new_empty(shapes[name])
            if kind == "uniform":
                tensor.uniform_(-number, number)
            elif kind == "normal":
                tensor.normal_(0.0, number)
            else:
                tensor.fill_(number)
            if self._over is not None:
                own.copy_(self._over.part(name, tensor))
                self._over.share(name, own)
        if "router.table" in self._names:
            table = self._weight("router.table")
            ids = torch.arange(table.numel(), device=table.device) % self.spec.experts
            table.copy_(ids.view(table.shape))

    @classmethod
    def from_hf(
        cls,
        folder: Union[str, os.PathLike],
        layer: int = 0,
        dtype: Optional[torch.dtype] = None,
        **ranks: Any,
    ) -> "MoE":
        """Reads the MoE layer of a model in a folder of transformers, router and experts. `ranks`
        are the arguments of a layer over ranks, such as `group`."""
        spec, arrays = read_hf(os.fspath(folder), layer)
        module = cls(spec, dtype=dtype, **ranks)
        module._copy(arrays, True)
        return module

    @torch.no_grad()
    def _copy(self, arrays: Mapping[str, Any], whole: bool) -> None:
        for name, weight in self.weights().items():
            tensor = torch.from_dlpack(arrays[name])
            weight.copy_(self._over.part(name, tensor) if self._over and whole else tensor)

    def load_foreign_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        library: str,
        *,
        prefix: Optional[str] = None,
        gate: Optional[int] = None,
        whole: bool = True,
    ) -> None:
        """Copies the weights of a layer of Tutel ("tutel") or FastMoE ("fastmoe") from its state
        dict. `prefix` names the layer where there are several, `gate` one of Tutel's gates. Over
        ranks the dict is of the whole layer, or with whole=False of this rank's experts.
        """
        own = self._weight("experts.up.weight").shape[0]
        if not whole and self._over is not None and self._over.expert_tp != 1:
            raise InvalidError("a rank's state dict has whole experts, not shards: expert_tp = 1")
        share = self._experts if whole or self._over is None else own
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
        arrays = read_state_dict(self.spec, library, tensors, share, prefix, gate)
        self._copy(arrays, whole)

    def pack(self) -> PackedLayer:
        """Copies the weights into a layer for inference alone, faster where calls have few tokens.

        It computes on the CPU, and takes and gives arrays by DLPack. Later changes of the weights
        do not reach it.
        """
        if self._over is not None:
            raise InvalidError("a layer over ranks is not packed: its part alone is no layer")
        dtypes = {name: ops.TORCH_DTYPES[kind] for name, kind, _ in self._call_spec().weights}
        tensors = {
            name: weight.detach().to("cpu", dtypes[name]).contiguous()
            for name, weight in self.weights().items()
        }
        return PackedLayer(self._call_spec(), tensors)

    def replay(self, routed_experts: torch.Tensor, layer: int = 0) -> "MoE":
        """Returns a layer of the same parameters that takes its experts from a record.

        routed_experts [T, layers, K]: integers, the experts that a serving engine chose for each
        token in each layer of a model; `layer` is one of them. Calls of the new layer take
        `token_ids`, rows of the record; weights and gradients follow from this layer's logits. Over
        ranks all of them give a record of as many tokens.
        """
        record = torch.as_tensor(routed_experts)
        if record.is_floating_point() or record.is_complex():
            raise InvalidError(f"routed_experts is {record.dtype}, expected integers")
        record = narrowed("routed_experts", record.cpu())
        spec, table = self.spec.replay(record.contiguous(), layer)
        ranks = {} if self._over is None else self._over.arguments
        # On meta nothing is drawn: the generator goes on as it would without this.
        replayed = MoE(spec, device="meta", experts_of=self, **ranks)
        replayed._owners.clear()
        table = torch.from_dlpack(table).to(self._weight("experts.up.weight").device)
        for name in replayed._names:
            own = table if name == "router.table" else self._weight(name)
            replayed._hold(name, own, False)
        return replayed

    def _call_spec(self) -> Spec:
        experts = [w for n, w in self.weights().items() if n.startswith("experts.")]
        dtype = ops.DTYPES.get(experts[0].dtype)
        return self.spec.with_precision(dtype, dtype)

    @property
    def losses(self) -> dict[str, torch.Tensor]:
        """The auxiliary losses of the last training call by kind, without coefficients."""
        if self._losses is None:
            return {}
        return dict(zip(self.spec.losses, self._losses.unbind()))

    def forward(
        self,
        x: torch.Tensor,
        *,
        token_ids: Optional[torch.Tensor] = None,
        topk_ids: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        token_mask: Optional[torch.Tensor] = None,
        active_k: Optional[torch.Tensor] = None,
        sequence_ids: Optional[torch.Tensor] = None,
        global_counts: Optional[torch.Tensor] = None,
        global_tokens: Optional[torch.Tensor] = None,
        capacity_factor: Optional[float] = None,
        rng_key: tuple[int, ...] = (),
        return_routing: bool = False,
    ) -> Any:
        """Runs the layer.

        x: [.., model_dim], f32, f16 or bf16. Inputs with a value per token have its leading sizes.
        token_ids [..]: for `router.kind = "table"`. topk_ids, topk_weights [.., K]: decision for
        `router.kind = "external"`, differentiable in the weights. token_mask [..], active_k [1],
        sequence_ids [..], global_counts [E], global_tokens [1]: as the spec's keys say.
        rng_key: (seed, step, layer, first token) instead of numbers from torch's generator.

        Returns y [.., output_dim], and with return_routing also the `Routing`.
        """
        # Most calls have x alone.
        alone = (
            token_ids is topk_ids is topk_weights is token_mask is active_k is sequence_ids
            is global_counts is global_tokens is capacity_factor is None
        )
        plain = None if self.training or return_routing or not alone else self._plain
        if plain is not None:
            y = plain.evaluate(x)
            if y is not None:
                return y
        width = self._width
        check_x(x, width)
        leading = x.shape[:-1]
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        names: list[str] = []
        inputs: list[torch.Tensor] = []

        if not alone:
            given = {
                "token_ids": token_ids, "topk_ids": topk_ids, "topk_weights": topk_weights,
                "token_mask": token_mask, "active_k": active_k, "sequence_ids": sequence_ids,
                "global_counts": global_counts, "global_tokens": global_tokens,
            }
            further = further_inputs(given, leading, self._top_k, self._experts)
            names, inputs = list(further), list(further.values())
        weights = [
            # Past nn.Module's own lookup, which costs more; a parametrized weight is found there.
            owner._parameters[last] if last in owner._parameters else getattr(owner, last)
            for owner, last in self._owners
        ]
        if self._over is not None:
            y, ids, chosen, counts, losses = self._over.run(
                rows, names, inputs, weights, self.training, rng_key, capacity_factor
            )
        else:
            y, ids, chosen, counts, losses = ops.layer(
                self._text, rows, names, inputs, weights, self.training, rng_key, capacity_factor,
                return_routing,
            )
        if plain is not None and losses is None and not y.requires_grad:
            of = ops.family(self._text).compiled(rows, weights, False)
            plain.see(of, rows, self._owners, weights)
        if self.training and is_compiling():
            # The compiler of torch 2.6 follows no other assignment.
            self._losses = losses
        elif self.training:
            # Past nn.Module's own, which costs more than the losses.
            self.__dict__["_losses"] = losses
        y = y if x.dim() == 2 else y.reshape(*leading, y.shape[-1])
        if not return_routing:
            return y
        if topk_ids is not None and topk_weights is not None:
            decided = topk_ids.reshape(-1)
            decided = decided[decided >= 0].long()
            counts = torch.bincount(decided, minlength=self._experts)
            if self.spec.rescales:
                chosen = chosen.view(topk_weights.shape)
            else:
                chosen = topk_weights.detach()
            return y, Routing(topk_ids, chosen, counts)
        slots = (*leading, self._top_k)
        return y, Routing(ids.view(slots), chosen.view(slots), counts)

    def extra_repr(self) -> str:
        shape = self.spec
        return (
            f"model_dim={shape.model_dim}, experts={shape.experts}, top_k={shape.top_k}, "
            f"output_dim={shape.output_dim}"
        )
