#!/bin/sh
# Collect wheels for an offline GPU machine in .whl/: spattn, PyCUDA and its dependencies, Transformers.
#
#     tools/gpu_bundle.sh ~/.pyenv/versions/3.12.1/bin/python      # a Python with the GPU machine's minor version
#
# Copy the tree and .whl/ to the GPU machine and run tools/gpu_tests.sh. Requires that Python with pip and venv, a C++
# compiler and the CUDA toolkit, but no GPU. The GPU machine must have what Transformers depends on.
set -eu
cd "$(dirname "$0")/.."
python=${1:?usage: tools/gpu_bundle.sh PYTHON}
transformers=5.24.0  # depends on huggingface-hub >= 1.31, tokenizers 0.23, safetensors >= 0.8, regex, typer
mkdir -p .whl
rm -f .whl/spattn-*.whl
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir .whl .
tools/add_kernels.sh "$python" .whl/spattn-*.whl
ls .whl/pycuda-*.whl > /dev/null 2>&1 || "$python" tools/build_pycuda_wheel.py --python "$python" --dest .whl --needs
if ! ls .whl/"transformers-$transformers"-*.whl > /dev/null 2>&1; then
  rm -f .whl/transformers-*.whl
  "$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest .whl "transformers==$transformers"
fi
ls -l .whl
