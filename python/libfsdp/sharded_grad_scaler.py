"""ShardedGradScaler: loss scaling, in which ranks do alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor


class ShardedGradScaler(TorchShardedGradScaler):
    """Scales losses for parameters that :func:`fully_shard` or ``FullyShardedDataParallel`` sharded, or none did, on any
    device. What torch's does, as a subclass of it: an overflow in one rank's shard makes all ranks of ``process_group``
    skip the step, and back off. Gradients may be of float16.

    Args:
        device: of the parameters. Default: the accelerator if there is one, else ``"cpu"``.
        process_group: the ranks that must agree. Default: all; this rank alone, if torch.distributed was not started.
    """

    def __init__(self, device: str | None = None, init_scale: float = 2.0**16, backoff_factor: float = 0.5,
                 growth_factor: float = 2.0, growth_interval: int = 2000, enabled: bool = True,
                 process_group: dist.ProcessGroup | None = None) -> None:
        if device is None:
            device = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
        super().__init__(device, init_scale, backoff_factor, growth_factor, growth_interval, enabled, process_group)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in place. Collective. RuntimeError if called twice before
        :meth:`update`."""
        if dist.is_initialized():
            super().unscale_(optimizer)
        else:
            GradScaler.unscale_(self, optimizer)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor,
                        allow_fp16: bool = True) -> dict[torch.device, torch.Tensor]:
        # On what this rank holds: over DTensors, the operator would reduce for each list of them.
        found: dict[torch.device, torch.Tensor] = {found_inf.device: found_inf}
        for (device, _), gradients in _held(optimizer).items():
            flag = found.setdefault(device, torch.zeros(1, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
        return found


def _held(optimizer: torch.optim.Optimizer) -> dict[Any, list[torch.Tensor]]:
    """The gradients of the optimizer's parameters, this rank's part of them, by device and dtype."""
    held: dict[Any, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()  # rows that occur twice may overflow together
                local = param.grad._values()
            else:
                local = param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad
            held.setdefault((local.device, local.dtype), []).append(local)
    return held
