#!/usr/bin/env bash
# sanitizer_env.sh asan|tsan <command>: runs the command with what the sanitizer must know about libtorch, which was
# built without it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kind=$1
shift

export OMP_NUM_THREADS=1
case $kind in
  asan)
    # libtorch's registries are never freed, on purpose.
    export ASAN_OPTIONS=detect_leaks=1:strict_init_order=1:detect_stack_use_after_return=1
    export LSAN_OPTIONS=suppressions=$here/sanitizers/lsan.supp:print_suppressions=0
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    ;;
  tsan)
    # What two threads hand over by libtorch's own atomics looks like a race, so races inside it are not reported.
    export TSAN_OPTIONS=suppressions=$here/sanitizers/tsan.supp:halt_on_error=0:second_deadlock_stack=1
    # ThreadSanitizer needs addresses that are not spread too far.
    if setarch -R true 2>/dev/null; then set -- setarch -R "$@"; fi
    ;;
  *)
    echo "sanitizer_env.sh: unknown sanitizer '$kind'; asan or tsan" >&2
    exit 2
    ;;
esac
exec "$@"
