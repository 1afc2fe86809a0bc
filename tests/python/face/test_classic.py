"""FullyShardedDataParallel against the unsharded model: what it computes."""

import contextlib
import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from libfsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from libfsdp.wrap import ModuleWrapPolicy, always_wrap_policy, enable_wrap, size_based_auto_wrap_policy, wrap
from models import MODELS, WIDTH, Block, Stack, batches, loss_of, make
from parity import assert_close, full
from ranks import on_ranks

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def wrapped(model, **options):
    """Every block, then the whole."""
    blocks = model.blocks
    for i in range(len(blocks)):
        blocks[i] = FullyShardedDataParallel(blocks[i], **options)
    return FullyShardedDataParallel(model, **options)


def whole_parameters(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def compare(plain, model, rank, world, steps=3, optimizer=torch.optim.AdamW, micro_batches=1, **tolerance):
    """Trains both; losses, gradient norms and parameters must agree."""
    optimizers = [optimizer(each.parameters(), 0.02) for each in (plain, model)]
    for step in range(steps):
        for micro in range(micro_batches):
            inputs = batches(world, micro_batches * step + micro)
            expected = [loss_of(plain(x)) for x in inputs]
            (sum(expected) / world).backward()
            if micro < micro_batches - 1:
                with model.no_sync():
                    loss = loss_of(model(inputs[rank]))
                    loss.backward()
            else:
                loss = loss_of(model(inputs[rank]))
                loss.backward()
            assert_close(loss, expected[rank], f"loss of step {step}", **tolerance)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert_close(model.clip_grad_norm_(0.5), norm, f"norm of step {step}", **tolerance)
        for each in optimizers:
            each.step()
            each.zero_grad()
    found = whole_parameters(model)
    expected = dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    for name, param in found.items():
        assert_close(param, expected[name], name, **tolerance)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"frozen"}))
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_models(rank, world, name, use_orig_params):
    plain = make(name)
    compare(plain, wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params), rank, world,
            optimizer=torch.optim.SGD)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_strategies(rank, world, strategy, use_orig_params):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=use_orig_params)
    compare(plain, model, rank, world, micro_batches=2)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("by", ["mesh", "groups"])
def test_hybrid(rank, world, strategy, by):
    plain = Stack()
    shape = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}[world]
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    ranks = {"device_mesh": mesh} if by == "mesh" else {"process_group": (mesh.get_group(1), mesh.get_group(0))}
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True, **ranks)
    compare(plain, model, rank, world, micro_batches=2)


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_by_host(rank, world, strategy):
    """Without a mesh or groups: sharded over the ranks that a launcher says are of one host."""
    plain = Stack()
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        model = FullyShardedDataParallel(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy],
                                         auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        assert dist.get_process_group_ranks(wrapper.process_group) == [[0, 1], [2, 3]][rank // 2]
    compare(plain, model, rank, world)


@on_ranks(2)
def test_hybrid_of_one_shard(rank, world):
    """cases.md, row 11."""
    linear = nn.Linear(1, 2, bias=False)
    nn.init.ones_(linear.weight)
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(linear, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh,
                                     use_orig_params=True)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert linear.weight.grad.tolist() == [1.5, 1.5]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale * self.weight


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_scalar_parameter(rank, world, use_orig_params):
    """cases.md, row 15."""
    model = FullyShardedDataParallel(Scaled(), use_orig_params=use_orig_params)
    model(torch.ones(4)).sum().backward()
    if use_orig_params:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert model.module.scale.grad.item() == 4.0
            assert model.module.weight.grad.tolist() == [2.0] * 4
    else:
        assert model._flat_param.grad.tolist() == [[2.0, 2.0, 2.0], [2.0, 4.0]][rank]


@on_ranks(2)
def test_frozen(rank, world):
    plain = make("frozen")
    compare(plain, wrapped(copy.deepcopy(plain), use_orig_params=True), rank, world)
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        FullyShardedDataParallel(make("frozen"))


@on_ranks(2)
def test_parameters_between_steps(rank, world):
    linear = nn.Linear(3, 3)
    weight, bias = linear.weight, linear.bias
    before = weight.detach().clone()
    model = FullyShardedDataParallel(linear, use_orig_params=True)
    assert model.module.weight is weight and model.module.bias is bias
    assert [name for name, _ in model.named_parameters()] == [
        "_fsdp_wrapped_module.weight", "_fsdp_wrapped_module.bias"]
    assert (weight.shape, bias.shape) == [((6,), (0,)), ((3,), (3,))][rank]
    assert torch.equal(weight, before.flatten()[:6] if rank == 0 else before.flatten()[6:])
    model(torch.ones(1, 3)).sum().backward()
    assert weight.grad.shape == weight.shape
    assert (bias.grad is None) == (rank == 0)
    flat = FullyShardedDataParallel(nn.Linear(3, 3))
    assert [name for name, _ in flat.named_parameters()] == ["_fsdp_wrapped_module._flat_param"]
    assert flat._flat_param.shape == (6,)
    flat(torch.ones(1, 3)).sum().backward()
    assert flat._flat_param.grad.shape == (6,)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_optimizer_built_before(rank, world, use_orig_params):
    """It steps where parameters stay, and says so where they do not."""
    plain = Stack()
    inner = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    model = wrapped(inner, use_orig_params=use_orig_params)
    loss_of(model(batches(world, 0)[rank])).backward()
    if not use_orig_params:
        with pytest.raises(ValueError, match="was built before"):
            optimizer.step()
        return
    optimizer.step()
    sum(loss_of(plain(x)) / world for x in batches(world, 0)).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for name, param in whole_parameters(model).items():
        assert_close(param, plain.get_parameter(name), name)


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
def test_prefetch(rank, world, prefetch):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), backward_prefetch=prefetch, forward_prefetch=True, limit_all_gathers=False,
                    cpu_offload=CPUOffload(True), use_orig_params=True)
    compare(plain, model, rank, world)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_strategies_and_memory(rank, world, use_orig_params):
    """What a rank holds for good, what it holds between forward and backward, and at most."""
    sizes = {name: param.numel() * param.element_size() for name, param in Stack().named_parameters()}
    own = sum(size for name, size in sizes.items() if not name.startswith("blocks"))
    inner = sum(size for name, size in sizes.items() if name.startswith("blocks.0"))
    shapes = {"HYBRID_SHARD": (2, world // 2), "_HYBRID_SHARD_ZERO2": (2, world // 2)} if world > 1 else {}
    for strategy in [*STRATEGIES, *shapes]:
        options = {"device_mesh": dist.init_device_mesh("cpu", shapes[strategy])} if strategy in shapes else {}
        model = wrapped(Stack(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params,
                        **options)
        parts = 1 if strategy == "NO_SHARD" else shapes.get(strategy, (1, world))[1]
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(2):
            loss = loss_of(model(batches(world, step)[rank]))
            frees = strategy in ("FULL_SHARD", "HYBRID_SHARD")
            assert model._unit.group.stats["unsharded_param_bytes"] == own + (0 if frees else 3 * inner), strategy
            loss.backward()
            optimizer.step()
            held = [each.untyped_storage() for param in model.parameters()
                    for each in (param, param.grad, *optimizer.state[param].values()) if each is not None and each.dim()]
            held = sum({each.data_ptr(): each.nbytes() for each in held}.values())
            whole = own + 3 * inner
            assert abs(held - 4 * whole / parts) <= 4 * 4 * 4 * parts, strategy  # the last part of a line may be short
            optimizer.zero_grad()
        stats = model._unit.group.stats
        assert stats["unsharded_param_bytes"] == stats["unsharded_gradient_bytes"] == 0
        if frees:
            assert stats["peak_unsharded_param_bytes"] <= own + 3 * inner  # the one used, the next, one on the wire
        assert stats["peak_unsharded_gradient_bytes"] <= own + 3 * inner


# --- which modules ----------------------------------------------------------------------------------------------------


def wrapped_names(model):
    return {name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
            for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)}


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("policy, expected", [
    (ModuleWrapPolicy({Block}), {"", "blocks.0", "blocks.1", "blocks.2"}),
    (functools.partial(size_based_auto_wrap_policy, min_num_params=150), {""}),
    (always_wrap_policy, None),
], ids=["classes", "size", "always"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_auto_wrap(rank, world, policy, expected, use_orig_params):
    plain = Stack()
    model = FullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    if expected is None:
        assert {"", "head", "blocks.0", "blocks.0.up"} <= wrapped_names(model)
    else:
        assert wrapped_names(model) == expected
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == len(wrapped_names(model))
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    compare(plain, model, rank, world, steps=2)
    assert [each.check_is_root() for each in FullyShardedDataParallel.fsdp_modules(model)].count(True) == 1


@on_ranks(2)
def test_manual_wrap(rank, world):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=True):
        model = wrap(nn.Sequential(wrap(copy.deepcopy(plain[0])), nn.Tanh(), wrap(copy.deepcopy(plain[2]))))
    assert wrapped_names(model) == {"", "0", "2"}
    compare(plain, model, rank, world, steps=2)


@on_ranks(2)
@pytest.mark.parametrize("by", ["modules", "states of modules", "states of parameters"])
def test_ignored(rank, world, by):
    plain = Stack()
    inner = copy.deepcopy(plain)
    ignored = [inner.blocks[1]]
    options = {"modules": {"ignored_modules": ignored}, "states of modules": {"ignored_states": ignored},
               "states of parameters": {"ignored_states": list(ignored[0].parameters())}}[by]
    model = FullyShardedDataParallel(inner, use_orig_params=True, **options)
    assert inner.blocks[1].up.weight.shape == plain.blocks[1].up.weight.shape
    assert inner.blocks[0].up.weight.dim() == 1
    inputs = batches(world, 0)
    assert_close(model(inputs[rank]), plain(inputs[rank]), "output")


# --- where values come from -------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("init", [None, "param_init_fn"])
def test_meta_device(rank, world, init):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def ones(module):
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    torch.manual_seed(3)
    model = FullyShardedDataParallel(module, param_init_fn=ones if init else None, use_orig_params=True)
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for (name, param), plain in zip(whole_parameters(model).items(), expected.parameters()):
        assert param.equal(torch.ones_like(param) if init else plain.detach()), name


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.arange(4), persistent=False)

    def forward(self, x):
        return self.linear(x) + self.count[:2]


@on_ranks(2)
@pytest.mark.parametrize("units", [1, 2])
def test_meta_buffer_that_nobody_fills(rank, world, units):
    """cases.md, row 12."""
    def wrapped(**options):
        with torch.device("meta"):
            module = nn.Sequential(Counted(), nn.Linear(2, 2))
        policy = ModuleWrapPolicy({Counted}) if units == 2 else None
        model = FullyShardedDataParallel(module, auto_wrap_policy=policy, **options)
        model.load_state_dict(source.state_dict())
        return model

    def emptied(module):
        module.to_empty(device="cpu", recurse=False)

    source, x = nn.Sequential(Counted(), nn.Linear(2, 2)), torch.ones(1, 2)
    with pytest.raises(ValueError, match="'count'"):
        wrapped()
    model = wrapped(param_init_fn=emptied)
    with pytest.raises(RuntimeError, match="count'"):
        model(x)
    model[0].count.copy_(torch.arange(4))
    assert_close(model(x), source(x), "output")

    def filled(module):
        emptied(module)
        if isinstance(module, Counted):
            module.count.copy_(torch.arange(4))

    model = wrapped(param_init_fn=filled)
    assert_close(model(x), source(x), "output")
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="count'"):
        model(x)


@on_ranks(2)
def test_meta_buffer_that_is_all_true(rank, world):
    """Not taken for one that nobody filled."""
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)

        def forward(self, x):
            return self.linear(x) * self.mask

    def init(module, anew):
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)
        if isinstance(module, Masked):
            module.mask = torch.ones(2, dtype=torch.bool) if anew else module.mask.fill_(True)

    for anew in (True, False):
        with torch.device("meta"):
            module = Masked()
        model = FullyShardedDataParallel(module, param_init_fn=lambda each: init(each, anew))
        assert model(torch.ones(1, 2)).eq(3).all()


@on_ranks(2)
def test_values_of_the_first_rank_for_buffers_on_meta(rank, world):
    torch.manual_seed(0)
    with torch.device("meta" if rank else "cpu"):
        module = Counted()
    model = FullyShardedDataParallel(
        module, sync_module_states=True, param_init_fn=lambda each: each.to_empty(device="cpu", recurse=False))
    torch.manual_seed(0)
    x = torch.ones(1, 2)
    assert_close(model(x), Counted()(x), "output")


@on_ranks(2)
def test_sync_module_states(rank, world):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module[1].running_mean.fill_(rank)
    torch.manual_seed(0)
    expected = nn.Linear(3, 4)
    model = FullyShardedDataParallel(module, sync_module_states=True)
    with FullyShardedDataParallel.summon_full_params(model):
        assert module[0].weight.equal(expected.weight)
    assert module[1].running_mean.eq(0).all()


# --- by hand ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("writeback", [True, False])
def test_summon_full_params(rank, world, use_orig_params, writeback):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    inputs = batches(world, 0)[rank]
    before = model(inputs)
    with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
            assert param.equal(expected), name
        with pytest.raises(RuntimeError, match="summon_full_params"):
            model(inputs)
        with torch.no_grad():
            assert_close(model(inputs), before, "output inside")
            for param in model.parameters():
                param.mul_(2)
    if writeback:
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(2)
    assert_close(model(inputs), plain(inputs), "output after")
    compare(plain, model, rank, world, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_summon_the_outermost_alone(rank, world, use_orig_params):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    inputs = batches(world, 0)[rank]
    model(inputs)
    with FullyShardedDataParallel.summon_full_params(model, recurse=False), torch.no_grad():
        assert model.module.head.weight.equal(plain.head.weight)
        assert not model.blocks[0]._unit.summoned
        assert_close(model(inputs), plain(inputs), "output")
    compare(plain, model, rank, world, steps=1)


@on_ranks(2)
def test_summon_on_the_first_rank(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        dims = {name: param.dim() for name, param in model.named_parameters()}
    assert dims["head.weight"] == (2 if rank == 0 else 1)
    with pytest.raises(NotImplementedError, match="rank0_only"):
        with FullyShardedDataParallel.summon_full_params(model, rank0_only=True):
            pass


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_apply(rank, world, use_orig_params):
    model = wrapped(Stack(), use_orig_params=use_orig_params)

    @torch.no_grad()
    def init(module):
        if isinstance(module, nn.Linear):
            module.weight.copy_(torch.arange(module.weight.numel()).view(module.weight.shape))

    model.apply(init)
    for name, param in whole_parameters(model).items():
        if param.dim() == 2 and not name.endswith("scale"):
            assert param.flatten().tolist() == list(range(param.numel())), name


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_another_dtype(rank, world, use_orig_params):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=use_orig_params)
    plain.double()
    model(batches(world, 0)[rank])
    model.double()
    inputs = batches(world, 0, torch.float64)
    assert_close(model(inputs[rank]), plain(inputs[rank]), "output", rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_only_the_outermost(rank, world):
    model = wrapped(Stack(), use_orig_params=True)
    model(batches(world, 0)[rank])
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    with pytest.raises(RuntimeError, match="root"):
        with model.blocks[0].no_sync():
            pass
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].clip_grad_norm_(1.0)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("of", ["the outermost", "an inner one"])
@pytest.mark.parametrize("how", ["data", "parameter"])
def test_replaced_between_steps(rank, world, use_orig_params, of, how):
    """What a user puts in a parameter's place, after a step too, is what runs and what is shown."""
    model = wrapped(Stack(), use_orig_params=use_orig_params)
    inputs = batches(world, 0)[rank]
    loss_of(model(inputs)).backward()
    wrapper = model if of == "the outermost" else model.blocks[0]
    holder, name = wrapper.module, "_flat_param"
    if use_orig_params:
        holder, name = (wrapper.head, "weight") if of == "the outermost" else (wrapper.up, "weight")
    param = getattr(holder, name)
    expected = {key: value.clone() for key, value in whole_parameters(model).items()}
    mine = [key for key, each in model.named_parameters() if each is param]
    if how == "data":
        param.data = torch.full_like(param, 0.25)
    else:
        setattr(holder, name, nn.Parameter(torch.full_like(param, 0.25)))
    if use_orig_params:
        expected[mine[0].replace("_fsdp_wrapped_module.", "")].fill_(0.25)
    else:
        prefix = "blocks.0." if of == "an inner one" else ("head", "shift")
        for key, value in expected.items():
            if key.startswith(prefix):
                value.fill_(0.25)
    plain = Stack()
    plain.load_state_dict(expected)
    assert_close(model(inputs), plain(inputs), "output")
    for key, value in model.state_dict().items():
        assert value.equal(expected[key]), key
    model.zero_grad()
    compare(plain, model, rank, world)


@on_ranks(2)
@pytest.mark.parametrize("shown", ["summon_full_params", "state_dict"])
def test_replaced_before_the_first_step(rank, world, shown):
    model = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=True)
    model.module.weight.data = torch.full_like(model.module.weight, 0.25)
    found = whole_parameters(model) if shown == "summon_full_params" else model.state_dict()
    assert found["weight"].equal(torch.full((3, 3), 0.25))
    model.module.weight = nn.Parameter(torch.full_like(model.module.weight, 0.5))
    found = whole_parameters(model) if shown == "summon_full_params" else model.state_dict()
    assert found["weight"].equal(torch.full((3, 3), 0.5))
    model.module.bias = nn.Parameter(torch.zeros(7))
    with pytest.raises(RuntimeError, match="Cannot writeback.*bias"):
        whole_parameters(model)


@on_ranks(2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_optimizer_that_steps_in_backward(rank, world, micro_batches):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=True)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.02})
    reference = torch.optim.AdamW(plain.parameters(), 0.02)
    for step in range(3):
        for micro in range(micro_batches):
            inputs = batches(world, step * micro_batches + micro)
            (sum(loss_of(plain(x)) for x in inputs) / world).backward()
            with model.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                loss_of(model(inputs[rank])).backward()
        reference.step()
        reference.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    for name, param in whole_parameters(model).items():
        assert_close(param, plain.get_parameter(name), name)


@on_ranks(2)
def test_optimizer_that_steps_a_flat_parameter_in_backward(rank, world):
    model = FullyShardedDataParallel(nn.Linear(3, 3))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
        model(torch.ones(1, 3))


@on_ranks(2)
def test_outermost_without_parameters_casts(rank, world):
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3), mixed_precision=low))
    model = FullyShardedDataParallel(model, mixed_precision=low)
    assert model(torch.ones(1, 3)).dtype is torch.bfloat16


class Summons(nn.Linear):
    def forward(self, x, model):
        with FullyShardedDataParallel.summon_full_params(model):
            return super().forward(x)


@on_ranks(2)
def test_summon_in_forward_or_backward(rank, world):
    model = FullyShardedDataParallel(Summons(3, 3), use_orig_params=True)
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        model(torch.ones(1, 3), model)
    model = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=True)
    output = model(torch.ones(1, 3))

    def summon(gradient):
        with FullyShardedDataParallel.summon_full_params(model):
            return gradient

    output.register_hook(summon)
    with pytest.raises(AssertionError, match="during forward/backward"):
        output.sum().backward()


@on_ranks(2)
def test_apply_inside_of_summon(rank, world):
    model = FullyShardedDataParallel(nn.Linear(3, 3))
    with FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(ValueError, match="apply of '.*' inside summon_full_params"):
            model.apply(lambda module: None)


@on_ranks(2)
@pytest.mark.parametrize("offloads", [True, False])
def test_summon_without_shards(rank, world, offloads):
    """Without writeback, what is shown is the one copy that there is, unless that is offloaded."""
    model = FullyShardedDataParallel(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.NO_SHARD,
                                     cpu_offload=CPUOffload(offloads), use_orig_params=True)
    before = model.module.weight.detach().clone()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
        model.module.weight.zero_()
    assert model.module.weight.equal(before if offloads else torch.zeros_like(before))


@on_ranks(2)
def test_clip_before_there_are_gradients(rank, world):
    model = FullyShardedDataParallel(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match=f"on rank {rank} with no gradients"):
        assert model.clip_grad_norm_(1.0) == 0


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_forwards_before_two_backwards(rank, world, strategy):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    first, second = batches(world, 0), batches(world, 1)
    losses = [loss_of(model(first[rank])), loss_of(model(second[rank]))]
    for loss in reversed(losses):
        loss.backward()
    sum(loss_of(plain(x)) / world for x in (*first, *second)).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            assert_close(param.grad, plain.get_parameter(name).grad, name)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shared_between_wrappers(rank, world, use_orig_params):
    model = make("tied")
    model.out = FullyShardedDataParallel(model.out, use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match="sharded already"):
        FullyShardedDataParallel(model, use_orig_params=use_orig_params)


@on_ranks(2)
def test_inside_fully_shard(rank, world):
    plain = Stack()
    model = copy.deepcopy(plain)
    for i in range(3):
        model.blocks[i] = FullyShardedDataParallel(model.blocks[i], use_orig_params=True)
    fully_shard(model)
    inputs = batches(world, 0)
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / world for x in inputs).backward()
    assert_close(full(model.head.weight.grad), plain.head.weight.grad, "head")
    for each in (plain, model):  # slices and DTensors in one optimizer
        torch.optim.SGD(each.parameters(), 0.1, momentum=0.9).step()
    assert_close(model(inputs[rank]), plain(inputs[rank]), "output")


def test_without_a_process_group():
    plain = Stack()
    model = wrapped(copy.deepcopy(plain))
    compare(plain, model, 0, 1)


@on_ranks(2)
def test_refusals(rank, world):
    mesh = dist.init_device_mesh("cpu", (2,))
    for error, match, options in [
        (ValueError, "both process_group and device_mesh", {"process_group": dist.group.WORLD, "device_mesh": mesh}),
        (ValueError, "Manual wrapping with HYBRID_SHARD", {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
        (ValueError, "2 dimensions", {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}),
        (ValueError, "both ignored_modules and ignored_states", {"ignored_modules": [], "ignored_states": []}),
        (TypeError, "iterable of `torch.nn.Module`s", {"ignored_modules": 1}),
        (ValueError, "expects nn.Module list elements", {"ignored_modules": [1]}),
    ]:
        with pytest.raises(error, match=match):
            FullyShardedDataParallel(nn.Linear(2, 2), **options)
    with pytest.raises(ValueError, match="one dtype"):
        FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="already"):
        FullyShardedDataParallel(nn.Sequential(model), auto_wrap_policy=always_wrap_policy)
    parallel = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor.*fully_shard does"):
        FullyShardedDataParallel(parallel)
    unlike = nn.Linear(2, 2 + rank)
    with pytest.raises(ValueError, match="differs|rank"):
        FullyShardedDataParallel(unlike)
