#!/bin/sh
# Run all GPU tests and write a summary.
#
#     tools/gpu_tests.sh FOLDER [PYTEST ARGUMENTS]      # summary: FOLDER/gpu_tests.txt; full output: FOLDER/log
#
# FOLDER/failures has each failure as soon as it happens, also if the run is stopped: with an empty kernel cache it takes
# over eight minutes on 16 cores.
#
# Tests the spattn of the wheels in .whl/ (tools/gpu_bundle.sh), or the installed one if there are none.
set -eu
cd "$(dirname "$0")/.."
out=${1:?usage: tools/gpu_tests.sh FOLDER [PYTEST ARGUMENTS]}
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
rm -f "$out/failures"
export SPATTN_TEST_FAILURES="$out/failures"
python3 -m pytest -m gpu tests -n "$((workers > 2 ? workers - 2 : 1))" --dist worksteal -rfEs "$@" >> "$out/log" 2>&1 || failed=$?
{
  echo "== $(git rev-parse --short HEAD 2> /dev/null || echo 'no git'), pytest -m gpu tests $*"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU"
  grep -E '^(FAILED|ERROR|SKIPPED|[0-9]+ (passed|failed|skipped)|=+ .*(passed|failed|skipped))' "$out/log" || true
} | tee "$out/gpu_tests.txt"
exit "$failed"
