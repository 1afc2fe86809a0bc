"""What goes into a forward and comes out of it, and what happens around it."""

import copy
import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import MixedPrecisionPolicy, fully_shard
from libfsdp._tensors import cast_floating, map_tensors
from models import Stack, batches, loss_of
from parity import assert_close, compare, full, shard_blocks
from ranks import on_ranks


@dataclasses.dataclass(frozen=True)
class Box:
    value: torch.Tensor
    name: str
    doubled: torch.Tensor = dataclasses.field(init=False, default=None)


Pair = namedtuple("Pair", "left right")


def test_map_tensors_goes_everywhere_and_copies_only_what_changed():
    one = torch.ones(1)
    nested = {"a": [one, (one, Pair(one, 3))], "b": OrderedDict(c=Box(one, "x")), "d": None,
              "p": nn.utils.rnn.pack_sequence([one, one])}
    doubled = map_tensors(lambda tensor: tensor * 2, nested)
    assert doubled["a"][0] == 2 and doubled["a"][1][1].left == 2 and doubled["a"][1][1].right == 3
    assert type(doubled["b"]) is OrderedDict and doubled["b"]["c"].value == 2 and doubled["b"]["c"].name == "x"
    assert torch.equal(doubled["p"].data, torch.full((2,), 2.0))
    assert nested["b"]["c"].value == 1
    assert map_tensors(lambda tensor: tensor, nested["a"]) is nested["a"]
    assert map_tensors(lambda tensor: tensor, nested["b"]) is nested["b"]
    assert cast_floating([torch.ones(1, dtype=torch.long)], torch.bfloat16)[0].dtype == torch.long


class Nested(nn.Module):
    """Takes and returns containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, box, *, extra, flag=False):
        assert flag == "yes"
        out = self.linear(box.value) + extra["bias"][0]
        return {"out": Box(out, box.name), "rest": [out * 2, (extra["bias"][1], "text")]}


@on_ranks(2)
def test_containers_and_keywords(rank):
    torch.manual_seed(0)
    plain = Nested()
    torch.manual_seed(0)
    model = fully_shard(Nested(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    call = {"extra": {"bias": [torch.ones(4), torch.arange(3)]}, "flag": "yes"}
    expected = plain(Box(torch.ones(2, 4), "n"), **call)
    result = model(Box(torch.ones(2, 4), "n"), **call)
    assert result["out"].name == "n" and result["rest"][1][1] == "text"
    assert result["out"].value.dtype == torch.float64 and result["rest"][1][0].dtype == torch.int64
    torch.testing.assert_close(result["out"].value.float(), expected["out"].value)
    (result["out"].value.sum() + result["rest"][0].sum()).backward()
    (expected["out"].value.sum() + expected["rest"][0].sum()).backward()
    torch.testing.assert_close(full(model.linear.weight.grad), plain.linear.weight.grad)


@on_ranks(2)
@pytest.mark.parametrize("policy", [
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
], ids=["param", "param-reduce", "reduce", "output"])
def test_mixed_precision(rank, world, policy):
    """Beside torch's FSDP2, in the same dtypes; the unsharded model computes in others."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    sides = []
    for shard in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = Stack()
        shard(model.head, mp_policy=policy)  # takes what blocks return, in whatever dtype
        sides.append(shard_blocks(model, shard, mp_policy=policy))
    for step in range(2):
        for model in sides:
            output = model(batches(world, step)[rank])
            assert output.dtype == (policy.output_dtype or policy.param_dtype or torch.float32)
            loss_of(output).backward()
        for (name, theirs), (_, ours) in zip(sides[0].named_parameters(), sides[1].named_parameters()):
            assert ours.dtype == torch.float32 and ours.grad.dtype == theirs.grad.dtype, name
            torch.testing.assert_close(full(ours.grad), full(theirs.grad), msg=name, rtol=2e-2, atol=2e-3)
        for model in sides:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


@on_ranks(2)
def test_parameters_in_forward_have_the_policys_dtype():
    class Looks(nn.Linear):
        def forward(self, x, *, scale):
            assert x.dtype == scale.dtype == self.weight.dtype == torch.bfloat16
            return super().forward(x) * scale

    model = fully_shard(Looks(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(1, 4), scale=torch.ones(4))
    uncast = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False))
    assert uncast(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        uncast(torch.ones(1, 4))
    uncast.reset_iter_state()


@on_ranks(2)
def test_other_forward_methods():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def encode(self, x, *, scale=1):
            return self.linear(x) * scale

        def forward(self, x):
            return self.encode(x)

    model = fully_shard(Encoder())
    libfsdp.register_fsdp_forward_method(model, "encode")
    libfsdp.register_fsdp_forward_method(nn.Linear(1, 1), "encode")  # not sharded: nothing happens
    model.encode(torch.ones(1, 4), scale=2).sum().backward()
    assert torch.equal(full(model.linear.weight.grad), torch.full((4, 4), 2.0))
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()  # the one inside the other
    assert torch.equal(full(model.linear.weight.grad), torch.ones(4, 4))


@on_ranks(2)
def test_users_hooks_run_inside():
    model = nn.Linear(4, 4)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    model.register_forward_hook(lambda module, args, output: seen.append(type(module.weight)))
    fully_shard(model)
    model(torch.ones(1, 4))
    assert seen == [nn.Parameter, nn.Parameter]


@on_ranks(2)
def test_eval_without_gradients(rank, world):
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(0)
    model = shard_blocks(Stack(), fully_shard)
    x = batches(world, 0)[rank]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(model(x), plain(x))
    loss_of(model(x)).backward()
    assert all(param.grad is not None for param in model.parameters())
    x = x.requires_grad_()
    loss_of(model(x)).backward()
    assert x.grad is not None


@on_ranks(2)
def test_a_call_of_an_inner_module_alone(rank, world):
    model = shard_blocks(Stack(), fully_shard)
    x = batches(world, 0)[rank]
    model.blocks[1](x).sum().backward()
    assert model.blocks[1].scale.grad is not None and model.head.weight.grad is None
    model.zero_grad()
    loss_of(model(x)).backward()
    assert model.head.weight.grad is not None
    model.blocks[1](x).sum().backward()


@on_ranks(2)
def test_a_module_in_a_list_that_owns_another(rank, world):
    """norm, mtp and head are one group; mtp has head as its child, and the root calls head again."""

    class Mtp(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.head = head

        def forward(self, x):
            return self.head(self.inner(x)) + self.inner.weight.sum()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList()
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 6)
            self.mtp = Mtp(self.head)

        def forward(self, x):
            x = self.norm(x)
            return self.mtp(x) + self.head(x)

    def shard(model, fully_shard):
        fully_shard([model.norm, model.mtp, model.head])
        return fully_shard(model)

    torch.manual_seed(0)
    compare(Net(), rank, world, shard=shard, beside_torch=False)


@on_ranks(2)
def test_a_list_run_in_part_and_by_chunks(rank, world):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 6)

        def forward(self, x):
            return self.norm(self.body(x))

    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = Net()
    fully_shard([model.norm, model.head])
    fully_shard(model)
    inputs = batches(world, 0)
    hidden = model(inputs[rank])
    sum(loss_of(model.head(chunk)) for chunk in hidden.chunk(2)).backward()
    for x in inputs:
        (sum(loss_of(plain.head(chunk)) for chunk in plain(x).chunk(2)) / world).backward()
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours.grad), expected.grad, msg=name)


@on_ranks(2)
def test_an_error_surfaces_as_itself_and_is_recovered_from(rank, world):
    class Explodes(nn.Linear):
        fuse = False

        def forward(self, x):
            if self.fuse:
                raise KeyError("mine")
            return super().forward(x)

    torch.manual_seed(0)
    model = Stack()
    model.head = Explodes(6, 6)
    plain = __import__("copy").deepcopy(model)
    shard_blocks(model, fully_shard)
    inputs = batches(world, 0)
    loss_of(model(inputs[rank])).backward()
    model.zero_grad()
    model.head.fuse = True
    with pytest.raises(KeyError, match="mine") as caught:
        model(inputs[rank])
    assert any("group '(root)'" in note for note in caught.value.__notes__)
    model.head.fuse = False
    with pytest.raises(torch.distributed.DistBackendError, match="reset_iter_state"):
        model(inputs[rank])
    with pytest.raises(RuntimeError, match="outermost"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / world for x in inputs).backward()
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours.grad), expected.grad, msg=name)


@on_ranks(2)
def test_an_error_on_one_rank_reaches_the_other(rank, world):
    class Explodes(nn.Linear):
        def forward(self, x):
            if fuse and rank == 1:
                raise ValueError("on rank 1 alone")
            return super().forward(x)

    fuse = False
    torch.manual_seed(0)
    model = Stack()
    model.blocks[1].down = Explodes(7, 6, bias=False)
    shard_blocks(model, fully_shard)
    x = batches(world, 0)[rank]
    loss_of(model(x)).backward()
    fuse = True
    with pytest.raises(RuntimeError if rank == 0 else ValueError, match="on rank 1 alone"):
        loss_of(model(x)).backward()
    fuse = False
    model.reset_iter_state()
    model.zero_grad()
    loss_of(model(x)).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_module_without_parameters(rank, world):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for module in (*model, model):
        fully_shard(module)
    model(batches(world, 0)[rank]).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert model[1].unshard() is None
    model[1].reshard()


@on_ranks(2)
def test_an_error_in_a_hook_of_backward_surfaces_as_itself(rank, world):
    torch.manual_seed(0)
    model = shard_blocks(Stack(), fully_shard)

    def fail(gradient):
        raise KeyError("in a hook")

    handle = model.blocks[0].scale.register_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        loss_of(model(batches(world, 0)[rank])).backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    handle.remove()
    model.reset_iter_state()
    loss_of(model(batches(world, 0)[rank])).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_block_that_is_called_twice_and_inside_itself(rank, world):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, depth=2):
            return self.linear(x) if depth == 0 else torch.tanh(self(self.linear(x), depth - 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Deep()])

        def forward(self, x):
            return self.blocks[0](self.blocks[0](x))

    torch.manual_seed(0)
    compare(Net(), rank, world, beside_torch=False)


@on_ranks(2)
@pytest.mark.parametrize("of", ["the outermost", "an inner one"])
def test_a_parameter_that_was_replaced_between_steps(rank, world, of):
    plain = Stack()
    model = shard_blocks(copy.deepcopy(plain), fully_shard)
    inputs = batches(world, 0)[rank]
    loss_of(model(inputs)).backward()
    path = "head" if of == "the outermost" else "blocks.0.up"
    holder = model.get_submodule(path)
    holder.weight = nn.Parameter(torch.full_like(holder.weight, 0.25))
    nn.init.constant_(plain.get_submodule(path).weight, 0.25)
    assert_close(model(inputs), plain(inputs), "output")
