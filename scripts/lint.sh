#!/usr/bin/env bash
# Everything CI checks without running the code: style, types, import contracts, file sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${RUBIN_MOE_VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/lint-imports"
"$bin/python" scripts/check_sizes.py
