"""What is left when a model is dropped: nothing."""

import gc
import os
import threading
import weakref

import torch

from libfsdp import fully_shard
from models import Block, Stack, batches, loss_of
from parity import shard_blocks
from ranks import on_ranks


def big():
    """Whole parameters of 3 MB: what leaks of it shows."""
    return shard_blocks(Stack(3, lambda: Block(hidden=20000)), fully_shard)


def step(model, optimizer, rank, world):
    loss_of(model(batches(world, 0)[rank])).backward()
    optimizer.step()
    optimizer.zero_grad()


def counts():
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    return tensors, threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@on_ranks(2)
def test_shard_train_drop(rank, world):
    def once():
        model = big()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer, rank, world)

    for _ in range(4):
        once()
    before, resident = counts(), _resident()
    for _ in range(15):
        once()
    assert counts() == before
    assert _resident() - resident < 16 << 20


@on_ranks(2)
def test_many_steps(rank, world):
    model = big()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        step(model, optimizer, rank, world)
    before, resident = counts(), _resident()
    for _ in range(60):
        step(model, optimizer, rank, world)
    assert counts() == before
    assert _resident() - resident < 16 << 20
    stats = model._get_fsdp_state().group.stats
    assert stats["unsharded_param_bytes"] == stats["unsharded_gradient_bytes"] == 0


@on_ranks(2)
def test_a_dropped_model_is_freed_at_once(rank, world):
    shard_blocks(Stack(), fully_shard)  # what torch imports on first use leaves frames behind
    gc.collect()
    gc.disable()
    try:
        model = shard_blocks(Stack(), fully_shard)
        loss = loss_of(model(batches(world, 0)[rank]))
        seen = [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(model._get_fsdp_state())]
        loss.backward()
        del model
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()


@on_ranks(2)
def test_parameters_outlive_their_model(rank, world):
    model = shard_blocks(Stack(), fully_shard)
    loss_of(model(batches(world, 0)[rank])).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.head.weight
    before = weight.full_tensor().clone()
    del model
    optimizer.step()
    assert not torch.equal(weight.full_tensor(), before)


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
