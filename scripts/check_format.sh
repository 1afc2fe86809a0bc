#!/usr/bin/env bash
# Checks that the sources are in the project's format (.clang-format); with --fix, rewrites them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Releases of clang-format differ in what they do, so it is this one.
tool=clang-format-14
command -v $tool >/dev/null || { echo "format: $tool is missing; make setup installs it"; exit 1; }

mapfile -d '' files < <(find include src python tests examples bench -name '*.h' -print0 -o -name '*.cc' -print0 | sort -z)
if [[ ${1:-} == --fix ]]; then
  $tool -i "${files[@]}"
  echo "format: ${#files[@]} files"
elif $tool --dry-run --Werror "${files[@]}"; then
  echo "format: ${#files[@]} files, all in order"
else
  echo "format: run 'make format'"
  exit 1
fi
