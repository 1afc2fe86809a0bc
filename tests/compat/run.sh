#!/usr/bin/env bash
# run.sh <python> <folder of the built package> <work folder> [suite...]: fetches and translates PyTorch's FSDP suites,
# runs them with libfsdp in place and judges the outcome. fsdp2, about ten minutes on two cores, then fsdp1, about 25.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$1 package=$2 work=$3
suites=("${@:4}")
[[ ${#suites[@]} -gt 0 ]] || suites=(fsdp2 fsdp1)

say() { echo "[compat] $*"; }

mkdir -p "$work"
work=$(cd "$work" && pwd)
export PYTHONPATH=$(cd "$package" && pwd)
if [[ ! -d $work/src ]]; then
  say "fetching the suites"
  rm -rf "$work/src.part"
  "$here/fetch_suite.sh" "$work/src.part"
  mv "$work/src.part" "$work/src"
fi
"$python" "$here/translate.py" "$work/src" "$work/suite"

# on <suite> <ranks> [more options]: run_suite fails where a test does; judge.py knows which may.
on() {
  say "$1 on $2 ranks"
  "$python" "$here/run_suite.py" --suite "$work/suite" --which "$1" --impl libfsdp_in_place:install \
    --world-size "$2" --report "$work/$1.ranks$2.json" "${@:3}" || true
}

# What fewer ranks skip is run on more.
run_fsdp2() {
  local long=(--timeout 300)
  on fsdp2 2 "${long[@]}"
  on fsdp2 4 "${long[@]}" --pattern 'WorldSize4|GradientScaler|hsdp_tp|NDTraining' \
    --files "$(printf 'test_fully_shard_%s,' clip_grad_norm_ grad_scaler state_dict)test_fully_shard_training"
  on fsdp2 8 "${long[@]}" --files test_fully_shard_training --pattern 3DTraining
}

run_fsdp1() {
  on fsdp1 2 --timeout 300
  on fsdp1 4 --timeout 300 --pattern 'StateDict4GPUs|TPFSDP|HSDP|raises_warning|FSDPHybridShard' \
    --files test_fsdp_state_dict,test_fsdp_dtensor_state_dict,test_hsdp_dtensor_state_dict,test_fsdp_hybrid_shard,test_fsdp_tp_integration
}

unexpected=0
for suite in "${suites[@]}"; do
  rm -f "$work/$suite".ranks*.json
  "run_$suite"
  "$python" "$here/judge.py" --expected "$here/expected_$suite.toml" --report "$here/report_$suite.md" \
    "$work/$suite".ranks*.json || unexpected=1
done
exit $unexpected
