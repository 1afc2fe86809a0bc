"""The class that a sharded module becomes, and what users call on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_face

from ._state import FSDPState, state_of


def _missing(what: str, instead: str = "") -> NotImplementedError:
    return NotImplementedError(f"libfsdp does not have {what} yet{instead}")


class UnshardHandle(TorchUnshardHandle):
    """Returned by ``unshard(async_op=True)``."""

    def __init__(self, state: FSDPState):
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Blocks until the module shows its whole parameters. A second call does nothing."""
        if self._state is not None:
            for group in self._state.ready():
                group.unshard(wait=True)
            self._state = None


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of a module that :func:`fully_shard` was applied to: ``Linear`` becomes ``FSDPLinear``.

    A subclass of torch's, of which it overrides every method. Those that change settings take effect at once and must
    be called alike on every rank; with ``recurse`` they apply to all sharded modules below as well.
    """

    _orig_cls_mro_index = 3  # of FSDP<Name>: itself, this class, torch's, then the original

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new object of the original class, not sharded: what slicing a container asks for."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        if torch_face._enable_fsdp_module_new_init:
            made.__init__(*args, **kwargs)
        return made

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(self)
        if state is None:
            raise AssertionError(f"libfsdp: this module has no sharding state: {self}")
        return state

    # --- parameters -------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's group, not its children's, and shows its parameters whole, in ``param_dtype`` of the
        policy. Collective. With ``async_op`` returns while the gather is under way; the module's next forward waits for
        it, or :meth:`UnshardHandle.wait`."""
        state = self._get_fsdp_state()
        for group in state.ready():
            group.unshard(wait=not async_op)
        return UnshardHandle(state) if async_op else None

    def reshard(self) -> None:
        """Frees the whole parameters of this module's group, not of its children's, and shows DTensors again."""
        for group in reversed(self._get_fsdp_state().ready()):
            group.reshard()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        state = self._get_fsdp_state()
        if state._ready:
            self.reshard()
        # Past torch's class: it would ask its own state.
        with state.emptied.watch(self):  # this may be of to_empty()
            result = super(TorchFSDPModule, self)._apply(fn, recurse)
        state.adopt()
        return result

    # --- an iteration -----------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: ends what is in flight and forgets the iteration, accumulated
        gradients included, so that the next step can begin. Collective; called on the outermost sharded module, else
        RuntimeError."""
        state = self._get_fsdp_state()
        states = state._state_ctx.all_states
        if states and states[0] is not state:
            raise RuntimeError(
                f"libfsdp: reset_iter_state() must be called on the outermost sharded module; '{state.group.name}' is "
                "inside another one"
            )
        state.ready()[0].reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, and changes nothing: gradients are handed out when each backward ends, so nothing is left in flight
        between two of them."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients stay unsharded and unreduced on this rank and accumulate, until a backward with True."""
        for state in self._states(recurse):
            state.group.sync_gradients = requires_gradient_sync
            state.group.all_reduce_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: on a mesh (replicate, shard), gradients are reduced over the shard axis only, and accumulate, until a
        backward with True."""
        for state in self._states(recurse):
            state.group.all_reduce_gradients = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether a group is freed when its module's forward ends. ValueError if not a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in self._states(recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether a group is freed when its gradients are complete."""
        for state in self._states(recurse):
            state.group.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this module's group when it comes to the module, only when an operator reads
        one of its parameters. For modules whose backward needs none of them (an embedding)."""
        for state in self._states(recurse=False):
            state.group.set_gathers_in_backward(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Groups to gather right after this one in forward, in this order. ValueError for other modules."""
        self._get_fsdp_state().set_prefetch(_states_of(modules), backward=False)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Groups to gather right after this one in backward, in this order. ValueError for other modules."""
        self._get_fsdp_state().set_prefetch(_states_of(modules), backward=True)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next forward waits for ``event``, once, before it gathers."""
        self._get_fsdp_state()._post_optim_event = event

    # --- reductions -------------------------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this group's gradients by ``factor`` instead of the number of ranks. ValueError unless positive."""
        if not factor > 0:
            raise ValueError(f"libfsdp: the gradient divide factor must be positive, got {factor}")
        for state in self._states(recurse=False):
            state.group.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`; warns."""
        warnings.warn("set_reduce_scatter_divide_factor is deprecated: call set_gradient_divide_factor", FutureWarning,
                      stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted, and changes nothing: gradients are always summed on the wire and divided afterwards."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted, and changes nothing: a parameter that only other ranks used always gets its gradient."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight, each of which holds a group's unsharded gradients until it is done,
        when the next one is issued. 1 unless set; more let a slow wire lag behind at the cost of that memory."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for state in self._states(recurse):
            state.group.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted, and changes nothing: reductions always have channels of their own."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """This module's group gathers by ``comm``: ``comm(output_tensor, input_tensor, group, async_op)``, of which
        ``output_tensor`` comes from ``comm.allocate(size, *, dtype, device)`` and gets every rank's input in the order
        of ranks. 1-D, as long for each rank as for the one that holds most, in the dtype that parameters are gathered
        in, or in bytes where there are several. ``group`` is the shard axis's. None: libfsdp's own again.

        Between steps, on every rank. NotImplementedError beside ``reshard_after_forward`` as a number."""
        for state in self._states(recurse=False):
            state.group.set_custom_all_gather(comm, state.shard_process_group())

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """This module's group reduces by ``comm``: ``comm(output_tensor, input_tensor, group, op, async_op)``, whose
        buffers come from ``comm.allocate``. 1-D, as long for each rank as for the one that holds most, in the dtype
        that gradients are reduced in, once for each where there are several. ``op`` is always a sum: libfsdp divides.
        None: libfsdp's own again. Between steps, on every rank."""
        for state in self._states(recurse=False):
            state.group.set_custom_reduce_scatter(comm, state.shard_process_group())

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """``hook`` gets the averaged gradients of this module's group that this rank holds, one flat tensor a dtype,
        when a reduction is done, the replicas' too, and before parameters get them. It may write to it, or reduce it
        over further ranks. None: no hook. On a device with streams it runs on ``stream``, ordered after the reduction
        and before the parameters get it, or on the stream of reductions; on a CPU a stream means nothing. ValueError
        for a stream on a mesh of two axes."""
        state = self._get_fsdp_state()
        if stream is not None:
            if state.mesh.ndim > 1:
                raise ValueError("libfsdp: a stream cannot be set on a mesh of two axes: the hook runs after its own")
            if state.mesh.device_type == "cpu":
                stream = None
        for each in state.together:
            each.group.set_all_reduce_hook(hook, stream)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted, and changes nothing: buffers of collectives come from the engine wherever it has memory of its own,
        as the one for ranks of a host has. AssertionError beside custom collectives."""
        self._without_custom_collectives("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """One host, one copy: the parameters of this module's group lie whole in memory that all ranks of the shard
        axis map, and each rank's shard is its slice of it. Nothing is gathered any more: forward and backward read in
        place, and the ranks together hold the parameters once, plus once more in ``param_dtype`` where that differs. A
        rank may write its shards between steps only, as optimizers and checkpoints do; a write to a whole parameter
        inside forward is refused. ``unshard()`` between steps makes a copy. ``backend`` means nothing on a CPU.

        Between steps, on every rank; for good. AssertionError beside custom collectives; NotImplementedError on every
        rank if the ranks do not share a host (``libfsdp`` then uses Gloo)."""
        states = self._without_custom_collectives("set_symm_mem_for_comm")
        for state in states:
            state.group.share_memory()

    def _without_custom_collectives(self, what: str) -> list[FSDPState]:
        states = list(self._states(recurse=False))
        for state in states:
            if state.group.has_custom_collective:
                raise AssertionError(
                    f"libfsdp: group '{state.group.name}' has a custom collective, beside which {what} has no meaning"
                )
        return states

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted, and changes nothing: gathers never share a stream with compute."""

    def _states(self, recurse: bool) -> Iterator[FSDPState]:
        for module in self.modules() if recurse else (self,):
            state = state_of(module)
            if state is not None:
                yield from state.together


def _states_of(modules: Iterable[Any]) -> list[FSDPState]:
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"libfsdp: expected modules that fully_shard was applied to, got {type(module)}: {module}")
        states.append(module._get_fsdp_state())
    return states


def _refuse_deepcopy(module: nn.Module, _memo: Any = None) -> NoReturn:
    raise AssertionError(
        f"FSDP does not support deepcopy, here of {type(module).__name__}: copy it before fully_shard, or save and "
        "load its state dict"
    )


@functools.cache
def sharded_class(original: type) -> type:
    """``FSDP<Name>``. One for each class, so that types compare equal."""
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {"__deepcopy__": _refuse_deepcopy})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes calls of ``module.<method_name>`` count as forwards: parameters are whole in it, inputs and outputs are
    cast as the policy says. Does nothing for a module that is not sharded; ValueError if it has no such method."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        args, kwargs = state.pre_forward(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            state.post_forward(self, args, None)  # sees the exception
            raise
        return state.post_forward(self, args, output)

    setattr(module, method_name, wrapped.__get__(module, type(module)))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Nothing is left to do: all models on one mesh share its channels. ValueError for modules that are not sharded."""
    _states_of(modules)
