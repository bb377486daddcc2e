"""The MoE block of Qwen3-MoE by transformers' own implementations and by moesaic.

    PYTHONPATH=interop/python/python python interop/python/benches/block.py

Microseconds of CPU time of the calling thread, the least of several samples: all on one thread.
"""

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moesaic
import moesaic.transformers
from timing import least

# Width, hidden width, experts, K; and calls of a sample.
SHAPES = [((64, 32, 8, 2), 20), ((512, 256, 32, 4), 3)]
IMPLEMENTATIONS = ("eager", "grouped_mm", "moesaic")
SAMPLES = 10


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


def measure(made, x, calls):
    leaf, dy, parameters = x.clone().requires_grad_(), torch.randn_like(x), list(made.parameters())
    with torch.no_grad():
        forward = least(lambda: made(x), calls, SAMPLES)
    both = least(lambda: torch.autograd.grad(made(leaf), [leaf, *parameters], dy), calls, SAMPLES)
    return forward, both


def main():
    torch.set_num_threads(1)
    moesaic.configure(threads=1)
    moesaic.transformers.register()
    print("width hidden experts K  tokens  experts by    forward  both passes")
    for shape, calls in SHAPES:
        for tokens in (1, 64):
            for implementation in IMPLEMENTATIONS:
                made = block(implementation, *shape)
                forward, both = measure(made, torch.randn(1, tokens, shape[0]), calls)
                print(f"{shape} {tokens:6}  {implementation:<12} {forward:9.0f} {both:9.0f}", flush=True)


if __name__ == "__main__":
    main()
