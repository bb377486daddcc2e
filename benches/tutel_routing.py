"""Tutel's routing, encode and decode on a CPU, forward and backward, one thread.

The same size as the second part of `cargo bench -p moesaic-benches --bench routing`: 8192 tokens of
1024, 256 experts, top-8, capacity factor 1, from scores on. Needs Tutel 0.3.2,
built with NO_CUDA=1, and PyTorch.

    python3 benches/tutel_routing.py
"""

import time

import torch
from tutel.impls.fast_dispatch import extract_critical, fast_decode, fast_encode

TOKENS, WIDTH, EXPERTS, TOP_K, RUNS = 8192, 1024, 256, 8, 7


def once():
    """Seconds of each stage: routing, encode, decode, backward of all three."""
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    times = [time.perf_counter()]
    scores = torch.softmax(logits, dim=1)
    critical, _ = extract_critical(
        scores, TOP_K, loss_fn=None, capacity_factor=1.0, normalize_gate=True
    )
    times.append(time.perf_counter())
    rows = fast_encode(x, critical, True)
    times.append(time.perf_counter())
    y = fast_decode(rows, critical, True)
    times.append(time.perf_counter())
    y.backward(x.detach())
    times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:])]


torch.manual_seed(0)
torch.set_num_threads(1)
best = [min(stage) for stage in zip(*(once() for _ in range(RUNS)))]
print(f"torch {torch.__version__}, best of {RUNS}, {TOKENS} tokens, {EXPERTS} experts, top-{TOP_K}")
for name, seconds in zip(["routing", "encode", "decode", "backward"], best):
    print(f"  {name:9} {seconds * 1e3:8.2f} ms")
