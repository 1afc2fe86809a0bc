#!/usr/bin/env bash
# Succeeds where a GPU is at hand.
set -euo pipefail
nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -q .
