"""libfsdp on GPUs beside the unsharded model: on one, and on two of NCCL's ranks where there are as many."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


def model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 33), nn.GELU(), nn.Linear(33, 96)) for _ in range(4)]
    return nn.Sequential(*blocks).cuda()


def batch(rank, step):
    torch.manual_seed(100 * step + rank)
    return torch.randn(8, 96, device="cuda")


def train(rank, world, policy, tolerance, offload):
    plain = model()
    sharded = copy.deepcopy(plain)
    options = {"mp_policy": policy, "offload_policy": offload}
    for block in sharded:
        fully_shard(block, **options)
    fully_shard(sharded, **options)
    state_on = "cpu" if isinstance(offload, CPUOffloadPolicy) else "cuda"
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, sharded)]
    for step in range(4):
        losses = [plain(batch(r, step)).square().mean() for r in range(world)]
        (sum(losses) / world).backward()
        loss = sharded(batch(rank, step)).square().mean()
        loss.backward()
        torch.testing.assert_close(loss.float(), losses[rank], **tolerance)
        for (name, expected), param in zip(plain.named_parameters(), sharded.parameters()):
            assert param.to_local().device.type == param.grad.to_local().device.type == state_on, name
            whole = param.grad.full_tensor().cuda()
            torch.testing.assert_close(whole, expected.grad, **tolerance, msg=lambda text: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rank_main(rank, world, port, *case):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    train(rank, world, *case)
    dist.destroy_process_group()


POLICIES = {
    "float32": (MixedPrecisionPolicy(), {"rtol": 1e-4, "atol": 1e-5}),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                      output_dtype=torch.float32), {"rtol": 0.1, "atol": 0.02}),
}


OFFLOADS = {"on_device": OffloadPolicy(), "pinned": CPUOffloadPolicy(), "pageable": CPUOffloadPolicy(pin_memory=False)}


@pytest.mark.parametrize("policy, offload", [("float32", "on_device"), ("bfloat16", "on_device"), ("float32", "pinned"),
                                             ("bfloat16", "pageable")])
@pytest.mark.parametrize("world", WORLDS)
def test_trains_as_the_unsharded_model(world, policy, offload):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(world, port, *POLICIES[policy], OFFLOADS[offload]), nprocs=world)
