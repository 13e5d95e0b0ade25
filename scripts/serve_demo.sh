#!/usr/bin/env bash
# Makes the environment, serves the shipped model with vLLM on the CPU and prints a completion, its
# speed, and which backend computed it and why. Arguments go to `rubin-moe demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
model=${RUBIN_MOE_DEMO_MODEL:-models/kjv/nvfp4-ue4m3}
exec "${RUBIN_MOE_VENV:-.venv}/bin/rubin-moe" demo "$model" "$@"
