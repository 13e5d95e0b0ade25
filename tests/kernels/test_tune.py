"""What `scripts/tune.py` never writes down: the fastest tiles, if their numbers are wrong."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rubin_moe.kernels.sm90.plan import Tiles
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHAPE, TOKENS = "qwen3", 16
GOOD = [Tiles(24, 2, 4, 4), Tiles(16, 3, 4, 4)]
BAD = Tiles(12, 4, 4, 4)


@pytest.fixture
def tune(monkeypatch):
    """The script, its GPU replaced: kernels give the reference, and ``BAD`` takes no time."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    found = importlib.util.spec_from_file_location("tune", SCRIPTS / "tune.py")
    tune = importlib.util.module_from_spec(found)
    found.loader.exec_module(tune)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(tune, "Fixed", Fixed)
    monkeypatch.setattr(tune, "random_weights", lambda shape: None)
    monkeypatch.setattr(tune, "routings", lambda shape, m: [(None, None)])
    monkeypatch.setattr(tune, "experts_touched", lambda routed: 8.0)
    monkeypatch.setattr(tune, "reference", lambda w, a, x, *routed: x.float())
    monkeypatch.setattr(tune, "median_us", lambda calls: calls[0].func.__self__.us)
    monkeypatch.setattr(Fixed, "harm", None)
    return tune


class Fixed:
    harm = None

    def __init__(self, shape, plan) -> None:
        self.bad = plan.tiles == BAD
        self.prefill = isinstance(plan, PrefillPlan)
        self.us = 1.0 if self.bad else 50.0

    def prepare(self, weights) -> None:
        return None

    def run(self, prepared, x, ids, weights):
        return Fixed.harm(x.clone()) if self.bad else x.clone()


def _one_nan(out):
    out[3, 7] = float("nan")
    return out


def _one_row(out):
    out[5] = 0
    return out


def _last_bit(out):
    out.view(torch.int16)[0, 0] ^= 1
    return out


HARMS = {
    "nan": lambda out: out * float("nan"),
    "one nan": _one_nan,
    "infinite": lambda out: out.fill_(float("inf")),
    "zeros": lambda out: out * 0,
    "one row": _one_row,
    "one bit": _last_bit,
}


# A last bit is within the reference's bound: of two that differ so, the first one is believed.
@pytest.mark.parametrize(
    ("harm", "first"), [(h, f) for h in HARMS for f in (False, True) if (h, f) != ("one bit", True)]
)
def test_tiles_with_wrong_numbers_are_left_out(tune, monkeypatch, capsys, harm, first):
    """Field report 90: a tile that emits NaN was the fastest, and an autotuner chose it. Where the
    wrong one comes first, it is not what the others are compared with."""
    monkeypatch.setattr(Fixed, "harm", staticmethod(HARMS[harm]))
    candidates = [BAD, *GOOD] if first else [*GOOD, BAD]
    monkeypatch.setitem(tune.CANDIDATES, SHAPE, candidates)
    kept = [row["tiles"] for row in tune.measure(SHAPE, [TOKENS])]
    assert kept == [tune.asdict(tiles) for tiles in GOOD]
    assert "left out" in capsys.readouterr().out


def test_each_regime_is_compared_with_itself(tune, monkeypatch):
    """Prefill adds in another order than decode: a bit more or less is no error of either."""
    monkeypatch.setattr(Fixed, "run", lambda self, prepared, x, *routed: self.of_regime(x.clone()))
    monkeypatch.setattr(
        Fixed, "of_regime", lambda self, x: _last_bit(x) if self.prefill else x, raising=False
    )
    monkeypatch.setitem(tune.CANDIDATES, SHAPE, GOOD)
    kept = [tune.choice.of_prefill(row["tiles"]) for row in tune.measure(SHAPE, [128])]
    assert kept.count(False) == len(GOOD)
    assert kept.count(True) == len(tune.candidates(SHAPE, 128)) - len(GOOD) > 0


@pytest.mark.parametrize(
    ("decode", "prefill", "takes_over"),
    [
        ({128: 100, 256: 150, 512: 310}, {128: 150, 256: 170, 512: 200, 1024: 300}, 300),
        ({128: 100, 256: 200}, {128: 100, 256: 100}, 129),
        ({128: 100, 256: 200}, {128: 90, 256: 100}, 128),
        ({128: 100, 256: 100}, {128: 200, 256: 300}, 257),
        ({16: 10}, {1024: 10}, None),
    ],
)
def test_prefill_takes_over_where_the_times_cross(tune, decode, prefill, takes_over):
    regimes = ({m: {"us": us} for m, us in times.items()} for times in (decode, prefill))
    assert tune.crossing(*regimes) == takes_over


def test_the_fake_tiles_are_kept_where_they_are_right(tune, monkeypatch):
    """Without harm the same tiles win: what leaves them out is their numbers."""
    monkeypatch.setattr(Fixed, "harm", staticmethod(lambda out: out))
    monkeypatch.setitem(tune.CANDIDATES, SHAPE, [*GOOD, BAD])
    rows = tune.measure(SHAPE, [TOKENS])
    assert min(rows, key=lambda row: row["us"])["tiles"] == tune.asdict(BAD)
