"""The compiled part of moesaic."""

import os
from typing import Any, Mapping, Optional, Protocol, Sequence

__version__: str

class Error(RuntimeError):
    """An operation of moesaic that failed."""

class InvalidError(Error, ValueError):
    """A spec, a tensor or an argument that cannot be."""

class SupportsDLPack(Protocol):
    def __dlpack__(self) -> Any: ...

class Array:
    """A tensor that moesaic made. `numpy.asarray` and `torch.from_dlpack` take it."""

    @property
    def shape(self) -> list[int]:
        """The sizes, outermost first."""
    @property
    def dtype(self) -> str:
        """The element type: `f32`, `f16`, `bf16`, `i32` or `i64`."""
    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """Returns a NumPy array in the same memory, read-only, or with `dtype` or `copy` a copy."""
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Spec:
    """The spec of a layer. `str(spec)` is its canonical text, equal for equal layers."""

    def __init__(self, source: str | Mapping[str, Any] | os.PathLike[str]) -> None: ...
    def replay(
        self, routed_experts: SupportsDLPack, layer: int = 0
    ) -> tuple[Spec, Array]:
        """Returns the spec of the layer that takes its experts from routed_experts [T, layers, K]
        i32 at `layer`, and its weight `router.table`."""
    @staticmethod
    def from_config(config_json: str, layer: int = 0) -> Spec:
        """Returns the spec of a layer of a model, from the text of its config.json."""
    def with_precision(
        self,
        weights: Optional[str] = None,
        activations: Optional[str] = None,
        expert_gradients: Optional[str] = None,
    ) -> Spec:
        """Returns the spec with other element types: "f32", "f16" or "bf16"."""
    def evaluation(self) -> Spec:
        """Returns the spec of the same layer in evaluation: without noise, dropout and losses."""
    @property
    def toml(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def output_dim(self) -> int: ...
    @property
    def experts(self) -> int:
        """The number of experts that the router scores."""
    @property
    def top_k(self) -> int: ...
    @property
    def precision(self) -> tuple[str, str]:
        """The element type of weights, and that of tokens."""
    @property
    def quantized(self) -> bool: ...
    @property
    def draws(self) -> bool:
        """Whether a training call draws random numbers."""
    @property
    def rescales(self) -> bool: ...
    @property
    def losses(self) -> list[str]: ...
    @property
    def weights(self) -> list[tuple[str, str, list[int]]]:
        """The weights: name, element type and shape."""
    @property
    def initial(self) -> list[tuple[str, str, float]]:
        """The distribution of each new weight: name, constant, uniform or normal, and a number."""
    @property
    def inputs(self) -> list[tuple[str, str, list[int]]]:
        """The inputs of a call: name, element type and shape; -1 is the number of tokens."""
    @property
    def trained(self) -> list[tuple[str, str]]:
        """The weights that have gradients: name, and element type of the gradient."""

Given = tuple[str, int, str, Sequence[int]]

class Layer:
    """A compiled layer without weights, at a backend, a GPU's number and a stream's handle."""

    def __init__(self, spec: Spec, place: tuple[str, int, int]) -> None: ...
    def bind(self, weights: Sequence[Given], names: Sequence[str]) -> BoundLayer:
        """Returns the layer with weights where they lie, for calls that bring these tensors."""
    @staticmethod
    def states() -> int:
        """Returns the number of states for backward that are alive in the process."""

class BoundLayer:
    """A layer with weights where their owner has them.

    A call brings the addresses of the tensors that `bind` named, in that order."""

    def evaluate(self, tokens: int, x: int, y: int) -> None:
        """Evaluates x to y, which are all that the call brings."""
    def forward(
        self, tokens: int, addresses: Sequence[int], capacity_factor: Optional[float] = None
    ) -> None: ...
    def forward_train(
        self,
        tokens: int,
        addresses: Sequence[int],
        rng_key: tuple[int, int, int, int],
        capacity_factor: Optional[float] = None,
    ) -> Any: ...
    def backward(
        self, state: int, tokens: int, addresses: Sequence[int], accumulate: bool
    ) -> None: ...

class PackedLayer:
    """A layer for inference with weights of its own, in the order that kernels read."""

    def __init__(
        self,
        spec: Spec,
        weights: Mapping[str, SupportsDLPack],
        bank: Optional[PackedLayer] = None,
    ) -> None: ...
    @staticmethod
    def from_hf(folder: str | os.PathLike[str], layer: int = 0) -> PackedLayer:
        """Reads the MoE layer of a model in a folder of transformers. Experts that it has as codes
        stay codes."""
    @staticmethod
    def from_gguf(file: str | os.PathLike[str], layer: int = 0) -> PackedLayer:
        """Reads the MoE layer of a model from a GGUF file. x and y are bf16 where its experts are
        codes."""
    @staticmethod
    def experts_of(
        model: str | os.PathLike[str], layer: int = 0, activations: Optional[str] = None
    ) -> PackedLayer:
        """Makes a layer of nothing but the routed experts of a model's layer, from its folder or its
        GGUF file: calls take topk_ids and topk_weights [T, K]. x and y have `activations`, such as
        "bf16", or the model's type."""
    def forward(
        self,
        x: SupportsDLPack,
        outputs: Sequence[str] = ("y",),
        capacity_factor: Optional[float] = None,
        **inputs: SupportsDLPack,
    ) -> dict[str, Array]:
        """Evaluates x [.., model_dim] to the named outputs, such as y [T, output_dim]."""
    def set_weight(self, name: str, value: SupportsDLPack) -> None:
        """Replaces a weight by a copy of another of its type and shape."""
    @property
    def spec(self) -> Spec: ...

class GateState:
    """The state between forward and backward of a call of a GateLayer."""

class GateLayer:
    """Layers that differ in their routers and share experts."""

    def __init__(
        self,
        spec: Spec,
        weights: Mapping[str, SupportsDLPack],
        routers: Sequence[Mapping[str, SupportsDLPack]],
        training: bool,
        mesh: Optional[Mesh] = None,
        strategy: Optional[str] = None,
    ) -> None: ...
    @property
    def in_one_pass(self) -> bool:
        """Whether a call runs all layers in one pass over the experts."""
    def forward(
        self,
        x: SupportsDLPack,
        outputs: Sequence[str] = ("y",),
        capacity_factor: Optional[float] = None,
        router_ids: Optional[SupportsDLPack] = None,
        **inputs: SupportsDLPack,
    ) -> list[dict[str, Array]]:
        """Evaluates x [.., model_dim] by every layer to the named outputs of each; with
        router_ids [T] i32 each token by one layer, to one dict."""
    def forward_train(
        self,
        x: SupportsDLPack,
        outputs: Sequence[str],
        rng_key: tuple[int, int, int, int],
        capacity_factor: Optional[float] = None,
        router_ids: Optional[SupportsDLPack] = None,
        **inputs: SupportsDLPack,
    ) -> tuple[list[dict[str, Array]], GateState]: ...
    def backward(
        self, state: GateState, dy: Sequence[SupportsDLPack]
    ) -> list[dict[str, Array]]:
        """Returns dx [T, model_dim] of each layer, from dy [T, output_dim] of each."""
    def gradient(self, gate: int, name: str) -> Array: ...
    def set_weight(self, gate: int, name: str, value: SupportsDLPack) -> None: ...

class Listener:
    """A port that waits for the other ranks of a group."""

    def __init__(self, host: str) -> None: ...
    @property
    def port(self) -> int: ...

class Ranks:
    """The ranks of a group, connected with each other. Every rank makes it."""

    def __init__(
        self, listener: Listener, rank: int, addresses: Sequence[str], key: bytes, timeout: float
    ) -> None: ...
    def mesh(self, expert_tp: int) -> Mesh:
        """Makes the mesh of expert_tp shards of each expert. All ranks call it."""
    def leave(self) -> None:
        """Ends the connections, so that the last messages arrive."""

class Mesh:
    """A rank's place among those that share layers."""

    def part(self, name: str, whole: SupportsDLPack) -> Array:
        """Copies this rank's part of a weight of the whole layer."""
    def part_shape(self, name: str, whole: Sequence[int]) -> list[int]: ...
    def is_replicated(self, name: str) -> bool:
        """Returns whether every rank has the same values of a weight."""

class RankState:
    """The state between forward and backward of a call over ranks."""

class RankLayer:
    """One rank's part of a layer. All ranks make the same calls in the same order."""

    def __init__(self, mesh: Mesh, spec: Spec, weights: Mapping[str, SupportsDLPack]) -> None: ...
    def set_weights(self, tensors: Sequence[Given]) -> None: ...
    def set_strategy(self, strategy: str) -> None: ...
    def forward(
        self, tokens: int, tensors: Sequence[Given], capacity_factor: Optional[float] = None
    ) -> None: ...
    def forward_train(
        self,
        tokens: int,
        tensors: Sequence[Given],
        rng_key: tuple[int, int, int, int],
        capacity_factor: Optional[float] = None,
    ) -> RankState: ...
    def backward(
        self, state: RankState, tensors: Sequence[Given], gradients: Sequence[Given]
    ) -> None: ...

def configure(target: Optional[str] = None, threads: Optional[int] = None) -> None:
    """Chooses a target, of the CPU or of GPUs, and the number of threads of layers that are made
    from now on."""

def memory(count: int) -> tuple[Any, bool]:
    """Returns the capsule of f32 memory for `count` elements, and whether they are zero."""

def engine_info() -> dict[str, Any]:
    """Returns target, device and threads of the CPU's engine, and how many kernels it compiled."""

def read_hf(folder: str | os.PathLike[str], layer: int = 0) -> tuple[Spec, dict[str, Array]]:
    """Reads the MoE layer of a model in a folder of transformers: spec, and weights by name."""

def read_state_dict(
    spec: Spec,
    library: str,
    tensors: Mapping[str, SupportsDLPack],
    share: Optional[int] = None,
    prefix: Optional[str] = None,
    gate: Optional[int] = None,
) -> dict[str, Array]:
    """Reads a layer from a state dict of Tutel ("tutel") or FastMoE ("fastmoe")."""
