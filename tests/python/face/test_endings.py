"""How things end: an exception of the user's on its way out, Ctrl-C in the middle of a step."""

import signal
import subprocess
import sys

import pytest
import torch

from libfsdp import fully_shard
from models import Stack, batches, loss_of
from parity import shard_blocks
from ranks import HERE, free_port, on_ranks


class Mistake(Exception):
    """A user's own."""


def raiser(*_, **__):
    raise Mistake("of the user's")


def check(raised, group):
    """It is the user's exception itself, and says once in which group it was raised."""
    assert raised.type is Mistake and str(raised.value) == "of the user's"
    notes = [note for note in raised.value.__notes__ if note.startswith("libfsdp: ")]
    assert len(notes) == 1 and f"'{group}'" in notes[0]


@on_ranks(2)
@pytest.mark.parametrize("where", ["module", "forward hook", "forward pre-hook"])
def test_an_exception_in_forward(rank, world, where):
    model = shard_blocks(Stack(), fully_shard)
    block = model.blocks[1]
    if where == "module":
        block.up.forward = raiser
    elif where == "forward hook":
        hook = block.up.register_forward_hook(raiser)
    else:
        hook = block.up.register_forward_pre_hook(raiser)
    with pytest.raises(Mistake) as raised:
        model(batches(world, 0)[rank])
    check(raised, "blocks.1")
    if where == "module":
        del block.up.forward
    else:
        hook.remove()
    model.reset_iter_state()
    loss_of(model(batches(world, 0)[rank])).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("where", [
    "tensor hook", "parameter hook", "parameter's hook after it", "all-reduce hook of the parameters", "function"])
def test_an_exception_in_backward(rank, world, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raiser()

    model = shard_blocks(Stack(), fully_shard)
    on = [True]

    def hook(_):
        if on[0]:
            raiser()

    if "parameter" in where:
        block = model.blocks[1]
        if where == "parameter hook":
            block.up.weight.register_hook(hook)
        elif where == "parameter's hook after it":
            block.up.weight.register_post_accumulate_grad_hook(hook)
        else:
            block.set_all_reduce_hook(hook)
        loss = loss_of(model(batches(world, 0)[rank]))
    elif where == "tensor hook":
        output = model(batches(world, 0)[rank])
        output.register_hook(raiser)
        loss = loss_of(output)
    else:
        loss = loss_of(Fails.apply(model(batches(world, 0)[rank])))
    with pytest.raises(Mistake) as raised:
        loss.backward()
    if "parameter" in where:
        check(raised, "blocks.1")
    on[0] = False
    model.reset_iter_state()
    loss_of(model(batches(world, 0)[rank])).backward()
    assert all(param.grad is not None for param in model.parameters())


TRAINS_FOR_EVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that it is ignored
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from libfsdp import fully_shard
from models import Stack, batches, loss_of
from parity import shard_blocks

rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
model = shard_blocks(Stack(), fully_shard)
step = 0
while True:
    loss_of(model(batches(2, step)[rank])).backward()
    step += 1
    if step == 3:
        print("training", flush=True)
        if sys.argv[4] == "waiting" and rank == 1:
            time.sleep(3600)
"""


@pytest.mark.parametrize("ranks, interrupted", [("waiting", (0, 1)), ("training", (1,))])
def test_ctrl_c_ends_all_ranks(ranks, interrupted):
    """SIGINT, to every rank as a terminal sends it, or to one: a rank leaves by KeyboardInterrupt, or because it sees
    that another one left. ``waiting``: rank 0 waits for rank 1, which sleeps."""
    address = f"tcp://127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen([sys.executable, "-c", TRAINS_FOR_EVER, str(HERE), address, str(rank), ranks], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "training\n", process.stderr.read()
        for rank in interrupted:
            processes[rank].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert all(process.returncode != 0 for process in processes)
        assert "KeyboardInterrupt" in errors[1] or len(interrupted) == 2 and "KeyboardInterrupt" in errors[0], errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
