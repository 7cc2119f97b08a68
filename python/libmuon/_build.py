"""Where this build of libmuon keeps its C++ side."""

from pathlib import Path

from libmuon import _C

#: For CMake's ``CMAKE_PREFIX_PATH``: ``find_package(Muon)`` then finds this build.
#: It lies beside the extension module, which in an editable install is not where the sources are.
cmake_prefix_path: str = str(Path(_C.__file__).parent / "share" / "cmake")
