"""Models, groupings and settings drawn at random, described by plain values so that a parent can send them to ranks."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from models import WIDTH

ROOT, OWN, WITH_NEXT = "root", "own", "with next"  # whose group a block is in
FLAGS = st.sampled_from([None, True, False])


@dataclass(frozen=True)
class BlockSpec:
    kind: str  # "mlp", "linear" or "norm"
    hidden: int
    group: str
    reshard: bool | None
    frozen: str = "none"  # "none", "weight" or "all"
    use: str = "always"  # "never", or "some": a rank uses the block or not as its input says
    checkpoint: bool | None = None  # use_reentrant of activation checkpointing around it

    def make(self):
        return {"mlp": lambda: Mlp(self.hidden), "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=self.hidden % 2 == 0),
                "norm": lambda: nn.LayerNorm(WIDTH)}[self.kind]()


@dataclass(frozen=True)
class Spec:
    blocks: tuple[BlockSpec, ...]
    tied: bool  # the first and the last block that are MLPs of the root's group share a weight
    own_parameter: bool  # of the root
    root_reshard: bool | None
    dtype: str
    policy: str  # "none", "compute" (bfloat16 but for the reduction) or "all" (reduction too)
    mesh: tuple[str, ...]  # axes; an axis "one" has size 1
    micro_batches: int
    sync_each: bool  # reduce after every micro-batch, not only after the last
    prefetch: bool
    optimizer: str
    clip: bool

    @property
    def torch_has_an_answer(self):
        """torch's FSDP2 waits for ever, or computes something else, where ranks use different parameters; and it fails
        on the prefetch of a module that does not run."""
        uses = {block.use for block in self.blocks}
        return "some" not in uses and not (self.prefetch and "never" in uses)


@st.composite
def specs(draw):
    count = draw(st.integers(1, 4))
    blocks = tuple(
        BlockSpec(kind=draw(st.sampled_from(["mlp", "mlp", "linear", "norm"])), hidden=draw(st.integers(1, 9)),
                  group=draw(st.sampled_from([OWN, OWN, OWN, ROOT, WITH_NEXT])), reshard=draw(FLAGS),
                  frozen=draw(st.sampled_from(["none", "none", "none", "weight", "all"])),
                  use=draw(st.sampled_from(["always", "always", "always", "always", "never", "some"])),
                  checkpoint=draw(st.sampled_from([None, None, None, True, False])))
        for _ in range(count))
    # A rank that used no parameter at all would have no backward, and that must be the same on all ranks.
    own_parameter = draw(st.booleans()) or any(block.use == "some" for block in blocks)
    return Spec(blocks=blocks, tied=draw(st.booleans()), own_parameter=own_parameter, root_reshard=draw(FLAGS),
                dtype=draw(st.sampled_from(["float32", "float64"])),
                policy=draw(st.sampled_from(["none", "none", "compute", "all"])),
                mesh=draw(st.sampled_from([("ranks",), ("ranks",), ("ranks", "one"), ("one", "ranks")])),
                micro_batches=draw(st.integers(1, 3)), sync_each=draw(st.booleans()), prefetch=draw(st.booleans()),
                optimizer=draw(st.sampled_from(["sgd", "adamw", "adamw fused"])), clip=draw(st.booleans()))


class Mlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(block.make() for block in spec.blocks)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1) if spec.own_parameter else None
        tied = [block for block, each in zip(self.blocks, spec.blocks) if each.kind == "mlp" and each.group == ROOT]
        if spec.tied and len(tied) > 1:
            tied[-1].up = nn.Linear(WIDTH, WIDTH)
            tied[-1].down.weight = tied[-1].up.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        for block, each in zip(self.blocks, spec.blocks):
            if each.frozen == "all":
                block.requires_grad_(False)
            elif each.frozen == "weight":
                next(block.parameters()).requires_grad_(False)
        self.to(getattr(torch, spec.dtype))

    def forward(self, x):
        use_some = bool(x.flatten()[0] > 0)
        x = x if self.shift is None else x + self.shift
        for block, each in zip(self.blocks, self.spec.blocks):
            if each.use == "never" or (each.use == "some" and not use_some):
                continue
            if each.checkpoint is None or not torch.is_grad_enabled():
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=each.checkpoint)
        return x


def policy_of(spec):
    compute = None if spec.policy == "none" else torch.bfloat16
    reduce = {"none": None, "compute": torch.float32, "all": torch.bfloat16}[spec.policy]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def shard(spec, model, fully_shard, mesh):
    options = {"mesh": mesh, "mp_policy": policy_of(spec)}
    waiting = []
    for i, (block, each) in enumerate(zip(model.blocks, spec.blocks)):
        if each.group == ROOT:
            continue
        waiting.append(block)
        joins = each.group == WITH_NEXT and i + 1 < len(spec.blocks) and spec.blocks[i + 1].group != ROOT
        if not joins:
            fully_shard(waiting if len(waiting) > 1 else block, reshard_after_forward=each.reshard, **options)
            waiting = []
    return fully_shard(model, reshard_after_forward=spec.root_reshard, **options)


def prefetch(spec, model):
    own = [block for block, each in zip(model.blocks, spec.blocks) if each.group == OWN]
    for this, following in zip(own, own[1:]):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
