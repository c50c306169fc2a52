#!/bin/sh
# Collect wheels for an offline GPU machine in .whl/: spattn, PyCUDA and its dependencies.
#
#     tools/gpu_bundle.sh ~/.pyenv/versions/3.12.1/bin/python      # a Python with the GPU machine's minor version
#
# Copy the tree and .whl/ to the GPU machine and run tools/gpu_tests.sh. Requires that Python with pip and venv, a C++
# compiler and the CUDA toolkit's headers, but no GPU.
set -eu
cd "$(dirname "$0")/.."
python=${1:?usage: tools/gpu_bundle.sh PYTHON}
mkdir -p .whl
rm -f .whl/spattn-*.whl
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir .whl .
ls .whl/pycuda-*.whl > /dev/null 2>&1 || "$python" tools/build_pycuda_wheel.py --python "$python" --dest .whl --needs
ls -l .whl
