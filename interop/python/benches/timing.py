"""What the benches of this folder share: the time of a call."""

import time


def least(call, calls, samples):
    """Returns microseconds of CPU time of the calling thread per call: the least of several samples
    of `calls` calls, as other work on the machine only adds."""
    call()
    best = float("inf")
    for _ in range(samples):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        best = min(best, time.thread_time_ns() - start)
    return best / calls / 1e3
