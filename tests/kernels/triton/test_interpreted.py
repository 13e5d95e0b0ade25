"""The layer contract and this folder's tests on the Triton kernels in Triton's interpreter.

Triton decides when it is imported whether it interprets, so the tests run in a process of their
own; there the ``triton`` row of `tests.layers.backends` is on the CPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACT = (
    "tests/layers/test_numerics.py",
    "tests/layers/test_runtime.py",
    "tests/layers/test_padding.py",
    "tests/layers/test_ops.py",
)
SLOW = "bit_equal and (ue5m3 or (ue4m3 and bfloat16) or (mxfp4 and float32))"  # two are enough
LEAST = {"contract": 160, "folder": 38}  # tests that must have run, so that none is lost unnoticed


@pytest.mark.timeout(1200)  # it takes 2 minutes on an idle core
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("contract", (*CONTRACT, "-k", f"triton- and not ({SLOW})")),
        ("folder", ("tests/kernels/triton/test_layer.py", "tests/kernels/triton/test_route.py")),
    ],
    ids=["contract", "folder"],
)
def test_in_the_interpreter(name, arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed.group(1)) >= LEAST[name]
