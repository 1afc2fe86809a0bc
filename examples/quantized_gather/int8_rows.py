"""A weight that travels in 8 bits: shards, gradients and optimizer states are float32, gathers move a quarter of the
bytes.

    torchrun --nproc-per-node 2 examples/quantized_gather/int8_rows.py

An ``Int8Rows`` is an ordinary tensor to everybody but the gathers, which call its two hooks: ``fsdp_pre_all_gather``
gives what this rank sends, 8-bit rows and a scale for each, and ``fsdp_post_all_gather`` makes the whole weight of what
came from all ranks. The hooks are those of PyTorch's FSDP2, so that classes written for it work as they are.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from libfsdp import fully_shard


class Int8Rows(torch.Tensor):
    """A matrix in float32 whose gathers are in 8 bits."""

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype,
                                                   device=data.device, requires_grad=data.requires_grad)

    def __init__(self, data: torch.Tensor):
        self._data = data.detach()

    def __repr__(self):
        return f"Int8Rows({self._data})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(x):
            return x._data if isinstance(x, Int8Rows) else x

        result = func(*pytree.tree_map(unwrapped, args), **pytree.tree_map(unwrapped, kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], Int8Rows):
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        # Every rank sends equally many rows.
        rows = self._data.new_zeros(math.ceil(outer_size[0] / mesh.size()), *outer_size[1:])
        rows[: len(self._data)] = self._data
        return quantized(rows), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        numbers, scales = all_gather_outputs
        if out is None:
            whole = dequantized(numbers, scales).to(param_dtype)
            return whole, (numbers, scales, whole)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(dequantized(numbers, scales))


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers and a float32 scale for each row."""
    scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (rows / scales).round().to(torch.int8), scales


def dequantized(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers * scales


def int8_linears(model: nn.Module) -> nn.Module:
    """Makes the weights of all linear layers Int8Rows, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Rows(module.weight))
    return model


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = int8_linears(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank() + 1)
    x = torch.randn(256, 64)
    for step in range(20):
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
