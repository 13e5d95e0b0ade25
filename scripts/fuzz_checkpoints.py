"""The long form of the fuzz and crash tests: as many cases as are wanted.

    python scripts/fuzz_checkpoints.py --cases 20000 --crashes 20

``--cases`` draws damaged checkpoints and reads or converts them; ``--crashes`` kills conversions at
so many random moments, and lets as many run out of room at random sizes. Ends at the first case
that gives neither an error of this package nor the right values.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from tests.convert import fuzz
from tests.convert.crashes import cut_short, digest, killed, reports
from tests.convert.sources import write_dense


def draw(what: str, cases: int, strategy: Any, check: Callable[[Any], bool]) -> None:
    """Runs ``check`` on so many drawn cases and prints how many were accepted."""
    counts: Counter[bool] = Counter()
    begin = time.perf_counter()

    @settings(
        max_examples=cases, deadline=10_000, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(case=strategy)
    def run(case: Any) -> None:
        counts[check(case)] += 1

    run()
    seconds = time.perf_counter() - begin
    print(f"{what}: {counts[True]} right, {counts[False]} refused, {seconds:.0f} s", flush=True)


def damaged(folder: Path, cases: int) -> None:
    """Reading and converting, in the proportions of the tests."""
    for what, share, strategy in (
        ("headers", 0.4, fuzz.damaged_headers()),
        ("configs", 0.3, fuzz.damaged_configs()),
        ("scales", 0.2, fuzz.damaged_scales()),
    ):
        number = max(1, int(cases * share))
        draw(what, number, strategy, lambda case: fuzz.check_reading(case, folder / "a"))

    def converted(both: Any) -> bool:
        for name in ("b", "b.partial"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return fuzz.check_conversion(both[0], both[1], folder / "a", folder / "b")

    any_case = fuzz.damaged_headers() | fuzz.damaged_configs() | fuzz.damaged_scales()
    both = st.tuples(any_case, st.sampled_from(fuzz.TARGETS))
    draw("conversions", max(1, cases // 10), both, converted)


def crashes(folder: Path, count: int) -> None:
    """Kills and full disks, each followed by a conversion that goes on."""
    options = Options("nvfp4-ue4m3", max_shard_bytes=20_000)
    source = write_dense(folder / "source", "bf16", layers=12, shards=3)
    before, rng, hits = digest(source), random.Random(0), 0
    total = reports(source, folder / "whole", options, 2)
    whole, out = digest(folder / "whole"), folder / "out"
    for i in range(count):
        hits += killed(source, out, options, 1 + i % 2, rng.randrange(total))
        if not out.exists():
            reports(source, out, options, 1 + i % 2)
        assert digest(out) == whole, "a killed conversion ended in other bytes"
        assert digest(source) == before, "the source was touched"
        shutil.rmtree(out)
    print(f"{hits} of {count} conversions killed; the same bytes each time", flush=True)
    largest = max(p.stat().st_size for p in (folder / "whole").glob("*.safetensors"))
    for _ in range(count):
        error = cut_short(source, out, options, rng.randrange(largest))
        assert "cannot be written: File too large" in error, error
        assert not out.exists()
        assert digest(source) == before, "the source was touched"
    convert(source, out, options, jobs=1)
    assert digest(out) == whole
    print(f"{count} conversions without room refused; the source is as it was", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--crashes", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rubin_moe_fuzz_") as name:
        if args.cases:
            damaged(Path(name), args.cases)
        if args.crashes:
            crashes(Path(name), args.crashes)


if __name__ == "__main__":
    main()
