"""Launches of the package on the stream that a call names, by stand-ins for the drivers of GPUs.

Runs where the extension was built with the feature `cuda` or `rocm`, and a C compiler and one for
such GPUs are there. The stand-ins are those of `targets`: their memory is the host's, and they log
every call, with what a driver would refuse. They compute nothing.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import moesaic

ROOT = pathlib.Path(__file__).parents[3]
SPEC = {
    "shape": {"model_dim": 64, "hidden_dim": 128, "experts": 4, "top_k": 2},
    "router": {"renormalize": "sum"},
}
# The stand-in, the file that it takes the place of, and two of its functions.
DRIVERS = {
    "cuda": ("cuda/tests/fake_cuda.c", "libcuda.so.1", "cuCtxSetCurrent", "cuStreamCreate"),
    "rocm": (
        "rocm/tests/fake_hip.c", "libamdhip64.so.7", "hipSetDevice", "hipStreamCreateWithFlags"
    ),
}
NO_COMPILER = 77


def stand_in(source, library):
    """Compiles a stand-in, changed to know every kernel."""
    for path in (source, "api/tests/gpu/fake_gpu.h"):
        text = (ROOT / "targets" / path).read_text()
        # A layer has more functions than the tests of a device.
        text = text.replace("#define MOST 256", "#define MOST 8192")
        text = text.replace(
            "  return 500;\n}\n\n// Params",
            "  Object *made = make('f');\n  made->module = m, made->name = strdup(name);\n"
            "  return *function = made, 0;\n}\n\n// Params",
        )
        (library.parent / pathlib.Path(path).name).write_text(text)
    source = library.parent / pathlib.Path(source).name
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)


@pytest.mark.parametrize("backend", DRIVERS)
def test_launches_are_on_the_stream_of_the_call(backend, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    try:
        moesaic.Layer(moesaic.Spec(SPEC), (backend, 0, 0))
    except moesaic.Error as error:
        if "maturin" in str(error):
            pytest.skip(f"the extension was built without the feature {backend}")
    source, library, *_ = DRIVERS[backend]
    stand_in(source, tmp_path / library)
    log = tmp_path / "log"
    log.touch()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_GPU_LOG": str(log)}
    command = [sys.executable, __file__, backend]
    run = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True)
    if run.returncode == NO_COMPILER:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stderr
    text = log.read_text()
    assert "ILLEGAL" not in text, text
    calls = text.split("CALL ")[1:]
    assert [call.split()[0] for call in calls] == ["s1", "s2", "s1"]
    for call in calls:
        launches = re.findall(r"^launch (\w+) .* on (s\d+) ", call, re.M)
        names = {name for name, _ in launches}
        assert {"grouped_gemm_down", "grouped_gemm_wgrad_down"} <= names, names
        assert {stream for _, stream in launches} == {call[:2]}
        # No call waits for its stream, or copies to the host.
        assert "synchronize" not in call and "download" not in call


def calls_on_two_streams(backend):
    """Runs both passes of a layer on either stream, in a process of its own."""
    from moesaic import MoE, _layers, ops
    from moesaic._devices import Place

    _, library, select, create = DRIVERS[backend]
    driver = ctypes.CDLL(library)
    driver[select](None)
    streams = [ctypes.c_void_p() for _ in range(2)]
    for stream in streams:
        assert driver[create](ctypes.byref(stream), 1) == 0
    places = [Place(backend, 0, stream.value) for stream in streams]
    at = [places[0]]
    _layers.place_of = lambda _: at[0]
    _layers.Compiled.check_device = lambda *_: None
    ops.selected = lambda _: contextlib.nullcontext()
    moe, x = MoE(SPEC), torch.zeros(5, 64, requires_grad=True)

    def call(place):
        at[0] = place
        moe(x).sum().backward()

    for place in places:
        call(place)
    # Kernels are compiled now, and modules loaded.
    for number in (0, 1, 0):
        with open(os.environ["FAKE_GPU_LOG"], "a") as log:
            log.write(f"CALL s{number + 1}\n")
        call(places[number])


if __name__ == "__main__":
    try:
        calls_on_two_streams(sys.argv[1])
    except moesaic.Error as error:
        if "no compiler" not in str(error):
            raise
        print(error, flush=True)
        os._exit(NO_COMPILER)
    # Streams of the stand-in are gone before engines are.
    os._exit(0)
