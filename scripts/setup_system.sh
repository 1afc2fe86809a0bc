#!/usr/bin/env bash
# Sees to the system packages that the build needs: installs them with apt as root, else says which ones are missing.
# Each is probed by what is used of it, so that one installed by other means counts too.
set -euo pipefail

say() { echo "[setup] $*"; }
has_command() { command -v "$1" >/dev/null; }
has_header() { echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1; }
has_python_header() { "${PYTHON:-python3}" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null; }
has_venv() { "${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null; }

# package, probe, what it is for
needs=(
  "build-essential    has_command g++                     the compiler"
  "python3            has_command ${PYTHON:-python3}      Python 3.11 or later"
  "python3-venv       has_venv -                          the virtual environment"
  "python3-dev        has_python_header -                 the Python package"
  "nlohmann-json3-dev has_header nlohmann/json.hpp        JSON"
  "libcli11-dev       has_header CLI/CLI.hpp              the programs' arguments"
  "libgtest-dev       has_header gtest/gtest.h            the tests"
  "libbenchmark-dev   has_header benchmark/benchmark.h    the benchmarks"
  "libopenmpi-dev     has_command mpicc                   the engine mpi"
  "clang-format-14    has_command clang-format-14         the format check"
)

missing=()
find_missing() {
  missing=()
  local need package probe argument purpose
  for need in "${needs[@]}"; do
    read -r package probe argument purpose <<<"$need"
    if ! $probe "$argument"; then missing+=("$package"); fi
  done
}

find_missing
if ((${#missing[@]} == 0)); then
  say "system packages: all there"
  exit
fi
if ((EUID == 0)) && has_command apt-get; then
  say "installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log"
    say "apt could not install them (the end of its output is above)"
    exit 1
  fi
  rm -f "$log"
  find_missing
fi
if ((${#missing[@]} > 0)); then
  say "missing system packages: ${missing[*]}"
  say "install them, for example with: sudo apt-get install ${missing[*]}"
  exit 1
fi
