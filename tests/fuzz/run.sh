#!/bin/sh
# Fuzzes the readers of a checkpoint under AddressSanitizer and UndefinedBehaviorSanitizer, one after the other.
# Usage: tests/fuzz/run.sh [seconds per target, 60] [header|index ...]
# New inputs go to the working folder (FSDP_FUZZ_DIR, else build/fuzz); the committed corpus stays as it is.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- header index
work=${FSDP_FUZZ_DIR:-$root/build/fuzz}
cxx=${FSDP_FUZZ_CXX:-$(command -v clang++ || command -v clang++-14)}
flags="-std=c++20 -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
mkdir -p "$work"

objects=
for source in src/checkpoint/crc32 src/checkpoint/dtype src/checkpoint/file src/checkpoint/index \
  src/checkpoint/plan src/checkpoint/safetensors tests/fuzz/targets; do
  object=$work/$(basename "$source").o
  # shellcheck disable=SC2086
  "$cxx" $flags -fsanitize=fuzzer-no-link -I "$root/src" -I "$root/include" -c "$root/$source.cc" -o "$object"
  objects="$objects $object"
done

for target in "$@"; do
  # shellcheck disable=SC2086
  "$cxx" $flags -fsanitize=fuzzer -DFSDP_FUZZ_TARGET="$target" "$root/tests/fuzz/fuzzer.cc" $objects \
    -o "$work/fuzz_$target"
  mkdir -p "$work/corpus-$target"
  nice -n 10 "$work/fuzz_$target" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -dict="$root/tests/fuzz/$target.dict" -artifact_prefix="$work/$target-" \
    "$work/corpus-$target" "$root/tests/fuzz/corpus/$target"
done
