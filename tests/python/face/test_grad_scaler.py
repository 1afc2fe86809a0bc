"""ShardedGradScaler over sharded modules: ranks do alike."""

import math

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from libfsdp import MixedPrecisionPolicy, ShardedGradScaler, fully_shard
from models import Stack, batches, loss_of
from parity import full, shard_blocks
from ranks import on_ranks


def trained(scaler, model, optimizers, world, rank, step=0, spoil=None):
    for each in optimizers:
        each.zero_grad()
    scaler.scale(loss_of(model(batches(world, step)[rank]))).backward()
    if spoil is not None:
        spoil.grad.to_local().flatten()[0] = math.inf
    for each in optimizers:
        scaler.step(each)
    scaler.update()


@on_ranks(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_overflow_in_one_shard_stops_all(rank, world, bad_rank):
    model = shard_blocks(Stack(), fully_shard)
    weight, *others = model.parameters()
    optimizers = [torch.optim.SGD([weight], 0.1), torch.optim.SGD(others, 0.1)]
    before = full(weight).clone(), full(others[0]).clone()
    scaler = ShardedGradScaler(init_scale=8.0, growth_interval=2)
    assert isinstance(scaler, TorchShardedGradScaler)
    trained(scaler, model, optimizers, world, rank, spoil=weight if rank == bad_rank else None)
    assert scaler.get_scale() == 4.0
    assert full(weight).equal(before[0])
    assert not full(others[0]).equal(before[1])


@on_ranks(2)
def test_grows_and_resumes(rank, world):
    model = shard_blocks(Stack(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = ShardedGradScaler(init_scale=8.0, growth_factor=4.0, growth_interval=2)
    scales = []
    for step in range(3):
        trained(scaler, model, [optimizer], world, rank, step)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 32.0, 32.0]
    resumed = ShardedGradScaler()
    resumed.load_state_dict(scaler.state_dict())
    trained(resumed, model, [optimizer], world, rank)
    assert resumed.get_scale() == 128.0


@on_ranks(2)
def test_half_precision(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = shard_blocks(Stack(), fully_shard, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [full(param).clone() for param in model.parameters()]
    scaler = ShardedGradScaler(init_scale=2.0**40)
    trained(scaler, model, [optimizer], world, rank)
    assert scaler.get_scale() == 2.0**39
    assert all(full(param).equal(old) for param, old in zip(model.parameters(), before))
    scaler.update(64.0)
    trained(scaler, model, [optimizer], world, rank)
    assert scaler.get_scale() == 64.0
    assert not any(full(param).equal(old) for param, old in zip(model.parameters(), before))


@on_ranks(2)
def test_one_unscale_an_iteration(rank, world):
    model = fully_shard(Stack())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = ShardedGradScaler()
    scaler.scale(loss_of(model(batches(world, 0)[rank]))).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert full(norm) < 100
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)


def test_without_a_process_group():
    model = torch.nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.grad.equal(torch.ones(2, 2).half())
