"""The MoE block of Qwen3-MoE by transformers' own implementations and by moesaic.

    PYTHONPATH=interop/python/python python interop/python/benches/block.py

Microseconds of CPU time of the calling thread, the least of several samples: all on one thread.
"""

import torch
import transformers
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moesaic
import moesaic.transformers
from timing import least

# Width, hidden width, experts, K.
SHAPE = (256, 128, 16, 4)
# Tokens, with the calls of a sample.
TOKENS = {1: 20, 64: 2, 1024: 1}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "moesaic")
SAMPLES = 5


def block(implementation, width, hidden, experts, top_k):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=hidden, num_experts=experts,
        num_experts_per_tok=top_k, num_hidden_layers=1,
    )
    config._experts_implementation = implementation
    made = Qwen3MoeSparseMoeBlock(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05)
    return made


def measure(blocks, x, calls):
    """Returns the least time of each block's forward pass and of both passes, by name. Blocks take
    turns, so that what else the machine does is all the same to them."""
    dy, times = torch.randn_like(x), {}
    for _ in range(SAMPLES):
        for name, made in blocks.items():
            leaf, parameters = x.clone().requires_grad_(), list(made.parameters())
            with torch.no_grad():
                forward = least(lambda: made(x), calls, 1)
            both = least(lambda: torch.autograd.grad(made(leaf), [leaf, *parameters], dy), calls, 1)
            old = times.get(name, (forward, both))
            times[name] = (min(old[0], forward), min(old[1], both))
    return times


def main():
    torch.set_num_threads(1)
    moesaic.configure(threads=1)
    moesaic.transformers.register()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, least of {SAMPLES}")
    print(f"width, hidden width, experts, K: {SHAPE}")
    print("tokens  experts by      forward  both passes")
    blocks = {name: block(name, *SHAPE) for name in IMPLEMENTATIONS}
    for tokens, calls in TOKENS.items():
        times = measure(blocks, torch.randn(1, tokens, SHAPE[0]), calls)
        for name, (forward, both) in times.items():
            print(f"{tokens:6}  {name:<12} {forward:10.0f}  {both:11.0f}", flush=True)


if __name__ == "__main__":
    main()
