"""What a call of a layer costs beside the layer itself: CPU time of the calling thread.

    PYTHONPATH=interop/python/python python interop/python/benches/call_overhead.py

The kernels of these layers take about a microsecond, and without tokens none is launched.
`cargo run --release --manifest-path interop/python/Cargo.toml --example call_overhead` times the
same calls from Rust; what is left is the door's. Each number is the least of several repeats, as
other work on the machine only adds.
"""

import torch

import moesaic
from moesaic import MoE
from timing import least

SPEC = "shape = { model_dim = 16, hidden_dim = 16, experts = 2, top_k = 1 }"
REPEATS = 40


def rows(tokens):
    """Yields the name of each kind of call, and the call."""
    moe, x = MoE(SPEC), torch.randn(tokens, 16)
    leaf, dy = x.clone().requires_grad_(), torch.ones(tokens, 16)
    parameters = list(moe.parameters())

    def both():
        torch.autograd.grad(moe(leaf), [leaf, *parameters], dy)

    moe.eval()
    with torch.no_grad():
        yield "evaluation", lambda: moe(x)
    moe.train()
    yield "training, forward", lambda: moe(leaf)
    yield "training, both passes", both


def main():
    torch.set_num_threads(1)
    moesaic.configure(threads=1)
    print(f"torch {torch.__version__}; microseconds of CPU time per call, least of {REPEATS}")
    print("tokens  call                         us")
    for tokens in (0, 1):
        for name, call in rows(tokens):
            print(f"{tokens:6}  {name:<24} {least(call, 500, REPEATS):6.2f}", flush=True)


if __name__ == "__main__":
    main()
