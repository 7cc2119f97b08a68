#!/usr/bin/env bash
# Installs the build of build/dev and uses it from a project outside this tree, as a user would: with find_package(Muon)
# alone, and beside find_package(Torch) where torch's own package works.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$PWD/build/consumer/prefix
torch=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").submodule_search_locations[0])')
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT

cmake --install build/dev --prefix "$prefix" >/dev/null
cp tests/consumer/CMakeLists.txt tests/consumer/main.cpp "$project"

run() { # name, cmake arguments
  local name=$1
  shift
  cmake -S "$project" -B "$project/$name" -G Ninja -DCMAKE_PREFIX_PATH="$prefix;$torch" "$@" >"$project/$name.log" 2>&1 \
    && cmake --build "$project/$name" >>"$project/$name.log" 2>&1 || {
    tail -n 60 "$project/$name.log" >&2
    echo "consumer ($name): does not build" >&2
    return 1
  }
  (cd "$project/$name" && ./xor | sed "s/^/consumer ($name): /")
}

run muon
if [ -e "$torch/lib/libtorch_cuda.so" ] && ! command -v nvcc >/dev/null; then
  echo "consumer (muon+torch): skipped, find_package(Torch) of a CUDA build of torch needs a CUDA toolkit (nvcc)"
else
  run muon+torch -DWITH_TORCH_PACKAGE=ON
fi
