"""SwinV2-MoE, small: handwritten digits read by a Swin Transformer with experts, beside its dense
twin of equal compute.

As in Tutel's paper, every other block has experts in place of its MLP: one per token, of the MLP's
hidden size, capacity factor 1.25, tokens served by their scores, noise on the gate, and importance
and load losses at 0.01. Digits are scikit-learn's 1797 images of 8 x 8; a pixel is a patch.

    PYTHONPATH=interop/python/python python interop/python/recipes/swin_moe.py --svg swin.svg
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn
from torch.nn import functional

import training
from moesaic.compat.tutel import moe_layer

AUX_WEIGHT = 0.01
HELD_OUT = 5
"""Every fifth image is held out."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model for images of `size` x `size` pixels in 10 classes."""

    size: int = 8
    patch: int = 1
    dim: int = 32
    heads: int = 2
    depths: tuple[int, ...] = (2, 2)
    window: int = 4
    mlp_ratio: int = 4
    experts: int = 8
    cosine_router: bool = False


class PositionBias(nn.Module):
    """SwinV2's continuous bias: a small MLP of log-spaced offsets, one value per head."""

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, heads, bias=False))
        place = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"), -1
        ).view(-1, 2)
        offset = (place[:, None] - place[None]).float() * (8.0 / max(1, window - 1))
        log = torch.sign(offset) * torch.log2(1.0 + offset.abs()) / 3.0
        self.register_buffer("offsets", log, persistent=False)

    def forward(self) -> torch.Tensor:
        """Returns the bias [heads, N, N] of a window of N tokens."""
        return 16.0 * self.mlp(self.offsets).permute(2, 0, 1).sigmoid()


class WindowAttention(nn.Module):
    """Attention within windows by cosines, with a learned scale per head."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        # As in SwinV2, queries and values have biases, and keys none.
        self.query, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.bias = PositionBias(window, heads)

    def forward(self, x: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        """Maps windows x [B, W, N, C] to the same shape; mask [W, 1, N, N] is added."""
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(2, 3)
            for linear in (self.query, self.key, self.value)
        )
        cosine = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
        scores = cosine * self.scale.clamp(max=math.log(100.0)).exp() + self.bias()
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))


class DenseMLP(nn.Sequential):
    """The MLP of a block without experts."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def expert_mlp(dim: int, hidden: int, shape: Shape) -> nn.Module:
    """Returns experts of the MLP's hidden size, with Swin-MoE's arguments of Tutel's layer."""
    gate = {
        "type": "cosine_top" if shape.cosine_router else "top",
        "k": 1, "fp32_gate": True, "capacity_factor": 1.25, "gate_noise": 1.0,
    }
    experts = {
        "type": "ffn", "num_experts_per_device": shape.experts,
        "hidden_size_per_expert": hidden, "activation_fn": functional.gelu,
    }
    return moe_layer(
        gate_type=gate, model_dim=dim, experts=experts, batch_prioritized_routing=True,
        normalize_gate=False, is_gshard_loss=False,
    )


class Block(nn.Module):
    """Attention in windows, then the MLP; each is normalized before it is added (res-post-norm)."""

    def __init__(self, size: int, dim: int, heads: int, odd: bool, moe: bool, shape: Shape) -> None:
        super().__init__()
        self.window = min(size, shape.window)
        # One window holds the whole image where they are of one size, so there is nothing to shift.
        self.shift = self.window // 2 if odd and size > self.window else 0
        self.attention = WindowAttention(dim, heads, self.window)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        hidden = dim * shape.mlp_ratio
        self.mlp = expert_mlp(dim, hidden, shape) if moe else DenseMLP(dim, hidden)
        self.register_buffer("mask", self._mask(size) if self.shift else None, persistent=False)

    def _mask(self, size: int) -> torch.Tensor:
        """Returns [W, 1, N, N]: -100 between pixels that only the shift made neighbours."""
        band = torch.zeros(size, dtype=torch.long)
        band[size - self.window :] = 1
        band[size - self.shift :] = 2
        region = (3 * band[:, None] + band[None]).float()[None, :, :, None]
        region = self._windows(region)[0, :, :, 0]
        return (region[:, :, None] != region[:, None]).float()[:, None] * -100.0

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        """Cuts [B, H, H, C] into windows [B, W, N, C]."""
        x = x.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _image(self, windows: torch.Tensor, size: int) -> torch.Tensor:
        """Puts windows [B, W, N, C] together to [B, H, H, C]."""
        side = size // self.window
        x = windows.unflatten(2, (self.window, self.window)).unflatten(1, (side, side))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [B, H, H, C] to the same shape."""
        moved = x.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = self._image(self.attention(self._windows(moved), self.mask), x.shape[1])
        y = y.roll((self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + self.norms[0](y)
        return x + self.norms[1](self.mlp(x))


class PatchMerging(nn.Module):
    """Joins 2 x 2 tokens into one of twice the channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduce, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [B, H, H, C] to [B, H/2, H/2, 2C]."""
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3)
        return self.norm(self.reduce(x.flatten(3)))


class Swin(nn.Module):
    """A small SwinV2; with `moe`, every other block has experts."""

    def __init__(self, shape: Shape, moe: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, shape.dim, shape.patch, shape.patch)
        self.norm = nn.LayerNorm(shape.dim)
        size, dim, heads = shape.size // shape.patch, shape.dim, shape.heads
        layers: list[nn.Module] = []
        for stage, depth in enumerate(shape.depths):
            if stage > 0:
                layers.append(PatchMerging(dim))
                size, dim, heads = size // 2, 2 * dim, 2 * heads
            for number in range(depth):
                odd = number % 2 == 1
                layers.append(Block(size, dim, heads, odd, moe and odd, shape))
        self.layers = nn.Sequential(*layers)
        self.last, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images [B, 1, S, S] to logits [B, 10]."""
        x = self.norm(self.embed(images).permute(0, 2, 3, 1))
        return self.head(self.last(self.layers(x)).mean((1, 2)))

    def auxiliary_loss(self) -> torch.Tensor:
        """Returns the sum of the load-balance losses of the last call."""
        losses = [m.l_aux for m in self.modules() if isinstance(m, moe_layer)]
        return torch.stack(losses).sum() if losses else torch.zeros(())


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scikit-learn's images [1797, 1, 8, 8], from -1 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    return images, torch.tensor(data.target)


class DigitsRun:
    """A model of one seed on the digits, in shuffled epochs."""

    def __init__(self, shape: Shape, moe: bool, seed: int, batch: int = 64) -> None:
        self.model = Swin(shape, moe)
        self.batch = batch
        self.random = torch.Generator().manual_seed(seed)
        images, labels = digits()
        held = torch.arange(len(labels)) % HELD_OUT == HELD_OUT - 1
        self.seen = (images[~held], labels[~held])
        self.unseen = (images[held], labels[held])
        self.order = torch.empty(0, dtype=torch.long)

    def loss(self, step: int) -> torch.Tensor:
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.seen[1]), generator=self.random)
        chosen, self.order = self.order[: self.batch], self.order[self.batch :]
        images, labels = (tensor[chosen] for tensor in self.seen)
        loss = functional.cross_entropy(self.model(images), labels)
        return loss + AUX_WEIGHT * self.model.auxiliary_loss()

    def held_out(self) -> tuple[float, float]:
        images, labels = self.unseen
        logits = self.model(images)
        right = (logits.argmax(1) == labels).float().mean()
        return functional.cross_entropy(logits, labels).item(), right.item()


PACE = training.Pace(steps=264, every=22, rate=2e-3, warmup=44, decay=0.05)

if __name__ == "__main__":
    training.main(
        "SwinV2 on 8 x 8 digits, 8 experts of 1 beside its dense twin", "nats",
        lambda moe, seed: DigitsRun(Shape(), moe, seed), PACE,
    )
