"""transformers' own tests of models, with moesaic's experts in every model.

MOESAIC_TRANSFORMERS is the folder of a source distribution of the installed transformers:
`pip download --no-deps --no-binary :all: transformers==VERSION`, unpacked. It has the tests that
all models share and that of training, and lacks those of generation and export, which are skipped.
"""

import importlib
import os
import sys
import types
import unittest

import pytest

FOLDER = os.environ.get("MOESAIC_TRANSFORMERS")
if FOLDER is None:
    pytest.skip("MOESAIC_TRANSFORMERS names no folder", allow_module_level=True)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("parameterized")
from transformers.integrations import moe

import moesaic.transformers
from test_transformers import MODELS, SIZES


def shared():
    """The module of tests that all models share."""
    sys.path.insert(0, FOLDER)
    tests = types.ModuleType("tests")
    tests.__path__ = [os.path.join(FOLDER, "tests")]
    sys.modules["tests"] = tests
    for path, name in (("exporters.test_export", "Export"), ("generation.test_utils", "Generation")):
        module = types.ModuleType(f"tests.{path}")
        setattr(module, f"{name}TesterMixin", type(f"{name}TesterMixin", (), {}))
        sys.modules[f"tests.{path.split('.')[0]}"] = types.ModuleType(path)
        sys.modules[f"tests.{path}"] = module
    return importlib.import_module("tests.test_modeling_common")


common = shared()
overfit = importlib.import_module("tests.test_training_mixin").TrainingTesterMixin
# Their comparison of implementations with eager compares moesaic with eager.
common.batched_mm_experts_forward = moesaic.transformers.experts_forward
common.grouped_mm_experts_forward = moesaic.transformers.experts_forward
_named = moe.ExpertsInterface.get_interface


def _ours(self, name, default):
    """Whatever a model asks for, eager aside, is moesaic; the mocks of their test stay."""
    if name == "eager":
        return default
    mocked = name in self and isinstance(self[name], unittest.mock.Mock)
    return _named(self, name, default) if mocked else moesaic.transformers.experts_forward


@pytest.fixture(autouse=True)
def every_model(monkeypatch):
    monkeypatch.setattr(moe.ExpertsInterface, "get_interface", _ours)


class Tester:
    """The part of transformers' model testers that the shared tests read."""

    is_training, batch_size, seq_length = True, 2, 7
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, name):
        self.name = name
        self.causal_lm_class = getattr(transformers, f"{name}ForCausalLM")

    def get_config(self):
        return getattr(transformers, f"{self.name}Config")(**{**SIZES, **MODELS[self.name]})

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, 64, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _suite(name):
    class Suite(common.ModelTesterMixin, overfit, unittest.TestCase):
        model_tester = None
        all_model_classes = tuple(
            getattr(transformers, name + end) for end in ("Model", "ForCausalLM")
        )
        all_generative_model_classes = ()

        def setUp(self):
            self.model_tester = Tester(name)

        # It fails with the models' own experts, too.
        test_bc_cache_name_forward = None

    Suite.__name__ = Suite.__qualname__ = f"Test{name}"
    return Suite


globals().update({f"Test{name}": _suite(name) for name in MODELS})
