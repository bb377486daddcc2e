"""Layers over two gloo processes beside the same layer in one."""

import os
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

# Each test is a function of this file that both processes call.
RANKS = 2
SPEC = """
shape = { model_dim = 24, hidden_dim = 40, experts = 6, top_k = 2 }
router = { renormalize = "sum" }
losses = [{ kind = "switch", coefficient = 0.01 }]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(name, file=__file__, ranks=RANKS):
    """Runs a function of a test's file in as many processes."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
        command = [sys.executable, file, name]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output


CASES = [
    "passes", "data_parallel", "fully_sharded", "evaluation", "shards", "draws", "refusals",
    "foreign", "replay", "tutel_experts", "tutel_shards", "tutel_llama", "fastmoe_experts",
    "fastmoe_mlp", "fastmoe_groups", "fastmoe_masks",
]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name):
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if name == "fully_sharded" and version < (2, 7):
        pytest.skip("torch 2.6 has no ignored_params")
    run_ranks(name)


def tokens(rank):
    torch.manual_seed(100 + rank)
    return torch.randn(5 + 2 * rank, 24)


def layers(group, spec=SPEC, **options):
    """The layer of one process, and that of the ranks, from equal seeds."""
    from moesaic import MoE

    torch.manual_seed(0)
    one = MoE(spec)
    torch.manual_seed(0)
    return one, MoE(spec, group=group, **options)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def gradients(moe, xs):
    """The outputs and gradients of one process that is given all tokens, rank by rank."""
    inputs = [x.clone().requires_grad_() for x in xs]
    outputs = [moe(x) for x in inputs]
    sum(y.square().mean() for y in outputs).backward()
    return [y.detach() for y in outputs], [x.grad for x in inputs]


def check_gradients(one, ours, rank, scale):
    import torch.distributed as dist

    for name, weight in ours.weights().items():
        whole = one._weight(name)
        if ours._over.mesh.is_replicated(name):
            found = weight.grad.clone()
            dist.all_reduce(found)
            close(found, whole.grad)
        else:
            close(weight.grad / scale, ours._over.part(name, whole.grad))


def passes(group, rank):
    for strategy in (None, "overlap_degree=2", "overlap_degree=2,overlap_by=peers"):
        one, ours = layers(group, strategy=strategy)
        xs = [tokens(r) for r in range(RANKS)]
        for _ in range(2):
            ys, dxs = gradients(one, xs)
            x = xs[rank].clone().requires_grad_()
            y, routing = ours(x, return_routing=True)
            y.square().mean().backward()
            close(y.detach(), ys[rank])
            close(x.grad, dxs[rank])
            check_gradients(one, ours, rank, 1 / RANKS)
            assert routing.ids.shape == (len(x), 2) and ours.losses["switch"] > 0
            # A change of the weights reaches the ranks' copies.
            with torch.no_grad():
                for moe in (one, ours):
                    for weight in moe.parameters():
                        weight.mul_(0.5)
                        weight.grad = None
    assert ours.experts.up.weight.shape == (3, 40, 24)


def evaluation(group, rank):
    one, ours = (moe.eval() for moe in layers(group))
    x = tokens(rank)
    with torch.no_grad():
        close(ours(x), one(x))
    x.requires_grad_()
    found = torch.autograd.grad(ours(x).sum(), x)[0]
    close(found, torch.autograd.grad(one(x).sum(), x)[0])
    # A rank without tokens takes part.
    with torch.no_grad():
        x = tokens(rank)[: 0 if rank else 5]
        close(ours(x), one(x))
    half = x.bfloat16().detach()
    assert ours.to(torch.bfloat16)(half).dtype == torch.bfloat16


def train_both(model, twin, rank):
    """Trains a model that averages gradients over ranks, and its twin on the tokens of all."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=False) for m in (model, twin)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        y, ys = model(tokens(rank)), [twin(tokens(r)) for r in range(RANKS)]
        close(y.detach(), ys[rank].detach())
        y.square().mean().backward()
        (sum(y.square().mean() for y in ys) / RANKS).backward()
        for optimizer in optimizers:
            optimizer.step()


def data_parallel(group, rank):
    from moesaic.distributed import expert_parameters, ignore_experts
    from torch.nn.parallel import DistributedDataParallel

    # Without auxiliary losses: their gradients come once for each call, whatever divides the loss.
    one, ours = layers(group, SPEC.replace("losses", "#"))
    model = torch.nn.Sequential(torch.nn.Linear(24, 24), ours)
    twin = torch.nn.Sequential(torch.nn.Linear(24, 24), one)
    twin[0].load_state_dict({n: t.fill_(0.1) for n, t in model[0].state_dict().items()})
    names = [name for name, _ in expert_parameters(model)]
    assert names == [f"1.experts.{m}.weight" for m in ("gate", "up", "down")]
    wrapped = DistributedDataParallel(ignore_experts(model))
    train_both(wrapped, twin, rank)
    close(model[0].weight.detach(), twin[0].weight.detach())
    for name, weight in ours.weights().items():
        close(weight.detach(), ours._over.part(name, one._weight(name)))


def fully_sharded(group, rank):
    from moesaic.distributed import expert_parameters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    one, ours = layers(group, SPEC.replace("losses", "#"))
    model = torch.nn.Sequential(torch.nn.Linear(24, 24), ours)
    twin = torch.nn.Sequential(torch.nn.Linear(24, 24), one)
    twin[0].load_state_dict(model[0].state_dict())
    for parameter in twin[0].parameters():
        torch.distributed.broadcast(parameter.data, 0)
    model[0].load_state_dict(twin[0].state_dict())
    experts = {parameter for _, parameter in expert_parameters(model)}
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model, mesh=mesh, ignored_params=experts)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) != (parameter in experts), name
    assert model[0].weight.to_local().shape == (24 // RANKS, 24)
    assert ours.router.weight.to_local().shape == (6 // RANKS, 24)
    train_both(model, twin, rank)
    close(model[0].weight.full_tensor().detach(), twin[0].weight.detach())
    close(ours.router.weight.full_tensor().detach(), one.router.weight.detach())
    for name, weight in expert_parameters(model):
        name = name.removeprefix("1.")
        close(weight.detach(), ours._over.part(name, one._weight(name)))


def shards(group, rank):
    one, ours = layers(group, expert_tp=2, gradients="sum")
    xs = [tokens(r) for r in range(RANKS)]
    ys, dxs = gradients(one, xs)
    x = xs[rank].clone().requires_grad_()
    y = ours(x)
    y.square().mean().backward()
    close(y.detach(), ys[rank])
    close(x.grad, dxs[rank])
    assert ours.experts.up.weight.shape == (6, 20, 24)
    check_gradients(one, ours, rank, 1)


def draws(group, rank):
    from moesaic import MoE

    torch.manual_seed(rank)
    noisy = SPEC + 'name = "noisy"\n'
    noisy = noisy.replace('router = {', 'router = { jitter = 0.1, ')
    moe = MoE(noisy, group=group)
    # Different seeds, and the same router all the same.
    import torch.distributed as dist

    router = moe.router.weight.detach().clone()
    dist.broadcast(router, 0)
    assert torch.equal(router, moe.router.weight)
    first, second = moe(tokens(rank)), moe(tokens(rank))
    assert not torch.equal(first, second)
    again = moe(tokens(rank), rng_key=(1, 2, 3, 0))
    assert torch.equal(again, moe(tokens(rank), rng_key=(1, 2, 3, 0)))


def refusals(group, rank):
    import copy
    import pickle

    from moesaic import InvalidError, MoE

    _, ours = layers(group)
    for refused, words in [
        (lambda: MoE(SPEC, group=group, expert_tp=3), "does not divide 2 ranks"),
        (lambda: MoE(SPEC, group=group, gradients="max"), "'mean' or 'sum'"),
        (lambda: MoE(SPEC, group=group, timeout=-1), "timeout = -1: give seconds, 0 or more"),
        (lambda: MoE(SPEC, expert_tp=2), "give a group"),
        (lambda: pickle.dumps(ours), "state_dict on each rank"),
        (lambda: ours.pack(), "is not packed"),
    ]:
        with pytest.raises(InvalidError, match=words):
            refused()
    with pytest.raises(RuntimeError, match="hop"):
        MoE(SPEC, group=group, strategy="hop=1")(tokens(rank))
    twin = copy.deepcopy(ours)
    close(twin(tokens(rank)), ours(tokens(rank)))
    state = ours.state_dict()
    state = {name: tensor * 2 for name, tensor in state.items()}
    twin.load_state_dict(state)
    assert not torch.equal(twin(tokens(rank)), ours(tokens(rank)))


def foreign(group, rank):
    from moesaic import MoE

    text = SPEC.replace("losses", 'experts = { form = "plain", activation = "relu" }\nlosses')
    torch.manual_seed(0)
    one, ours = MoE(text), MoE(text, group=group)
    own = slice(3 * rank, 3 * rank + 3)
    for share, whole in [(slice(None), True), (own, False)]:
        state = {
            "moe.gates.0.wg.weight": one.router.weight.detach(),
            "moe.experts.batched_fc1_w": one.experts.up.weight.detach()[share],
            "moe.experts.batched_fc2_w": one.experts.down.weight.detach()[share].transpose(1, 2),
        }
        ours.reset_parameters()
        ours.load_foreign_state_dict(state, "tutel", whole=whole)
        close(ours(tokens(rank)), one(tokens(rank)))


def replay(group, rank):
    one, ours = layers(group, strategy="overlap_degree=2")
    xs = [tokens(r) for r in range(RANKS)]
    record = torch.randint(0, 6, (20, 2, 1)) + torch.tensor([0, 1])
    record = record % 6
    torch.distributed.broadcast(record, 0)
    places = [torch.arange(len(x)) * 2 + 1 for x in xs]
    wanted, replayed = one.replay(record, 1), ours.replay(record, 1)
    inputs = [x.clone().requires_grad_() for x in xs]
    ys = [wanted(x, token_ids=at.int()) for x, at in zip(inputs, places)]
    sum(y.square().mean() for y in ys).backward()
    x = xs[rank].clone().requires_grad_()
    y, routing = replayed(x, token_ids=places[rank].int(), return_routing=True)
    assert torch.equal(routing.ids.long(), record[places[rank], 1])
    y.square().mean().backward()
    close(y, ys[rank])
    close(x.grad, inputs[rank].grad)
    assert replayed.experts.up.weight is ours.experts.up.weight
    check_gradients(one, ours, rank, 1 / RANKS)


class Scaled(torch.nn.Module):
    """Experts of a caller's own: a matrix for each."""

    def __init__(self, model_dim, num_experts_per_device, sharded_count):
        super().__init__()
        matrices = torch.randn(num_experts_per_device, model_dim, model_dim)
        self.matrices = torch.nn.Parameter(matrices)

    def forward(self, x, ctx):
        return torch.bmm(x, self.matrices).relu()


def tutel_pair(group, kind, count, parallel_type="adaptive:1", **options):
    """Tutel's layer of one process with all experts, and that of the ranks."""
    from moesaic.compat.tutel import moe_layer

    def made(group, count):
        torch.manual_seed(0)
        gate = {"type": "top", "k": 2, "capacity_factor": 4.0}
        experts = {"type": kind, "num_experts_per_device": count, **options}
        layer = moe_layer(gate, 24, experts, group=group, parallel_type=parallel_type)
        torch.manual_seed(1)
        torch.nn.init.normal_(layer.gates[0].wg.weight)
        return layer

    alone = [torch.distributed.new_group([r]) for r in range(RANKS)][torch.distributed.get_rank()]
    total = count * RANKS if count > 0 else RANKS // -count
    return made(alone, total), made(group, count)


def both_of_tutel(one, ours, rank):
    xs = [torch.randn(6, 24, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    inputs = [x.clone().requires_grad_() for x in xs]
    ys = [one(x) for x in inputs]
    sum(y.square().sum() for y in ys).backward()
    x = xs[rank].clone().requires_grad_()
    y = ours(x)
    y.square().sum().backward()
    close(y, ys[rank])
    close(x.grad, inputs[rank].grad)
    found = ours.gates[0].wg.weight.grad.clone()
    torch.distributed.all_reduce(found)
    close(found, one.gates[0].wg.weight.grad)


def tutel_experts(group, rank):
    one, ours = tutel_pair(group, "custom", 2, module=Scaled)
    own = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad():
        ours.experts.matrices.copy_(one.experts.matrices[own])
    both_of_tutel(one, ours, rank)
    close(ours.experts.matrices.grad, one.experts.matrices.grad[own])


class InShards(Scaled):
    """One expert whose columns lie on several ranks; each gives its part of the sum."""

    def __init__(self, model_dim, num_experts_per_device, sharded_count):
        super().__init__(model_dim, num_experts_per_device, 1)
        self.columns = model_dim // sharded_count
        self.shards = sharded_count

    def forward(self, x, ctx):
        assert (ctx.adaptive_degree, ctx.sharded_count) == (self.shards, self.shards)
        first = torch.distributed.get_rank(ctx.group) % self.shards * self.columns
        own = self.matrices[:, first : first + self.columns]
        return torch.bmm(x[..., first : first + self.columns], own)


def tutel_shards(group, rank):
    from moesaic import InvalidError

    # Alone, one rank has the whole of the only expert.
    one, ours = tutel_pair(group, "custom", -2, module=InShards, parallel_type="model")
    with torch.no_grad():
        ours.experts.matrices.copy_(one.experts.matrices)
    both_of_tutel(one, ours, rank)
    own = slice(12 * rank, 12 * rank + 12)
    found, wanted = ours.experts.matrices.grad, one.experts.matrices.grad
    close(found[:, own], wanted[:, own])
    assert wanted[:, own].abs().max() > 0
    for wrong in ("adaptive:x", "tensor"):
        with pytest.raises(InvalidError, match="parallel_type"):
            tutel_pair(group, "custom", -2, module=InShards, parallel_type=wrong)
    with pytest.raises(InvalidError, match="one of 0, 1, 2"):
        ours(torch.zeros(2, 24), adaptive_r=3)


def tutel_llama(group, rank):
    for count in (2, -2):
        one, ours = tutel_pair(group, "llama_ffn", count, hidden_size_per_expert=40)
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            whole, own = getattr(one.experts, name), getattr(ours.experts, name)
            with torch.no_grad():
                whole.mul_(10)
                own.copy_(whole.view(RANKS, -1)[rank])
        both_of_tutel(one, ours, rank)
        for name in ("W_fc1", "W_fc2", "W_fc3"):
            whole, own = getattr(one.experts, name), getattr(ours.experts, name)
            assert own.numel() * RANKS == whole.numel()
            close(own.grad, whole.grad.view(RANKS, -1)[rank])


class Widening(torch.nn.Module):
    """An expert of a caller's own."""

    def __init__(self, d_model):
        super().__init__()
        self.linear = torch.nn.Linear(d_model, 2 * d_model)

    def forward(self, x, count):
        assert count.tolist() == [len(x)]
        return self.linear(x).relu()


def fastmoe_pair(group, make, **options):
    """FastMoE's layer of one process with all experts, and that of the ranks."""
    torch.manual_seed(0)
    one = make(num_expert=4, d_model=24, **options)
    ours = make(num_expert=2, d_model=24, world_size=RANKS, moe_group=group, **options)
    ours.gate.load_state_dict(one.gate.state_dict())
    return one, ours


def fastmoe_own(whole, rank):
    """This rank's experts, of those of one process."""
    of = {name: value for name, value in whole.items() if name.startswith("experts.")}
    if all(name.split(".")[1].isdigit() for name in of):
        split = [(name.split(".", 2), value) for name, value in of.items()]
        return {
            f"experts.{int(number) - 2 * rank}.{rest}": value
            for (_, number, rest), value in split if int(number) // 2 == rank
        }
    return {name: value[2 * rank : 2 * rank + 2] for name, value in of.items()}


def both_of_fastmoe(one, ours, rank, masks=None):
    ours.load_state_dict(fastmoe_own(one.state_dict(), rank), strict=False)
    xs = [tokens(r) for r in range(RANKS)]
    x, wanted = xs[rank].clone().requires_grad_(), [x.clone().requires_grad_() for x in xs]
    ys = []
    for own, one.mask in zip(wanted, masks or [None] * RANKS):
        ys.append(one(own))
    sum(y.square().sum() for y in ys).backward()
    y = ours(x)
    y.square().sum().backward()
    close(y, ys[rank])
    close(x.grad, wanted[rank].grad)
    gradients = {name: weight.grad for name, weight in one.named_parameters()}
    own = fastmoe_own(gradients, rank)
    for name, weight in ours.named_parameters():
        if name.startswith("experts."):
            close(weight.grad, own[name])
    found = ours.gate.gate.weight.grad.clone()
    torch.distributed.all_reduce(found)
    close(found, one.gate.gate.weight.grad)


def fastmoe_experts(group, rank):
    from moesaic import InvalidError
    from moesaic.compat.fastmoe import FMoE, SwitchGate

    one, ours = fastmoe_pair(group, FMoE, expert=Widening)
    both_of_fastmoe(one, ours, rank)
    # gloo has no bf16 of its own.
    x = tokens(rank).bfloat16()
    found, wanted = ours.bfloat16()(x), one.bfloat16()(x)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    with pytest.raises(InvalidError, match="moe_group has 2 ranks"):
        FMoE(num_expert=2, d_model=24, world_size=3, expert=Widening)
    # An expert takes ceil(0.4 * 5 / 2) = 1 token of all ranks.
    torch.manual_seed(0)
    gate = SwitchGate(24, 2, RANKS, capacity=(0.4, 0.4))
    torch.nn.init.zeros_(gate.gate.weight)
    gate.gate.bias.data = torch.tensor([0.0, 9.0, 0.0, 0.0])
    gate.moe_group = group
    kept = gate.eval()(torch.randn(5, 24))[0]
    assert kept[:, 0].tolist() == ([1, -1, -1, -1, -1] if rank == 0 else [-1] * 5)


def fastmoe_mlp(group, rank):
    from moesaic.compat.fastmoe import FMoETransformerMLP

    one, ours = fastmoe_pair(group, FMoETransformerMLP, d_hidden=40)
    both_of_fastmoe(one, ours, rank)
    # Ranks with the same tokens: each computes half of them, and has the whole result.
    torch.manual_seed(5)
    xs = torch.randn(6, 24)
    torch.manual_seed(0)
    sliced = FMoETransformerMLP(
        num_expert=2, d_model=24, d_hidden=40, world_size=RANKS, slice_group=group
    )
    sliced.load_state_dict(ours.state_dict())
    x, wanted = xs.clone().requires_grad_(), xs.clone().requires_grad_()
    y, expected = sliced(x), one(wanted)
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, wanted.grad)


def fastmoe_masks(group, rank):
    from moesaic.compat.fastmoe import FMoE, FMoETransformerMLP

    constants = {1: 0.5, 2: torch.tensor([[1.0], [-2.0]])}
    masks = [torch.arange(len(tokens(r))) % 4 for r in range(RANKS)]
    for make, options in ((FMoE, {"expert": Widening}), (FMoETransformerMLP, {"d_hidden": 40})):
        one, ours = fastmoe_pair(group, make, mask_dict=constants, **options)
        ours.mask = masks[rank]
        both_of_fastmoe(one, ours, rank, masks)
        # Ranks with the same tokens: a mask of this rank's slice, or of all rows.
        torch.manual_seed(5)
        x, mask = torch.randn(8, 24), torch.arange(8) % 4
        one.mask = mask
        sliced = make(
            num_expert=2, d_model=24, world_size=RANKS, slice_group=group, mask_dict=constants,
            **options,
        )
        sliced.load_state_dict(ours.state_dict())
        for own in (mask, mask.chunk(RANKS)[rank]):
            sliced.mask = own
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            y, wanted = sliced(inputs[0]), one(inputs[1])
            close(y, wanted)
            for output in (y, wanted):
                output.square().mean().backward()
            close(inputs[0].grad, inputs[1].grad)


def fastmoe_groups(group, rank):
    from moesaic.compat.fastmoe import DistributedGroupedDataParallel, FMoETransformerMLP

    alone = [torch.distributed.new_group([r]) for r in range(RANKS)][rank]
    torch.manual_seed(rank)
    moe = FMoETransformerMLP(num_expert=2, d_model=24, d_hidden=40, world_size=RANKS)
    moe.other = torch.nn.Linear(2, 2)
    experts = moe.experts.htoh4.weight.detach().clone()
    model = DistributedGroupedDataParallel(moe, dp_group=alone)
    assert torch.equal(experts, moe.experts.htoh4.weight)
    for parameter in moe.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    gathered = [torch.empty_like(moe.gate.gate.weight) for _ in range(RANKS)]
    torch.distributed.all_gather(gathered, moe.gate.gate.weight.detach())
    assert torch.equal(*gathered)
    model.allreduce_params()
    assert moe.gate.gate.weight.grad.unique().tolist() == [0.5]
    assert moe.experts.htoh4.weight.grad.unique().tolist() == [rank]
    assert moe.other.weight.grad.unique().tolist() == [rank]


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.group.WORLD, dist.get_rank())
    dist.destroy_process_group()
