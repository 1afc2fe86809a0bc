#!/usr/bin/env bash
# tidy.sh <build folder>: clang-tidy over src/ with that build's flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1

command -v clang-tidy-14 >/dev/null || { echo "tidy: clang-tidy-14 is missing; apt-get install clang-tidy-14"; exit 1; }
# Clang cannot read g++'s precompiled header, so the commands lose it.
flags=$(mktemp -d)
trap 'rm -rf "$flags"' EXIT
sed -E 's/-Winvalid-pch|-fpch-preprocess|-include [^ ]*cmake_pch\.hxx//g' "$build/compile_commands.json" >"$flags/compile_commands.json"
find src -name '*.cc' -print0 | sort -z | xargs -0 -n 1 -P "$(nproc)" clang-tidy-14 --quiet -p "$flags"
