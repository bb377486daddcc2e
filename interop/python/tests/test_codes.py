"""Experts of transformers' models as the FP8 codes of their folders."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
from transformers import AutoModelForCausalLM

import moesaic
import moesaic.transformers
from test_transformers import models

# Codes are multiplied where the widths of experts are multiples of 128.
WIDTHS = dict(hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
QUANTIZED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def quantized(matrix):
    """Returns FP8 codes of a matrix in blocks of 128 x 128, and a scale for each."""
    rows, columns = (size // 128 for size in matrix.shape)
    blocks = matrix.float().view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448.0
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(matrix.shape), scales


def folder_of(model, path):
    """Saves a model whose experts are FP8, as DeepSeek publishes them."""
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = safetensors.load_file(file)
    for name, tensor in list(tensors.items()):
        parts = name.split(".")
        if "experts" in parts and parts[-2] in QUANTIZED:
            tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensor)
    safetensors.save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    others = {name.rsplit(".", 1)[0] for name in tensors if f"{name}_scale_inv" not in tensors}
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(n for n in others if ".experts." not in n),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def loaded(path, experts="moesaic"):
    return AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=experts, dtype=torch.float32
    )


@pytest.fixture(scope="module", params=["Mixtral", "Qwen3Moe"])
def folder(request, tmp_path_factory):
    model, _ = models(request.param, **WIDTHS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.2)
    return folder_of(model, tmp_path_factory.mktemp(request.param))


def test_codes_give_the_logits_of_their_numbers(folder):
    ids, numbers, model = torch.randint(3, 64, (2, 9)), loaded(folder, "eager"), loaded(folder)
    assert moesaic.transformers.keep_codes(model, folder) == 2
    assert all(p.numel() == 0 for n, p in model.named_parameters() if ".experts." in n)
    with torch.no_grad():
        wanted = numbers(ids).logits
        torch.testing.assert_close(model(ids).logits, wanted, rtol=2e-4, atol=2e-5)
        found = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, numbers.generate(ids, max_new_tokens=5, do_sample=False))


def test_what_codes_cannot_do_is_an_error(folder, tmp_path):
    model = loaded(folder)
    moesaic.transformers.keep_codes(model, folder)
    logits = model(torch.tensor([[3, 4]])).logits
    for attempt in (
        lambda: logits.sum().backward(), lambda: model.save_pretrained(tmp_path / "saved"),
        model.state_dict, lambda: copy.deepcopy(model),
    ):
        with pytest.raises(moesaic.InvalidError, match="are codes of .*without `keep_codes`"):
            attempt()


def test_folders_of_other_models_are_refused(folder, tmp_path):
    model = loaded(folder)
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.experts").down_proj.mul_(-1.0)
    with pytest.raises(moesaic.InvalidError, match="layers.1.mlp.experts.*differ .* by"):
        moesaic.transformers.keep_codes(model, folder)
    plain, _ = models("Mixtral")
    plain.save_pretrained(tmp_path)
    with pytest.raises(moesaic.InvalidError, match="no quantized experts"):
        moesaic.transformers.keep_codes(loaded(tmp_path), tmp_path)
    with pytest.raises(moesaic.Error, match="nowhere"):
        moesaic.transformers.keep_codes(loaded(folder), tmp_path / "nowhere")
