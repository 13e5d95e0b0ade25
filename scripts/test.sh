#!/usr/bin/env bash
# Makes the environment and runs lint and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
bash scripts/lint.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
# A worker that died ends the run: its tests would be dealt out again and could hang it.
exec "${RUBIN_MOE_VENV:-.venv}/bin/python" -m pytest -n 2 --dist loadfile --max-worker-restart 0 \
    -m "not peers and not hw and not long" "$@"
