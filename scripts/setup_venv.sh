#!/usr/bin/env bash
# setup_venv.sh <python> <folder> <requirements>: a virtual environment with the pinned torch and build tools.
set -euo pipefail
python=$1 venv=$2 requirements=$3

say() { echo "[setup] $*"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "$("$python" --version) is too old: Python 3.11 or later is needed (make PYTHON=... chooses another)"
  exit 1
}
if [[ ! -x $venv/bin/python ]]; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
say "installing into it (a few minutes): $(paste -sd ' ' "$requirements")"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --requirement "$requirements"
say "torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)') is ready"
