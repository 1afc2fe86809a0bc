"""What one wrapper made: the group of its parameters, as Python holds it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.utils.hooks import RemovableHandle

from .. import _C, _stale_optimizers
from .._fully_shard import Found, place_of
from .._state import FSDPState, Home, state_of
from ._buffers import CastBuffers
from ._ranks import Ranks
from ._step_in_backward import refuse_in_backward, step_in_backward

FLAT_PARAM = "_flat_param"


class Piece:
    """One parameter of a unit: a stretch of its line of elements."""

    def __init__(self, found: Found, lead: int, part: range):
        self.name = found.name
        self.shape = found.param.shape
        self.numel = found.param.numel()
        self.lead = lead  # where it begins in the line
        #: The elements of the (flattened) parameter that this rank holds.
        self.here = slice(*(min(max(end - lead, 0), self.numel) for end in (part.start, part.stop)))
        self.places = [(weakref.ref(module), name) for module, name in found.places]
        #: The parameter that users hold, where it is one of its own.
        self.param: nn.Parameter | None = None

    @property
    def here_numel(self) -> int:
        return self.here.stop - self.here.start

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """(module, name) of the places where the parameter is."""
        for ref, name in self.places:
            if (module := ref()) is not None:
                yield module, name

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a whole tensor."""
        return whole.detach().reshape(-1)[self.here]


class Unit(FSDPState):
    """The state of a wrapper. ``pieces`` are the parameters in the order of the line; of that, this rank holds
    ``part``."""

    def __init__(self, wrapper: nn.Module, holder: nn.Module, found: list[Found], ranks: Ranks,
                 strategy: ShardingStrategy, mixed_precision: MixedPrecision, use_orig_params: bool,
                 backward_prefetch: BackwardPrefetch | None, buffers: CastBuffers):
        self.ranks, self.strategy, self.mixed_precision = ranks, strategy, mixed_precision
        self.use_orig_params = use_orig_params
        self.flat_param: nn.Parameter | None = None
        self._holder = weakref.ref(holder)
        self._buffers = buffers
        self._steps: list[RemovableHandle] = []
        lowers = (mixed_precision.param_dtype, mixed_precision.reduce_dtype, mixed_precision.buffer_dtype)
        self._full_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and any(lowers)
        self._full = False  # runs in full precision now, for evaluation
        self.total = sum(each.param.numel() for each in found)
        self.chunk = math.ceil(self.total / ranks.parts)
        first = min(self.total, self.chunk * ranks.part)
        self.part = range(first, min(self.total, first + self.chunk))
        self.pieces: list[Piece] = []
        lead = 0
        for each in found:
            self.pieces.append(Piece(each, lead, self.part))
            lead += each.param.numel()
        group = _C.Group([each.name for each in found], [each.param for each in found], [0] * len(found), ranks.engine,
                         mixed_precision.param_dtype, mixed_precision.reduce_dtype, flat=True,
                         keep_reduced=mixed_precision.keep_low_precision_grads)
        policy = MixedPrecisionPolicy(mixed_precision.param_dtype, mixed_precision.reduce_dtype,
                                      cast_forward_inputs=mixed_precision.cast_forward_inputs)
        keeps = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2,
                             ShardingStrategy.NO_SHARD)
        homes = [Home(weakref.ref(each.places[0][0]), each.places[0][1], each.param.shape, each.param.stride(), None)
                 for each in found]
        super().__init__([wrapper], ranks.device_mesh, ranks.engine, group, homes, policy, False if keeps else None)
        if backward_prefetch is None:
            self._prefetch[True] = []
        for i, each in enumerate(found):
            if use_orig_params:
                self._show_slice(i, each)
            else:
                _stale_optimizers.mark(each.param, each.name)
        if not use_orig_params and found:
            self._show_flat(holder, found)
        if mixed_precision.keep_low_precision_grads:
            for param in self.params:
                param.grad_dtype = None  # any

    def _show_slice(self, i: int, found: Found) -> None:
        piece, param = self.pieces[i], found.param
        gradient, param.grad = param.grad, None
        piece.param = param
        param._libfsdp_slice = True
        self.group.place(i, param, [place_of(*place) for place in found.places], None)
        if gradient is not None:
            param.grad = piece.cut(gradient).clone()

    def _show_flat(self, holder: nn.Module, found: list[Found]) -> None:
        """One parameter over this rank's part of the line, registered in ``holder``; the modules keep their whole
        parameters as plain attributes, which are empty but in forward and backward."""
        trains = {each.param.requires_grad for each in found}
        if len(trains) > 1:
            named = ", ".join(f"{each.name} ({each.param.requires_grad})" for each in found)
            raise ValueError("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`, got "
                             f"{named}; wrap them apart, or pass use_orig_params=True")
        flat = nn.Parameter(torch.empty(0, dtype=found[0].param.dtype), requires_grad=trains.pop())
        self._name_flat(flat)
        for each in found:
            for module, name in each.places:
                del module._parameters[name]
        holder._parameters[FLAT_PARAM] = flat
        for i, (piece, each) in enumerate(zip(self.pieces, found)):
            places = [(module.__dict__, name, follower) for module, name in each.places
                      for _, _, follower in (place_of(module, name),)]
            self.group.hide(i, flat, self.offset(piece),
                            (holder._parameters, FLAT_PARAM, None), places)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _arranged(self, outermost: bool) -> None:
        super()._arranged(outermost)
        self._arrange_steps()
        self._arrange_casts()

    def _arrange_casts(self) -> None:
        if self._full:
            self._buffers.restore()
            self._input_dtype = None
            return
        self._buffers.cast()
        precision = self.mixed_precision
        # The outermost casts for those inside, even where it has no parameters of its own.
        casts = ((precision.cast_forward_inputs and self.pieces)
                 or (self._outermost and precision.cast_root_forward_inputs))
        self._input_dtype = precision.param_dtype if casts else None

    def _follow_mode(self) -> None:
        """Where evaluation is of full precision, makes the units of this model, of which this is the outermost, as their
        modules' modes are now. Collective where one changed, which takes their groups anew."""
        self.ready()
        leads = self.outermost and not self.group.busy
        units = [each for each in self._state_ctx.all_states if isinstance(each, Unit)] if leads else [self]
        changed = [unit for unit in units if unit._full_in_eval and unit._full is unit.holder.training]
        if changed and not leads:
            raise RuntimeError(f"libfsdp: '{self.group.name}' is in {'evaluation' if self._full else 'training'} for the "
                               "outermost wrapper of its model, and not by its own mode: with "
                               "FSDP_USE_FULL_PREC_IN_EVAL=1 call train() or eval() ahead of the model's forward, and "
                               "make the outermost module a FullyShardedDataParallel")
        for unit in changed:
            unit._full, precision = not unit._full, unit.mixed_precision
            if unit.pieces:
                unit.group.set_dtypes(None if unit._full else precision.param_dtype,
                                      None if unit._full else precision.reduce_dtype,
                                      not unit._full and precision.keep_low_precision_grads)
            unit._arrange_casts()
        for state in self._state_ctx.all_states if changed else ():
            state._apply_prefetch()

    @property
    def gradient_dtype(self) -> torch.dtype:
        """That optimizers see."""
        precision, own = self.mixed_precision, self.line().dtype
        if self._full or not precision.keep_low_precision_grads:
            return own
        return precision.reduce_dtype or precision.param_dtype or own

    def _arrange_steps(self) -> None:
        for handle in self._steps:
            handle.remove()
        if self.flat_param is not None:
            refuse_in_backward(self.flat_param, self.group.name)
        else:
            self._steps = step_in_backward(self.params)

    @property
    def summoned(self) -> bool:
        """Whether the modules show whole parameters that are not the engine's."""
        return self.group.lent

    @property
    def shows_itself(self) -> bool:
        """Whether writes to summoned parameters stay without writeback, as with torch's: where there are no shards, it
        shows the copy that there is, unless that is offloaded."""
        offloads = self.modules[0].cpu_offload.offload_params
        return self.strategy is ShardingStrategy.NO_SHARD and not offloads

    @property
    def params(self) -> list[nn.Parameter]:
        """What users hold: one for each piece, or the flat one."""
        self._follow()
        return [self.flat_param] if self.flat_param is not None else [piece.param for piece in self.pieces]

    def _follow(self) -> None:
        """Looks which parameters users hold now: they may have put others in their places."""
        if self.summoned or self.group.busy:
            return
        if self.flat_param is not None:
            shown = self.holder._parameters.get(FLAT_PARAM)
            if shown is not None and shown is not self.flat_param:
                self._name_flat(shown)
            return
        for piece in self.pieces:
            for module, name in piece.modules():
                shown = module._parameters.get(name)
                if shown is not None and shown is not piece.param:
                    piece.param = shown
                    shown._libfsdp_slice = True
                    break

    def _name_flat(self, flat: nn.Parameter) -> None:
        # Read by torch.distributed.checkpoint under torch's names.
        flat._is_flat_param, flat._fqns = True, [piece.name for piece in self.pieces]
        self.flat_param = flat

    @property
    def holder(self) -> nn.Module:
        """The module that the flat parameter is registered in."""
        return self._holder()

    @property
    def outermost(self) -> bool:
        return self._ready and self._state_ctx.all_states[0] is self

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not self.summoned:
            if self._full_in_eval:
                self._follow_mode()
            return super().pre_forward(module, args, kwargs)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"libfsdp: a forward of '{self.group.name}' inside summon_full_params would train copies of its "
                "parameters: leave the context first, or run it under torch.no_grad()"
            )
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return output if self.summoned else super().post_forward(module, args, output)

    def assert_idle(self, what: str) -> None:
        if self.summoned or self.group.busy:
            state = "summon_full_params" if self.summoned else "forward or backward"
            raise ValueError(f"libfsdp: {what} of '{self.group.name}' inside {state}: expected to be in states "
                             f"[IDLE]")

    def adopt(self) -> None:
        """As of any state. RuntimeError for a parameter of another shape."""
        try:
            super().adopt()
        except ValueError as error:
            raise RuntimeError(f"Cannot writeback what a parameter was replaced by: {error}") from error
        self._follow()

    def shard_process_group(self) -> dist.ProcessGroup | None:
        return self.ranks.group

    # --- the line -----------------------------------------------------------------------------------------------------

    def line(self) -> torch.Tensor:
        """This rank's part of the parameters, 1-D; shares their memory."""
        first = self.group.shard(0)
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(
            first.untyped_storage(), 0, (len(self.part),))

    def stretches(self, lead: int, numel: int) -> list[range]:
        """Of ``numel`` elements of the line from ``lead`` on, those that each rank holds."""
        ends = [min(max(rank * self.chunk - lead, 0), numel) for rank in range(self.ranks.parts + 1)]
        return [range(begin, end) for begin, end in zip(ends, ends[1:])]

    def offset(self, piece: Piece) -> int:
        """Where the piece's elements begin in this rank's part of the line."""
        return piece.lead + piece.here.start - self.part.start if piece.here_numel else 0

    def whole_line(self, line: torch.Tensor) -> torch.Tensor:
        """Every rank's part of a line, one after another: a new tensor. Collective among the shard group."""
        group = self.ranks.shard_group
        if group is None:
            return line.clone()
        mine = line.new_zeros(self.chunk)
        mine[: line.numel()] = line
        out = line.new_empty(self.chunk * self.ranks.parts)
        if self.chunk > 0:
            # As bytes: not every backend knows every dtype.
            dist.all_gather_single(out.view(torch.uint8), mine.view(torch.uint8), group=group)
        return out[: self.total]

    def pieces_of(self, whole_line: torch.Tensor) -> list[torch.Tensor]:
        """Views of a whole line, one for each parameter, of its shape."""
        return [whole_line[piece.lead : piece.lead + piece.numel].view(piece.shape) for piece in self.pieces]

    def whole(self) -> list[torch.Tensor]:
        """The parameters, whole and in their own dtype: new tensors. Collective among the shard group."""
        return self.pieces_of(self.whole_line(self.line())) if self.pieces else []

    def whole_gradients(self) -> list[torch.Tensor | None]:
        """Of the parameters of their own, as :meth:`whole`; None where no rank has one. Collective among the shard
        group."""
        if not self.pieces:
            return []
        there = torch.tensor([float(piece.param.grad is not None) for piece in self.pieces])
        if self.ranks.shard_group is not None:
            dist.all_reduce(there, dist.ReduceOp.MAX, self.ranks.shard_group)
        line = torch.zeros_like(self.line(), dtype=self.gradient_dtype)
        for piece in self.pieces:
            if piece.param.grad is not None:
                self.stretch(line, piece).copy_(piece.param.grad)
        wholes = self.pieces_of(self.whole_line(line))
        return [whole if flag else None for whole, flag in zip(wholes, there.tolist())]

    def stretch(self, line: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The piece's elements in this rank's part of a line."""
        return line.narrow(0, self.offset(piece), piece.here_numel)


def units_in(module: nn.Module) -> list[Unit]:
    """Of all wrappers at and below ``module``, in module order."""
    states = (state_of(each) for each in module.modules())
    return [state for state in states if isinstance(state, Unit)]
