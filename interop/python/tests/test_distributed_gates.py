"""Several routers over shared experts: two gloo processes beside the same module in one."""

import sys

import pytest

torch = pytest.importorskip("torch")
from test_distributed import RANKS, SPEC, check_gradients, close, run_ranks, tokens, train_both

from moesaic import MultiGate

CASES = [
    "several_routers", "several_shards", "several_draws", "trained", "trained_by_token",
    "trained_in_bf16", "data_parallel", "fully_sharded",
]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name):
    run_ranks(name, __file__)


def several_routers(group, rank, scale=1, **options):
    options = options or {"strategy": "overlap_degree=2", "gradients": "sum"}
    torch.manual_seed(0)
    one = MultiGate(SPEC, 3)
    torch.manual_seed(0)
    over = MultiGate(SPEC, 3, group=group, **options)
    xs = [tokens(r) for r in range(RANKS)]
    for routers in (None, [torch.arange(len(x)) % 3 for x in xs]):
        inputs = [x.clone().requires_grad_() for x in xs]
        ids = [{} if routers is None else {"router_ids": routers[r]} for r in range(RANKS)]
        wanted = [one.eval()(x, **own) for x, own in zip(inputs, ids)]
        sum(y.square().sum() for y in wanted).backward()
        x = xs[rank].clone().requires_grad_()
        y = over.eval()(x, **ids[rank])
        close(y, wanted[rank])
        y.square().sum().backward()
        close(x.grad, inputs[rank].grad)
        check_gradients(one.experts, over.experts, rank, scale)
        for own, whole in zip(over.routers, one.routers):
            found = own.weight.grad.clone()
            torch.distributed.all_reduce(found)
            close(found, whole.weight.grad)
        one.zero_grad()
        over.zero_grad()


def several_shards(group, rank):
    several_routers(group, rank, expert_tp=2, gradients="sum")
    several_routers(group, rank, 1 / RANKS, gradients="mean")


def several_draws(group, rank):
    noisy = SPEC.replace("router = {", "router = { jitter = 0.1, ").replace("losses", "#")
    torch.manual_seed(0)
    one = MultiGate(noisy, 2)
    torch.manual_seed(0)
    over = MultiGate(noisy, 2, group=group)
    x, before = tokens(rank), sum(len(tokens(r)) for r in range(rank))
    y = over(x, rng_key=(1, 2, 3, 0))
    close(y, one(x, rng_key=(1, 2, 3, before)))
    assert not torch.equal(y, over(x))
    y.sum().backward()
    one(x, rng_key=(1, 2, 3, before)).sum().backward()
    assert one.routers[0].weight.grad.abs().max() > 0
    close(over.routers[0].weight.grad, one.routers[0].weight.grad)


SHARED = """
experts = { bias = true }
[[shared]]
hidden_dim = 8
gate = "sigmoid"
"""


def modules(group, spec, **options):
    """The module of one process, and that of the ranks, from equal seeds."""
    torch.manual_seed(0)
    one = MultiGate(spec, 3)
    torch.manual_seed(0)
    return one, MultiGate(spec, 3, group=group, **options)


def check_weights(one, over):
    """Compares every weight of the ranks with its part of that of one process."""
    ranks = over.experts._over
    for (_, name, weight), (_, _, whole) in zip(over.weights(), one.weights()):
        whole = whole if ranks.mesh.is_replicated(name) else ranks.part(name, whole)
        close(weight.detach(), whole.detach())


def several_steps(group, rank, routers=None, **options):
    """Trains both modules, with the losses of routers, biases, and shared experts with a gate."""
    one, over = modules(group, SPEC + SHARED, gradients="sum", **options)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in (one, over)]
    xs = [tokens(r) for r in range(RANKS)]
    ids = [{} if routers is None else {"router_ids": routers(len(x))} for x in xs]
    for _ in range(3):
        inputs = [x.clone().requires_grad_() for x in xs]
        wanted = [one(x, **own) for x, own in zip(inputs, ids)]
        sum(y.square().mean() for y in wanted).backward()
        x = xs[rank].clone().requires_grad_()
        y = over(x, **ids[rank])
        assert over.losses["switch"].min() > 0
        y.square().mean().backward()
        close(y, wanted[rank])
        close(x.grad, inputs[rank].grad)
        check_gradients(one.experts, over.experts, rank, 1)
        for _, name, weight in over.weights():
            if over.experts._over.mesh.is_replicated(name):
                torch.distributed.all_reduce(weight.grad)
        assert all(weight.grad.any() for _, _, weight in one.weights())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_weights(one, over)


def trained(group, rank):
    several_steps(group, rank)
    several_steps(group, rank, expert_tp=2, strategy="overlap_degree=2")


def trained_by_token(group, rank):
    several_steps(group, rank, lambda count: torch.arange(count) % 3)


def trained_in_bf16(group, rank):
    one, over = (module.to(torch.bfloat16) for module in modules(group, SPEC + SHARED))
    x = tokens(rank).bfloat16()
    close(over(x), one(x))
    over(x).float().square().mean().backward()
    for _, _, weight in over.weights():
        assert weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()


# Without auxiliary losses: their gradients come once for each call, whatever divides the loss.
PLAIN = SPEC.replace("losses", "#") + SHARED


def data_parallel(group, rank):
    from moesaic.distributed import ignore_experts
    from torch.nn.parallel import DistributedDataParallel

    one, over = modules(group, PLAIN)
    train_both(DistributedDataParallel(ignore_experts(over)), one, rank)
    check_weights(one, over)


def fully_sharded(group, rank):
    from moesaic.distributed import expert_parameters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one, over = modules(group, PLAIN)
    experts = {parameter for _, parameter in expert_parameters(over)}
    fully_shard(over, mesh=init_device_mesh("cpu", (RANKS,)), ignored_params=experts)
    train_both(over, one, rank)
    over.unshard()
    check_weights(one, over)


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.group.WORLD, dist.get_rank())
    dist.destroy_process_group()
