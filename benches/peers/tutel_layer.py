"""Tutel's MoE layer on several CPU processes (gloo), a party of `cargo bench -p moesaic-benches --bench ranks`.

The bench starts as many as there are ranks, with torchrun's variables, and gives orders
through a named pipe each; README.md has them, and tutel.sh makes a Python that has Tutel.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python tutel_layer.py FOLDER
"""

import json
import os
import sys
import time

# The bench reads answers; whatever libraries print must not get between them.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import torch.distributed as dist
from safetensors import safe_open
from tutel import moe, net, system

KINDS = {"f32": torch.float32}


class Rank:
    """A rank's part of a layer, and its tokens."""

    def __init__(self):
        torch.set_num_threads(1)
        self.world = system.init_data_model_parallel(group_count=1, backend="gloo")
        self.rank, self.size = self.world.global_rank, self.world.global_size

    def load(self, folder, name, kind, what):
        """Every rank has the gate and its share of experts."""
        with open(os.path.join(folder, "layer.json")) as file:
            layer = json.load(file)
        if kind not in KINDS or layer["activation"] != "relu" or not layer["renormalize"]:
            raise ValueError(f"{name} {kind}: this script runs plain relu layers in f32")
        if layer["experts"] % self.size:
            raise ValueError(f"{layer['experts']} experts over {self.size} processes")
        self.width, self.both = layer["model_dim"], what == "both"
        own = layer["experts"] // self.size
        self.layer = moe.moe_layer(
            gate_type={"type": "top", "k": layer["top_k"], "fp32_gate": True, "capacity_factor": 0.0},
            experts={
                "type": "ffn",
                "num_experts_per_device": own,
                "hidden_size_per_expert": layer["hidden_dim"],
                "activation_fn": torch.relu,
            },
            model_dim=self.width,
            scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
        )
        experts = self.layer.experts
        with safe_open(os.path.join(folder, "weights.safetensors"), "pt") as file:
            part = lambda name: file.get_slice(name)[own * self.rank : own * (self.rank + 1)]
            with torch.no_grad():
                self.layer.gates[0].wg.weight.copy_(file.get_tensor("router.weight"))
                experts.batched_fc1_w.copy_(part("experts.up.weight"))
                experts.batched_fc1_bias.copy_(part("experts.up.bias"))
                # Hidden first.
                experts.batched_fc2_w.copy_(part("experts.down.weight").transpose(1, 2))
                experts.batched_fc2_bias.copy_(part("experts.down.bias"))
        return []

    def input(self, folder, tokens):
        tokens = int(tokens)
        if tokens % self.size:
            raise ValueError(f"Tutel's ranks have equally many tokens; {tokens} over {self.size}")
        each = tokens // self.size
        if each == 0:
            raise ValueError("Tutel's ranks have tokens")

        def own(name):
            with open(os.path.join(folder, name), "rb") as file:
                file.seek(each * self.rank * self.width * 4)
                data = bytearray(file.read(each * self.width * 4))
            return torch.frombuffer(data, dtype=torch.float32).view(each, self.width).clone()

        self.x, self.dy = own("x"), own("dy")
        return []

    def once(self):
        if not self.both:
            with torch.no_grad():
                return self.layer(self.x)
        for leaf in [self.x, *self.layer.parameters()]:
            leaf.requires_grad_(True)
            leaf.grad = None
        y = self.layer(self.x)
        y.backward(self.dy)
        for param in self.layer.parameters():
            if not hasattr(param, "skip_allreduce"):
                param.grad = net.simple_all_reduce(param.grad)
        return y

    def check(self, stem):
        y = self.once()
        results = {"y": y}
        if self.both:
            experts = self.layer.experts
            results["dx"] = self.x.grad
            gradients = {
                "router.weight": self.layer.gates[0].wg.weight.grad,
                "experts.up.weight": experts.batched_fc1_w.grad,
                "experts.up.bias": experts.batched_fc1_bias.grad,
                "experts.down.weight": experts.batched_fc2_w.grad.transpose(1, 2),
                "experts.down.bias": experts.batched_fc2_bias.grad,
            }
            for name, gradient in gradients.items():
                results["grad." + name] = gradient @ spread(gradient.shape[-1])
        for name, values in results.items():
            data = values.detach().contiguous().view(-1).numpy().tobytes()
            with open(f"{stem}.{self.rank}.{name}", "wb") as file:
                file.write(data)
        return []

    def run(self, count):
        """Nanoseconds of so many calls, after one that does not count."""
        self.once()
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(int(count)):
            self.once()
        return [time.perf_counter_ns() - start]

    def obey(self, words):
        orders = {"load": self.load, "input": self.input, "check": self.check, "run": self.run}
        if words[0] not in orders:
            raise ValueError(f"{words[0]} is not for Tutel")
        return orders[words[0]](*words[1:])


def spread(n):
    """The vector that gradients are multiplied with before they are compared."""
    return (torch.arange(n) * 7919 % 1000).float() / 1000 - 0.5


def main():
    rank = Rank()
    if rank.rank == 0:
        title = f"ready Tutel, {rank.size} processes of 1 thread by gloo, torch {torch.__version__}"
        print(title, file=ANSWERS, flush=True)
    with open(os.path.join(sys.argv[1], f"orders.{rank.rank}")) as orders:
        for line in orders:
            try:
                told = " ".join(map(str, rank.obey(line.split())))
            except Exception as error:  # the bench decides what to do without an answer
                words = " ".join(str(error).split()[:40])
                told = f"no {type(error).__name__}: {words}"
            all_told = [None] * rank.size
            dist.all_gather_object(all_told, told)
            if rank.rank == 0:
                problems = [told for told in all_told if told.startswith("no ")]
                line = problems[0] if problems else " ".join(["ok", *all_told])
                print(line, file=ANSWERS, flush=True)


main()
