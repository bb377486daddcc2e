"""Qwen3-MoE by transformers' own experts and by moesaic: an MoE block, and a whole model.

    PYTHONPATH=interop/python/python python interop/python/benches/transformers_speed.py [--threads N]

The implementations take turns, and have the same parameters and inputs. A line has the median
milliseconds of each over its turns, and the ratio of the fastest of transformers' to moesaic.
"""

import argparse
import statistics
import time

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeSparseMoeBlock,
)

import moesaic
import moesaic.transformers

OURS = "moesaic"
THEIRS = ("eager", "grouped_mm", "batched_mm")
TOKENS = (1, 64, 1024)
# A block of this many copied weights per token does not fit the memory of a small machine.
BATCHED_LIMIT = 64
LAYERS, VOCABULARY = 4, 1000


def configuration(implementation, layers=1):
    config = Qwen3MoeConfig(
        hidden_size=512, moe_intermediate_size=256, intermediate_size=256, num_experts=32,
        num_experts_per_tok=4, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, vocab_size=VOCABULARY,
    )
    config._experts_implementation = implementation
    return config


def block(implementation, dtype):
    made = Qwen3MoeSparseMoeBlock(configuration(implementation))
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05)
    return made.to(dtype)


def model(implementation, dtype):
    torch.manual_seed(0)
    config = configuration(implementation, LAYERS)
    made = Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation)
    return made.to(dtype)


def block_calls(made, tokens, dtype):
    """Returns the forward and both passes of a block on `tokens` rows, as functions."""
    torch.manual_seed(1)
    x, dy = (torch.randn(1, tokens, 512).to(dtype) for _ in range(2))
    leaf, parameters = x.clone().requires_grad_(), list(made.parameters())
    return lambda: made(x), lambda: torch.autograd.grad(made(leaf), [leaf, *parameters], dy)


def model_calls(made, tokens, dtype):
    """Returns the forward and both passes of a model on `tokens` tokens, as functions."""
    del dtype
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    parameters = list(made.parameters())

    def both():
        logits = made(ids, use_cache=False).logits
        torch.autograd.grad(logits.float().logsumexp(-1).sum(), parameters)

    return lambda: made(ids, use_cache=False).logits, both


def forward_alone(call):
    with torch.no_grad():
        return call()


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls, budget):
    """Returns the median milliseconds of each call; they take turns for `budget` seconds."""
    for call in calls.values():
        call()
    taken = {name: [] for name in calls}
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 5:
        for name, call in calls.items():
            taken[name].append(seconds(call))
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def compare(what, makes, calls_of, dtype, tokens, budget):
    names = [n for n in (*THEIRS, OURS) if n != "batched_mm" or tokens <= BATCHED_LIMIT]
    passes = {name: calls_of(makes[name], tokens, dtype) for name in names}
    outputs = {name: forward_alone(calls[0]) for name, calls in passes.items()}
    for name in names:
        scale = outputs["eager"].abs().max()
        error = ((outputs[name] - outputs["eager"]).abs().max() / scale).item()
        assert error < (1e-4 if dtype is torch.float32 else 5e-2), (what, tokens, name, error)
    for label, index in (("forward", 0), ("both", 1)):
        calls = {
            name: (lambda pair=pair: forward_alone(pair[0])) if index == 0 else pair[1]
            for name, pair in passes.items()
        }
        times = in_turns(calls, budget)
        theirs = {name: times[name] for name in names if name != OURS}
        best = min(theirs, key=theirs.get)
        columns = " ".join(f"{times[n]:10.3f}" if n in times else " " * 10 for n in (*THEIRS, OURS))
        ratio = theirs[best] / times[OURS]
        print(f"{what:<6} {str(dtype)[6:]:<9} {tokens:6} {label:<8} {columns}  {best} {ratio:.2f}",
              flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    moesaic.configure(threads=options.threads)
    moesaic.transformers.register()
    print(f"torch {torch.__version__}, {options.threads} threads; median milliseconds in turns")
    print("what   dtype     tokens pass           eager grouped_mm batched_mm    moesaic  ratio")
    for what, make, calls_of in (("block", block, block_calls), ("model", model, model_calls)):
        for dtype in (torch.float32, torch.bfloat16):
            makes = {name: make(name, dtype) for name in (*THEIRS, OURS)}
            for tokens in TOKENS:
                compare(what, makes, calls_of, dtype, tokens, options.seconds)


if __name__ == "__main__":
    main()
