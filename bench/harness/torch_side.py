"""One rank of a Python side: plain, DDP, FSDP2, libfsdp or its classic wrapper. Serves the driver's commands (see ../README.md, "Protocol")."""

import argparse
import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness.torch_models import make_input, make_model  # noqa: E402


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--side", choices=["plain", "ddp", "fsdp2", "libfsdp", "inplace", "classic"], required=True)
    p.add_argument("--model", choices=["block", "rows", "norms"], default="block")
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--columns", type=int, default=1)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--seq", type=int, default=8)
    p.add_argument("--engine", choices=["fake", "gloo"], default="gloo")
    p.add_argument("--rank", type=int, default=0)
    p.add_argument("--world", type=int, default=1)
    p.add_argument("--time-zero-grad", action="store_true")
    p.add_argument("--adamw", nargs="?", const="default", choices=["default", "foreach", "fused"],
                   help="step an AdamW after each backward, outside the timed part")
    p.add_argument("--time-adamw", action="store_true", help="inside of it")
    return p.parse_args()


def join(args):
    if args.engine == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.world)
    elif args.world > 1:
        dist.init_process_group("gloo", rank=args.rank, world_size=args.world)


def shard(args, model):
    if args.side == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if args.side == "classic":
        from libfsdp import FullyShardedDataParallel

        for i, layer in enumerate(model):
            model[i] = FullyShardedDataParallel(layer, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    if args.side in ("fsdp2", "libfsdp", "inplace"):
        if args.side == "fsdp2":
            from torch.distributed.fsdp import fully_shard
        else:
            from libfsdp import fully_shard
        mesh = init_device_mesh("cpu", (args.world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if args.side == "inplace":
            for layer in model:
                layer.set_symm_mem_for_comm()
    return model


def status_mb(field, of="status"):
    with open(f"/proc/self/{of}") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(field + ":"))


def reset_peak():
    """Makes VmHWM start over, where the kernel allows it."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass


class Side:
    def __init__(self, args):
        self.args = args
        self.base_mb = status_mb("VmRSS")
        model = make_model(args)
        join(args)
        begin = time.perf_counter()
        self.model = shard(args, model)
        self.setup_us = (time.perf_counter() - begin) * 1e6
        self.parameters = list(self.model.parameters())
        kind = {args.adamw: True} if args.adamw in ("foreach", "fused") else {}
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, **kind) if args.adamw else None
        self.input = make_input(args, args.rank)
        self.build_peak_mb = status_mb("VmHWM")
        reset_peak()

    def ready(self):
        return {
            "ready": True,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "setup_us": self.setup_us,
            "parameters": sum(p.numel() for p in self.parameters),
        }

    def loss(self, x):
        return self.model(x).square().mean()

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    def step(self):
        """Microseconds of forward, of the whole step, and of the optimizer."""
        if self.args.engine == "gloo" and self.args.world > 1:
            dist.barrier()
        begin = time.perf_counter()
        loss = self.loss(self.input)
        forward = time.perf_counter()
        loss.backward()
        end = stepped = time.perf_counter()
        if self.optimizer:
            self.optimizer.step()
            stepped = time.perf_counter()
        optimizer = stepped - end
        if self.args.time_adamw:
            end = stepped
        self.zero_grad()
        if self.args.time_zero_grad:
            end = time.perf_counter() - (0 if self.args.time_adamw else optimizer)
        return (forward - begin) * 1e6, (end - begin) * 1e6, optimizer * 1e6

    def round(self, warmup, steps):
        for _ in range(warmup):
            self.step()
        times = [self.step() for _ in range(steps)]
        return {name: list(us) for name, us in zip(("forward_us", "us", "optimizer_us"), zip(*times))}

    def gradients(self):
        """Of the mean over all ranks' inputs; plain does them all itself. The loss of this rank's, or of them all."""
        ranks = range(self.args.world) if self.args.side == "plain" else [self.args.rank]
        losses = []
        for rank in ranks:
            loss = self.loss(make_input(self.args, rank))
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def learn(self, steps):
        """Steps the optimizer with the gradients of the mean over all ranks' inputs."""
        for _ in range(steps):
            self.gradients()
            self.optimizer.step()
            self.zero_grad()
        return {}

    def check(self):
        """The loss of this rank's input and the norms of the ranks' mean gradients."""
        loss = self.gradients()
        norms = [self.norm(p).item() for p in self.parameters]
        self.zero_grad()
        return {"loss": loss, "grad_norms": norms}

    def norm(self, parameter):
        """Of the whole gradient."""
        if self.args.side == "classic":  # a slice, and none where this rank has nothing of the parameter
            square = torch.zeros((), dtype=torch.double)
            if parameter.grad is not None:
                square += parameter.grad.double().square().sum()
            dist.all_reduce(square)
            return square.sqrt()
        grad = parameter.grad
        return (grad.full_tensor() if isinstance(grad, DTensor) else grad).double().norm()

    def copies(self):
        """Microseconds of the fake group's own gather and reduce of one layer's bytes: it copies, a wire would not."""
        shard = torch.zeros(sum(p.to_local().numel() for p in self.model[0].parameters()))
        whole = torch.zeros(shard.numel() * self.args.world)
        backend = dist.group.WORLD._get_backend(shard.device)

        def microseconds(collective, n=200):
            begin = time.perf_counter()
            for _ in range(n):
                collective()
            return (time.perf_counter() - begin) * 1e6 / n

        return {"gather_us": microseconds(lambda: backend._allgather_base(whole, shard)),
                "reduce_us": microseconds(lambda: backend._reduce_scatter_base(shard, whole))}

    def memory(self):
        return {"base_mb": self.base_mb, "build_peak_mb": self.build_peak_mb, "peak_mb": status_mb("VmHWM"),
                "pss_mb": self.pss_of_a_step()}

    def pss_of_a_step(self):
        """This process's share of the memory that is its own or shared, at its largest in a step."""
        peak, over = [0.0], threading.Event()

        def sample():
            while not over.wait(0.02):
                peak[0] = max(peak[0], status_mb("Pss", of="smaps_rollup"))

        sampler = threading.Thread(target=sample)
        sampler.start()
        self.step()
        over.set()
        sampler.join()
        return peak[0]


def main():
    torch.set_num_threads(1)
    args = parse_args()
    # Fake gathers leave whatever was in memory; arithmetic on denormals would be timed with the host's work.
    torch.set_flush_denormal(args.engine == "fake")
    side = Side(args)
    print(json.dumps(side.ready()), flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        commands = {"round": side.round, "check": side.check, "learn": side.learn, "copies": side.copies,
                    "memory": side.memory}
        reply = commands[command](*map(int, numbers))
        print(json.dumps(reply), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
