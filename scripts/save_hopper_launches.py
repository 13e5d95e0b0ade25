#!/usr/bin/env python
"""Saves launches of Hopper kernels with the memory that the emulator leaves: peers' and ours.

    python scripts/save_hopper_launches.py FOLDER

A machine with an H200 then runs them again and says what differs:

    rubin-moe replay FOLDER --output docs/results/emulator_h200_kernels.json
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rubin_moe.emulator.dsl import emulated_device  # noqa: E402
from rubin_moe.emulator.saved import SavedLaunch  # noqa: E402
from rubin_moe.replay.record import attach  # noqa: E402
from tests.emulator.peers.suite import CASES  # noqa: E402

TARGET = "sm_90a"
OWN = ("nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4")
"""Weight formats; `relu2` over one-hot tokens, so that every order of addition gives the same bits.
"""


def save_peers(folder: Path) -> None:
    """Every Hopper peer and Triton kernel of the conformance suite."""
    for case in CASES:
        if case.target == TARGET:
            with emulated_device(case.target, save_to=folder) as gpu:
                case.prepare().run(gpu)
                (made,) = folder.glob("001_*.launch")
                path = made.rename(folder / f"{case.name}.launch")
                ranges = [(b.address, len(b.data)) for b in SavedLaunch.load(path).buffers]
                attach(
                    path, [np.frombuffer(ctypes.string_at(*place), np.uint8) for place in ranges]
                )
            typer.echo(f"saved {path}")


def main(folder: Annotated[Path, typer.Argument()]) -> None:
    """Peers, then one layer of ours for each weight format."""
    folder.mkdir(parents=True, exist_ok=True)
    save_peers(folder)
    for fmt in OWN:
        command = [sys.executable, "-c", "from rubin_moe.cli import main; main()", "replay"]
        options = ["--save", str(folder / fmt), "--backend", "sm90", "--format", fmt]
        options += ["--activation", "relu2"]
        subprocess.run([*command, *options], check=True, cwd=ROOT)
        for path in (folder / fmt).glob("*.launch"):
            path.rename(folder / f"{path.stem}_{fmt}.launch")
        (folder / fmt).rmdir()


if __name__ == "__main__":
    typer.run(main)
