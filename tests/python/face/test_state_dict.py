"""State dicts, conversions, and parameters that are made on the meta device."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from libfsdp import fully_shard
from models import Stack, Tied, batches, loss_of
from parity import full, shard_blocks
from ranks import on_ranks


def made(make=Stack, seed=0, **options):
    torch.manual_seed(seed)
    return shard_blocks(make(), fully_shard, **options)


def whole(model):
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def trained(model, rank, world, steps=1, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model(batches(world, step)[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@on_ranks(2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [Stack, Tied])
def test_round_trip(rank, world, make, assign):
    source = made(make)
    trained(source, rank, world)
    state = source.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    target = made(make, seed=1)
    target(batches(world, 0)[rank])
    assert target.load_state_dict(state, assign=assign, strict=True).missing_keys == []
    expected = whole(source)
    for name, value in whole(target).items():
        assert torch.equal(value, expected[name]), name
    x = batches(world, 7)[rank]
    torch.testing.assert_close(target(x), source(x))
    # What was loaded is the target's own: training it leaves the source alone, and goes on as the source would.
    trained(target, rank, world)
    for name, value in whole(source).items():
        assert torch.equal(value, expected[name]), name
    trained(source, rank, world)
    expected = whole(source)
    for name, value in whole(target).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@on_ranks(2)
def test_strict(rank):
    model = made()
    state = model.state_dict()
    state.pop("head.bias")
    state["other"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="Missing key.*head.bias"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).unexpected_keys == ["other"]


@on_ranks(2)
def test_assigning_what_does_not_fit_is_refused():
    model = made()
    state = model.state_dict()
    state["shift"] = torch.zeros(6)
    with pytest.raises(ValueError, match="'shift'"):
        model.load_state_dict(state, assign=True)


@on_ranks(2, 3)
def test_meta_device(rank, world):
    source = made()
    with torch.device("meta"):
        model = Stack()
    shard_blocks(model, fully_shard)
    assert all(param.device.type == "meta" and isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu")
    mesh = model.head.weight.device_mesh
    state = {name: distribute_tensor(value, mesh, model.get_parameter(name).placements)
             for name, value in whole(source).items()}
    model.load_state_dict(state)
    x = batches(world, 0)[rank]
    torch.testing.assert_close(model(x), source(x))
    trained(model, rank, world)
    trained(source, rank, world)
    expected = whole(source)
    for name, value in whole(model).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@on_ranks(2)
def test_meta_device_with_reset_parameters(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model[1])
    fully_shard(model)
    model.to_empty(device="cpu")
    for module in model:
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    assert torch.equal(model(torch.ones(1, 6)), torch.full((1, 6), 36.0))


@on_ranks(2)
def test_meta_device_with_parameters_made_from_others():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False)
            self.norm = nn.Parameter(torch.empty(3))

        def forward(self, x):
            return self.linear(x) * self.norm

    with torch.device("meta"):
        model = Net()
    fully_shard(model.linear)
    fully_shard(model)
    model.linear.to_empty(device="cpu")
    nn.init.ones_(model.linear.weight)
    with torch.no_grad():
        model.norm = nn.Parameter(torch.linalg.norm(model.linear.weight, dim=1))
    torch.testing.assert_close(model(torch.ones(1, 3)), torch.full((1, 3), 3 * 3 ** 0.5))


class Tables(nn.Module):
    """Buffers that a state dict has none of, but one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fill()

    def fill(self):
        self.register_buffer("count", torch.arange(4), persistent=False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("kept", torch.tensor([3.0]))

    def forward(self, x):
        return self.linear(x) * self.scale * self.mask * self.kept + self.count


@on_ranks(2)
def test_buffers_that_nobody_fills(rank, world):
    """cases.md, row 12: what a state dict does not hold is asked for by name, and never read as it lies in memory."""
    def emptied(shard_inner=True):
        with torch.device("meta"):
            model = nn.Sequential(Tables(), nn.Linear(4, 4))
        if shard_inner:
            fully_shard(model[0])
        fully_shard(model)
        model.to_empty(device="cpu")
        mesh = model[1].weight.device_mesh
        model.load_state_dict({
            name: distribute_tensor(value, mesh, model.get_parameter(name).placements) if "kept" not in name else value
            for name, value in source.state_dict().items()
        })
        return model

    torch.manual_seed(0)
    source = nn.Sequential(Tables(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    for shard_inner in (True, False):
        model = emptied(shard_inner)
        with pytest.raises(RuntimeError, match=r"\['0.count', '0.scale', '0.mask'\]"):
            model(x)
        model[0].count.data.copy_(torch.arange(4))
        model[0].scale = torch.full((4,), 2.0)
        with pytest.raises(RuntimeError, match=r"\['0.mask'\]"):
            model(x)
        model[0].mask.fill_(True)
        torch.testing.assert_close(model(x), source(x))
    model = emptied()
    model[0].fill()
    model.load_state_dict({"0.kept": source[0].kept}, strict=False)
    torch.testing.assert_close(model(x), source(x))
    with torch.device("meta"):
        unsharded = nn.Sequential(Tables())  # around a sharded module
    fully_shard(unsharded[0]).fill()
    unsharded.to_empty(device="cpu")
    unsharded[0].count.zero_()
    with pytest.raises(RuntimeError, match=r"\['scale', 'mask', 'kept'\]"):
        unsharded(x)
    model.to_empty(device="cpu")  # in the middle of training, to begin anew
    with pytest.raises(RuntimeError, match=r"\['0.count', '0.scale', '0.mask', '0.kept'\]"):
        model(x)


@on_ranks(2)
def test_meta_device_with_several_modules_in_a_group(rank, world):
    def shard(model):
        fully_shard([model.blocks[2], model.head])
        return fully_shard(model)

    with torch.device("meta"):
        first, second = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    first.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"materialized from meta device.*\['1.weight', '1.bias'\]"):
        first(torch.ones(1, 4))
    expected = Stack()
    with torch.device("meta"):
        model = shard(Stack())
    model.to_empty(device="cpu")
    for param, whole in zip(model.parameters(), expected.parameters()):
        param.data.copy_(distribute_tensor(whole.data, param.device_mesh, param.placements))
    x = batches(world, 0)[rank]
    torch.testing.assert_close(model(x), expected(x))


@on_ranks(2)
def test_a_forward_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"materialized from meta device.*\['weight', 'bias'\]"):
        model(torch.ones(1, 4))


@on_ranks(2)
def test_assigned_from_the_meta_device(rank, world):
    source = made()
    with torch.device("meta"):
        model = Stack()
    shard_blocks(model, fully_shard)
    mesh = model.head.weight.device_mesh
    model.load_state_dict({name: distribute_tensor(value, mesh, model.get_parameter(name).placements)
                           for name, value in whole(source).items()}, assign=True)
    x = batches(world, 0)[rank]
    torch.testing.assert_close(model(x), source(x))


@on_ranks(2)
def test_conversion(rank, world):
    model = made()
    loss_of(model(batches(world, 0)[rank])).backward()
    model.double()
    assert all(param.dtype == torch.float64 and param.grad.dtype == torch.float64 for param in model.parameters())
    x = batches(world, 0, torch.float64)[rank]
    torch.manual_seed(0)
    plain = Stack().double()
    torch.testing.assert_close(model(x), plain(x))
    trained(model.float(), rank, world)
    assert all(param.dtype == torch.float32 for param in model.parameters())


@on_ranks(2)
def test_writes_to_parameters_between_steps(rank, world):
    model = made()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    x = batches(world, 0)[rank]
    loss_of(model(x)).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    first = model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.25)
    assert not torch.equal(model(x), first)
    torch.manual_seed(0)
    plain = Stack()
    nn.utils.vector_to_parameters(torch.full((sum(p.numel() for p in plain.parameters()),), 0.25), plain.parameters())
    torch.testing.assert_close(model(x), plain(x))


@on_ranks(2, 3)
def test_torchs_distributed_state_dicts(rank, world):
    source, target = made(), made(seed=1)
    optimizer = trained(source, rank, world, steps=2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(source, options=options)
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(source, optimizer))  # loading does not copy
    if rank == 0:
        file = io.BytesIO()
        torch.save(model_state, file)
        file.seek(0)
        assert torch.load(file).keys() == source.state_dict().keys()
    other = torch.optim.AdamW(target.parameters(), lr=1e-2)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, model_state, options=broadcast)
    set_optimizer_state_dict(target, other, optimizer_state)
    trained(source, rank, world, optimizer=optimizer)
    trained(target, rank, world, optimizer=other)
    expected = whole(source)
    for name, value in whole(target).items():
        torch.testing.assert_close(value, expected[name], msg=lambda m: f"{name}: {m}")


@on_ranks(2)
def test_torchs_distributed_checkpoint(rank, world):
    import tempfile

    import torch.distributed.checkpoint as checkpoint

    source, target = made(), made(seed=1)
    trained(source, rank, world)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    checkpoint.save({"model": source.state_dict()}, checkpoint_id=folder[0])
    state = {"model": target.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    expected = whole(source)
    for name, value in whole(target).items():
        assert torch.equal(value, expected[name]), name
