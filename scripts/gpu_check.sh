#!/usr/bin/env bash
# gpu_check.sh <python> <build folder> [pytest's arguments]: what `make gpu-check` runs on a machine with a GPU once the
# build is there, in under 4 minutes: training beside the unsharded model, the C++ tests of one process on the CUDA
# build, and what sharding costs the host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1 build=$2
shift 2
export PYTHONPATH=$PWD/$build/python OMP_NUM_THREADS=1

"$python" -m pytest -q tests/gpu "$@"
for room in base shard comm mesh engine tensor module; do
  program=$build/tests/fsdp_${room}_test
  if [[ -x $program ]]; then
    echo "[gpu-check] $program"
    timeout 90 "$program" --gtest_brief=1 --gtest_filter='-*Procs*:*Fault*'
  fi
done
"$python" tests/gpu/host_cost.py
