"""libfsdp beside torch's FSDP2 and the unsharded model: the same steps on each, and what must be equal after each."""

import copy

import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import libfsdp
from models import batches, loss_of


def shard_blocks(model, fully_shard, root=True, **options):
    """The usual way: every block, then the whole."""
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    return model


def full(tensor):
    if tensor is None:
        return None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(found, expected, what, **tolerance):
    if expected is None or found is None:
        assert found is None and expected is None, f"{what}: {found} where {expected} was expected"
        return
    torch.testing.assert_close(full(found).detach(), full(expected).detach(), msg=lambda m: f"{what}: {m}", **tolerance)


class Plain:
    """The unsharded model, trained on all ranks' batches: the reference where torch's FSDP2 has no say."""

    def __init__(self, model):
        self.model = model

    def gradients(self, inputs, rank):
        losses = [loss_of(self.model(x)) for x in inputs]
        (sum(losses) / len(losses)).backward()
        return losses[rank].detach()


class Sharded:
    def __init__(self, model):
        self.model = model

    def gradients(self, inputs, rank):
        loss = loss_of(self.model(inputs[rank]))
        loss.backward()
        return loss.detach()


def compare(model, rank, world, *, shard=shard_blocks, beside_torch=True, steps=3, optimizer=torch.optim.SGD,
            optimizer_options=None, prepare=lambda model: None, run=None, **tolerance):
    """Trains copies of ``model`` and compares losses, gradients and parameters. ``shard(model, fully_shard)`` shards a
    copy, ``prepare`` sets it up. Returns libfsdp's."""
    sides = {"plain": Plain(copy.deepcopy(model))}
    if beside_torch:
        sides["torch"] = Sharded(shard(copy.deepcopy(model), torch_fully_shard))
        prepare(sides["torch"].model)
    sides["libfsdp"] = Sharded(shard(model, libfsdp.fully_shard))
    prepare(model)
    others = [name for name in sides if name != "libfsdp"]
    options = {"lr": 0.1, **(optimizer_options or {})}
    optimizers = {name: optimizer(side.model.parameters(), **options) for name, side in sides.items()}
    assert [name for name, _ in sides["libfsdp"].model.named_parameters()] == [
        name for name, _ in sides["plain"].model.named_parameters()]
    for step in range(steps):
        inputs = batches(world, step)
        losses = {name: side.gradients(inputs, rank) for name, side in sides.items()}
        for other in others:
            assert_close(losses["libfsdp"], losses[other], f"step {step}: loss against {other}", **tolerance)
            expected = dict(sides[other].model.named_parameters())
            for name, param in sides["libfsdp"].model.named_parameters():
                what = f"step {step}: gradient of {name} against {other}"
                assert_close(param.grad, expected[name].grad, what, **tolerance)
        for name, each in optimizers.items():
            each.step()
            each.zero_grad()
    for other in others:
        expected = dict(sides[other].model.named_parameters())
        for name, param in sides["libfsdp"].model.named_parameters():
            assert isinstance(param, DTensor)
            assert_close(param, expected[name], f"{name} against {other}", **tolerance)
            if other == "torch":
                assert param.placements == expected[name].placements
                assert param.to_local().shape == expected[name].to_local().shape
    return sides["libfsdp"].model
