"""What sharding costs the host on a GPU: a step of blocks that compute next to nothing, with collectives that do nothing.

    python tests/gpu/host_cost.py

Prints milliseconds a step for the plain model, torch's FSDP2 and libfsdp, the runs interleaved. Plain PyTorch, one
process, under a minute; `make gpu-check` runs it last.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from libfsdp import fully_shard

BLOCKS, WIDTH, STEPS, ROUNDS = 50, 64, 10, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model(shard):
    made = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    if shard is not None:
        for block in made:
            shard(block)
        shard(made)
    return made


def step_ms(made, x):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        made(x).sum().backward()
        made.zero_grad()
    issued = time.perf_counter()  # the host's part: the GPU may lag behind
    torch.cuda.synchronize()
    return (issued - begin) / STEPS * 1e3, (time.perf_counter() - begin) / STEPS * 1e3


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    sides = {"plain": model(None), "torch FSDP2": model(torch_fully_shard), "libfsdp": model(fully_shard)}
    x = torch.randn(8, WIDTH, device="cuda")
    measured = {name: [] for name in sides}
    for round_ in range(ROUNDS + 1):
        for name, made in sides.items():
            times = step_ms(made, x)
            if round_ > 0:
                measured[name].append(times)
    print(f"{torch.cuda.get_device_name()}, {BLOCKS} blocks of 16 parameters, torch {torch.__version__}")
    for name, times in measured.items():
        host, wall = (statistics.median(column) for column in zip(*times))
        print(f"  {name:12} host {host:7.2f} ms a step, {wall:7.2f} ms with the GPU's work")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
