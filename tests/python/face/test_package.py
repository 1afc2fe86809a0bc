"""The package itself: where names are put, what it says when it cannot work, its stubs."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.pipelining.stage
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import libfsdp
from libfsdp import _version_check

SOURCE = Path(__file__).parents[3] / "python" / "libfsdp"


def test_install_and_uninstall():
    library = types.ModuleType("library_that_imported_it")
    exec("from torch.distributed.fsdp import FSDPModule as Mixin, fully_shard", library.__dict__)
    sys.modules[library.__name__] = library
    try:
        libfsdp.install()
        libfsdp.install()
        from torch.distributed.fsdp import fully_shard

        assert fully_shard is libfsdp.fully_shard is composable.fully_shard is library.fully_shard
        assert library.Mixin is libfsdp.FSDPModule is torch_fsdp.FSDPModule
        assert torch.distributed.pipelining.stage.fully_shard is libfsdp.fully_shard
        assert torch_fsdp.sharded_grad_scaler.ShardedGradScaler is libfsdp.ShardedGradScaler
        import torch.distributed.fsdp._fully_shard as package

        assert package.fully_shard is libfsdp.fully_shard
    finally:
        libfsdp.uninstall()
        del sys.modules[library.__name__]
    assert torch_fsdp.fully_shard is torch_fully_shard is library.fully_shard is composable.fully_shard
    assert library.Mixin is torch_fsdp.FSDPModule is not libfsdp.FSDPModule


def test_names_of_torch_are_there():
    for name in ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"):
        assert getattr(libfsdp, name) is getattr(torch_fsdp, name)
    for name in ("FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        assert name in libfsdp.__all__ and name in torch_fsdp.__all__
    assert issubclass(libfsdp.FSDPModule, torch_fsdp.FSDPModule)
    assert issubclass(libfsdp.UnshardHandle, torch_fsdp.UnshardHandle)


def test_another_torch_is_refused_with_what_to_do():
    _version_check.check("2.13.0", "2.13.1+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.13\.0, and torch 2\.14\.1 is installed.*pip install"):
        _version_check.check("2.13.0", "2.14.1")


def test_the_source_folder_says_what_it_is(tmp_path):
    (tmp_path / "libfsdp").mkdir()
    for file in SOURCE.glob("*.py"):
        (tmp_path / "libfsdp" / file.name).write_text(file.read_text())
    (tmp_path / "libfsdp" / "torch_version.txt").write_text(torch.__version__)
    ran = subprocess.run([sys.executable, "-c", "import libfsdp"], cwd=tmp_path, env={"PYTHONPATH": ""}, text=True,
                         stderr=subprocess.PIPE)
    assert ran.returncode != 0 and "extension module is missing" in ran.stderr


def test_version_is_the_projects():
    cmake = (SOURCE.parents[1] / "CMakeLists.txt").read_text()
    assert f"project(fsdp VERSION {libfsdp.__version__} " in cmake


def test_stubs_are_those_of_the_extension(tmp_path):
    """To make them again: PYTHONPATH=build/release/python python -m pybind11_stubgen libfsdp._C -o python"""
    subprocess.run([sys.executable, "-m", "pybind11_stubgen", "libfsdp._C", "-o", str(tmp_path)], check=True)
    assert (tmp_path / "libfsdp" / "_C.pyi").read_text() == (SOURCE / "_C.pyi").read_text(), (
        test_stubs_are_those_of_the_extension.__doc__)
