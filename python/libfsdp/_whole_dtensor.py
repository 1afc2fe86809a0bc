"""What a parameter of another parallelism is while its group is unsharded: a DTensor over the engine's leaf."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement


class WholeDTensor:
    """The DTensor that stands in the module for an unsharded leaf, this rank's part of a parameter."""

    def __init__(self, spec: DTensorSpec, data_axes: frozenset[int] = frozenset()):
        self._spec = spec
        self._data_axes = data_axes  # of the mesh: over which the engine reduces

    def show(self, leaf: torch.Tensor) -> DTensor:
        """A DTensor over the leaf's bytes, there or not. Its gradient arrives at the leaf."""
        shown = _Show.apply(leaf, self._of(leaf), self._data_axes)
        shown._is_param = True
        return shown

    def gradient(self, local: torch.Tensor) -> DTensor:
        """What arrived at the leaf, for hooks of the parameter."""
        spec = self._of(local)
        placements = tuple(Partial() if i in self._data_axes else each for i, each in enumerate(spec.placements))
        return DTensor(local, DTensorSpec(spec.mesh, placements, spec.tensor_meta), requires_grad=False)

    def local_gradient(self, gradient: DTensor) -> torch.Tensor:
        """:meth:`gradient`'s inverse, for what a hook returned."""
        return _local_gradient(gradient, self._spec.placements, self._data_axes)

    def _of(self, local: torch.Tensor) -> DTensorSpec:
        return replace(self._spec, tensor_meta=self._spec.tensor_meta._replace(dtype=local.dtype))


class _Show(torch.autograd.Function):
    # Not DTensor.from_local: a view would read the leaf, and on data-parallel axes gradients would be reduced.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, spec: DTensorSpec, data_axes: frozenset[int]) -> DTensor:
        ctx.placements, ctx.data_axes = spec.placements, data_axes
        ctx.set_materialize_grads(False)
        return DTensor(leaf.data, spec, requires_grad=leaf.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        return _local_gradient(gradient, ctx.placements, ctx.data_axes), None, None


def _local_gradient(gradient: DTensor, placements: tuple[Placement, ...], data_axes: frozenset[int]) -> torch.Tensor:
    """This rank's part of a gradient that lies as its parameter, but on data-parallel axes as one of the terms that the
    engine sums up."""
    wanted = tuple(
        came if i in data_axes and came.is_partial("sum") else each
        for i, (came, each) in enumerate(zip(gradient.placements, placements))
    )
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    # DTensor operators may have summed up over a data-parallel axis already. Counted on every rank, such a gradient
    # would weigh more than those of other parameters.
    terms = math.prod(gradient.device_mesh.size(i) for i in data_axes if wanted[i].is_replicate())
    return local if terms == 1 else local / terms
