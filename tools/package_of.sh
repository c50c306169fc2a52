#!/usr/bin/env bash
# Build the package of a commit, unless it is cached, and print the folder that holds it.
#
#   tools/package_of.sh FOLDER COMMIT      # FOLDER/<hash>/spattn
#
# $PYTHON has the build requirements of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-$(command -v python3)}")
commit=$(git rev-parse --verify --quiet "$2^{commit}") || {
  echo "package_of: $2 is not a commit" >&2
  exit 1
}
folder=$(realpath --canonicalize-missing "$1")/$commit
if [ ! -d "$folder/spattn" ]; then
  built=$(mktemp -d)
  git worktree add --quiet --detach "$built/source" "$commit" >&2
  trap 'git worktree remove --force "$built/source"; rm -rf "$built"' EXIT
  PATH=$(dirname "$python"):$PATH "$python" -m pip --disable-pip-version-check --quiet wheel --no-deps \
    --no-build-isolation --wheel-dir "$built" "$built/source" >&2
  mkdir -p "$folder"
  "$python" -m zipfile -e "$built"/spattn-*.whl "$folder"
fi
echo "$folder"
