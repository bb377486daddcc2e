"""Layers of arrays, without torch."""

import pytest

np = pytest.importorskip("numpy")
import moesaic

SPEC = "shape = { model_dim = 12, hidden_dim = 20, experts = 4, top_k = 2 }"


def test_new_weights_have_a_distribution_each():
    initial = {name: (kind, number) for name, kind, number in moesaic.Spec(SPEC).initial}
    assert list(initial) == [name for name, _, _ in moesaic.Spec(SPEC).weights]
    assert initial["experts.down.weight"] == ("uniform", pytest.approx(20**-0.5))


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


def test_errors_name_tensor_and_remedy():
    spec, w = moesaic.Spec(SPEC), weights()
    with pytest.raises(moesaic.InvalidError, match="router.weight"):
        moesaic.PackedLayer(spec, {k: v for k, v in w.items() if k != "router.weight"})
    with pytest.raises(moesaic.InvalidError, match="64 bits"):
        moesaic.PackedLayer(spec, {**w, "router.weight": w["router.weight"].astype(float)})
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
    with pytest.raises(moesaic.InvalidError, match="quantum"):
        moesaic.configure(target="quantum")
    assert issubclass(moesaic.InvalidError, ValueError) and issubclass(moesaic.Error, RuntimeError)
