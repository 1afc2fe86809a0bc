"""State dicts of wrapped models, in each shape: into and from the unsharded model, fully_shard and other shapes."""

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from libfsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from models import MODELS, Stack, batches, loss_of, make
from parity import assert_close, full, shard_blocks
from ranks import on_ranks
from test_classic import whole_parameters, wrapped

FULL, SHARDED, LOCAL = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT,
                        StateDictType.LOCAL_STATE_DICT)


def state_dict(model, kind, config=None):
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return model.state_dict()


def doubled(plain):
    """Other values than a fresh model's."""
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2).add_(1)
    return plain


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_full(rank, world, name, use_orig_params):
    plain = make(name)
    if name == "frozen" and not use_orig_params:
        plain.requires_grad_(False)
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.equal(expected[key]), key
    other = doubled(plain).state_dict()
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    for key, value in model.state_dict().items():
        assert value.equal(other[key]), key
    inputs = batches(world, 0)[rank]
    assert_close(model(inputs), plain(inputs), "output")


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("by_mesh", [True, False])
def test_sharded(rank, world, use_orig_params, by_mesh):
    """As rows; into another wrapped model, and where they are DTensors, into a model of fully_shard and from it."""
    plain = Stack()
    options = {"device_mesh": dist.init_device_mesh("cpu", (world,))} if by_mesh else {}
    options["use_orig_params"] = use_orig_params
    model = wrapped(copy.deepcopy(plain), **options)
    found = state_dict(model, SHARDED)
    assert all(isinstance(value, DTensor if by_mesh else ShardedTensor) for value in found.values())
    assert {key: value.size() for key, value in found.items()} == {
        key: value.size() for key, value in plain.state_dict().items()}
    other = wrapped(doubled(Stack()), **options)
    with FullyShardedDataParallel.state_dict_type(other, SHARDED):
        other.load_state_dict(found)
    for name, param in whole_parameters(other).items():
        assert param.equal(plain.get_parameter(name)), name
    if by_mesh:
        sharded = shard_blocks(doubled(Stack()), fully_shard)
        sharded.load_state_dict(found)
        for name, param in sharded.named_parameters():
            assert full(param).equal(plain.get_parameter(name)), name
        back = wrapped(doubled(Stack()), **options)
        back.load_state_dict(sharded.state_dict())
        assert_close(back(batches(world, 0)[rank]), plain(batches(world, 0)[rank]), "output")


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local(rank, world, use_orig_params):
    model, other = (wrapped(Stack(), use_orig_params=use_orig_params) for _ in range(2))
    found = state_dict(model, LOCAL)
    assert all(isinstance(value, ShardedTensor) and value.dim() == 1 for value in found.values())
    assert ("_flat_param" in found) != use_orig_params
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(found)
    expected = whole_parameters(model)
    for name, param in whole_parameters(other).items():
        assert param.equal(expected[name]), name


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local_through_a_checkpoint(rank, world, use_orig_params):
    """What one rank holds is not what another does: a checkpoint has both."""
    model, other = (wrapped(Stack(), use_orig_params=use_orig_params) for _ in range(2))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    dcp.save(state_dict(model, LOCAL), checkpoint_id=folder[0])
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        found = other.state_dict()
        dcp.load(found, checkpoint_id=folder[0])
        other.load_state_dict(found)
    expected = whole_parameters(model)
    for name, param in whole_parameters(other).items():
        assert param.equal(expected[name]), name
    if rank == 0:
        shutil.rmtree(folder[0])


@on_ranks(2)
@pytest.mark.parametrize("offload", [True, False])
def test_on_the_first_rank(rank, world, offload):
    model = wrapped(make("convolution"), use_orig_params=True)
    found = state_dict(model, FULL, FullStateDictConfig(offload_to_cpu=offload, rank0_only=True))
    assert found.keys() == (make("convolution").state_dict().keys() if rank == 0 else set())


@on_ranks(2)
def test_what_does_not_fit(rank, world):
    for use_orig_params in (True, False):
        model = wrapped(Stack(), use_orig_params=use_orig_params)
        before = whole_parameters(model)
        full_dict = Stack().state_dict()
        del full_dict["blocks.1.up.weight"]
        full_dict["more"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=r'Missing key[^\n]*up.weight"(.|\n)*more"'):
            model.load_state_dict(full_dict)
        result = model.load_state_dict(full_dict, strict=False)
        assert result.missing_keys == ["blocks.1.up.weight"] and result.unexpected_keys == ["more"]
        assert whole_parameters(model)["blocks.1.up.weight"].equal(before["blocks.1.up.weight"])
        full_dict = Stack().state_dict()
        full_dict["head.weight"] = torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
            model.load_state_dict(full_dict)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_reading_changes_nothing(rank, world, use_orig_params):
    """Between steps, between forward and backward, and in low precision: values are of full precision, and training
    goes on as without."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    plain = Stack()
    options = {"mixed_precision": precision, "use_orig_params": use_orig_params}
    model, silent = (wrapped(copy.deepcopy(plain), **options) for _ in range(2))
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (model, silent)]
    for step in range(2):
        inputs = batches(world, step)[rank]
        if step == 0:
            for key, value in model.state_dict().items():
                assert value.equal(plain.state_dict()[key]), key
        losses = [loss_of(each(inputs)) for each in (model, silent)]
        model.state_dict()
        state_dict(model, SHARDED)
        for loss in losses:
            loss.backward()
        model.state_dict()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].equal(losses[1])
    expected = silent.state_dict()
    for key, value in model.state_dict().items():
        assert value.equal(expected[key]), key


@on_ranks(2)
def test_settings(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    settings = FullyShardedDataParallel.get_state_dict_type(model)
    assert settings.state_dict_type is FULL and settings.state_dict_config == FullStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, SHARDED):
        assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is SHARDED
    before = FullyShardedDataParallel.set_state_dict_type(model, SHARDED, ShardedStateDictConfig())
    assert before.state_dict_type is FULL
    assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is SHARDED
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FullyShardedDataParallel.set_state_dict_type(model, FULL, ShardedStateDictConfig())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_no_shard_is_full(rank, world, kind):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy.NO_SHARD)
    for key, value in model.state_dict().items():
        assert value.equal(plain.state_dict()[key]), key
    with pytest.raises(RuntimeError, match="can only be used when"):
        state_dict(model, StateDictType[kind])


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_inside_summon_full_params(rank, world, use_orig_params):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    with FullyShardedDataParallel.summon_full_params(model):
        for key, value in model.state_dict().items():
            assert value.equal(plain.state_dict()[key]), key
        model.load_state_dict(doubled(plain).state_dict())
    assert_close(model(batches(world, 0)[rank]), plain(batches(world, 0)[rank]), "output")


@on_ranks(2)
def test_of_an_enclosing_module(rank, world):
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(plain[0], FullyShardedDataParallel(copy.deepcopy(plain[1])))
    for key, value in model.state_dict().items():
        assert value.equal(plain.state_dict()[key]), key
    model.load_state_dict(doubled(plain).state_dict())
    assert model.state_dict()["1.weight"].equal(plain[1].weight)


def test_without_a_process_group():
    plain = Stack()
    model = wrapped(copy.deepcopy(plain))
    for key, value in model.state_dict().items():
        assert value.equal(plain.state_dict()[key]), key
    with pytest.raises(RuntimeError, match="init_process_group"):
        state_dict(model, SHARDED)
