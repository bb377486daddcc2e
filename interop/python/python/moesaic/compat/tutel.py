"""`moe_layer` with the arguments of `tutel.moe.moe_layer`, in one process or over the ranks of a
group.

The gate is torch's, so that `l_aux` is differentiable and gates of your own work; dispatch, experts
and combine are moesaic's, but for experts of your own. Parameters have Tutel's names, and from
equal seeds Tutel's values.
"""

from __future__ import annotations

import math
import os
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import nn
from torch.nn import functional

from .._native import InvalidError
from . import _dispatch, _experts
from ._dispatch import fast_decode, fast_encode, gshard_loss, top_k_routing

extract_critical = top_k_routing


class LinearGate(nn.Module):
    """Tutel's gate `top`: wg is a linear map of tokens to experts, without bias."""

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        capacity_factor: float = float(os.environ.get("CAP_FACTOR", 1.0)),
        gate_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False)
        self.top_k = min(num_global_experts, int(k))
        self.fp32_gate = fp32_gate
        self.capacity_factor = float(capacity_factor)
        self.gate_noise = float(gate_noise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, E] of x [T, M]."""
        dtype = torch.float32 if self.fp32_gate else self.wg.weight.dtype
        return functional.linear(x.to(dtype), self.wg.weight.to(dtype))


class CosineGate(nn.Module):
    """Tutel's gate `cosine_top`: the cosine of a projected token and each expert's direction."""

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 256,
        init_t: float = 0.5,
        capacity_factor: float = float(os.environ.get("CAP_FACTOR", 1.0)),
        gate_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([math.log(1.0 / init_t)]))
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts) * 0.01)
        self.top_k = min(num_global_experts, int(k))
        self.fp32_gate = fp32_gate
        self.capacity_factor = float(capacity_factor)
        self.gate_noise = float(gate_noise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, E] of x [T, M]."""
        linear = self.cosine_projector
        dtype = torch.float32 if self.fp32_gate else linear.weight.dtype
        rows = functional.linear(x.to(dtype), linear.weight.to(dtype), linear.bias.to(dtype))
        rows = functional.normalize(rows, dim=1)
        logits = rows @ functional.normalize(self.sim_matrix.to(dtype), dim=0)
        return logits * self.temperature.to(dtype).clamp(max=math.log(100.0)).exp()


class FusedExperts(nn.Module):
    """Tutel's experts `ffn`: fc1, an activation, fc2, with biases."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        hidden_size_per_expert: int,
        activation_fn: Optional[Callable] = None,
        activation_fn_with_self: Optional[Callable] = None,
        output_dim: Optional[int] = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
        sharded_count: int = 1,
    ) -> None:
        super().__init__()
        output_dim = output_dim or model_dim
        if hidden_size_per_expert % sharded_count:
            raise InvalidError(
                f"hidden_size_per_expert = {hidden_size_per_expert} in {sharded_count} shards"
            )
        if activation_fn_with_self is not None:
            activation_fn = lambda x: activation_fn_with_self(x, self)  # noqa: E731
        self.activation = _experts.activation_name(activation_fn or functional.relu)
        size = hidden_size_per_expert // sharded_count
        self.batched_fc1_w = nn.Parameter(torch.empty(num_experts, size, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(num_experts, size, output_dim))
        bias = torch.empty(num_experts, size) if has_fc1_bias else None
        self.batched_fc1_bias = nn.Parameter(bias) if bias is not None else None
        width = -(-output_dim // sharded_count)
        bias = torch.empty(num_experts, width) if has_fc2_bias else None
        self.batched_fc2_bias = nn.Parameter(bias) if bias is not None else None
        self.sizes = (model_dim, hidden_size_per_expert, output_dim, num_experts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights expert by expert, as Tutel does: equal seeds give equal weights."""
        one, two = self.batched_fc1_bias, self.batched_fc2_bias
        _, hidden, model = self.batched_fc1_w.shape
        for at in range(self.batched_fc1_w.shape[0]):
            fc1 = nn.Linear(model, hidden, bias=one is not None)
            fc2 = nn.Linear(hidden, self.batched_fc2_w.shape[2], bias=two is not None)
            self.batched_fc1_w[at] = fc1.weight
            self.batched_fc2_w[at] = fc2.weight.t()
            if one is not None:
                one[at] = fc1.bias
            if two is not None:
                two[at] = fc2.bias[: two.shape[1]]

    def form(self) -> str:
        """Returns the keys `experts` of a spec."""
        has = (self.batched_fc1_bias is not None, self.batched_fc2_bias is not None)
        bias = {(True, True): "true", (True, False): '"up"', (False, True): '"down"'}
        bias = bias.get(has, "false")
        return f'{{ form = "plain", activation = "{self.activation}", bias = {bias} }}'

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by canonical name."""
        down = torch.ops.moesaic.unpack(self.batched_fc2_w, False, False, True)[0]
        named = {"experts.up.weight": self.batched_fc1_w, "experts.down.weight": down}
        if self.batched_fc1_bias is not None:
            named["experts.up.bias"] = self.batched_fc1_bias
        if self.batched_fc2_bias is not None:
            named["experts.down.bias"] = self.batched_fc2_bias
        return named


class LlamaExperts(nn.Module):
    """Tutel's experts `llama_ffn`: W_fc3 of the activated W_fc1 times W_fc2; flat weights."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        hidden_size_per_expert: int,
        activation_fn: Callable = functional.silu,
        sharded_count: int = 1,
    ) -> None:
        super().__init__()
        if hidden_size_per_expert % sharded_count:
            raise InvalidError(
                f"hidden_size_per_expert = {hidden_size_per_expert} in {sharded_count} shards"
            )
        self.activation = _experts.activation_name(activation_fn)
        self.sizes = (model_dim, hidden_size_per_expert, model_dim, num_experts)
        self.sharded_count = sharded_count
        count = -(-num_experts * model_dim * hidden_size_per_expert // sharded_count)
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            self.register_parameter(name, nn.Parameter(torch.randn(count) * 0.01))

    def form(self) -> str:
        """Returns the keys `experts` of a spec."""
        return f'{{ activation = "{self.activation}" }}'

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by canonical name, those of whole experts."""
        return self.named(self.W_fc1, self.W_fc2, self.W_fc3)

    def named(self, *flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns flat weights of whole experts by canonical name."""
        model, hidden, _, count = self.sizes
        gate, up = (w.view(count, model, hidden).transpose(1, 2) for w in flat[:2])
        down = flat[2].view(count, hidden, model).transpose(1, 2)
        return {
            "experts.gate.weight": gate, "experts.up.weight": up, "experts.down.weight": down,
        }


GATES = {"top": LinearGate, "cosine_top": CosineGate}
EXPERTS = {"ffn": FusedExperts, "llama_ffn": LlamaExperts}


class MOELayer(nn.Module):
    """A whole layer: x [.., model_dim] to y [.., output_dim], which carries `l_aux`.

    Over the ranks of a group x and y are this rank's tokens, parameters those of its experts.
    """

    def __init__(
        self,
        gate_type: Union[dict, Sequence[dict]],
        model_dim: int,
        experts: dict,
        scan_expert_func: Optional[Callable] = None,
        result_func: Optional[Callable] = None,
        group: Any = None,
        seeds: Optional[Sequence[Optional[int]]] = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        pad_samples: Any = None,
    ) -> None:
        super().__init__()
        self.group, self.world_size = _group(group)
        self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        self.model_dim, self.is_postscore = model_dim, is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing or (
            os.environ.get("BATCH_PRIO") == "1"
        )
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.result_func, self.l_aux = result_func, None
        self.parallel_type = parallel_type
        _seed(seeds, 1)
        self._new_experts(dict(experts))
        self.register_buffer("_num_global_experts", torch.tensor(self.num_global_experts))
        self.gates = nn.ModuleList()
        for index, options in enumerate(gate_type if isinstance(gate_type, list) else [gate_type]):
            _seed(seeds, 0, index)
            self.gates.append(_new_gate(model_dim, self.num_global_experts, dict(options)))
        _seed(seeds, 2)
        for name, parameter in self.experts.named_parameters():
            parameter._tutel_expert = True
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)

    @staticmethod
    def global_expert_count(num_local_experts: int, group: Any = None) -> int:
        """Returns the experts of all ranks, each of which has so many, or with a negative number
        one in so many shards."""
        world = _group(group)[1]
        if num_local_experts > 0:
            return num_local_experts * world
        if num_local_experts == 0 or world % -num_local_experts:
            raise InvalidError(f"num_experts_per_device = {num_local_experts} of {world} ranks")
        return world // -num_local_experts

    def get_parameter_iterator(self, param_type: str):
        """Returns the named parameters of `gate` or of `local_experts`."""
        parts = {"gate": self.gates, "local_experts": self.experts}
        if param_type not in parts:
            raise InvalidError(f"param_type {param_type!r} is none of {', '.join(parts)}")
        return parts[param_type].named_parameters()

    def forward(
        self,
        x: torch.Tensor,
        gate_index: int = 0,
        capacity_factor: Optional[float] = None,
        top_k: Optional[int] = None,
        a2a_ffn_overlap_degree: Optional[int] = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: Optional[int] = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Runs the layer. `adaptive_r` changes no result; experts of your own in shards read it as
        `adaptive_degree` of the layer, which they get.

        megablocks_size above 0 drops nothing, and is for inference.
        """
        if adaptive_r is not None:
            self.adaptive_degree = _degree(adaptive_r, self.valid_rs)
        rows = x.reshape(-1, self.model_dim)
        rows = rows.to(next(self.experts.parameters()).dtype)
        gate = self.gates[gate_index]
        k = min(self.num_global_experts, top_k or gate.top_k)
        logits = gate(rows)
        noise = getattr(gate, "gate_noise", 0.0)
        noisy = logits
        if self.training and noise > 0:
            noisy = logits + noise * torch.randn_like(logits) / self.num_global_experts
        scores = noisy.softmax(1)
        chosen, ids = scores.topk(k, 1)
        l_aux = self._loss(logits, noisy, scores, ids, noise)
        if k > 1 and self.normalize_gate:
            least = torch.finfo(chosen.dtype).eps
            chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=least)
        if capacity_factor is None:
            capacity_factor = getattr(gate, "capacity_factor", 1.0)
        factor = 0.0 if megablocks_size > 0 else float(capacity_factor)
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = a2a_ffn_overlap_degree
        y = self._experts(rows, ids, chosen, scores, factor, inequivalent_tokens)
        model_out = y.shape[1]
        width = x.shape[-reserve_dims:] if model_out == self.model_dim else (model_out,)
        y = y.reshape(*x.shape[: x.dim() - reserve_dims], *width).to(x.dtype)
        self.l_aux = y.l_aux = l_aux
        return self.result_func(y) if self.result_func else y

    def _experts(self, rows, ids, chosen, scores, factor: float, uneven: bool) -> torch.Tensor:
        if not self.batch_prioritized_routing:
            return self._served(rows, ids, chosen, factor, uneven)
        # Served in the order of tokens, so tokens come in the order of their best scores.
        order = scores.detach().amax(1).argsort(descending=True, stable=True)
        y = self._served(rows[order], ids[order], chosen[order], factor, uneven)
        return torch.zeros_like(y).index_copy(0, order, y)

    def _served(self, rows, ids, chosen, factor: float, uneven: bool) -> torch.Tensor:
        alignment = self.sharded_count * self.a2a_ffn_overlap_degree
        alignment = -(-alignment // 128) * 128 if alignment > 256 else alignment
        custom = not isinstance(self.experts, tuple(EXPERTS.values()))
        if not custom and alignment == 1 and self.world_size == 1:
            return self._run(rows, ids, chosen, factor)
        # A rank's capacity is its own, and no spec has one that is a multiple of a number. So
        # assignments are dropped here, and the layer drops none.
        count = self.num_global_experts
        places, counts = _dispatch.served(ids, count)
        tokens = self._most(rows.shape[0]) if uneven else rows.shape[0]
        most = lambda: self._most(int(counts.max()))  # noqa: E731
        limit = _dispatch.capacity(factor, ids.shape[1], tokens, count, most, alignment)
        if not custom:
            return self._run(rows, ids.masked_fill(places >= limit, -1), chosen, None)
        before, after = (None, chosen) if self.is_postscore else (chosen, None)
        # Ranks exchange as many rows of each expert.
        limit = self._most(limit)
        own = _dispatch.encode(rows, ids, places, limit, count, before)
        if self.world_size == 1:
            return _dispatch.decode(self.experts(own, self), ids, places, after)
        from ._tutel_ranks import through_experts

        return _dispatch.decode(through_experts(self, own), ids, places, after)

    def _run(self, rows, ids, chosen, factor: Optional[float]) -> torch.Tensor:
        """Computes the experts by moesaic; without a factor none has a capacity."""
        model, hidden, output, _ = self.experts.sizes
        place = "output" if self.is_postscore else "input"
        text = _experts.external_spec(
            model, hidden, output, self.num_global_experts, ids.shape[1], self.experts.form(),
            factor is not None, place,
        )
        if self.world_size == 1:
            return _experts.run(text, rows, ids, chosen, self.experts.tensors(), factor)
        return self._over.run(self, text, rows, ids, chosen)

    def _most(self, number: int) -> int:
        """Returns the largest of the ranks' numbers."""
        if self.world_size == 1:
            return number
        most = torch.tensor(number)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self.group)
        return int(most)

    def _new_experts(self, options: dict) -> None:
        kind = options.pop("type", None)
        count = options.pop("count_per_node", 1)
        count = options.pop("num_experts_per_device", count)
        count = 1 if count == -1 else count
        self.num_global_experts = self.global_expert_count(count, self.group)
        shards = self.sharded_count = max(1, self.world_size // self.num_global_experts)
        self.num_local_experts = max(1, count)
        self.valid_rs = [0, *(r for r in range(1, shards + 1) if shards % r == 0)]
        self._new_degree(shards)
        if self.world_size > 1:
            from ._tutel_ranks import Over

            self._over = Over(shards)
        if kind == "custom":
            count = self.num_local_experts
            made = options.pop("module")
            options |= {"model_dim": self.model_dim, "sharded_count": shards}
            try:
                self.experts = made(num_experts_per_device=count, **options)
            except TypeError:  # a name of older versions, which Tutel takes too
                self.experts = made(local_experts=count, **options)
            return
        if kind not in EXPERTS:
            raise InvalidError(f"experts of type {kind!r}: expected {', '.join(EXPERTS)} or custom")
        options["sharded_count"] = shards
        what = f"experts {kind!r}"
        self.experts = _made(
            EXPERTS[kind], what, self.model_dim, self.num_local_experts, options
        )

    def _new_degree(self, shards: int) -> None:
        """Sets how many shards of an expert get each row, 0 for weights that come to the rows; only
        experts of a caller's own see it."""
        kind = self.parallel_type
        if kind.startswith("adaptive:"):
            wanted = kind.removeprefix("adaptive:")
            if not wanted.isdigit():
                raise InvalidError(f"parallel_type = {kind!r}: expected a number after adaptive:")
            self.adaptive_degree = _degree(min(int(wanted), shards), self.valid_rs)
        elif kind in ("data", "model", "auto"):
            self.adaptive_degree = shards if kind == "model" else 1
        else:
            raise InvalidError(
                f"parallel_type = {kind!r}: expected adaptive:0 and up, data, model or auto"
            )

    def _loss(self, logits, noisy, scores, ids, noise: float) -> torch.Tensor:
        count = self.num_global_experts
        if self.is_gshard_loss:
            return gshard_loss(scores, ids)
        if noise <= 0:
            raise InvalidError("is_gshard_loss=False needs gate_noise > 0")
        # Importance and load as Tutel has them, in evaluation too: a probability without noise is
        # compared with the last chosen noisy logit.
        normal = torch.distributions.Normal(0.0, noise / count)
        clean = logits.softmax(1).float()
        load = normal.cdf(clean - noisy.gather(1, ids[:, -1:]).float()).sum(0)
        return 0.5 * (_variation(clean.sum(0)) + _variation(load))

    def extra_repr(self) -> str:
        return f"model_dim={self.model_dim}, experts={self.num_global_experts}"


moe_layer = MOELayer


def _degree(r: int, valid: Sequence[int]) -> int:
    if r not in valid:
        raise InvalidError(f"adaptive degree {r}: expected one of {', '.join(map(str, valid))}")
    return r


def _variation(values: torch.Tensor) -> torch.Tensor:
    return values.var() / (values.mean().square() + 1e-10)


def _group(group: Any) -> tuple[Any, int]:
    """Returns a group, or that of all ranks, and its number of ranks: 1 without a group."""
    if group is None and not torch.distributed.is_initialized():
        return None, 1
    group = torch.distributed.group.WORLD if group is None else group
    return group, torch.distributed.get_world_size(group)


def _seed(seeds: Optional[Sequence[Optional[int]]], which: int, more: int = 0) -> None:
    if seeds is not None and seeds[which] is not None:
        torch.manual_seed(seeds[which] + more)


def _new_gate(model_dim: int, experts: int, options: dict) -> nn.Module:
    kind = options.pop("type", None)
    if kind == "custom":
        return options.pop("module")(model_dim=model_dim, num_global_experts=experts, **options)
    if kind not in GATES:
        raise InvalidError(f"gate of type {kind!r}: expected {', '.join(GATES)} or custom")
    return _made(GATES[kind], f"gate {kind!r}", model_dim, experts, options)


def _made(kind: type, what: str, model_dim: int, experts: int, options: dict) -> nn.Module:
    try:
        return kind(model_dim, experts, **options)
    except TypeError as error:
        raise InvalidError(f"{what}: {error}") from error
