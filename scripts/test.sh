#!/usr/bin/env bash
# Makes the environment and runs lint and tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
bash scripts/lint.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
exec "${RUBIN_MOE_VENV:-.venv}/bin/python" -m pytest -n 2 --dist loadfile -m "not peers and not hw and not long" "$@"
