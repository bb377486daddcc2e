"""The Python blocks of the pages, as they stand there."""

import pathlib
import re

import pytest

import moesaic

ROOT = pathlib.Path(__file__).parents[3]
PAGES = ["README.md", "interop/python/README.md", "interop/python/recipes/README.md"]
SPEC = "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    pytest.param(found[1], id=f"{page}:{number}")
    for page in PAGES
    for number, found in enumerate(BLOCK.finditer((ROOT / page).read_text()))
]


def a_model(folder):
    """Writes a small model in the form of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def tutels():
    """Returns a layer and the state dict of Tutel's model that has it."""
    from moesaic.compat.tutel import moe_layer

    experts = {"type": "ffn", "hidden_size_per_expert": 48, "count_per_node": 2}
    theirs = moe_layer({"type": "top", "k": 2}, 32, experts)
    text = "shape = { model_dim = 32, hidden_dim = 48, experts = 2, top_k = 2 }\n"
    moe = moesaic.MoE(text + 'experts = { form = "plain", activation = "relu", bias = true }')
    return moe, {f"blocks.3.moe.{name}": value for name, value in theirs.state_dict().items()}


@pytest.fixture
def alone(monkeypatch):
    """What `torchrun --nproc-per-node 1` tells a process."""
    for name, value in dict(
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    ).items():
        monkeypatch.setenv(name, value)
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_as_it_stands(block, tmp_path, request):
    names = {"spec": SPEC}
    pytest.importorskip("numpy")
    if "numpy" not in block:
        torch = pytest.importorskip("torch")
        names |= {"torch": torch, "MoE": moesaic.MoE}
        if '"cuda"' in block and not torch.cuda.is_available():
            pytest.skip("no GPU")
    if "(folder" in block:
        names["folder"] = a_model(tmp_path)
    if "state_dict" in block:
        names["moe"], names["state_dict"] = tutels()
    if "init_process_group" in block:
        request.getfixturevalue("alone")
    exec(compile(block, "page", "exec"), names)
