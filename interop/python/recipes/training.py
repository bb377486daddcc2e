"""The common part of the recipes: training of a model and its dense twin, and the report."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Callable, Protocol

import torch
from torch import nn

import moesaic
import plot


@dataclass(frozen=True)
class Pace:
    """The length and the optimizer's settings of a run."""

    steps: int
    every: int
    """Steps between two evaluations."""
    rate: float
    """The highest learning rate: linear warm-up before it, a cosine to zero after it."""
    warmup: int
    decay: float
    """AdamW's weight decay, of matrices alone."""
    seeds: int = 3


class Run(Protocol):
    """A model of one seed with its data."""

    model: nn.Module

    def loss(self, step: int) -> torch.Tensor:
        """Returns the loss of the step's batch, auxiliary losses included."""

    def held_out(self) -> tuple[float, float]:
        """Returns loss and accuracy on the part of the data that no step sees."""


def optimizer_of(model: nn.Module, pace: Pace) -> torch.optim.Optimizer:
    """Returns AdamW, which decays matrices and leaves biases and scales alone."""
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        # Biases of experts are matrices in shape, [E, h], so the name decides too.
        groups[parameter.dim() > 1 and "bias" not in name].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": pace.decay},
         {"params": groups[False], "weight_decay": 0.0}],
        lr=pace.rate,
    )


def rate_at(step: int, pace: Pace) -> float:
    """Returns the learning rate of a step, counted from 0."""
    if step < pace.warmup:
        return pace.rate * (step + 1) / pace.warmup
    done = (step - pace.warmup) / max(1, pace.steps - pace.warmup)
    return pace.rate * 0.5 * (1.0 + math.cos(math.pi * done))


def train(run: Run, pace: Pace) -> list[dict]:
    """Trains a run and returns its points: step, mean training loss since the last, held-out."""
    optimizer = optimizer_of(run.model, pace)
    points, total = [], 0.0
    for step in range(pace.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, pace)
        run.model.train()
        loss = run.loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (step + 1) % pace.every == 0:
            run.model.eval()
            with torch.no_grad():
                held_out, accuracy = run.held_out()
            point = {"step": step + 1, "training": total / pace.every,
                     "loss": held_out, "accuracy": accuracy}
            points.append(point)
            total = 0.0
    return points


def compare(build: Callable[[bool, int], Run], pace: Pace) -> dict:
    """Trains the dense twin and the model with experts on the same batches, seed by seed."""
    models = {name: {"parameters": 0, "runs": []} for name in ("dense", "experts")}
    for seed in range(pace.seeds):
        for name, model in models.items():
            torch.manual_seed(seed)
            run, start = build(name == "experts", seed), time.monotonic()
            points = train(run, pace)
            model["parameters"] = sum(p.numel() for p in run.model.parameters())
            model["runs"].append(points)
            last = points[-1]
            print(f"seed {seed}, {name}: loss {last['loss']:.4f}, accuracy "
                  f"{last['accuracy']:.4f}, {time.monotonic() - start:.0f} s", flush=True)
    return {"pace": asdict(pace), "models": models}


def mean(values: list[float]) -> float:
    """Returns the mean of values."""
    return sum(values) / len(values)


def table(result: dict) -> str:
    """Returns the curves as text: the mean over seeds and, of the last point, each seed."""
    lines = []
    for name, model in result["models"].items():
        lines.append(f"{name}: {model['parameters']} parameters")
    lines.append("")
    lines.append(f"{'':>6} {'dense':^26}  {'experts':^26}")
    lines.append(f"{'step':>6}" + f" {'training':>9} {'held out':>8} {'accuracy':>8}" * 2)
    models = result["models"].values()
    for at, first in enumerate(result["models"]["dense"]["runs"][0]):
        line = f"{first['step']:>6}"
        for model in models:
            means = (mean([run[at][key] for run in model["runs"]])
                     for key in ("training", "loss", "accuracy"))
            line += " {:9.4f} {:8.4f} {:8.4f}".format(*means)
        lines.append(line)
    lines.append("")
    for key in ("loss", "accuracy"):
        for name, model in result["models"].items():
            ends = " ".join(f"{run[-1][key]:.4f}" for run in model["runs"])
            lines.append(f"held-out {key} at the end by seed, {name}: {ends}")
    return "\n".join(lines)


def main(title: str, unit: str, build: Callable[[bool, int], Run], pace: Pace) -> None:
    """Runs a recipe by its arguments; `unit` is that of the loss."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--steps", type=int, default=pace.steps)
    parser.add_argument("--seeds", type=int, default=pace.seeds)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file to write all points to")
    parser.add_argument("--svg", help="file to draw the curves to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    moesaic.configure(threads=options.threads)
    pace = replace(pace, steps=options.steps, seeds=options.seeds)
    result = {"title": title, "unit": unit, **compare(build, pace)}
    print(table(result))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file)
    if options.svg:
        with open(options.svg, "w", encoding="utf-8") as file:
            file.write(plot.svg(result))
