#!/usr/bin/env bash
# train.sh <gpt> [arguments]: runs the training program on RANKS local ranks. `make train` calls it with RANKS, STEPS,
# DATA, OUT, RESUME and SEED from its own variables; empty ones are the program's defaults.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$1
shift
