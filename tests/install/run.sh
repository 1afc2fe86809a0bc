#!/usr/bin/env bash
# run.sh <build folder> <cmake> <c++ compiler>: installs the build under a temporary prefix and uses it as a stranger
# would: a project that knows find_package(fsdp) alone, and each public header on its own.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$1 cmake=$2 compiler=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

fail() { echo "install: $*" >&2; exit 1; }

"$cmake" --install "$build" --prefix "$prefix" >"$work/install.log"
generator=$("$cmake" -N -L "$build" >/dev/null && sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt")
make_program=$(sed -n 's/^CMAKE_MAKE_PROGRAM:[A-Z]*=//p' "$build/CMakeCache.txt")

echo "== installed: exactly the public headers"
expected="checkpoint clip_grad custom_comm device_mesh distributed dtensor error export fsdp fully_shard fully_sharded_data_parallel grad_scaler optim tensor_extension version"
installed=$(cd "$prefix/include/fsdp" && echo *.h | sed 's/\.h//g')
[[ $installed == "$expected" ]] || fail "headers are '$installed', expected '$expected'"

echo "== libfsdp.so: exports its own interface only"
foreign=$(nm -DC --defined-only "$prefix"/lib*/libfsdp.so | sed -E 's/^[0-9a-f]+ [A-Z] //' | grep -E '(^| )fsdp::(base|shard|comm|mesh|engine|tensor)::' || true)
[[ -z $foreign ]] || fail "internal symbols are exported: $(head -n 5 <<<"$foreign")"

echo "== a consumer: configure, build, run"
"$cmake" -S "$here/consumer" -B "$work/consumer" -G "$generator" -DCMAKE_MAKE_PROGRAM="$make_program" \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Debug >"$work/consumer.log" 2>&1 ||
  { cat "$work/consumer.log"; fail "the consumer does not configure"; }
"$cmake" --build "$work/consumer" 2>&1 || fail "the consumer does not build"
env -u RANK -u WORLD_SIZE "$work/consumer/consumer" || fail "the consumer does not run"

echo "== each public header alone"
torch=$(sed -n 's/^FSDP_TORCH_ROOT:[A-Z]*=//p' "$build/CMakeCache.txt")
for header in $expected; do
  echo "#include <fsdp/$header.h>" >"$work/alone.cc"
  "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -H -I "$prefix/include" \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" "$work/alone.cc" 2>"$work/alone.log" ||
    { grep -v '^\.' "$work/alone.log" | head -n 20; fail "fsdp/$header.h does not compile alone"; }
  if grep -E '^\.+ .*/(Python\.h|pybind11/|gloo/|mpi\.h|nccl\.h)' "$work/alone.log"; then
    fail "fsdp/$header.h reaches the headers above"
  fi
done
echo "install: all in order"
