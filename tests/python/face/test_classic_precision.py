"""FullyShardedDataParallel: dtypes, and hooks on gradients."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from libfsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from libfsdp.wrap import ModuleWrapPolicy
from models import WIDTH, Block, Stack, batches, loss_of
from parity import assert_close
from ranks import on_ranks
from test_classic import STRATEGIES, compare, whole_parameters, wrapped

# --- precision --------------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.seen = {}

    def forward(self, x):
        self.seen = {"input": x.dtype, "weight": self.linear.weight.dtype, "buffer": self.shift.dtype}
        return self.linear(x.to(self.linear.weight.dtype)) + self.shift


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("cast_root, cast_inner", [(True, False), (False, True), (False, False)])
def test_mixed_precision(rank, world, use_orig_params, cast_root, cast_inner):
    bf16, fp32 = torch.bfloat16, torch.float32
    precision = MixedPrecision(param_dtype=bf16, reduce_dtype=fp32, buffer_dtype=torch.float64,
                               cast_forward_inputs=cast_inner, cast_root_forward_inputs=cast_root)
    inner, outer = Seen(), Seen()
    options = {"mixed_precision": precision, "use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(inner, **options), nn.Tanh(), outer),
                                     **options)
    output = model(torch.ones(2, WIDTH))
    assert inner.seen == {"input": bf16 if cast_root or cast_inner else fp32, "weight": bf16, "buffer": torch.float64}
    output.sum().backward()
    for param in model.parameters():
        assert param.dtype == fp32
        assert param.grad is None or param.grad.dtype == fp32
    assert model.state_dict()["2.shift"].dtype == fp32
    assert all(param.dtype == fp32 for param in whole_parameters(model).values())


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("param_dtype, reduce_dtype", [("bfloat16", "float32"), ("bfloat16", "bfloat16"),
                                                       ("float16", "float16"), (None, "bfloat16"), ("float64", None)])
def test_low_precision_trains(rank, world, strategy, param_dtype, reduce_dtype):
    plain = Stack()
    precision = MixedPrecision(*(getattr(torch, name) if name else None for name in (param_dtype, reduce_dtype)))
    model = FullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Block}),
                                     sharding_strategy=ShardingStrategy[strategy], mixed_precision=precision)
    compare(plain, model, rank, world, steps=2, optimizer=torch.optim.SGD, rtol=0.03, atol=0.03)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_low_precision_gradients(rank, world, strategy, use_orig_params):
    plain, bf16 = Stack(), torch.bfloat16
    precision = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, keep_low_precision_grads=True)
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], mixed_precision=precision,
                    use_orig_params=use_orig_params)
    upcast = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy],
                     mixed_precision=MixedPrecision(param_dtype=bf16, reduce_dtype=bf16),
                     use_orig_params=use_orig_params)
    for _ in range(2):  # the second backward accumulates
        for each in (model, upcast):
            loss_of(each(batches(world, 0)[rank])).backward()
    seen = [param.grad for param in model.parameters() if param.numel()]
    assert {gradient.dtype for gradient in seen} == {bf16}
    for found, param in zip(seen, (param for param in upcast.parameters() if param.numel())):
        assert_close(found.float(), param.grad, "gradient", rtol=0.01, atol=1e-3)
    norm, expected = model.clip_grad_norm_(0.5), upcast.clip_grad_norm_(0.5)
    assert norm.dtype == bf16
    assert_close(norm.float(), expected, "norm", rtol=0.02, atol=1e-3)
    if use_orig_params:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert model.head.weight.grad.dtype == bf16 and model.head.weight.grad.shape == (WIDTH, WIDTH)
    assert all(param.grad.dtype == bf16 for param in model.parameters() if param.numel())
    for each in (model, upcast):
        torch.optim.SGD(each.parameters(), 0.1).step()
    expected = whole_parameters(upcast)
    for name, param in whole_parameters(model).items():
        assert param.dtype == torch.float32
        assert_close(param, expected[name], name, rtol=0.01, atol=1e-3)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_full_precision_in_evaluation(rank, world, use_orig_params):
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        inner, outer = Seen(), Seen()
        model = FullyShardedDataParallel(
            nn.Sequential(FullyShardedDataParallel(inner, mixed_precision=low, use_orig_params=use_orig_params), outer),
            mixed_precision=low, use_orig_params=use_orig_params)
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, WIDTH)

    def step():
        model(x).sum().backward()
        dtypes = {param.grad.dtype for param in model.parameters() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        assert dtypes == {torch.float32}
        return [set(each.seen.values()) for each in (inner, outer)]

    for _ in range(2):
        assert step() == [{torch.bfloat16}] * 2
        trained = whole_parameters(model)
        model.eval()
        expected = nn.functional.linear(nn.functional.linear(x, trained["0.linear.weight"], trained["0.linear.bias"]),
                                        trained["1.linear.weight"], trained["1.linear.bias"])
        with torch.no_grad():
            assert_close(model(x), expected, "output")
        assert step() == [{torch.float32}] * 2
        model.train()
    # What was recorded in one mode has no backward in the other, and is not lost without a word.
    loss = model(x).sum()
    model.eval()
    model(x)
    with pytest.raises((ValueError, RuntimeError), match="forward before its group was given another dtype"):
        loss.backward()


# --- hooks ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_comm_hook(rank, world):
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), use_orig_params=True)
    calls = []

    def hook(state, gradients, output):
        state.append(gradients.numel())
        dist.reduce_scatter_tensor(output, gradients / world)

    model.register_comm_hook(calls, hook)
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(calls, hook)
    compare(plain, model, rank, world, steps=2)
    assert len(calls) == 8


@on_ranks(1, 2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_comm_hook_without_shards(rank, world, use_orig_params):
    """It gets the whole gradients of a wrapper, and what it makes of them is what optimizers see."""
    plain = Stack()
    model = wrapped(copy.deepcopy(plain), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params)
    calls = []

    def hook(state, gradients):
        state.append(gradients.numel())
        dist.all_reduce(gradients)
        gradients.div_(world)

    model.register_comm_hook(calls, hook)
    compare(plain, model, rank, world, steps=2, micro_batches=2)
    inner, outer = sum(p.numel() for p in plain.blocks[0].parameters()), WIDTH * WIDTH + 2 * WIDTH
    assert sorted(calls) == sorted(2 * [outer] + 6 * [inner])


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_comm_hook_in_half_precision(rank, world, strategy):
    """The hook sees gradients as backward made them, and nothing is done to its result."""
    half = torch.float16
    weight = nn.Parameter(torch.zeros(4))
    module = nn.Linear(4, 1, bias=False)
    module.weight = nn.Parameter(weight.view(1, 4))
    model = FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
                                     mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half))
    seen = []

    def hook(state, gradients, output=None):
        seen.append(gradients.tolist())
        (gradients if output is None else output).fill_(0.5)

    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert seen == [[rank + 1.0] * 4]
    assert module.weight.grad.eq(0.5).all()


@on_ranks(2)
def test_hook_on_the_flat_parameter(rank, world):
    """A tensor hook gets this rank's whole gradients before they are reduced; a post-accumulate hook runs once, when
    the reduced ones are there."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = FullyShardedDataParallel(copy.deepcopy(plain))
    before, after = [], []
    model._flat_param.register_hook(lambda gradient: before.append(gradient.clone()) or gradient * 2)
    model._flat_param.register_post_accumulate_grad_hook(lambda param: after.append(param.grad.clone()))
    inputs = [torch.full((1, 3), float(each)) for each in range(world)]
    for step in range(2):
        alone = torch.autograd.grad(plain(inputs[rank]).sum(), list(plain.parameters()))
        plain.zero_grad()
        (sum(plain(x).sum() for x in inputs) / world).backward()
        model.zero_grad()
        model(inputs[rank]).sum().backward()
        line, whole = (torch.cat([each.flatten() for each in gradients])
                       for gradients in (alone, [param.grad for param in plain.parameters()]))
        assert_close(before[step], line, "what the hook got")
        assert_close(model._flat_param.grad, 2 * whole.chunk(world)[rank], "what is there after it")
        assert len(after) == step + 1 and after[step].equal(model._flat_param.grad)
    with model.no_sync():
        model(inputs[rank]).sum().backward()
    assert len(before) == len(after) == 2
    model._flat_param.register_hook(lambda gradient: gradient[1:])
    with pytest.raises(RuntimeError, match="changed the size"):
        model(inputs[rank]).sum().backward()


@on_ranks(2)
def test_hook_on_the_flat_parameter_that_raises(rank, world):
    """On one rank: no rank waits for another, and after it the next step is as any other."""
    model, fails = FullyShardedDataParallel(nn.Linear(3, 3)), rank == 1

    def hook(gradient):
        if fails:
            raise KeyError("mine")

    model._flat_param.register_hook(hook)
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="mine" if rank == 1 else "rank 1 gave up"):
        loss.backward()
    fails = False
    model._unit.group.reset()
    model(torch.ones(1, 3)).sum().backward()
    assert model._flat_param.grad.eq(1).all()
