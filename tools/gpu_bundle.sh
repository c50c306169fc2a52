#!/bin/sh
# Wheels for a GPU machine that reaches no package registry: spattn's and PyCUDA's, with what that needs, into .whl/.
#
#     tools/gpu_bundle.sh ~/.pyenv/versions/3.12.1/bin/python      # the Python of that machine, in its minor version
#
# Take the tree and .whl/ there and run tools/gpu_tests.sh. Needs here: that Python with pip and venv, a C++ compiler, the
# CUDA toolkit's headers. No GPU.
set -eu
cd "$(dirname "$0")/.."
python=${1:?which python: see the head of this file}
mkdir -p .whl
rm -f .whl/spattn-*.whl
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir .whl .
ls .whl/pycuda-*.whl > /dev/null 2>&1 || "$python" tools/build_pycuda_wheel.py --python "$python" --dest .whl --needs
ls -l .whl
