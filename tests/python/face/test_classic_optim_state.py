"""Optimizer state of wrapped models: whole, in rows, and back into another one, or into the unsharded model's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.optim import _NamedOptimizer

import libfsdp
from libfsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from libfsdp import FullyShardedDataParallel as FSDP
from models import Stack, batches, loss_of, make
from parity import assert_close, full
from ranks import on_ranks
from test_classic import whole_parameters, wrapped

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def optimizer_of(model):
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[:1], "lr": 0.02}, {"params": params[1:], "lr": 0.01}])


def trained(model, optimizer, rank, world, steps=2, plain=False):
    for step in range(steps):
        inputs = batches(world, step)
        if plain:
            (sum(loss_of(model(x)) for x in inputs) / world).backward()
        else:
            loss_of(model(inputs[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_states_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, state in found.items():
        assert state.keys() == expected[name].keys(), name
        for key, value in state.items():
            assert_close(torch.as_tensor(value) if not isinstance(value, torch.Tensor) else value,
                         torch.as_tensor(expected[name][key]), f"{name} {key}", **tolerance)


def by_name(model, state):
    names = [name for name, _ in model.named_parameters()]
    return {names[i]: each for i, each in state.items()}


def assert_go_on_alike(one, other, rank, world):
    """Two (model, optimizer) have the same parameters after the same further steps."""
    for model, optimizer in (one, other):
        trained(model, optimizer, rank, world)
    expected = whole_parameters(one[0])
    for name, param in whole_parameters(other[0]).items():
        assert param.equal(expected[name]), name


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["stack", "tied", "unused", "convolution"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_whole(rank, world, name, use_orig_params):
    """Equal to the unsharded optimizer's, into which it loads, and from which it comes."""
    plain = make(name)
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (plain, model)]
    trained(plain, optimizers[0], rank, world, plain=True)
    trained(model, optimizers[1], rank, world)
    found = FSDP.optim_state_dict(model, optimizers[1])
    expected = by_name(plain, optimizers[0].state_dict()["state"])
    if not use_orig_params:  # the unused are a part of what is stepped
        found["state"] = {name: each for name, each in found["state"].items() if name in expected}
    assert_states_equal(found["state"], expected)
    numbered = FSDP.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain, optim=optimizers[0])
    again = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain, optim=optimizers[0])
    assert_states_equal(again["state"], found["state"])
    assert numbered["param_groups"][0]["params"] == list(range(len(list(plain.parameters()))))


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("by_mesh", [True, False])
def test_round_trip(rank, world, kind, use_orig_params, into, by_mesh):
    """Into a model wrapped the same way, or the other; training goes on as it would have."""
    options = {"device_mesh": dist.init_device_mesh("cpu", (world,))} if by_mesh else {}
    model = wrapped(Stack(), use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    trained(model, optimizer, rank, world)
    other = wrapped(Stack(), use_orig_params=into, **options)
    resumed = torch.optim.AdamW(other.parameters(), 0.5)
    with FSDP.state_dict_type(model, StateDictType[kind]), FSDP.state_dict_type(other, StateDictType[kind]):
        other.load_state_dict(model.state_dict())
        saved = FSDP.optim_state_dict(model, optimizer)
        resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, saved))
    assert resumed.param_groups[0]["lr"] == 0.02
    assert_go_on_alike((model, optimizer), (other, resumed), rank, world)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local_is_in_rows(rank, world, use_orig_params):
    """As torch's: an optimizer's state has no shape of its own for LOCAL_STATE_DICT."""
    model = wrapped(Stack(), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    trained(model, optimizer, rank, world)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        saved = FSDP.optim_state_dict(model, optimizer)
        mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    with FSDP.state_dict_type(model, SHARDED):
        expected = FSDP.optim_state_dict(model, optimizer)
    for name, state in expected["state"].items():
        assert saved["state"][name]["exp_avg"].metadata() == state["exp_avg"].metadata()
    assert_states_equal(mine["state"], optimizer.state_dict()["state"])


@on_ranks(2)
def test_from_the_first_rank(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = optimizer_of(model)
    trained(model, optimizer, rank, world)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True),
                              FullOptimStateDictConfig(rank0_only=True)):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (rank == 0)
        mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert_states_equal(mine["state"], {i: each for i, each in optimizer.state_dict()["state"].items()})


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_older_names(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = optimizer_of(model)
    trained(model, optimizer, rank, world)
    expected = optimizer.state_dict()["state"]
    whole = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(whole) == (rank == 0)
    assert_states_equal(FSDP.scatter_full_optim_state_dict(whole, model, optim=optimizer)["state"], expected)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_states_equal(FSDP.shard_full_optim_state_dict(whole, model, optim=optimizer)["state"], expected)
    rows = FSDP.sharded_optim_state_dict(model, optimizer)
    assert_states_equal(FSDP.flatten_sharded_optim_state_dict(rows, model, optim=optimizer)["state"], expected)
    for optim_input in (None, list(model.parameters()), [{"params": list(model.parameters())}]):
        with pytest.raises(ValueError, match="lies in 2 groups"):
            FSDP.shard_full_optim_state_dict(whole, model, optim_input)
        whole_group = {**whole, "param_groups": [{"params": list(whole["state"])}]}
        mine = FSDP.shard_full_optim_state_dict(whole_group, model, optim_input)
        assert_states_equal(mine["state"], expected)


@on_ranks(2)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_distributed_checkpoint(rank, world, whole, use_orig_params):
    """torch.distributed.checkpoint's get_state_dict and set_state_dict, with libfsdp installed in torch's place."""
    libfsdp.install()
    try:
        mesh = dist.init_device_mesh("cpu", (world,))
        model, other = (wrapped(Stack(), use_orig_params=use_orig_params, device_mesh=mesh) for _ in range(2))
        optimizer, resumed = (torch.optim.AdamW(each.parameters(), 0.02) for each in (model, other))
        trained(model, optimizer, rank, world)
        options = StateDictOptions(full_state_dict=whole)
        saved, saved_optimizer = get_state_dict(model, optimizer, options=options)
        assert saved.keys() == Stack().state_dict().keys()
        set_state_dict(other, resumed, model_state_dict=saved, optim_state_dict=saved_optimizer, options=options)
    finally:
        libfsdp.uninstall()
    assert_go_on_alike((model, optimizer), (other, resumed), rank, world)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_optimizers_that_list_parameters_in_another_order(rank, world, kind):
    model = wrapped(Stack(), use_orig_params=True)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params if rank == 0 else params[::-1], 0.02)
    trained(model, optimizer, rank, world)
    with FSDP.state_dict_type(model, StateDictType[kind]):
        saved = FSDP.optim_state_dict(model, optimizer)
        mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert_states_equal(mine["state"], optimizer.state_dict()["state"])
    for name, state in saved["state"].items():
        assert state["exp_avg"].size() == Stack().get_parameter(name).size(), name


@on_ranks(2)
def test_optimizers_of_other_parameters(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = torch.optim.AdamW(list(model.parameters())[: None if rank == 0 else -1], 0.02)
    trained(model, optimizer, rank, world)
    with pytest.raises(RuntimeError, match=r"some ranks are missing some of those states.*one alone has \['head.bias'\]"):
        FSDP.optim_state_dict(model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_named_parameters(rank, world, use_orig_params):
    """An optimizer that was built from names, and one whose state dicts go by them."""
    model = wrapped(Stack(), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.named_parameters(), 0.02)
    trained(model, optimizer, rank, world)
    saved = copy.deepcopy(FSDP.optim_state_dict(model, optimizer))
    assert sorted(saved["param_groups"][0]["params"]) == sorted(Stack().state_dict())
    mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert mine["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_states_equal(mine["state"], optimizer.state_dict()["state"])
    named = _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.02)
    named.init_state()
    named.load_state_dict(FSDP.optim_state_dict_to_load(model, named, saved, is_named_optimizer=True))
    again = FSDP.optim_state_dict(model, named)
    assert_states_equal(again["state"], saved["state"])


@on_ranks(2)
def test_state_of_empty_stretches(rank, world):
    """A rank that holds nothing of a parameter may have state of it that was never stepped: it counts for nothing."""
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    trained(model, optimizer, rank, world, steps=2)
    assert any(param.numel() == 0 for param in model.parameters())
    for name, state in FSDP.optim_state_dict(model, optimizer)["state"].items():
        assert state["step"].item() == 3, name


@on_ranks(2)
def test_flat_parameter_of_parts_that_stepped_apart(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    trained(model, optimizer, rank, world)
    saved = FSDP.optim_state_dict(model, optimizer)
    del saved["state"]["head.bias"]
    other = wrapped(Stack())
    with pytest.raises(ValueError, match="must have scalar state with the same value.*'head.bias' has None"):
        FSDP.optim_state_dict_to_load(other, torch.optim.AdamW(other.parameters(), 0.02), saved)


@on_ranks(2)
def test_without_groups_and_with_values_of_the_users(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    trained(model, optimizer, rank, world)
    held = optimizer.state_dict()
    del held["param_groups"]
    for state in held["state"].values():
        state["mine"], state["none"] = 2.5, None
    saved = FSDP.optim_state_dict(model, optimizer, held)
    assert saved.keys() == {"state"}
    mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert mine.keys() == {"state"}
    assert all(state["mine"] == 2.5 and state["none"] is None for state in mine["state"].values())


@on_ranks(3)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_over_some_of_the_ranks(rank, world, use_orig_params):
    """Of a model on ranks 1 and 2 the first rank is 1."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model = wrapped(Stack(), process_group=group, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    trained(model, optimizer, rank - 1, 2)
    expected = whole_parameters(model)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True),
                              FullOptimStateDictConfig(rank0_only=True)):
        saved, saved_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == bool(saved_optimizer) == (rank == 1)
        mine = FSDP.optim_state_dict_to_load(model, optimizer, saved_optimizer)
    assert_states_equal(mine["state"], optimizer.state_dict()["state"])
    other = wrapped(Stack(), process_group=group, use_orig_params=use_orig_params)
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        other.load_state_dict(model.state_dict())
        mine = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
    assert_states_equal(mine["state"], optimizer.state_dict()["state"])
    for name, param in whole_parameters(other).items():
        assert param.equal(expected[name]), name


@on_ranks(2)
def test_refusals(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    optimizer = optimizer_of(model)
    trained(model, optimizer, rank, world)
    with pytest.raises(ValueError, match="not part of the model"):
        FSDP.optim_state_dict(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    foreign = TorchFSDP.__new__(TorchFSDP)
    nn.Module.__init__(foreign)
    foreign._fsdp_wrapped_module = FSDP(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'1' was wrapped by torch's own"):
        FSDP.optim_state_dict(nn.Sequential(model, foreign), optimizer)
    saved = FSDP.optim_state_dict(model, optimizer)
    saved["param_groups"] = saved["param_groups"][:1]
    with pytest.raises(KeyError, match="no parameter group"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)


@on_ranks(2)
def test_mixture_with_plain_modules(rank, world):
    model = nn.Sequential(nn.Linear(6, 6), FSDP(nn.Linear(6, 6), use_orig_params=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trained(model, optimizer, rank, world)
    saved = FSDP.optim_state_dict(model, optimizer)["state"]
    assert saved.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert full(saved["1.weight"]["momentum_buffer"]).shape == (6, 6)
