"""Schedules of torch.distributed.pipelining over sharded stages, on a mesh (pp, dp) of 2 x 2, against plain."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F

import libfsdp
from models import WIDTH, Block
from parity import assert_close
from ranks import on_ranks

MICRO_BATCHES, ROWS, STEPS = 4, 2, 3


@contextmanager
def installed():
    """Pipelining asks torch.distributed.fsdp's fully_shard for a module's state."""
    libfsdp.install()
    try:
        yield
    finally:
        libfsdp.uninstall()


def blocks(count):
    return nn.Sequential(*(Block(hidden=5 + i) for i in range(count)))


def shard(stage, mesh):
    for block in stage:
        libfsdp.fully_shard(block, mesh=mesh)
    return libfsdp.fully_shard(stage, mesh=mesh)


def batch(step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=generator)


@on_ranks(4)
@pytest.mark.parametrize("schedule_class, stages_each", [
    (ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)])
def test_schedules(rank, world, schedule_class, stages_each):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    count = 2 * stages_each  # stages, of two blocks each
    torch.manual_seed(0)
    plain = blocks(2 * count)
    mine = range(pipeline, count, 2)
    parts = {i: shard(nn.Sequential(*copy.deepcopy(plain[2 * i:2 * i + 2])), mesh["dp"]) for i in mine}
    stages = [PipelineStage(part, i, count, torch.device("cpu"), group=mesh.get_group("pp"))
              for i, part in parts.items()]
    schedule = schedule_class(stages if stages_each > 1 else stages[0], n_microbatches=MICRO_BATCHES,
                              loss_fn=F.mse_loss)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts.values()]
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with installed():
        for step in range(STEPS):
            losses = []
            inputs, last = (batch(step, replica),) if 0 in mine else (), count - 1 in mine
            schedule.step(*inputs, target=batch(step, replica) if last else None, losses=losses if last else None)
            whole = [F.mse_loss(plain(batch(step, each)), batch(step, each)) for each in range(2)]
            (sum(whole) / 2).backward()
            if last:
                assert_close(torch.stack(losses).mean(), whole[replica], f"step {step}: loss")
            for i, part in parts.items():
                for (name, param), other in zip(part.named_parameters(), plain[2 * i:2 * i + 2].parameters()):
                    assert_close(param.grad, other.grad, f"step {step}: stage {i}: gradient of {name}")
            for optimizer in (*optimizers, expected):
                optimizer.step()
                optimizer.zero_grad()
