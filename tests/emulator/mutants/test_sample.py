"""Forty kernels with one fault each: the rules, a deadlock or wrong bytes show 95 % of them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_rules_catch_a_sample_of_mutants():
    command = [sys.executable, "scripts/emulator_mutants.py", "--sample", "--jobs", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert '"mutants": 40' in ran.stdout, ran.stdout[-2000:]
