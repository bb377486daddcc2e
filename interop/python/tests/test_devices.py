"""Calls of tensors on a GPU. No GPU is here: the tensors are on the CPU, and the test says where
torch would have them; the engine behind is the CPU's."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import moesaic
from moesaic import MoE, _devices, _layers, ops
from moesaic._devices import Place

SPEC = {
    "shape": {"model_dim": 16, "hidden_dim": 32, "experts": 4, "top_k": 2},
    "router": {"renormalize": "sum"},
    "losses": [{"kind": "switch", "coefficient": 0.1}],
}


class Gpu:
    """Has calls take CPU tensors for tensors of a GPU, on the stream `stream`."""

    def __init__(self, monkeypatch) -> None:
        self.stream, self.selected = 7, []
        monkeypatch.setattr(_layers, "place_of", lambda _: Place("cpu", 0, self.stream))
        monkeypatch.setattr(_layers.Compiled, "check_device", lambda *_: None)
        monkeypatch.setattr(ops, "selected", self.select)

    @contextlib.contextmanager
    def select(self, place):
        self.selected.append(place)
        yield


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def both_passes(moe, x, dy):
    moe.zero_grad()
    x = x.clone().requires_grad_()
    y = moe(x, rng_key=(1, 2, 3, 4))
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in moe.parameters())]


def test_each_stream_has_a_layer_of_its_own(monkeypatch):
    moe = MoE(SPEC)
    x, dy = torch.randn(5, 16), torch.randn(5, 16)
    wanted = both_passes(moe, x, dy)
    moe.eval()
    evaluated = moe(x).detach()
    gpu = Gpu(monkeypatch)
    for gpu.stream in (7, 8):
        moe.train()
        gpu.selected.clear()
        for found, own in zip(both_passes(moe, x, dy), wanted):
            assert torch.equal(found, own)
        moe.eval()
        with torch.no_grad():
            assert torch.equal(moe(x), evaluated)
            assert torch.equal(moe(x), evaluated)
        # Forward, backward and each evaluation: none takes the way of the CPU's calls.
        assert gpu.selected == [Place("cpu", 0, gpu.stream)] * 4


def test_backward_on_another_stream_is_refused(gpu):
    moe = MoE(SPEC)
    y = moe(torch.randn(5, 16))
    gpu.stream += 1
    with pytest.raises(moesaic.InvalidError, match="another stream"):
        y.sum().backward()


class Cuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cpu, is_cuda = False, True

    def get_device(self):
        return 1


def test_a_call_is_on_the_current_stream(monkeypatch):
    x = torch.randn(2, 16).as_subclass(Cuda)
    stream = type("Stream", (), {"cuda_stream": 4711})
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert _devices.place_of(x) == ("cuda", 1, 4711)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert _devices.place_of(x) == ("rocm", 1, 4711)
    capturing[0] = True
    with pytest.raises(moesaic.InvalidError, match="CUDA graph"):
        _devices.place_of(x)


def test_tensors_of_two_devices_are_refused(monkeypatch):
    moe = MoE(SPEC, device="meta")
    with pytest.raises(moesaic.InvalidError, match="is on meta, its layer on the CPU"):
        moe(torch.randn(2, 16))
    with pytest.raises(moesaic.InvalidError, match="x is on meta"):
        MoE(SPEC)(torch.randn(2, 16, device="meta"))


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(_layers, "place_of", lambda _: Place("cuda", 0, 0))
    with pytest.raises(moesaic.Error, match="cuda") as error:
        MoE(SPEC)(torch.randn(2, 16))
    # The advice is for those who build wheels.
    assert "Cargo.toml" not in str(error.value)


def test_a_target_of_gpus_leaves_the_cpus():
    before = moesaic._native.engine_info()["target"]
    moesaic.configure(target="cuda:sm_90a")
    assert moesaic._native.engine_info()["target"] == before
