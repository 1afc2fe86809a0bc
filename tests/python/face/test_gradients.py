"""Gradients: accumulation, hooks, checkpointing, and autograd used in other ways than backward()."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from libfsdp import fully_shard
from models import WIDTH, Block, Stack, batches, loss_of
from parity import compare, full, shard_blocks
from ranks import on_ranks


def pair(make=Stack):
    """The same model plain and sharded."""
    torch.manual_seed(0)
    plain = make()
    return plain, shard_blocks(copy.deepcopy(plain), fully_shard)


def assert_gradients(model, plain):
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters()):
        if expected.grad is None:
            assert ours.grad is None, name
        else:
            torch.testing.assert_close(full(ours.grad), expected.grad, msg=lambda m: f"{name}: {m}")


@on_ranks(2, 3)
@pytest.mark.parametrize("sync", [True, False])
def test_accumulation(rank, world, sync):
    plain, model = pair()
    for step in range(2):
        for micro in range(3):
            inputs = batches(world, 10 * step + micro)
            if not sync:
                model.set_requires_gradient_sync(micro == 2)
                model.set_reshard_after_backward(micro == 2)
                model.set_is_last_backward(micro == 2)
            loss_of(model(inputs[rank])).backward()
            sum(loss_of(plain(x)) / world for x in inputs).backward()
            if not sync and micro < 2:
                assert all(param.grad is None for param in model.parameters())
        assert_gradients(model, plain)
        reduces = [act for _, act, _ in model._get_fsdp_state().group.schedule].count("reduce-scatter")
        assert reduces == 4, reduces
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


@on_ranks(2)
def test_several_forwards_before_a_backward(rank, world):
    plain, model = pair()
    inputs = [batches(world, step) for step in range(3)]
    sum(loss_of(model(each[rank])) for each in inputs).backward()
    sum(loss_of(plain(x)) / world for each in inputs for x in each).backward()
    assert_gradients(model, plain)


@on_ranks(2)
def test_divide_factor(rank, world):
    plain, model = pair()
    inputs = batches(world, 0)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(8.0)
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / 8 for x in inputs).backward()
    assert_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()
    for module in (model, *model.blocks):
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            module.set_reduce_scatter_divide_factor(2.0)
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / 2 for x in inputs).backward()
    assert_gradients(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters(rank, world, when):
    """A tensor hook sees the whole gradient of this rank and may change it; a post-accumulate hook runs once, when
    .grad holds the reduced rows."""
    linear = nn.Linear(4, 4, bias=False)
    seen, after = [], []

    def register():
        linear.weight.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
        return linear.weight.register_post_accumulate_grad_hook(lambda param: after.append(param.grad))

    if when == "before":
        handle = register()
    fully_shard(linear)
    if when == "after":
        handle = register()
    linear(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((4, 4), rank + 1.0))
    assert len(after) == 1 and isinstance(after[0], DTensor) and after[0] is linear.weight.grad
    assert torch.equal(full(linear.weight.grad), torch.full((4, 4), 3.0))
    handle.remove()
    linear(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 2 and len(after) == 1


@on_ranks(2)
def test_an_optimizer_that_steps_in_hooks(rank, world):
    plain, model = pair()
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(3):
        inputs = batches(world, i)
        loss_of(model(inputs[rank])).backward()
        sum(loss_of(plain(x)) / world for x in inputs).backward()
        reference.step()
        reference.zero_grad()
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(full(ours).detach(), expected.detach(), msg=name)


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x):
        x = x + self.shift
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@on_ranks(2, 3)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_checkpointing(rank, world, reentrant, outside):
    """Around sharded blocks, and inside of them."""

    class Inside(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed() if outside else Stack(3, Inside)
    model.reentrant = reentrant
    compare(model, rank, world)


@on_ranks(2)
def test_checkpoint_wrapper(rank, world):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = Stack()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    compare(model, rank, world)


@on_ranks(2)
def test_autograd_grad(rank, world):
    plain, model = pair()
    x = batches(world, 0)[rank].requires_grad_()
    ours, = torch.autograd.grad(loss_of(model(x)), x)
    expected, = torch.autograd.grad(loss_of(plain(x)), x)
    torch.testing.assert_close(ours, expected)
    assert all(param.grad is None for param in model.parameters())

    class Holds(nn.Linear):
        def forward(self, x):
            self.held = self.__dict__["held"] = [self.weight]
            return super().forward(x)

    held = fully_shard(Holds(4, 4))
    gradient, = torch.autograd.grad(held(torch.ones(1, 4)).sum(), held.held[0])
    assert torch.equal(gradient, torch.ones(4, 4))


@on_ranks(2)
@pytest.mark.parametrize("keep", [True, False])
def test_gradient_penalty(rank, world, keep):
    plain, model = pair()
    if keep:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)

    def penalty(net, x):
        x = x.clone().requires_grad_()
        gradient, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    inputs = batches(world, 0)
    penalty(model, inputs[rank]).backward()
    sum(penalty(plain, x) / world for x in inputs).backward()
    assert_gradients(model, plain)


@on_ranks(2)
def test_gradients_of_gradients_for_parameters_are_refused(rank, world):
    _, model = pair()
    with pytest.raises(RuntimeError, match="create_graph"):
        loss_of(model(batches(world, 0)[rank])).backward(create_graph=True)
    model.reset_iter_state()


@on_ranks(2)
def test_a_second_backward_over_a_kept_graph(rank, world):
    plain, model = pair()
    inputs = batches(world, 0)
    loss = loss_of(model(inputs[rank]))
    losses = [loss_of(plain(x)) / world for x in inputs]
    for i in range(2):
        loss.backward(retain_graph=True)
        sum(losses).backward(retain_graph=True)
    assert_gradients(model, plain)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()


@on_ranks(2)
def test_a_penalty_on_the_sharded_parameters(rank, world):
    """Computed on DTensors, outside any forward, as with torch's FSDP2."""
    plain, model = pair()
    inputs = batches(world, 0)
    penalty = sum(param.square().sum().full_tensor() for param in model.parameters())
    (loss_of(model(inputs[rank])) + 0.1 * penalty).backward()
    penalty = sum(param.square().sum() for param in plain.parameters())
    (sum(loss_of(plain(x)) / world for x in inputs) + 0.1 * penalty).backward()
    assert_gradients(model, plain)


@on_ranks(2)
def test_freezing_and_thawing(rank, world):
    plain, model = pair()
    inputs = batches(world, 0)
    for each in (plain, model):
        each.requires_grad_(False)
    assert not model(inputs[rank]).requires_grad
    for each in (plain, model):
        each.requires_grad_(True)
        each.blocks[0].requires_grad_(False)
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / world for x in inputs).backward()
    assert_gradients(model, plain)


@on_ranks(2, 3)
def test_parameters_that_only_some_ranks_use(rank, world):
    class Choosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x, both):
            return self.a(x) + self.b(x) if both else self.a(x)

    model = Choosy()
    fully_shard(model)
    for _ in range(3):
        model(torch.ones(1, 4), both=rank == 0).sum().backward()
        assert torch.equal(full(model.a.weight.grad), torch.ones(4, 4))
        torch.testing.assert_close(full(model.b.weight.grad), torch.full((4, 4), 1 / world))
        model.zero_grad()


@on_ranks(2)
def test_an_inplace_operator_on_a_view_that_a_block_returned(rank, world):
    class Child(nn.Linear):
        def forward(self, x):
            return super().forward(x).view(-1, WIDTH)

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Child(WIDTH, WIDTH)])
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            out = self.blocks[0](x)
            out += x.view(-1, WIDTH)
            return self.last(torch.tanh(out))

    torch.manual_seed(0)
    compare(Views(), rank, world, beside_torch=False)


@on_ranks(2)
def test_optimizers_see_dtensors_and_clipping_is_global(rank, world):
    plain, model = pair()
    inputs = batches(world, 0)
    loss_of(model(inputs[rank])).backward()
    sum(loss_of(plain(x)) / world for x in inputs).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(full(norm), expected)
    assert_gradients(model, plain)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor)
    assert torch.distributed.tensor.Shard(0) in next(iter(optimizer.state.values()))["exp_avg"].placements


@on_ranks(2)
def test_reduction_after_the_last_backward_as_pipelines_do_it(rank, world):
    plain, model = pair()
    for micro in range(3):
        inputs = batches(world, micro)
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        loss_of(model(inputs[rank])).backward()
        sum(loss_of(plain(x)) / world for x in inputs).backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    assert_gradients(model, plain)
    assert {each.group.state for each in state._state_ctx.all_states} == {"sharded"}


@on_ranks(2)
def test_unshard_in_backward(rank, world):
    """An embedding's backward reads no weight: it is gathered for forward alone, if told so."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)])

        def forward(self, x):
            return self.blocks[1](self.blocks[0]((x.abs() * 10).long() % 8))

    model = shard_blocks(Net(), fully_shard)
    for wanted, gathers in ((True, ["1", "0"]), (False, ["1"])):
        model.blocks[0].set_unshard_in_backward(wanted)
        for _ in range(6):  # what no rank needs leaves the order when that was seen a few times
            loss_of(model(batches(world, 0)[rank])).backward()
        schedule = model._get_fsdp_state().group.schedule
        found = [group for phase, act, group in schedule if phase == "backward" and act == "all-gather"]
        assert [group for group in found if group] == [f"blocks.{name}" for name in gathers], schedule


@on_ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [True, False])
def test_compile(rank, world, backend, whole):
    plain, model = pair()
    for block in model.blocks:
        if not whole:
            block.compile(backend=backend)
    called = torch.compile(model, backend=backend) if whole else model
    for step in range(2):
        inputs = batches(world, step)
        loss_of(called(inputs[rank])).backward()
        sum(loss_of(plain(x)) / world for x in inputs).backward()
    assert_gradients(model, plain)


@on_ranks(2)
def test_replicas_reduce_when_they_are_told_to(rank, world):
    plain, _ = pair()
    mesh = torch.distributed.init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(copy.deepcopy(plain), fully_shard, mesh=mesh)
    for micro in range(3):
        inputs = batches(world, micro)
        model.set_requires_all_reduce(micro == 2)
        loss_of(model(inputs[rank])).backward()
        sum(loss_of(plain(x)) / world for x in inputs).backward()
        if micro < 2:
            assert all(param.grad is None for param in model.parameters())
    assert_gradients(model, plain)
    assert model._get_fsdp_state().group.stats["all_reduces"] == 4
