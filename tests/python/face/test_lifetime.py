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

GROWTH = 16 << 20  # bytes that a process may grow by, of fragments and caches


def model_of_300_kb():
    """Of whole parameters: what leaks of them, once a step or a model, shows in GROWTH."""
    return shard_blocks(Stack(3, lambda: Block(hidden=2000)), fully_shard)


def step(model, optimizer, rank, world):
    loss_of(model(batches(world, 0)[rank])).backward()
    optimizer.step()
    optimizer.zero_grad()


def require_flat(act, times):
    """Nothing may grow with the number of times that ``act`` is done."""
    for _ in range(5):
        act()
    before = counts()
    for _ in range(times):
        act()
    after = counts()
    grown = {what: after[what] - before[what] for what in after}
    objects, resident = grown.pop("objects"), grown.pop("resident")
    # What an earlier test left may go meanwhile.
    assert max(grown.values()) <= 0, f"{grown} more after {times} times"
    assert objects < times / 2, f"{objects} more Python objects after {times} times"
    assert resident < GROWTH, f"{resident >> 10} KB more after {times} times"


def counts():
    gc.collect()
    objects = gc.get_objects()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"tensors": sum(issubclass(type(each), torch.Tensor) for each in objects), "objects": len(objects),
            "resident": resident, "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
            "threads of all languages": len(os.listdir("/proc/self/task"))}


@on_ranks(2)
def test_shard_train_drop(rank, world):
    def once():
        model = model_of_300_kb()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer, rank, world)

    require_flat(once, times=100)


@on_ranks(2)
def test_many_steps(rank, world):
    model = model_of_300_kb()
    optimizer = torch.optim.AdamW(model.parameters())
    require_flat(lambda: step(model, optimizer, rank, world), times=1000)
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
