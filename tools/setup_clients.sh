#!/usr/bin/env bash
# Creates .venv-clients with the pinned packages of requirements-clients.txt, on top of .venv: one torch serves both.
set -euo pipefail
cd "$(dirname "$0")/.."
clients=.venv-clients/bin/python

if [ ! -x "$clients" ]; then
  .venv/bin/python -m venv --without-pip .venv-clients # .venv's pip installs
fi
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
{
  .venv/bin/python -c "$purelib"
  echo "$PWD/build/dev/python"
} >"$("$clients" -c "$purelib")/libmuon_clients.pth"

install() {
  .venv/bin/pip --python "$clients" install --quiet --disable-pip-version-check -c requirements-dev.txt "$@"
}
# qkan is built from source with .venv's torch: a build environment of its own would download another one.
install -c requirements-clients.txt setuptools
QKAN_SKIP_CUDA_BUILD=TRUE install --no-build-isolation -r requirements-clients.txt
