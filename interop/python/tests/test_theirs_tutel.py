"""Tutel's own tests and examples, with `moesaic.compat.tutel` in the place of `tutel.moe`.

MOESAIC_TUTEL is the folder of Tutel's repository, https://github.com/microsoft/tutel. Their caller
starts their examples by `torch.distributed.run`. In every process that it starts `tutel.moe` is
moesaic's, and the compiled part of Tutel is a module of torch's operations, with which Tutel itself
runs too, for comparison. The examples take a hundred steps of seconds: MOESAIC_TUTEL_STEPS are run,
3 by default.
"""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

FOLDER = os.environ.get("MOESAIC_TUTEL")
if FOLDER is None:
    pytest.skip("MOESAIC_TUTEL names no folder", allow_module_level=True)

pytest.importorskip("torch")

STEPS = int(os.environ.get("MOESAIC_TUTEL_STEPS", "3"))

# Run by each Python process when it starts. With THEIRS the layer is Tutel's own. Steps are TIMES
# as long: those of the examples are for large layers, and a small one's losses would not change.
START = """
import importlib.util, os, sys, types

def sparse(tensors, extra, kind):
    import torch
    gates, ids, places, rows, served = tensors
    _, width, capacity = extra
    token = torch.where((places < capacity) & (ids >= 0))[0]
    at = ids[token].long() * capacity + places[token].long()
    gates = gates.view(len(ids), -1)
    if kind == 0:
        served.view(-1, width).index_add_(0, at, gates[token, :1] * rows[token])
    elif kind == 1:
        rows.zero_()[token] = gates[token, :1] * served.view(-1, width)[at]
    else:
        gates.zero_()[token, 0] = (served.view(-1, width)[at] * rows[token]).sum(1)

kernels = types.ModuleType("tutel_custom_kernel")
kernels.__file__ = None
kernels.invoke_cpu_fp32 = kernels.invoke_cpu_fp64 = sparse
sys.modules["tutel_custom_kernel"] = kernels

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tutel.moe":
            import torch
            SGD, times = torch.optim.SGD, float(os.environ.get("TIMES", "1"))
            torch.optim.SGD = lambda parameters, lr: SGD(parameters, lr * times)
            if "THEIRS" not in os.environ:
                return importlib.util.find_spec("moesaic.compat.tutel")
            load = torch.ops.load_library
            torch.ops.load_library = lambda path: None if path is None else load(path)

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Has Python processes that the test starts find moesaic as `tutel.moe`."""
    (tmp_path / "sitecustomize.py").write_text(START)
    (tmp_path / "python3").symlink_to(sys.executable)
    package = os.path.dirname(os.path.dirname(importlib.import_module("moesaic").__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), package, FOLDER]))
    folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([folder, os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(os.path.join(FOLDER, "tests"))
    return importlib.import_module("test_tutel")


def losses(caller, **options):
    options = {"show_step_time": False, "device": "cpu", "num_steps": STEPS, **options}
    return caller.HelloworldCaller().run(**options)


def recorded(dtype, top, experts):
    with open("tests/test_baseline.json") as file:
        cases = json.load(file)
    keys, digits = ("dtype", "top", "num_local_experts"), 3 if dtype == "float32" else 1
    (found,) = [case for case in cases if [case[key] for key in keys] == [dtype, top, experts]]
    return [round(float(loss), digits) for loss in found["losses"]]


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("top", [1, 2])
def test_losses_in_f32_are_the_recorded_ones(start, top, experts):
    found = losses(start, top=top, dtype="float32", num_local_experts=experts)
    assert len(found) == STEPS and found == recorded("float32", top, experts)[:STEPS]


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("top", [1, 2])
def test_losses_in_f16_are_the_recorded_ones(start, top, experts):
    # Their tests compare two steps.
    found = losses(start, top=top, dtype="float16", num_local_experts=experts, num_steps=2)
    assert found == recorded("float16", top, experts)[:2]


SMALL = "--batch_size 4 --num_tokens 64 --model_dim 64 --num_steps 12 --device cpu"


def example(name, options="", ranks=1, theirs=False):
    """Returns the losses that an example prints: by moesaic, or by Tutel itself."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--standalone", f"tutel/examples/{name}.py", *SMALL.split(), *options.split()]
    command += [] if "custom" in name else ["--hidden_size", "96"]
    # Experts whose first weights are small learn more slowly; two ranks have twice the gradient, and
    # steps as long as one rank's end in NaN, Tutel's own too.
    times = {1: "20000", 2: "12000"}[ranks] if "llama" in options else "1000"
    env = {**os.environ, "TIMES": times, **({"THEIRS": "1"} if theirs else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [float(loss) for loss in re.findall(r"loss = (-?[\d.]+)", done.stdout)]
    assert len(found) == 12 and found[0] > found[-1] + 0.01, done.stdout
    return found


ONE = ["--top 1", "--top 2 --l_aux_wt 0.1", "--top 2 --capacity_factor 0.5 --fp32_gate",
       "--top 2 --capacity_factor 0 --a2a_ffn_overlap_degree 3", "--top 3 --num_local_experts 5",
       "--top 2 --capacity_factor -0.7 --a2a_ffn_overlap_degree 3", "--expert_type llama_ffn"]
MANY = [f"--top 2 --num_local_experts {count} {more}" for count in (1, 2, -2)
        for more in ("", "--capacity_factor 0.6 --a2a_ffn_overlap_degree 2")]
MANY += ["--top 2 --num_local_experts -2 --parallel_type model", "--use_2dh",
         "--capacity_factor 0 --expert_type llama_ffn"]


@pytest.mark.parametrize(
    "ranks, options", [*((1, each) for each in ONE), *((2, each) for each in MANY)]
)
def test_helloworld_is_tutels(start, ranks, options):
    found, wanted = (example("helloworld", options, ranks, theirs) for theirs in (False, True))
    assert found == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("name, ranks, options", [
    ("helloworld_custom_gate_expert", 1, ""), ("helloworld_custom_expert_sharded", 1, ""),
    ("helloworld_custom_expert_sharded", 2, "--num_local_experts -2"),
    ("helloworld_switch", 1, ""), ("helloworld_switch", 2, ""), ("helloworld_ddp_tutel", 2, ""),
])
def test_examples_are_tutels(start, name, ranks, options):
    found, wanted = (example(name, options, ranks, theirs) for theirs in (False, True))
    assert found == pytest.approx(wanted, abs=2e-4)
