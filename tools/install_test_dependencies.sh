#!/usr/bin/env bash
# GoogleTest and Google Benchmark come from the system: installs Debian's packages where that is allowed, and ccache with
# them, which saves the wheel's test a second compilation.
set -euo pipefail

has() {
  echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1
}

missing=()
has gtest/gtest.h || missing+=(libgtest-dev)
has benchmark/benchmark.h || missing+=(libbenchmark-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "test: install GoogleTest and Google Benchmark (Debian: ${missing[*]}), then type: make test" >&2
  exit 1
elif [ "$(id -u)" = 0 ]; then
  as_root=()
elif sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  echo "test: ${missing[*]} missing; type: sudo apt-get install -y ${missing[*]}" >&2
  exit 1
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq "${missing[@]}" ccache >/dev/null
