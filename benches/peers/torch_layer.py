"""PyTorch's MoE layers as a peer of `cargo bench -p moesaic-benches --bench layer` and of the GPU smoke test.

The bench starts this with `--threads N`, the smoke test with `--device cuda`, and talks to it
in lines; README.md has the protocol. Ways to run the layer, all on the same weights:

    eager    transformers' block of that model, its own loop over experts
    grouped  the same block over torch's grouped matrix product
    compiled the same as torch.compile makes it
    loop     rows sorted by expert once, one fused gate-up product per expert
    packed   as loop, weights reordered for oneDNN beforehand; forward only, on CPUs
    products as loop, but torch's grouped product for all experts at once; on GPUs, without bias
    vllm, flashinfer
             their experts for serving, between our router and our sum with shared experts;
             forward only, on GPUs, gated by silu without bias
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time

# Lines go to the bench; whatever libraries print must not get between them.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer(*words):
    print(*words, file=ANSWERS, flush=True)


try:
    import torch
    import torch.nn.functional as F
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as error:
    answer("no", error)
    sys.exit(0)

try:
    import transformers
except ImportError:
    transformers = None

ALPHA, CLAMP = 1.702, 7.0  # gpt-oss
DEVICE = "cpu"


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def activate(layer, hidden):
    """The activation between the two products; gate rows lie before up rows."""
    if layer["activation"] == "relu":
        return F.relu(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    if layer["activation"] == "clamped":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return F.silu(gate) * up


def route(layer, weights, x):
    """Ids and f32 weights, both [T, K]."""
    logits = F.linear(x, weights["router.weight"], weights.get("router.bias")).float()
    if layer["score"] == "softmax-selected":
        best, ids = logits.topk(layer["top_k"], dim=-1)
        return ids, best.softmax(-1)
    scores = logits.sigmoid() if layer["score"] == "sigmoid" else logits.softmax(-1)
    bias = weights.get("router.select_bias")
    ids = (scores if bias is None else scores + bias).topk(layer["top_k"], dim=-1)[1]
    chosen = scores.gather(1, ids)
    if layer["renormalize"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return ids, chosen * layer["scale"]


def by_expert(layer, weights, x, up, down):
    """The layer, with `up(e, rows)` and `down(e, rows)` for one expert's products."""
    ids, scores = route(layer, weights, x)
    flat, order = ids.flatten().sort(stable=True)
    counts = torch.bincount(flat, minlength=layer["experts"]).tolist()
    rows = x[order // layer["top_k"]].split(counts)
    out = [down(e, activate(layer, up(e, r))) for e, r in enumerate(rows) if len(r)]
    return combined(layer, weights, x, order, scores, torch.cat(out))


def combined(layer, weights, x, order, scores, out):
    """Rows in the order of experts, back to tokens; and shared experts."""
    slots = torch.empty_like(out).index_copy(0, order, out)
    slots = slots.view(len(x), layer["top_k"], -1) * scores.unsqueeze(-1).to(x.dtype)
    return with_shared(layer, weights, x, slots.sum(1))


def with_shared(layer, weights, x, y):
    if layer["shared_dim"]:
        hidden = F.linear(x, weights["shared.0.gate_up.weight"])
        y = y + F.linear(activate(layer, hidden), weights["shared.0.down.weight"])
    return y


def products(layer, weights):
    first = weights["experts.up.weight" if layer["plain"] else "experts.gate_up.weight"]
    second = weights["experts.down.weight"]

    def forward(x):
        ids, scores = route(layer, weights, x)
        flat, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(flat, minlength=layer["experts"])
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // layer["top_k"]]
        hidden = activate(layer, torch._grouped_mm(rows, first.transpose(1, 2), offs=ends))
        out = torch._grouped_mm(hidden, second.transpose(1, 2), offs=ends)
        return combined(layer, weights, x, order, scores, out)

    return forward


def vllm(weights):
    """vLLM's Triton kernels, or whichever it chooses for these weights."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    first, second = weights["experts.gate_up.weight"], weights["experts.down.weight"]
    return lambda x, ids, scores: fused_experts(x, first, second, scores, ids)


def flashinfer(weights):
    """FlashInfer's CUTLASS kernels, whose up rows lie before the gate rows."""
    from flashinfer.fused_moe import cutlass_fused_moe

    first = torch.cat(weights["experts.gate_up.weight"].chunk(2, dim=1)[::-1], dim=1)
    second = weights["experts.down.weight"]

    def experts(x, ids, scores):
        y = cutlass_fused_moe(x, ids, scores, first, second, x.dtype, quant_scales=None)
        return y[0] if isinstance(y, (list, tuple)) else y

    return experts


SERVING = {"vllm": vllm, "flashinfer": flashinfer}
PACKAGES = {"vllm": "vllm", "flashinfer": "flashinfer-python"}


def installed():
    return [name for name in SERVING if importlib.util.find_spec(name)]


def version(name):
    try:
        return importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return "of no version"


def serving(layer, weights):
    """Those that are installed and take the layer."""
    takes = layer["activation"] == "silu" and "experts.down.bias" not in weights
    return installed() if takes else []


def served(name, layer, weights):
    experts = SERVING[name](weights)

    def forward(x):
        ids, scores = route(layer, weights, x)
        y = experts(x, ids.to(torch.int32), scores.float())
        return with_shared(layer, weights, x, y)

    return forward


def loop(layer, weights):
    first = "up" if layer["plain"] else "gate_up"
    names = [f"experts.{part}.{kind}" for part in (first, "down") for kind in ("weight", "bias")]

    def forward(x):
        # One unbind, because the gradient of w[e] is as large as that of w.
        none = [None] * layer["experts"]
        each = [weights[name].unbind() if name in weights else none for name in names]
        up = lambda e, rows: F.linear(rows, each[0][e], each[1][e])
        down = lambda e, rows: F.linear(rows, each[2][e], each[3][e])
        return by_expert(layer, weights, x, up, down)

    return forward


def packed(layer, weights):
    reorder = lambda w: [torch.ops.mkldnn._reorder_linear_weight(one.detach(), None) for one in w]
    into = reorder(weights["experts.up.weight" if layer["plain"] else "experts.gate_up.weight"])
    into_bias = weights.get("experts.up.bias" if layer["plain"] else "experts.gate_up.bias")
    out, out_bias = reorder(weights["experts.down.weight"]), weights.get("experts.down.bias")

    def product(rows, weight, bias, e):
        bias = None if bias is None else bias[e]
        return torch.ops.mkldnn._linear_pointwise(rows, weight[e], bias, "none", [], "")

    up = lambda e, rows: product(rows, into, into_bias, e)
    down = lambda e, rows: product(rows, out, out_bias, e)
    return lambda x: by_expert(layer, weights, x, up, down)


# Per model: transformers' module and class, and what its config calls our sizes.
BLOCKS = {
    "mixtral": ("mixtral", "Mixtral", "SparseMoeBlock", "intermediate_size"),
    "qwen3": ("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", "moe_intermediate_size"),
    "olmoe": ("olmoe", "Olmoe", "SparseMoeBlock", "intermediate_size"),
    "olmoe-half": ("olmoe", "Olmoe", "SparseMoeBlock", "intermediate_size"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3", "MoE", "moe_intermediate_size"),
    "gpt-oss": ("gpt_oss", "GptOss", "MLP", "intermediate_size"),
}


def state_of(name, layer, weights):
    """The weights under the names that transformers gives them."""
    fused, down = weights["experts.gate_up.weight"], weights["experts.down.weight"]
    if name == "gpt-oss":
        # Gate and up of a channel beside each other, and inputs before outputs.
        interleave = lambda w: torch.stack(w.chunk(2, dim=1), dim=2).flatten(1, 2)
        return {
            "router.weight": weights["router.weight"],
            "router.bias": weights["router.bias"],
            "experts.gate_up_proj": interleave(fused).transpose(1, 2).contiguous(),
            "experts.gate_up_proj_bias": interleave(weights["experts.gate_up.bias"]),
            "experts.down_proj": down.transpose(1, 2).contiguous(),
            "experts.down_proj_bias": weights["experts.down.bias"],
        }
    state = {
        "gate.weight": weights["router.weight"],
        "experts.gate_up_proj": fused,
        "experts.down_proj": down,
    }
    if name == "deepseek-v3":
        gate, up = weights["shared.0.gate_up.weight"].chunk(2)
        state["gate.e_score_correction_bias"] = weights["router.select_bias"]
        state["shared_experts.gate_proj.weight"] = gate
        state["shared_experts.up_proj.weight"] = up
        state["shared_experts.down_proj.weight"] = weights["shared.0.down.weight"]
    return state


def config_of(kind, prefix, width, layer):
    module = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    config = getattr(module, prefix + "Config")()
    config.hidden_size = layer["model_dim"]
    setattr(config, width, layer["hidden_dim"])
    for experts in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, experts):
            setattr(config, experts, layer["experts"])
    config.num_experts_per_tok = layer["top_k"]
    config.norm_topk_prob = layer["renormalize"]
    config.routed_scaling_factor = layer["scale"]
    config.n_group = config.topk_group = config.n_shared_experts = 1
    return config


# Ways of transformers' block, and what transformers calls them. Its third, `batched_mm`, copies
# the weights of every choice: it was the slowest at every number of tokens, and is left out.
IMPLEMENTATIONS = {"eager": "eager", "grouped": "grouped_mm", "compiled": "grouped_mm"}


def block(name, layer, weights, way):
    kind, prefix, suffix, width = BLOCKS[name]
    config = config_of(kind, prefix, width, layer)
    config._experts_implementation = IMPLEMENTATIONS[way]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.device("meta"):
        made = getattr(module, prefix + suffix)(config)
    made.load_state_dict(state_of(name, layer, weights), assign=True)

    called = torch.compile(made) if way == "compiled" else made

    def forward(x):
        y = called(x.unsqueeze(0))
        return (y[0] if isinstance(y, tuple) else y).squeeze(0)

    forward.made = made
    return forward


class Peer:
    """One layer, one input, and the ways to run them."""

    def load(self, folder):
        self.__dict__.clear()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # the memory of the last layer is for everybody
        with open(os.path.join(folder, "layer.json")) as file:
            self.layer = json.load(file)
        self.weights = {}
        with safe_open(os.path.join(folder, "weights.safetensors"), "pt") as file:
            for name in file.keys():
                # A copy: memory of its own has large pages, a mapped file has not.
                self.weights[name] = file.get_tensor(name).to(DEVICE, copy=True)
        self.made = {}
        blocks = self.layer["name"] in BLOCKS and transformers is not None
        both = (list(IMPLEMENTATIONS) if blocks else []) + ["loop"]
        if DEVICE == "cpu":
            return [f"{name}:both" for name in both] + ["packed:forward"]
        both = [name for name in both if name != "compiled"]  # it compiles for minutes
        if "experts.down.bias" not in self.weights:
            both.append("products")
        forward = serving(self.layer, self.weights)
        return [f"{name}:both" for name in both] + [f"{name}:forward" for name in forward]

    def input(self, path):
        with safe_open(path, "pt") as file:
            read = lambda name: file.get_tensor(name).to(DEVICE, copy=True)
            self.x, self.dy = read("x"), read("dy")

    def variant(self, name):
        if name not in self.made:
            layer, weights = self.layer, self.weights
            if name in IMPLEMENTATIONS:
                self.made[name] = block(layer["name"], layer, weights, name)
            elif name in SERVING:
                self.made[name] = served(name, layer, weights)
            else:
                ways = {"loop": loop, "packed": packed, "products": products}
                self.made[name] = ways[name](layer, weights)
        return self.made[name]

    def once(self, name, both):
        forward = self.variant(name)
        if not both:
            with torch.inference_mode():
                return forward(self.x)
        self.leaves = self.leaves_of(forward)
        for leaf in [self.x, *self.leaves.values()]:
            leaf.requires_grad_(leaf.is_floating_point())
            leaf.grad = None
        y = forward(self.x)
        y.backward(self.dy)
        return y

    def leaves_of(self, forward):
        """What has gradients, by the names that transformers or we give them."""
        made = getattr(forward, "made", None)
        return dict(made.named_parameters()) if made else self.weights

    def check(self, name, both, path):
        y = self.once(name, both)
        result = {"y": y.detach().float().contiguous()}
        if both:
            result["dx"] = self.x.grad.float().contiguous()
            for leaf, gradient in self.gradients(name).items():
                result["grad." + leaf] = (gradient.float() @ spread(gradient.shape[-1])).contiguous()
        save_file({leaf: tensor.cpu() for leaf, tensor in result.items()}, path)

    def gradients(self, name):
        """Gradients under our names and in our shapes."""
        grads = {leaf: t.grad for leaf, t in self.leaves.items() if t.grad is not None}
        if name in ("loop", "products"):
            return grads
        if self.layer["name"] == "gpt-oss":
            apart = lambda g: torch.cat([g[:, ::2], g[:, 1::2]], dim=1)
            return {
                "router.weight": grads["router.weight"],
                "experts.gate_up.weight": apart(grads["experts.gate_up_proj"].transpose(1, 2)),
                "experts.down.weight": grads["experts.down_proj"].transpose(1, 2),
                "experts.gate_up.bias": apart(grads["experts.gate_up_proj_bias"]),
                "experts.down.bias": grads["experts.down_proj_bias"],
            }
        return {
            "router.weight": grads["gate.weight"],
            "experts.gate_up.weight": grads["experts.gate_up_proj"],
            "experts.down.weight": grads["experts.down_proj"],
        }

    def run(self, name, both, count):
        if DEVICE == "cuda":
            return self.queue(name, both, count)
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            self.once(name, both)
            times.append(time.perf_counter_ns() - start)
        return times


    def queue(self, name, both, count):
        """The device's time of calls that follow each other, between events."""
        self.once(name, both)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(count):
            self.once(name, both)
        marks[1].record()
        wait()
        return [round(marks[0].elapsed_time(marks[1]) * 1e6 / count)] * count


def spread(n):
    """The vector that gradients are multiplied with before they are compared."""
    return (torch.arange(n, device=DEVICE) * 7919 % 1000).float() / 1000 - 0.5


def limit(dtype):
    """GFLOP/s of one large product by the library that torch takes."""
    n = 4096 if DEVICE == "cpu" else 8192
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a, b = (torch.randn(n, n, device=DEVICE).to(kind) for _ in range(2))
    best = float("inf")
    with torch.inference_mode():
        for _ in range(6):
            wait()
            start = time.perf_counter()
            F.linear(a, b)
            wait()
            best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e9


def obey(peer, words):
    match words:
        case ["load", folder]:
            return peer.load(folder)
        case ["input", path]:
            return peer.input(path) or []
        case ["check", name, what, path]:
            return peer.check(name, what == "both", path) or []
        case ["run", name, what, count]:
            return peer.run(name, what == "both", int(count))
        case ["limit", dtype]:
            return [limit(dtype)]
    raise ValueError(f"unknown command {words}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    global DEVICE
    DEVICE = arguments.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return answer("no", "torch sees no GPU")
    others = [f"transformers {transformers.__version__}"] if transformers else []
    if DEVICE == "cuda":
        others += [f"{name} {version(name)}" for name in installed()]
    answer("ready", ", ".join([f"torch {torch.__version__}", *others]))
    peer = Peer()
    for line in sys.stdin:
        try:
            answer("ok", *obey(peer, line.split()))
        except Exception as error:  # the bench decides what to do without an answer
            answer("no", f"{type(error).__name__}:", *str(error).split()[:40])


main()
