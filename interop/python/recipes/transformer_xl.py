"""FastMoE's Transformer-XL, small: bytes of Moby-Dick with experts, beside the dense twin of equal
compute.

Attention has relative positions and a memory of the segment before. As in FastMoE's recipe the
position-wise MLP of every layer becomes `FMoETransformerMLP` with the naive gate, two experts per
token and ReLU; experts have half the MLP's hidden size, so that two cost what the MLP does.

    PYTHONPATH=interop/python/python python interop/python/recipes/transformer_xl.py --svg xl.svg
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import nn
from torch.nn import functional

import training
from moesaic.compat.fastmoe import FMoETransformerMLP  # FastMoE: `from fmoe import ...`

BOOK = Path(__file__).parents[3] / "examples/data/moby_dick.txt"
HELD_OUT = 0.05
"""The last twentieth of the text is held out."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model over bytes."""

    dim: int = 64
    heads: int = 4
    layers: int = 3
    hidden: int = 256
    segment: int = 64
    memory: int = 64
    experts: int = 16
    top_k: int = 2


class RelativeAttention(nn.Module):
    """Causal attention over the memory and the segment, by content and by distance."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, self.heads = shape.dim, shape.heads
        self.query, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.pair = nn.Linear(dim, 2 * dim, bias=False)
        self.distance = nn.Linear(dim, dim, bias=False)
        head = (shape.heads, 1, dim // shape.heads)
        self.content_bias = nn.Parameter(torch.zeros(head))
        self.place_bias = nn.Parameter(torch.zeros(head))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [.., N, C] to [.., heads, N, C / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Maps x [B, L, C] with memory [B, M, C] to [B, L, C]; places [M + L, C] embeds the
        distances M + L - 1 .. 0."""
        length, total = x.shape[1], memory.shape[1] + x.shape[1]
        q = self._split(self.query(x))
        k, v = (self._split(p) for p in self.pair(torch.cat([memory, x], 1)).chunk(2, -1))
        r = self._split(self.distance(places))
        row = torch.arange(length)[:, None]
        column = torch.arange(total)[None]
        # Query i and key j are M + i - j apart, whose embedding is row L - 1 - i + j of places.
        index = (length - 1 - row + column).clamp(max=total - 1)
        by_place = (q + self.place_bias) @ r.mT
        by_place = by_place.gather(-1, index.expand_as(by_place))
        scores = ((q + self.content_bias) @ k.mT + by_place) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(column > row + total - length, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and MLP, each normalized after it is added."""

    def __init__(self, shape: Shape, moe: bool) -> None:
        super().__init__()
        self.attention = RelativeAttention(shape)
        self.norms = nn.ModuleList([nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)])
        if moe:
            self.mlp: nn.Module = FMoETransformerMLP(
                num_expert=shape.experts, d_model=shape.dim,
                d_hidden=shape.hidden // shape.top_k, activation=nn.ReLU(), top_k=shape.top_k,
            )
        else:
            self.mlp = nn.Sequential(
                nn.Linear(shape.dim, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.dim)
            )

    def forward(self, x: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Maps x [B, L, C] to the same shape."""
        x = self.norms[0](x + self.attention(x, memory, places))
        return self.norms[1](x + self.mlp(x))


class TransformerXL(nn.Module):
    """A language model over bytes with segment recurrence."""

    def __init__(self, shape: Shape, moe: bool) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(256, shape.dim)
        self.layers = nn.ModuleList([Layer(shape, moe) for _ in range(shape.layers)])
        self.head = nn.Linear(shape.dim, 256)

    def _places(self, total: int) -> torch.Tensor:
        """Returns sines and cosines [total, C] of the distances total - 1 .. 0."""
        half = self.shape.dim // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(total - 1, -1, -1.0)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)

    def forward(
        self, ids: torch.Tensor, memories: Optional[list[torch.Tensor]] = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Maps ids [B, L] to logits [B, L, 256] and the layers' memories [B, <= M, C]."""
        x = self.embed(ids)
        if memories is None:
            memories = [x[:, :0].detach()] * len(self.layers)
        places = self._places(memories[0].shape[1] + ids.shape[1])
        kept = []
        for layer, memory in zip(self.layers, memories):
            kept.append(torch.cat([memory, x.detach()], 1)[:, -self.shape.memory :])
            x = layer(x, memory, places)
        return self.head(x), kept


class TextRun:
    """A model of one seed on streams of a text, each step the next segment of all streams."""

    def __init__(
        self, shape: Shape, moe: bool, seed: int, text: Optional[bytes] = None, streams: int = 16
    ) -> None:
        self.model = TransformerXL(shape, moe)
        text = BOOK.read_bytes() if text is None else text
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = int(len(ids) * (1.0 - HELD_OUT))
        # A seed starts its streams at a place of its own.
        begin = int(torch.randint(cut // 4, (), generator=torch.Generator().manual_seed(seed)))
        self.seen = self._streams(ids[:cut].roll(-begin), streams)
        self.unseen = self._streams(ids[cut:], streams)
        self.memories: Optional[list[torch.Tensor]] = None

    @staticmethod
    def _streams(ids: torch.Tensor, count: int) -> torch.Tensor:
        """Cuts a text into [count, length]."""
        return ids[: len(ids) // count * count].view(count, -1)

    def _segment(self, streams: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.model.shape.segment
        start = number * length
        return streams[:, start : start + length], streams[:, start + 1 : start + length + 1]

    def _segments(self, streams: torch.Tensor) -> int:
        return (streams.shape[1] - 1) // self.model.shape.segment

    def loss(self, step: int) -> torch.Tensor:
        number = step % self._segments(self.seen)
        if number == 0:
            self.memories = None
        ids, wanted = self._segment(self.seen, number)
        logits, self.memories = self.model(ids, self.memories)
        return bits(logits, wanted)

    def held_out(self) -> tuple[float, float]:
        memories, losses, right = None, [], []
        for number in range(self._segments(self.unseen)):
            ids, wanted = self._segment(self.unseen, number)
            logits, memories = self.model(ids, memories)
            losses.append(bits(logits, wanted).item())
            right.append((logits.argmax(-1) == wanted).float().mean().item())
        return training.mean(losses), training.mean(right)


def bits(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of wanted bytes in bits."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / math.log(2.0)


PACE = training.Pace(steps=400, every=40, rate=2e-3, warmup=40, decay=0.0)

if __name__ == "__main__":
    training.main(
        "Transformer-XL on bytes of Moby-Dick, 16 experts of 2 beside its dense twin",
        "bits per byte", lambda moe, seed: TextRun(Shape(), moe, seed), PACE,
    )
