"""torch's optimizers on sharded parameters: numbers, states, and that they step rows and not DTensors."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from libfsdp import fully_shard
from models import Stack, batches, loss_of
from parity import assert_close, compare, shard_blocks
from ranks import on_ranks

OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "NAdam": {},
    "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "SGD": {"momentum": 0.9}}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class DTensorOperators(TorchDispatchMode):
    """Counts the operators that get a DTensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += any(issubclass(each, DTensor) for each in types)
        return operator(*args, **(kwargs or {}))


@on_ranks(3)
@pytest.mark.parametrize("name, kind", [
    *((name, "foreach") for name in OPTIMIZERS), *((name, "fused") for name in FUSED), ("AdamW", None)])
def test_numbers(rank, world, name, kind):
    options = {"lr": 1e-2, **OPTIMIZERS[name], **({kind: True} if kind else {})}
    compare(Stack(), rank, world, beside_torch=False, optimizer=getattr(torch.optim, name), optimizer_options=options)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_is_seen_by_parameters_that_stay_whole(rank, world, kind):
    def stay_whole(model):
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)

    model = compare(Stack(), rank, world, beside_torch=False, optimizer=torch.optim.AdamW, prepare=stay_whole,
                    optimizer_options={"lr": 1e-2, kind: True})
    # And a graph that was built before it is refused, as in plain torch.
    inputs = batches(world, 0)[rank]
    optimizer = torch.optim.AdamW(model.parameters(), **{kind: True})
    loss_of(model(inputs)).backward()
    loss = loss_of(model(inputs))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()


@on_ranks(2)
@torch.no_grad()
def test_operators_on_lists_are_seen_between_evaluations(rank, world):
    """A root stays whole after its forward; an average that is put into place afterwards must be what counts."""
    plain = Stack()
    model = shard_blocks(copy.deepcopy(plain), fully_shard)
    inputs = batches(world, 0)[rank]
    for _ in range(2):
        assert_close(model(inputs), plain(inputs), "output")
        for each in (plain, model):
            torch._foreach_mul_(list(each.parameters()), 0.5)
    model.unshard()
    torch.testing.assert_close(model.head.weight, plain.head.weight)


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_stepped_and_states_are_dtensors(rank, world, name):
    model = shard_blocks(Stack(), fully_shard)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
    for step in range(3):
        loss_of(model(batches(world, step)[rank])).backward()
        with DTensorOperators() as seen:
            optimizer.step()
        if step > 0:
            assert seen.count == 0
        optimizer.zero_grad()
    for param in model.parameters():
        for key, state in optimizer.state[param].items():
            if isinstance(state, torch.Tensor) and state.dim() > 0:
                assert isinstance(state, DTensor) and state.shape == param.shape, key
                assert state.placements == param.placements


@on_ranks(2)
def test_beside_parameters_that_are_not_sharded(rank, world):
    plain = Stack()
    model = copy.deepcopy(plain)
    ignored = {model.head.weight, model.head.bias}
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params=ignored)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (plain, model)]
    for step in range(2):
        inputs = batches(world, step)
        sum(loss_of(plain(x)) / world for x in inputs).backward()
        loss_of(model(inputs[rank])).backward()
        for param in ignored:
            torch.distributed.all_reduce(param.grad)
            param.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
        assert_close(param, expected, name)


@on_ranks(2)
def test_a_gradient_that_lies_otherwise(rank, world):
    """What the user put into .grad may be replicated: then DTensor finds the rows."""
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    before = layer.weight.full_tensor().clone()
    replicated = torch.distributed.tensor.distribute_tensor(
        torch.ones(4, 4), layer.weight.device_mesh, [torch.distributed.tensor.Replicate()])
    layer.weight.grad = replicated
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    torch.testing.assert_close(layer.weight.full_tensor(), before - 0.5)
