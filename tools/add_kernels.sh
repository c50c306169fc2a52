#!/usr/bin/env bash
# Add compiled kernels for Hopper to a wheel, so that common calls run without nvcc and without waiting for it.
#
#   tools/add_kernels.sh PYTHON WHEEL      # a Python that the wheel is for; needs nvcc and a package registry
#
# They are those of float16 and bfloat16 at head_dim up to 128, forward and backward (spattn/cuda/prebuild.py).
set -euo pipefail
python=$1 wheel=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check --quiet install wheel "$wheel"
"$work/venv/bin/wheel" unpack --dest "$work/unpacked" "$wheel"
(cd "$work" && SPATTN_CACHE_DIR=$work/cache venv/bin/python -m spattn.cuda.prebuild sm_90a --head-dim 64 128 \
  --ship "$(echo "$work"/unpacked/spattn-*)/spattn/cuda/kernels")
rm "$wheel"
"$work/venv/bin/wheel" pack --dest-dir "$(dirname "$wheel")" "$work"/unpacked/spattn-*
