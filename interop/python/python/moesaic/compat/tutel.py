"""`moe_layer` with the arguments of `tutel.moe.moe_layer`, in one process.

The gate is torch's, so that `l_aux` is differentiable and gates of your own work; capacity,
dispatch, experts and combine are moesaic's. Parameters have Tutel's names.
"""

from __future__ import annotations

import math
import os
from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import nn
from torch.nn import functional

from .._native import InvalidError
from . import _experts


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
    ) -> None:
        super().__init__()
        output_dim = output_dim or model_dim
        if activation_fn_with_self is not None:
            activation_fn = lambda x: activation_fn_with_self(x, self)  # noqa: E731
        self.activation = _experts.activation_name(activation_fn or functional.relu)
        size = hidden_size_per_expert
        self.batched_fc1_w = nn.Parameter(torch.empty(num_experts, size, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(num_experts, size, output_dim))
        bias = torch.empty(num_experts, size) if has_fc1_bias else None
        self.batched_fc1_bias = nn.Parameter(bias) if bias is not None else None
        bias = torch.empty(num_experts, output_dim) if has_fc2_bias else None
        self.batched_fc2_bias = nn.Parameter(bias) if bias is not None else None
        self.sizes = (model_dim, size, output_dim, num_experts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights, as `nn.Linear` does."""
        model, hidden, _, _ = self.sizes
        for fan_in, names in ((model, "fc1"), (hidden, "fc2")):
            for tensor in (getattr(self, f"batched_{names}_{end}") for end in ("w", "bias")):
                if tensor is not None:
                    tensor.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

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
    ) -> None:
        super().__init__()
        self.activation = _experts.activation_name(activation_fn)
        self.sizes = (model_dim, hidden_size_per_expert, model_dim, num_experts)
        count = num_experts * model_dim * hidden_size_per_expert
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            self.register_parameter(name, nn.Parameter(torch.randn(count) * 0.01))

    def form(self) -> str:
        """Returns the keys `experts` of a spec."""
        return f'{{ activation = "{self.activation}" }}'

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by canonical name."""
        model, hidden, _, count = self.sizes
        gate, up = (w.view(count, model, hidden).transpose(1, 2) for w in (self.W_fc1, self.W_fc2))
        down = self.W_fc3.view(count, hidden, model).transpose(1, 2)
        return {
            "experts.gate.weight": gate, "experts.up.weight": up, "experts.down.weight": down,
        }


GATES = {"top": LinearGate, "cosine_top": CosineGate}
EXPERTS = {"ffn": FusedExperts, "llama_ffn": LlamaExperts}


class MOELayer(nn.Module):
    """A whole layer: x [.., model_dim] to y [.., output_dim], which carries `l_aux`."""

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
        _check_group(group)
        self.model_dim, self.is_postscore = model_dim, is_postscore
        self.batch_prioritized_routing = batch_prioritized_routing or (
            os.environ.get("BATCH_PRIO") == "1"
        )
        self.normalize_gate, self.is_gshard_loss = normalize_gate, is_gshard_loss
        self.result_func, self.l_aux = result_func, None
        _seed(seeds, 1)
        self.experts = _new_experts(model_dim, dict(experts))
        self.num_global_experts = self.experts.sizes[3]
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
        """Returns the experts of all ranks, which are those of this process."""
        if num_local_experts < 1:
            raise InvalidError(f"{num_local_experts} experts: this layer runs in one process")
        return num_local_experts

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
        """Runs the layer. What concerns many ranks changes nothing in one process.

        megablocks_size above 0 drops nothing, and is for inference.
        """
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
        y = self._experts(rows, ids, chosen, scores, factor)
        model_out = self.experts.sizes[2]
        width = x.shape[-reserve_dims:] if model_out == self.model_dim else (model_out,)
        y = y.reshape(*x.shape[: x.dim() - reserve_dims], *width).to(x.dtype)
        self.l_aux = y.l_aux = l_aux
        return self.result_func(y) if self.result_func else y

    def _experts(self, rows, ids, chosen, scores, factor: float) -> torch.Tensor:
        model, hidden, output, count = self.experts.sizes
        place = "output" if self.is_postscore else "input"
        text = _experts.external_spec(
            model, hidden, output, count, ids.shape[1], self.experts.form(), True, place
        )
        tensors = self.experts.tensors()
        if not self.batch_prioritized_routing:
            return _experts.run(text, rows, ids, chosen, tensors, factor)
        # Served in the order of tokens, so tokens come in the order of their best scores.
        order = scores.detach().amax(1).argsort(descending=True, stable=True)
        y = _experts.run(text, rows[order], ids[order], chosen[order], tensors, factor)
        return torch.zeros_like(y).index_copy(0, order, y)

    def _loss(self, logits, noisy, scores, ids, noise: float) -> torch.Tensor:
        count, tokens = self.num_global_experts, max(1, logits.shape[0])
        if self.is_gshard_loss:
            first = torch.bincount(ids[:, 0], minlength=count).to(scores.dtype)
            return (scores.sum(0) * first).sum() * (count / (tokens * tokens))
        if noise <= 0:
            raise InvalidError("is_gshard_loss=False needs gate_noise > 0")
        # Importance and load as Tutel has them, in evaluation too: a probability without noise is
        # compared with the last chosen noisy logit.
        normal = torch.distributions.Normal(0.0, noise / count)
        clean = logits.softmax(1).float()
        load = normal.cdf(clean - noisy.gather(1, ids[:, -1:]).float()).sum(0)
        return 0.5 * (_variation(clean.sum(0)) + _variation(load))

    def extra_repr(self) -> str:
        model, hidden, output, count = self.experts.sizes
        return f"model_dim={model}, hidden={hidden}, output_dim={output}, experts={count}"


moe_layer = MOELayer


def _variation(values: torch.Tensor) -> torch.Tensor:
    return values.var() / (values.mean().square() + 1e-10)


def _check_group(group: Any) -> None:
    sized = group is not None or torch.distributed.is_initialized()
    if sized and torch.distributed.get_world_size(group) > 1:
        raise InvalidError("group has several ranks: this layer runs in one process")


def _seed(seeds: Optional[Sequence[Optional[int]]], which: int, more: int = 0) -> None:
    if seeds is not None and seeds[which] is not None:
        torch.manual_seed(seeds[which] + more)


def _new_experts(model_dim: int, options: dict) -> nn.Module:
    kind = options.pop("type", None)
    if kind not in EXPERTS:
        raise InvalidError(f"experts of type {kind!r}: expected one of {', '.join(EXPERTS)}")
    count = options.pop("count_per_node", 1)
    count = options.pop("num_experts_per_device", count)
    if count == 0 or count < -1:
        raise InvalidError(f"num_experts_per_device = {count}: one process holds whole experts")
    return _made(EXPERTS[kind], f"experts {kind!r}", model_dim, abs(count), options)


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
