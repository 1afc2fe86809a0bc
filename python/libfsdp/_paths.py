"""Where C++ projects find libfsdp."""

from pathlib import Path

#: For ``cmake -DCMAKE_PREFIX_PATH=...`` of a C++ project that calls ``find_package(fsdp)``. Holds the C++ library where
#: libfsdp was installed by pip; in a build folder, the library must be installed first (``make install``).
cmake_prefix_path: str = str(Path(__file__).parent / "cpp")
