#!/usr/bin/env bash
# Creates .venv with the pinned packages of requirements-dev.txt, where `import libmuon` sees the build in build/dev.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

stop() {
  echo "setup: $*" >&2
  exit 1
}

if [ ! -x .venv/bin/pip ]; then
  command -v "$python" >/dev/null || stop "'$python' was not found; install Python 3.11 or newer, or type: make PYTHON=python3.12 setup"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || stop "needs Python 3.11 or newer, got $("$python" -V 2>&1); type: make PYTHON=python3.12 setup"
  "$python" -c 'import ensurepip, venv' 2>/dev/null \
    || stop "$("$python" -V) has no venv module; on Debian type: apt-get install python3-venv"
  "$python" -m venv .venv
fi

.venv/bin/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-parity.txt
site_packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/build/dev/python" >"$site_packages/libmuon_development.pth"
