"""A conversion holds one expert, however large the checkpoint is."""

import os
from pathlib import Path

import pytest
import torch

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from tests.loader.checkpoints import MODEL_CONFIG, Folder

from .sources import write_dense

EXPERTS, HIDDEN, WIDTH = 48, 512, 512
MiB = 1 << 20


def write(path: Path, stacked: bool) -> Path:
    """72 MiB of bfloat16 experts in one layer, 1.5 MiB each."""
    module, half = "model.layers.0.mlp.experts", torch.bfloat16
    shapes = {
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }
    if stacked:
        tensors = {
            f"{module}.gate_up_proj": torch.full((EXPERTS, 2 * WIDTH, HIDDEN), 0.01, dtype=half),
            f"{module}.down_proj": torch.full((EXPERTS, HIDDEN, WIDTH), 0.01, dtype=half),
        }
    else:
        tensors = {
            f"{module}.{e}.{name}.weight": torch.full(shape, 0.01, dtype=half)
            for e in range(EXPERTS)
            for name, shape in shapes.items()
        }
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    kind = {"model_type": "qwen3_5_moe" if stacked else "qwen3_moe"}
    return Folder(tensors, {**MODEL_CONFIG, **sizes, **kind}).write(path)


def peak(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(field))


def growth(source: Path, out: Path, target: str, like: Path) -> int:
    """Bytes by which a conversion's peak exceeds what the process held after one of ``like``, a
    small checkpoint, which maps the libraries' pages."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        convert(like, out.with_name(f"{out.name}-like"), Options(target), jobs=1)  # type: ignore[arg-type]
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = peak("VmRSS:")
        convert(source, out, Options(target), jobs=1)  # type: ignore[arg-type]
        os.write(writing, str(peak("VmHWM:") - before).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return int(told)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_expert_at_a_time(tmp_path, stacked):
    """An expert is 1.5 MiB in 16 bits, 0.4 in NVFP4; all are 72 and 20 MiB. Limits leave room for
    what the allocator keeps and for pages of libraries that are touched for the first time."""
    bf16 = write_dense(tmp_path / "bf16", "bf16")
    nvfp4 = convert(bf16, tmp_path / "nvfp4", Options("nvfp4-ue4m3"), jobs=1).folder
    source = write(tmp_path / "a", stacked)
    assert growth(source, tmp_path / "b", "nvfp4-ue4m3", bf16) < 32 * MiB  # float64 on the way
    assert growth(tmp_path / "b", tmp_path / "c", "bf16", nvfp4) < 20 * MiB
    assert growth(tmp_path / "b", tmp_path / "d", "nvfp4-ue5m3", nvfp4) < 10 * MiB
