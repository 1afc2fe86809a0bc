#!/usr/bin/env bash
# train.sh <gpt> [arguments]: runs the training program on RANKS local ranks, then draws its loss curve. `make train`
# calls it with RANKS, STEPS, DATA, OUT, RESUME and SEED from its own variables; empty ones are the program's defaults.
# RESUME is a checkpoint, or 1 for the one in OUT.
set -euo pipefail
example=$(cd "$(dirname "${BASH_SOURCE[0]}")/../examples/gpt" && pwd)
program=$1
shift

out=${OUT:-out/gpt}
data=${DATA:-$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')}
arguments=(--data "$data" --out "$out")
[[ -z ${STEPS:-} ]] || arguments+=(--steps "$STEPS")
[[ -z ${SEED:-} ]] || arguments+=(--seed "$SEED")
case ${RESUME:-} in
  '' | 0) ;;
  1) arguments+=(--resume) ;;
  *) arguments+=(--resume "$RESUME") ;;
esac

# The curve is drawn in the end, whatever the end was: the program's last line stays the last.
status=0
"$example/launch.py" --ranks "${RANKS:-2}" "$program" "${arguments[@]}" "$@" || status=$?
if [[ -s $out/metrics.csv ]]; then
  "$example/plot.py" "$out" >&2 || true
fi
exit $status
