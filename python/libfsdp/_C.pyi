"""
The engine of libfsdp. Private to the package.
"""
from __future__ import annotations
import collections.abc
import torch
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['Group', 'LEFT_ENDED', 'LEFT_FAILED', 'LEFT_NESTED', 'Mesh', 'World', 'arrange', 'engines', 'torch_version', 'version']
class Mesh:
    """
    Ranks arranged in axes, and the channels among them.
    """
    def require_same(self, subject: str, lines: collections.abc.Sequence[str]) -> None:
        """
        Compares `lines` over the ranks of the mesh; ValueError on all of them where two differ. Collective.
        """
    @property
    def size(self) -> int:
        ...
class World:
    """
    The ranks of a process group.
    """
    def __init__(self, engine: str, store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt | typing.SupportsIndex, size: typing.SupportsInt | typing.SupportsIndex, timeout_seconds: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    def mesh(self, device: torch.device, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], names: collections.abc.Sequence[str], ranks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> Mesh:
        """
        A mesh over `ranks` (row-major), this one included. Channels are opened on first use and shared by what is sharded on the mesh.
        """
class Group:
    """
    What one call of fully_shard made.
    """
    all_reduce_gradients: bool
    reshard_after_backward: bool
    reshard_after_forward: bool
    sync_gradients: bool
    def __init__(self, names: collections.abc.Sequence[str], params: collections.abc.Sequence[torch.Tensor], dims: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], mesh: Mesh, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, flat: bool = False, keep_reduced: bool = False, offload: tuple[torch.device, bool] | None = None) -> None:
        """
        Copies this rank's rows, along `dims`, of `params`; `flat`: its elements of all, one after another; `keep_reduced`: gradients stay in the dtype that they were reduced in; `offload`: to host memory, page-locked or not, and whole parameters are on that device. Collective.
        """
    def __len__(self) -> int:
        ...
    def adopt(self) -> bool:
        """
        Takes over replaced parameters; False if they have another dtype or device: see rebuild().
        """
    def enter(self) -> None:
        """
        A forward begins: gathers, and shows the parameters whole. Nests.
        """
    def extend(self, i: typing.SupportsInt | typing.SupportsIndex, impl: typing.Any, like: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        Gathers of the i-th parameter move what `impl` sends, tensors like `like`, and `impl` shows it whole.
        """
    def extended(self, i: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether the i-th parameter has an extension.
        """
    def hide(self, i: typing.SupportsInt | typing.SupportsIndex, flat: typing.Any, offset: typing.SupportsInt | typing.SupportsIndex, holder: tuple[dict, str, typing.Any], places: collections.abc.Sequence[tuple[dict, str, typing.Any]]) -> None:
        """
        Shows the i-th parameter as the whole alone; users hold `flat`, at `holder`, whose elements from `offset` on it is.
        """
    def keep_over(self, ranks: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Between forward and backward, keep the parameters over this many ranks; 0: do not. Collective.
        """
    def leave(self) -> int:
        """
        One of the LEFT_ numbers.
        """
    def place(self, i: typing.SupportsInt | typing.SupportsIndex, user: typing.Any, places: collections.abc.Sequence[tuple[dict, str, typing.Any]], wrapper: typing.Any) -> None:
        """
        Shows the i-th parameter as `user`, a parameter that is a DTensor or becomes an ordinary tensor over shard(i), at each (table, name, weak reference or None); whole as what `wrapper` makes of it, if that is not None.
        """
    def rebuild(self) -> None:
        """
        As adopt(), for any dtype and device. Collective.
        """
    def reduce_held(self) -> None:
        """
        Reduces the gradients that backwards without synchronisation left. Collective.
        """
    def reset(self) -> None:
        """
        Ends the iteration of the model after an error. Collective.
        """
    def reshard(self) -> None:
        """
        Frees the whole parameters and shows DTensors.
        """
    def set_all_reduce_hook(self, hook: typing.Any, stream: torch.Stream | None) -> None:
        """
        Called with this rank's averaged gradients, flat, on `stream` of a device that has them; None: not.
        """
    def set_custom_all_gather(self, comm: typing.Any, process_group: typing.Any) -> None:
        """
        Gathers by `comm`, of torch's interface; None: by the engine.
        """
    def set_custom_all_reduce(self, reduce: typing.Any) -> None:
        """
        Averages this rank's gradients, flat and in place, where parameters are not cut.
        """
    def set_custom_reduce_scatter(self, comm: typing.Any, process_group: typing.Any) -> None:
        """
        Reduces by `comm`, of torch's interface; None: by the engine.
        """
    def set_dtypes(self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, keep_reduced: bool) -> None:
        """
        Other dtypes from now on, between steps. Collective.
        """
    def set_gathers_in_backward(self, gathers: bool) -> None:
        """
        Whether watched outputs do. If not, the first operator that reads a parameter does.
        """
    def set_name(self, name: str, params: collections.abc.Sequence[str]) -> None:
        """
        Names of the group and its parameters.
        """
    def set_prefetch(self, groups: collections.abc.Sequence[Group], backward: bool) -> None:
        ...
    def set_shared(self, several: bool) -> None:
        """
        Whether it stands for several modules.
        """
    def shard(self, i: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        This rank's rows of the i-th parameter; all share one buffer.
        """
    def share_memory(self) -> None:
        """
        The whole parameters lie in memory that the ranks of a host have in common. Collective.
        """
    def show_sharded(self) -> None:
        """
        Shows DTensors, unless a forward or a backward needs the whole.
        """
    def unshard(self, wait: bool) -> None:
        """
        Gathers by hand. Collective.
        """
    def watch(self, outputs: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        A backward from these gathers the group.
        """
    @property
    def busy(self) -> bool:
        """
        Whether a forward or a backward needs the whole parameters now.
        """
    @property
    def divide_factor(self) -> float:
        ...
    @divide_factor.setter
    def divide_factor(self, arg1: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def has_custom_collective(self) -> bool:
        ...
    @property
    def lent(self) -> bool:
        """
        While set, modules show something else than the parameters, and adopt() looks away.
        """
    @lent.setter
    def lent(self, arg0: bool) -> None:
        ...
    @property
    def max_reductions(self) -> int:
        ...
    @max_reductions.setter
    def max_reductions(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def parameter_names(self) -> list[str]:
        ...
    @property
    def schedule(self) -> list[tuple[str, str, str]]:
        """
        (phase, act, group) of the last iteration, in order of issue.
        """
    @property
    def state(self) -> str:
        """
        'sharded', 'gathering' or 'unsharded'.
        """
    @property
    def stats(self) -> dict:
        """
        Bytes alive and collectives issued by the model of this group.
        """
def arrange(groups: collections.abc.Sequence[Group], parents: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], leaders: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], mesh: Mesh) -> None:
    """
    Makes `groups` one model, in module order; the i-th is inside groups[parents[i]], -1 for none, and of the same modules as groups[leaders[i]], -1 for none. Collective.
    """
def engines() -> list[str]:
    """
    Names of the engines that this build knows.
    """
def torch_version() -> str:
    """
    Of the torch that this was built for.
    """
def version() -> str:
    ...
LEFT_ENDED: int = 1
LEFT_FAILED: int = 2
LEFT_NESTED: int = 0
