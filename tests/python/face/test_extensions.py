"""Local tensors that say what is gathered of them: fsdp_pre_all_gather and fsdp_post_all_gather."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from libfsdp import MixedPrecisionPolicy, fully_shard
from models import WIDTH, loss_of
from ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "quantized_gather"))
from int8_rows import Int8Rows, dequantized, int8_linears, quantized  # noqa: E402


class Halves(nn.Module):
    """Two linear layers whose results are used together: their nodes take turns in backward."""

    def __init__(self, hidden=7):
        super().__init__()
        self.left = nn.Linear(WIDTH, hidden)
        self.right = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.down(torch.tanh(self.left(x)) * self.right(torch.sin(x))) + self.shift


class Stack(nn.Module):
    def __init__(self, recomputed=None):
        super().__init__()
        self.blocks = nn.ModuleList(Halves() for _ in range(3))
        self.recomputed = recomputed

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.recomputed is None else checkpoint(block, x, use_reentrant=self.recomputed)
        return x


def as_gathered(weight):
    """The weight that a forward sees, differentiable as if it were the weight."""
    return weight + (dequantized(*quantized(weight.detach())) - weight.detach())


def plain_loss(model, x):
    params = {name: as_gathered(p) if p.dim() == 2 else p for name, p in model.named_parameters()}
    return loss_of(torch.func.functional_call(model, params, (x,)))


def sharded(model, fine=False):
    for block in model.blocks:
        if fine:
            for linear in (block.left, block.right):
                fully_shard(linear)
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("recomputed", [None, False, True])
@on_ranks(2, 3)
def test_trains_as_the_whole_model_with_what_was_gathered(rank, world, recomputed, fine):
    plain = Stack()
    model = sharded(int8_linears(copy.deepcopy(plain)), fine=fine)
    model.recomputed = recomputed
    names = dict(model.named_parameters())
    assert isinstance(names["blocks.0.left.weight"]._local_tensor, Int8Rows)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    for step in range(3):
        xs = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        if recomputed:
            xs = [x.requires_grad_() for x in xs]
        whole = sum(plain_loss(plain, x) for x in xs) / world
        loss = loss_of(model(xs[rank]))
        torch.testing.assert_close(loss, plain_loss(plain, xs[rank]))
        whole.backward()
        loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda text: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stats = fully_shard.state(model).group.stats
    assert stats["unsharded_param_bytes"] == 0


@on_ranks(2)
def test_bytes_are_those_of_the_sent_form_and_are_freed(rank, world):
    model = sharded(int8_linears(Stack()))
    x = torch.randn(2, WIDTH)
    seen = []
    block = model.blocks[1]
    block.down.register_forward_hook(lambda module, *_: seen.append(module.weight))
    model(x).sum().backward()
    group = fully_shard.state(block).group
    # Padded to an even number of rows: 8 x 6, 8 x 6 and 6 x 7 numbers, a scale a row, and the others in float32.
    numbers, scales, others = 48 + 48 + 42, 8 + 8 + 6, 7 + 7 + 6 + 6
    assert group.state == "sharded"
    block.unshard()
    assert group.stats["unsharded_param_bytes"] == numbers + 4 * scales + 4 * others
    (shown,) = seen
    assert isinstance(shown, nn.Parameter) and shown.shape == (6, 7) and type(shown) is torch.Tensor
    assert shown.untyped_storage().nbytes() == 4 * 6 * 7
    block.reshard()
    assert shown.untyped_storage().nbytes() == 0 and group.stats["unsharded_param_bytes"] == 0


@on_ranks(2)
def test_hooks_put_on_a_plain_local_tensor(rank, world):
    """As torch's: also after to_empty(), and on a mixed precision policy."""
    calls = []

    def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
        calls.append(("pre", mesh.size(), tuple(outer_size), outer_stride, type(module).__name__, mp_policy.param_dtype))
        return (self.to(torch.float64),), "kept"

    def post(self, outputs, metadata, param_dtype, *, out=None):
        calls.append(("post", metadata, param_dtype, out is not None))
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(2 * outputs[0])
            return None
        whole = 2 * outputs[0].to(param_dtype)
        return whole, (outputs[0], whole)

    with torch.device("meta"):
        model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre.__get__(local), post.__get__(local)
    for _ in range(2):
        out = model(torch.ones(3, 4))
        assert out.dtype == torch.bfloat16 and torch.equal(out, torch.full((3, 6), 8.0, dtype=torch.bfloat16))
    out.sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((6, 4), 3.0))
    model.reshard()
    model(torch.ones(3, 4))
    assert calls[0] == ("pre", 2, (6, 4), (4, 1), "FSDPLinear", torch.bfloat16)
    assert calls[2] == ("post", "kept", torch.bfloat16, False) and calls[-1] == ("post", "kept", torch.bfloat16, True)


class Failing(Int8Rows):
    fails = False

    def fsdp_pre_all_gather(self, *args):
        if Failing.fails:
            raise ArithmeticError("no more numbers")
        return super().fsdp_pre_all_gather(*args)


@on_ranks(2)
def test_a_hook_that_throws_ends_the_step_on_all_ranks(rank, world):
    model = Stack()
    for block in model.blocks:
        block.left.weight = nn.Parameter(Failing(block.left.weight))
    sharded(model)
    x = torch.randn(2, WIDTH)
    expected = model(x)
    expected.sum().backward()
    Failing.fails = rank == 1
    if rank == 1:
        with pytest.raises(ArithmeticError, match="no more numbers"):
            model(x)
    else:
        # This rank got NaNs in the place of what the other one could not send.
        with pytest.raises(RuntimeError, match="rank 1 gave up"):
            out = model(x)
            assert out.isnan().any()
            out.sum().backward()
    Failing.fails = False
    model.reset_iter_state()
    torch.testing.assert_close(model(x), expected)


class Unpadded(Int8Rows):
    def fsdp_pre_all_gather(self, *args):
        return quantized(self._data), None


class Hookless(Int8Rows):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()


@on_ranks(2)
def test_refusals(rank, world):
    model = nn.Linear(WIDTH, 7)
    model.weight = nn.Parameter(Unpadded(model.weight))
    fully_shard(model)
    with pytest.raises(ValueError, match=r"fsdp_pre_all_gather.*\[4, 6\].*\[3, 6\]"):
        model(torch.ones(1, WIDTH))

    model = nn.Linear(WIDTH, 7)
    model.weight = nn.Parameter(Hookless(model.weight))
    fully_shard(model)
    with pytest.raises(NotImplementedError, match="'weight' is a Hookless"):
        model(torch.ones(1, WIDTH))

    model = fully_shard(nn.Linear(4, 4))
    model.weight._local_tensor.fsdp_pre_all_gather = lambda *_: None
    with pytest.raises(AttributeError, match="'weight' has fsdp_pre_all_gather and no fsdp_post_all_gather"):
        model(torch.ones(1, 4))


@on_ranks(4)
def test_a_number_for_reshard_after_forward_is_refused(rank, world):
    model = fully_shard(int8_linears(nn.Sequential(nn.Linear(8, 8))), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match="'0.weight'.*has an extension"):
        model(torch.ones(1, 8))


@on_ranks(4)
def test_replicas_of_a_two_dimensional_mesh(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = nn.Linear(WIDTH, 7)
    model = fully_shard(int8_linears(copy.deepcopy(plain)), mesh=mesh)
    xs = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    (sum(plain_loss(plain, x) for x in xs) / world).backward()
    loss_of(model(xs[rank])).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
