"""Parameters whose local tensors say what is gathered of them and what becomes of it: ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, the protocol by which quantized tensors are gathered in their own form."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._whole_dtensor import WholeDTensor


def is_extended(name: str, local: torch.Tensor) -> bool:
    """Whether the local tensor of parameter ``name``, or its class, has the protocol's hooks. AttributeError if it has
    one of the two."""
    has = {hook: hasattr(local, hook) for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather")}
    if len(set(has.values())) > 1:
        there, missing = sorted(has, key=has.get, reverse=True)
        raise AttributeError(
            f"the local tensor of parameter '{name}' has {there} and no {missing}: what is gathered and what is made "
            "of it belong together"
        )
    return has["fsdp_pre_all_gather"]


def runs_operators(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class runs operators itself."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


class Extension:
    """Of one parameter: calls its local tensor's hooks, and keeps what they made while it is whole.

    The hooks run without gradients. Both are called for each gather, the first one at the first use once more, by which
    ranks agree on sizes: ``fsdp_pre_all_gather`` must give tensors of the same sizes and dtypes each time and on every
    rank (where rows are cut unevenly: padded).
    """

    def __init__(self, name: str, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh,
                 module: nn.Module, policy: MixedPrecisionPolicy, whole: WholeDTensor | None):
        self._name = name
        self._size, self._stride, self._dtype = size, stride, dtype
        self._mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # the shard axis
        self._module = weakref.ref(module)
        self._policy = policy
        self._whole_dtensor = whole
        self._metadata: Any = None
        self._made: torch.Tensor | None = None  # of the first gather; later ones refill it
        self._whole: torch.Tensor | None = None  # what of it is the parameter
        self._inner: list[tuple[torch.UntypedStorage, int]] = []  # what it takes besides what was received, and its size

    # --- around a gather, from the engine -----------------------------------------------------------------------------

    def send(self, local: torch.Tensor) -> list[torch.Tensor]:
        hook = local.fsdp_pre_all_gather
        parameters = list(inspect.signature(hook).parameters.values())
        mesh_alone = len(parameters) == 1 and parameters[0].kind != inspect.Parameter.VAR_POSITIONAL
        more = () if mesh_alone else (self._size, self._stride, self._module(), self._policy)
        sent, self._metadata = hook(self._mesh, *more)
        return [sent] if isinstance(sent, torch.Tensor) else list(sent)

    def receive(self, local: torch.Tensor, received: list[torch.Tensor]) -> None:
        if self._made is not None:
            for storage, size in self._inner:
                storage.resize_(size)
            local.fsdp_post_all_gather(tuple(received), self._metadata, self._dtype, out=self._made)
            return
        result = local.fsdp_post_all_gather(tuple(received), self._metadata, self._dtype)
        if result is None:
            raise ValueError(
                f"fsdp_post_all_gather of parameter '{self._name}' returned None when it was called without out; "
                "expected the whole tensor and a tuple of the tensors whose memory it takes"
            )
        self._made, inner = result
        # Padded where rows are cut unevenly.
        fits = self._made.shape == self._size
        self._whole = self._made if fits else self._made.as_strided(self._size, self._stride, 0)
        seen = {tensor.untyped_storage()._cdata for tensor in received}
        for tensor in inner:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                self._inner.append((storage, storage.nbytes()))

    def release(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)

    # --- what the module shows, see ShownParam ------------------------------------------------------------------------

    def show(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """What the last gather made, whose gradient arrives at the leaf. None before the first one."""
        if self._whole is None:
            return None
        shown = _Show.apply(leaf, self._whole)
        if self._whole_dtensor is not None:
            return self._whole_dtensor.show(shown)
        shown._is_param = True
        return shown

    def gradient(self, local: torch.Tensor) -> torch.Tensor:
        return local if self._whole_dtensor is None else self._whole_dtensor.gradient(local)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self._whole_dtensor is None else self._whole_dtensor.local_gradient(gradient)


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, whole: torch.Tensor):
        ctx.set_materialize_grads(False)
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None):
        if gradient is not None and runs_operators(gradient):
            gradient = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        return gradient, None
