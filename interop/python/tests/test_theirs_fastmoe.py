"""FastMoE's own tests, with `moesaic.compat.fastmoe` in the place of `fmoe`.

MOESAIC_FASTMOE is the folder of FastMoE's repository, https://github.com/laekov/fastmoe. Its tests
put tensors on a GPU, and ranks meet by NCCL; here `cuda` leaves tensors where they are, and ranks
meet by gloo. Those of CUDA kernels that `fmoe` exposes are not here.
"""

import importlib
import itertools
import os
import socket
import subprocess
import sys
import types

import pytest

FOLDER = os.environ.get("MOESAIC_FASTMOE")
if FOLDER is None:
    pytest.skip("MOESAIC_FASTMOE names no folder", allow_module_level=True)

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
from moesaic.compat import fastmoe


class Expert(fastmoe._MLP):
    """Their `_Expert`: two linear maps of every expert with an activation between."""

    def __init__(self, num_expert, d_model, d_hidden, activation, rank=0):
        super().__init__(num_expert, d_model, d_hidden)
        self.sizes, self.activation = (num_expert, d_model, d_hidden), activation


class FMoE(fastmoe.FMoE):
    """An FMoE whose `experts` may be an `_Expert`, which moesaic then computes."""

    def expert_fn(self, x, ids, scores):
        if not isinstance(self.experts, Expert):
            return super().expert_fn(x, ids, scores)
        layer = fastmoe.FMoETransformerMLP(
            *self.experts.sizes, self.experts.activation, world_size=self.world_size,
            moe_group=self.moe_group,
        )
        layer.experts = self.experts
        return layer.expert_fn(x, ids, scores)


def init_weight(layer, rng, sigma):
    """Draws the weight of an FMoELinear, whose bias stays."""
    bound = sigma / layer.weight.shape[-1] ** 0.5
    values = rng.uniform(-bound, bound, size=tuple(layer.weight.shape))
    layer.weight.data = torch.tensor(values, dtype=layer.weight.dtype)


NAMES = {
    "": {"FMoETransformerMLP": fastmoe.FMoETransformerMLP},
    "gates": {
        name: getattr(fastmoe, name) for name in ("NaiveGate", "SwitchGate", "GShardGate")
    },
    "layers": {"FMoE": FMoE, "_fmoe_general_global_forward": None},
    "transformer": {"_Expert": Expert},
    "functions": {"ensure_comm": lambda x, group: None},
    "distributed": {
        "DistributedGroupedDataParallel": fastmoe.DistributedGroupedDataParallel
    },
    "megatron": {},
    "megatron.layers": {"_megatron_init_method": init_weight},
}


def theirs(monkeypatch, alone=True):
    """Imports their modules over stand-ins for `fmoe`, for a GPU and, alone, for ranks."""
    for path, names in NAMES.items():
        name = f"fmoe.{path}".rstrip(".")
        module = types.ModuleType(name)
        vars(module).update(names, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    for owner in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(owner, "cuda", lambda self, *_: self)
    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    if alone:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.syspath_prepend(os.path.join(FOLDER, "tests"))
    ddp = types.ModuleType("test_ddp")
    ddp._ensure_initialized, ddp._run_distributed = (lambda: None), None
    monkeypatch.setitem(sys.modules, "test_ddp", ddp)

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.fixture
def load(monkeypatch):
    return theirs(monkeypatch)


ALONE = dict(rank=0, world_size=1, mp_group=None, dp_group=None, world_group=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("num_expert", [4, 8])
def test_fmoe_linear(load, num_expert, top_k, dtype):
    sizes = dict(num_expert=num_expert, top_k=top_k, batch_size=4, d_model=16, d_hidden=32)
    load("test_numerical").test_fmoe_linear(**sizes, **ALONE, data_type=str(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("num_expert", [4, 8])
@pytest.mark.parametrize("expert", ["NaiveExpert", "LinearExpert"])
def test_fmoe(load, expert, num_expert, top_k, dtype):
    sizes = dict(num_expert=num_expert, top_k=top_k, batch_size=4, d_model=16)
    load("test_numerical").test_fmoe(**sizes, **ALONE, expert=expert, data_type=dtype)


@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_fmoe_experts(load, mixed, top_k):
    module = load("test_numerical")
    naive, linear = module.NaiveExpert, module.LinearExpert
    experts = [linear, naive] * 4 if mixed else [naive] * 4
    sizes = dict(num_expert=None, top_k=top_k, batch_size=4, d_model=16)
    module.test_fmoe_experts(**sizes, **ALONE, expert=experts, data_type=torch.float32)


@pytest.mark.parametrize("cap", [0.1, 1.1])
def test_gshard_gate(load, cap):
    load("test_gates")._test_gshard_gate(d_model=1024, batch_size=16, n_expert=4, cap=cap)


@pytest.mark.parametrize("n_expert", [1, 16])
@pytest.mark.parametrize("cap", [0.1, 0.8])
def test_switch_gate(load, cap, n_expert):
    load("test_gates")._test_switch_gate(1024, 4096, n_expert, cap)


def test_zero_transformer(load):
    load("test_zero")._test_zero_transformer()


def cases(mp_size):
    """Their cases of ranks: a function of their file, and its arguments."""
    sizes = dict(top_k=2, batch_size=4, d_model=16)
    for num_expert, dtype in itertools.product([4, 8], DTYPES):
        shape = dict(**sizes, num_expert=num_expert, data_type=str(dtype))
        yield "test_fmoe_linear", dict(**shape, d_hidden=32)
        for expert in ("NaiveExpert", "LinearExpert"):
            yield "test_fmoe", dict(**shape, expert=expert)
    yield "_test_fmoe_local_ddp", {}


@pytest.mark.parametrize("mp_size", [1, 2])
def test_ranks(mp_size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world, started = 2 * mp_size, []
    for rank in range(world):
        ranks = dict(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=port)
        env = {**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(mp_size)]
        started.append(subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ))
    outputs = [process.communicate(timeout=500)[0] for process in started]
    for process, output in zip(started, outputs):
        assert process.returncode == 0, output[-4000:]


def run_rank(mp_size):
    """Runs all cases as one rank of theirs, with the groups that their file makes."""
    dist = torch.distributed
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    models = [range(first, first + mp_size) for first in range(0, world, mp_size)]
    datas = [range(first, world, mp_size) for first in range(mp_size)]
    groups = dict(
        rank=rank, world_size=world,
        mp_group=[dist.new_group(list(own)) for own in models][rank // mp_size],
        dp_group=[dist.new_group(list(own)) for own in datas][rank % mp_size],
        world_group=dist.new_group(list(range(world))),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = theirs(monkeypatch, alone=False)("test_numerical")
        # They look that parameters are on a GPU.
        text = open(module.__file__).read().replace("device.type == 'cuda'", "device.type == 'cpu'")
        exec(compile(text, module.__file__, "exec"), vars(module))
        for name, arguments in cases(mp_size):
            print(name, arguments, flush=True)
            getattr(module, name)(**groups, **arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]))
