"""libfsdp on GPUs beside the unsharded model: on one, and on two of NCCL's ranks where there are as many."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


def model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 33), nn.GELU(), nn.Linear(33, 96)) for _ in range(4)]
    return nn.Sequential(*blocks).cuda()


def batch(rank, step):
    torch.manual_seed(100 * step + rank)
    return torch.randn(8, 96, device="cuda")


def train(rank, world, policy, tolerance):
    plain = model()
    sharded = copy.deepcopy(plain)
    for block in sharded:
        fully_shard(block, mp_policy=policy)
    fully_shard(sharded, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, sharded)]
    for step in range(4):
        losses = [plain(batch(r, step)).square().mean() for r in range(world)]
        (sum(losses) / world).backward()
        loss = sharded(batch(rank, step)).square().mean()
        loss.backward()
        torch.testing.assert_close(loss.float(), losses[rank], **tolerance)
        for (name, expected), param in zip(plain.named_parameters(), sharded.parameters()):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, **tolerance, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rank_main(rank, world, port, policy, tolerance):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    train(rank, world, policy, tolerance)
    dist.destroy_process_group()


POLICIES = {
    "float32": (MixedPrecisionPolicy(), {"rtol": 1e-4, "atol": 1e-5}),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                      output_dtype=torch.float32), {"rtol": 0.1, "atol": 0.02}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", WORLDS)
def test_trains_as_the_unsharded_model(world, policy):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(world, port, *POLICIES[policy]), nprocs=world)


def test_offloading_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="CPUOffloadPolicy"):
        fully_shard(nn.Linear(4, 4).cuda(), offload_policy=CPUOffloadPolicy())
