"""Layers of arrays and of models' files, without torch."""

import json
import re
import struct

import pytest

np = pytest.importorskip("numpy")
import moesaic

SPEC = "shape = { model_dim = 12, hidden_dim = 20, experts = 4, top_k = 2 }"


def test_new_weights_have_a_distribution_each():
    initial = {name: (kind, number) for name, kind, number in moesaic.Spec(SPEC).initial}
    assert list(initial) == [name for name, _, _ in moesaic.Spec(SPEC).weights]
    assert initial["experts.down.weight"] == ("uniform", pytest.approx(20**-0.5))


def test_a_spec_lists_what_calls_read():
    options = """
        router = { kind = "table", table_rows = 3, active_k = true }
        losses = [{ kind = "sequence", coefficient = 0.1 }]"""
    spec = moesaic.Spec(SPEC + options)
    assert sorted(spec.inputs) == [
        ("active_k", "i32", [1]),
        ("sequence_ids", "i32", [-1]),
        ("token_ids", "i32", [-1]),
        ("x", "f32", [-1, 12]),
    ]
    assert ("router.weight", "f32") in spec.trained
    # Rows that are rounded to codes have no gradients, and so no layer that trains.
    rounded = moesaic.Spec(
        """shape = { model_dim = 32, hidden_dim = 32, experts = 4, top_k = 2 }
        precision = { experts = "mxfp4", expert_activations = "int8" }"""
    )
    assert rounded.inputs == [("x", "f32", [-1, 32])] and rounded.trained == []


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, _, shape in moesaic.Spec(SPEC).weights
    }


def loop(w, x):
    logits = x @ w["router.weight"].T
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    ids = np.argsort(-scores, -1, kind="stable")[:, :2]
    y = np.zeros_like(x)
    for t, row in enumerate(x):
        for e in ids[t]:
            gate = w["experts.gate.weight"][e] @ row
            hidden = gate / (1 + np.exp(-gate)) * (w["experts.up.weight"][e] @ row)
            y[t] += scores[t, e] * (w["experts.down.weight"][e] @ hidden)
    return y, ids


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_a_packed_layer_is_a_loop(tokens):
    w, x = weights(), np.random.default_rng(1).standard_normal((tokens, 12)).astype(np.float32)
    layer = moesaic.PackedLayer(moesaic.Spec(SPEC), w)
    found = layer.forward(x, ["y", "topk_ids"])
    y, ids = loop(w, x)
    np.testing.assert_allclose(np.from_dlpack(found["y"]), y, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.from_dlpack(found["topk_ids"]), ids)
    assert found["y"].shape == [tokens, 12] and found["y"].dtype == "f32"


def test_weights_change_and_arrays_outlive_their_layer():
    w, x = weights(), np.ones((2, 12), np.float32)
    layer = moesaic.PackedLayer(moesaic.Spec(SPEC), w)
    w["experts.down.weight"] *= 2
    before = np.from_dlpack(layer.forward(x)["y"])
    layer.set_weight("experts.down.weight", w["experts.down.weight"])
    after = np.from_dlpack(layer.forward(x)["y"])
    del layer
    np.testing.assert_allclose(after, 2 * before, rtol=1e-5)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="an older NumPy exports none"
)
def test_read_only_arrays_are_read(tmp_path):
    w, x = weights(), np.ones((2, 12), np.float32)
    wanted = np.asarray(moesaic.PackedLayer(moesaic.Spec(SPEC), w).forward(x)["y"])
    for name, weight in w.items():
        np.save(tmp_path / f"{name}.npy", weight)
    mapped = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in w}
    x.setflags(write=False)
    found = moesaic.PackedLayer(moesaic.Spec(SPEC), mapped).forward(x)["y"]
    np.testing.assert_array_equal(np.asarray(found), wanted)
    half = np.asarray(found, np.float16)
    assert half.dtype == np.float16 and np.array(found).flags.writeable


def test_an_object_of_an_older_dlpack_is_read():
    class Older:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

    layer, x = moesaic.PackedLayer(moesaic.Spec(SPEC), weights()), np.ones((2, 12), np.float32)
    y = [np.asarray(layer.forward(one)["y"]) for one in (x, Older(x))]
    np.testing.assert_array_equal(*y)


def test_an_input_that_no_layer_of_the_spec_reads_is_refused():
    text = SPEC + '\nlosses = [{ kind = "global", coefficient = 0.5 }]\n'
    spec, x = moesaic.Spec(text), np.ones((2, 12), np.float32)
    gates = [{"router.weight": weights()["router.weight"]}] * 2
    experts = {name: w for name, w in weights().items() if name not in gates[0]}
    counts = {"global_counts": np.ones(4, np.int64), "global_tokens": np.array([2])}
    for layer in (
        moesaic.PackedLayer(spec, weights()),
        moesaic.GateLayer(spec, experts, gates, False),
    ):
        with pytest.raises(moesaic.InvalidError, match="reads no `token_id`, only x, global"):
            layer.forward(x, token_id=np.arange(2, dtype=np.int32))
        # Losses read these, which an evaluation has not.
        layer.forward(x, **counts)


def test_errors_name_tensor_and_remedy():
    spec, w = moesaic.Spec(SPEC), weights()
    with pytest.raises(moesaic.InvalidError, match="router.weight"):
        moesaic.PackedLayer(spec, {k: v for k, v in w.items() if k != "router.weight"})
    with pytest.raises(moesaic.InvalidError, match="64 bits"):
        moesaic.PackedLayer(spec, {**w, "router.weight": w["router.weight"].astype(float)})
    with pytest.raises(moesaic.InvalidError, match="`experts.down.bias` is no weight of the spec"):
        moesaic.PackedLayer(spec, {**w, "experts.down.bias": np.zeros((4, 12), np.float32)})
    turned = np.asfortranarray(w["router.weight"])
    with pytest.raises(moesaic.InvalidError, match="contiguous"):
        moesaic.PackedLayer(spec, {**w, "router.weight": turned})
    layer = moesaic.PackedLayer(spec, w)
    with pytest.raises(moesaic.InvalidError, match="width 13"):
        layer.forward(np.ones((2, 13), np.float32))
    with pytest.raises(moesaic.Error, match="no output `z`"):
        layer.forward(np.ones((2, 12), np.float32), ["z"])
    with pytest.raises(moesaic.InvalidError, match="DLPack"):
        layer.forward([[1.0] * 12])
    wrong = {"quantum": "known targets", "cpu:avx3": "known targets", "sim:sm_90a": "simulator"}
    for name, words in wrong.items():
        with pytest.raises(moesaic.InvalidError, match=f"(?s){name}.*{words}"):
            moesaic.configure(target=name)
    assert issubclass(moesaic.InvalidError, ValueError) and issubclass(moesaic.Error, RuntimeError)


D, H, E = 128, 256, 4
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": D, "moe_intermediate_size": H, "num_experts": E,
    "num_experts_per_tok": 2, "num_hidden_layers": 1, "torch_dtype": "float32",
}
SIZES = {"gate": (H, D), "up": (H, D), "down": (D, H)}


def write_folder(folder, config, tensors):
    """Writes config.json and one safetensors file of (dtype, array) by name."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8


def test_a_folder_is_read_and_codes_stay_codes(tmp_path):
    mlp = "model.layers.0.mlp"
    plain = {f"{mlp}.gate.weight": ("F32", floats(0, E, D))}
    coded = dict(plain)
    for expert in range(E):
        for at, (name, size) in enumerate(SIZES.items()):
            full = f"{mlp}.experts.{expert}.{name}_proj.weight"
            plain[full] = ("F32", floats(10 * expert + at, *size))
            # Codes of FP8 E4M3 below 1, of either sign.
            codes = np.random.default_rng(expert).integers(0, 0x38, size, dtype=np.uint8)
            coded[full] = ("F8_E4M3", codes | (codes & 1) << 7)
            coded[full + "_scale_inv"] = ("F32", np.full((size[0] // 128, size[1] // 128), 0.5, "f"))
    write_folder(tmp_path / "plain", CONFIG, plain)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_folder(tmp_path / "coded", {**CONFIG, "quantization_config": method}, coded)
    x = floats(99, 3, D)
    for name, quantized in (("plain", False), ("coded", True)):
        layer = moesaic.PackedLayer.from_hf(tmp_path / name)
        assert layer.spec.quantized is quantized
        y = np.asarray(layer.forward(x)["y"])
        # The same numbers, decoded.
        wanted = moesaic.PackedLayer(*moesaic.read_hf(tmp_path / name)).forward(x)["y"]
        np.testing.assert_allclose(y, np.asarray(wanted), rtol=1e-3, atol=1e-3)
        assert np.abs(y).max() > 0.01
    with pytest.raises(moesaic.InvalidError, match="layer"):
        moesaic.PackedLayer.from_hf(tmp_path / "plain", 7)
    with pytest.raises(moesaic.InvalidError, match="config.json"):
        moesaic.PackedLayer.from_hf(tmp_path / "nowhere")


def gguf(metadata, tensors):
    """Returns a GGUF file of f32 arrays."""
    def text(words):
        return struct.pack("<Q", len(words)) + words.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind = struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack(
            "<II", 4, value
        )
        head += text(key) + kind
    data = b""
    for name, array in tensors.items():
        sizes = array.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", 0, len(data))
        data += array.tobytes()
    return head + b"\0" * (-len(head) % 32) + data


def test_a_gguf_file_is_read(tmp_path):
    names = {
        "embedding_length": D, "expert_count": E, "expert_used_count": 2, "block_count": 1,
        "expert_feed_forward_length": H,
    }
    metadata = {f"qwen3moe.{name}": value for name, value in names.items()}
    weights = {name: floats(at, E, *size) for at, (name, size) in enumerate(SIZES.items())}
    router, x = floats(7, E, D), floats(8, 3, D)
    tensors = {f"blk.0.ffn_{name}_exps.weight": weight for name, weight in weights.items()}
    file = tmp_path / "model.gguf"
    metadata = {"general.architecture": "qwen3moe", **metadata}
    file.write_bytes(gguf(metadata, {"blk.0.ffn_gate_inp.weight": router, **tensors}))
    layer = moesaic.PackedLayer.from_gguf(file)
    own = {f"experts.{name}.weight": weight for name, weight in weights.items()}
    wanted = moesaic.PackedLayer(layer.spec, {"router.weight": router, **own})
    found, wanted = (np.asarray(one.forward(x)["y"]) for one in (layer, wanted))
    np.testing.assert_array_equal(found, wanted)
    file.write_bytes(b"no model")
    with pytest.raises(moesaic.InvalidError, match="model.gguf"):
        moesaic.PackedLayer.from_gguf(file)


# Names of Rust's, and a structure as Rust prints it.
RUST = re.compile(
    r"Cargo\.toml|its feature|::|`Input`|`Raw|forward_train|gradient_ptr|Options|TokenScope|"
    r"\w \{ \w+: "
)


def test_errors_speak_to_a_python_caller(tmp_path):
    native, w, x = moesaic._native, weights(), np.ones((3, 12), np.float32)
    spec = moesaic.Spec(SPEC + '\nlosses = [{ kind = "switch", coefficient = 0.1 }]')
    layer, routers = moesaic.PackedLayer(spec, w), [{"router.weight": w["router.weight"]}]
    others = {name: value for name, value in w.items() if name != "router.weight"}
    wider = moesaic.Spec(SPEC.replace("= 20", "= 24"))
    calls = {
        "maturin build --features cuda": lambda: native.Layer(spec, ("cuda", 0, 0)),
        "maturin build --features rocm": lambda: native.Layer(spec, ("rocm", 0, 0)),
        "`loss.switch`": lambda: layer.forward(x, ["loss.switch"]),
        "`grad.router.weight`": lambda: layer.forward(x, ["grad.router.weight"]),
        "weights do not fit": lambda: moesaic.PackedLayer(spec, {}),
        "has shape": lambda: layer.set_weight("router.weight", x),
        "has width 4": lambda: layer.forward(x[:, :4].copy()),
        "give it a `group`": lambda: native.GateLayer(spec, others, routers, False, None, "r=1"),
        "experts.gate.weight": lambda: moesaic.PackedLayer(wider, routers[0], layer),
        "config.json": lambda: moesaic.PackedLayer.from_hf(tmp_path),
        "nowhere": lambda: moesaic.PackedLayer.from_gguf(tmp_path / "nowhere"),
        "expected a table": lambda: moesaic.Spec("shape = 3"),
    }
    for wanted, call in calls.items():
        with pytest.raises(moesaic.Error) as found:
            call()
        text = str(found.value)
        assert wanted in text and not RUST.search(text), text
