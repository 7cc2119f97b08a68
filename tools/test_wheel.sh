#!/usr/bin/env bash
# Builds a wheel, installs it into a clean virtual environment and runs the Python tests there, from another folder.
# The environment gets torch and the test packages from .venv by a .pth file instead of downloading them again.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# With the compiler and the warning flags of the development build, so that ccache, where installed, compiles nothing twice.
CXX=${CXX:-$(command -v c++)} pip wheel . --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$work/dist" \
  -C cmake.define.MUON_WERROR=ON
python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/dist/libmuon-*.whl

site_packages() {
  "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}
# Python does not follow .pth files in a folder that a .pth file adds, so that the development build stays out.
site_packages python >"$(site_packages "$work/venv/bin/python")/torch_of_development.pth"

cp -r tests/python "$work/tests"
cp pyproject.toml "$work"
ln -s "$root/tests/golden" "$work/golden"
ln -s "$root/tests/fixtures" "$work/fixtures"
cd "$work"
where=$(venv/bin/python -c 'import libmuon; print(libmuon.__file__)')
case $where in
"$work"/venv/*) ;;
*) echo "wheel: libmuon was imported from $where, not from the wheel" >&2 && exit 1 ;;
esac
venv/bin/python -m pytest -q --rootdir "$work" -p no:cacheprovider "$@" tests
