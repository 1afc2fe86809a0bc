"""Runs test functions on several ranks, each a process that imports torch once and then serves case after case."""

import functools
import importlib
import inspect
import multiprocessing
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: What one rank waits for another, and what a case may take: a first case imports much of torch, on each rank at its
#: own speed.
PEER_SECONDS = 60
CASE_SECONDS = 180


def on_ranks(*worlds):
    """Marks a function as one that runs on every rank of a world, once for each size given. It may ask for the
    arguments ``rank`` and ``world``, besides those that pytest.mark.parametrize gives it."""

    def decorate(fn):
        own = inspect.signature(fn).parameters
        asked = [name for name in own if name not in ("rank", "world")]

        @pytest.mark.parametrize("world", worlds)
        @functools.wraps(fn)
        def test(world, rank_pool, **arguments):
            rank_pool.run(world, fn.__module__, fn.__name__, arguments)

        names = ["world", "rank_pool", *asked]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
        test.on_rank = fn
        return test

    return decorate


class RankPool:
    """Processes for up to ``size`` ranks, started when a case first asks for them. A case on fewer ranks uses the first
    of them."""

    def __init__(self, size):
        self._size = size
        self._workers = []
        self._world, self._address = 0, None  # of the process group that is up

    def run(self, world, module, name, arguments):
        """Runs ``module.name.on_rank`` on ``world`` ranks; fails with the tracebacks of all that raised."""
        self._start(world)
        if world != self._world:
            self._world, self._address = world, f"tcp://127.0.0.1:{free_port()}"
        order = (world, self._address, module, name, arguments)
        for _, pipe in self._workers[:world]:
            pipe.send(order)
        failures = []
        for rank, (process, pipe) in enumerate(self._workers[:world]):
            try:
                said = pipe.recv() if pipe.poll(CASE_SECONDS) else f"no answer within {CASE_SECONDS} s"
            except EOFError:
                process.join()
                said = f"the process ended (exit code {process.exitcode})"
            if said is not None:
                failures.append(f"--- rank {rank} of {world} ---\n{said}")
        if failures:
            self.close()
            pytest.fail("\n".join(failures), pytrace=False)

    def _start(self, world):
        spawn = multiprocessing.get_context("spawn")
        assert world <= self._size
        for rank in range(len(self._workers), world):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def close(self):
        for process, pipe in self._workers:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers, self._world = [], 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(HERE))
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    joined = None
    while True:
        try:
            world, address, module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent is done; peers may be gone, so nothing is torn down
        try:
            if address != joined:
                if joined:
                    dist.destroy_process_group()
                dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world,
                                        timeout=timedelta(seconds=PEER_SECONDS))
                joined = address
            # torch remembers meshes with what it worked out for them, and takes one of the same ranks for another: one
            # of an earlier case, whose groups may be gone by now.
            _clear_sharding_prop_cache()
            fn = getattr(importlib.import_module(module), name).on_rank
            known = inspect.signature(fn).parameters
            extra = {"rank": rank, "world": world}
            torch.manual_seed(0)
            fn(**arguments, **{key: value for key, value in extra.items() if key in known})
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
