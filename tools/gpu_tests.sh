#!/bin/sh
# Every test that needs a GPU, on a machine with one: installs the wheels of tools/gpu_bundle.sh and writes a summary.
#
#     tools/gpu_tests.sh FOLDER [pytest's arguments]      # into FOLDER/gpu_tests.txt; FOLDER/log has all of it
#
# Tests read the tree, and import spattn from the wheel. Without wheels in .whl/ the spattn that is installed is tested.
set -eu
cd "$(dirname "$0")/.."
out=${1:?where the summary goes}
shift
mkdir -p "$out"
site=$(mktemp -d)
if ls .whl/*.whl > /dev/null 2>&1; then
  python3 -m pip --disable-pip-version-check install --quiet --no-index --no-deps --target "$site" .whl/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
workers=$(nproc)
python3 -c 'import spattn; spattn.show_versions()' | tee "$out/log"
failed=0
python3 -m pytest -m gpu tests -n "$((workers > 2 ? workers - 2 : 1))" --dist worksteal -rfEs "$@" >> "$out/log" 2>&1 || failed=$?
{
  echo "== $(git rev-parse --short HEAD 2> /dev/null || echo 'no git'), pytest -m gpu tests $*"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU"
  grep -E '^(FAILED|ERROR|SKIPPED|[0-9]+ (passed|failed|skipped)|=+ .*(passed|failed|skipped))' "$out/log" || true
} | tee "$out/gpu_tests.txt"
exit "$failed"
