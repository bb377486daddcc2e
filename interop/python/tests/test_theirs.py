"""transformers' own tests of models, with moesaic's experts in every model.

MOESAIC_TRANSFORMERS is the folder of the installed transformers' sources, in one of two forms. The
repository has the tests of each model, with those of generation, training and export; put its `src`
on PYTHONPATH if no transformers is installed. A source distribution (`pip download --no-deps
--no-binary :all: transformers==VERSION`, unpacked) has the tests that all models share and that of
training, and lacks those of generation and export, which are skipped.

MOESAIC_TRANSFORMERS_EXPERTS=eager runs the models' own experts, to see what fails without moesaic.
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

# Each with tests of its own in the repository.
FILES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"]
WHOLE = os.path.isdir(os.path.join(FOLDER, "tests", "models", FILES[0]))
EAGER = os.environ.get("MOESAIC_TRANSFORMERS_EXPERTS") == "eager"


def whole():
    """Imports modules of the repository, which need a package with the name of a test of ours."""
    ours = sys.modules.pop("test_module", None)
    sys.path[:0] = [FOLDER, os.path.join(FOLDER, "utils")]
    for name in FILES:
        importlib.import_module(f"tests.models.{name}.test_modeling_{name}")
    importlib.import_module("tests.utils.test_modeling_utils")
    del sys.path[1]
    del sys.modules["test_module"]
    if ours is not None:
        sys.modules["test_module"] = ours


def shared():
    """Returns the module of tests that all models share."""
    if WHOLE:
        whole()
        return importlib.import_module("tests.test_modeling_common")
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
if not EAGER:
    common.batched_mm_experts_forward = moesaic.transformers.experts_forward
    common.grouped_mm_experts_forward = moesaic.transformers.experts_forward
_named = moe.ExpertsInterface.get_interface


def _ours(self, name, default):
    """Whatever a model asks for, eager aside, is moesaic; the mocks of their test stay."""
    found = _named(self, name, default)
    if name == "eager" or isinstance(found, unittest.mock.Mock):
        return found
    return moesaic.transformers.experts_forward


@pytest.fixture(autouse=True)
def every_model(monkeypatch):
    if not EAGER:
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


def _theirs(name):
    """The test cases of a model's own file; those of trained weights, to be downloaded, aside."""
    module = sys.modules[f"tests.models.{name}.test_modeling_{name}"]
    own = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in own if issubclass(each, unittest.TestCase)]
    own = [each for each in own if each.__module__ == module.__name__]
    own = [each for each in own if "Integration" not in each.__name__]
    for each in own:
        for test in dir(each):
            # The processes that these start would have the models' own experts.
            if test.startswith(("test_fsdp2", "test_tp_", "test_ep_")):
                setattr(each, test, None)
    return {each.__name__: each for each in own}


def _interface():
    """The case of their tests of the interfaces of attention and of experts."""
    module = sys.modules["tests.utils.test_modeling_utils"]
    return {"TestInterfaces": module.TestAttentionImplementation}


if WHOLE:
    globals().update(_interface())
    for _file in FILES:
        globals().update(_theirs(_file))
else:
    globals().update({f"Test{name}": _suite(name) for name in MODELS})
