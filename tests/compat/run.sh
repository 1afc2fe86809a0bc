#!/usr/bin/env bash
# run.sh <python> <folder of the built package> <work folder>: fetches, translates and runs PyTorch's FSDP2 suite with
# libfsdp in place, on 2 ranks and what needs more on 4 and 8, and judges the outcome. About ten minutes on two cores.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$1 package=$2 work=$3

say() { echo "[compat] $*"; }

mkdir -p "$work"
work=$(cd "$work" && pwd)
export PYTHONPATH=$(cd "$package" && pwd)
if [[ ! -d $work/src ]]; then
  say "fetching the suite"
  rm -rf "$work/src.part"
  "$here/fetch_suite.sh" "$work/src.part"
  mv "$work/src.part" "$work/src"
fi
"$python" "$here/translate.py" "$work/src" "$work/suite"

# suite <ranks> [more options]: run_suite fails where a test does; judge.py knows which may.
suite() {
  say "on $1 ranks"
  "$python" "$here/run_suite.py" --suite "$work/suite" --which fsdp2 --impl libfsdp_in_place:install \
    --world-size "$1" --timeout 300 --report "$work/ranks$1.json" "${@:2}" || true
}
rm -f "$work"/ranks*.json
suite 2
files=(clip_grad_norm_ grad_scaler state_dict training)
suite 4 --files "$(IFS=, && echo "${files[*]/#/test_fully_shard_}")" \
  --pattern 'WorldSize4|GradientScaler|hsdp_tp|NDTraining'
suite 8 --files test_fully_shard_training --pattern 3DTraining
"$python" "$here/judge.py" --expected "$here/expected.toml" --report "$here/report.md" "$work"/ranks{2,4,8}.json
