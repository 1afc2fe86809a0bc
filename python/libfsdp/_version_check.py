"""Importing this module fails, with what to do, where the extension cannot work with the torch that is there."""

import importlib.machinery
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("libfsdp needs torch, which is not installed for this Python: pip install torch") from error


def _release(version: str) -> str:
    """``2.13.0+cpu`` is the release ``2.13``: within one, torch's C++ interface stays as it is."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check(built_for: str, found: str) -> None:
    """ImportError unless both versions are of one torch release."""
    if _release(built_for) != _release(found):
        raise ImportError(
            f"this libfsdp was built for torch {built_for}, and torch {found} is installed: C++ interfaces differ "
            f"between torch releases. Install libfsdp again, so that it is built for the torch that is there (pip "
            f"install --no-build-isolation --force-reinstall --no-deps <libfsdp>), or install torch {built_for}"
        )


def _built_for() -> str:
    # Read from a file and not from the extension: that may not even load beside another torch.
    return (Path(__file__).parent / "torch_version.txt").read_text().strip()


check(_built_for(), torch.__version__)

if not any((Path(__file__).parent / f"_C{end}").exists() for end in importlib.machinery.EXTENSION_SUFFIXES):
    raise ImportError(
        "libfsdp's extension module is missing for this Python: it was built for another Python version, or this is "
        "its source folder. Install it with pip, or use the folder `python` of a build"
    )
