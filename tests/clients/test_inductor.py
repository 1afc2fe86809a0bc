"""torch.compile with Inductor: blocks that were compiled before and after they were sharded."""

import copy

import pytest
import torch

from libfsdp import fully_shard
from models import Stack, batches, loss_of
from parity import assert_close
from ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_inductor(rank, world, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Stack(2)
    model = copy.deepcopy(plain)
    for block in model.blocks:
        if compiled == "before":
            block.compile()
        fully_shard(block)
        if compiled == "after":
            block.compile()
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        inputs = batches(world, step)
        losses = [loss_of(plain(x)) for x in inputs]
        (sum(losses) / world).backward()
        loss = loss_of(model(inputs[rank]))
        loss.backward()
        assert_close(loss, losses[rank], f"step {step}: loss")
        for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
            assert_close(param.grad, expected.grad, f"step {step}: gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
