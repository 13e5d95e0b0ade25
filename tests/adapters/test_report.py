"""What the log says about a model's experts: the true reasons, once."""

import pytest

from rubin_moe.kernels import registry
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.target import named
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec, Scheme

pytestmark = pytest.mark.serve

LAYERS = ("layers.0.mlp.experts", "layers.1.mlp.experts")


def serve(
    monkeypatch,
    scheme: Scheme = "w4a16",
    width: int = 352,
    tp: int = 1,
    where: str = "cpu",
) -> list[str]:
    """Lines of the log of a model with two layers, each of which is loaded twice."""
    from rubin_moe.adapters.vllm import report

    said: list[str] = []
    monkeypatch.setattr(report._logger, "info", lambda text, *args: said.append(text % args))
    spec = ExpertsSpec(MODELOPT, 64, width, 8, scheme=scheme)
    own = Shard(tp_size=tp).columns(width, 16).padded
    selection = registry.select(MoEProblem(8, 8, 2, 64, own, spec.fmt), named(where))
    made = report.ServingReport()
    for name in LAYERS:
        made.add_experts(name, selection, spec)
    for name in LAYERS + LAYERS:
        made.loaded(name)
    return said


def test_one_line_for_all_layers_and_reloads(monkeypatch):
    """Field report 107: once, and with the reason of every backend that was not taken."""
    (line,) = serve(monkeypatch)
    assert "2 layers of nvfp4-ue4m3 experts" in line
    for name in registry.backend_names():
        assert (f"not {name}: " in line) == (name != "cpu")


def test_only_who_has_4_bit_activations_reads_that_they_are_not_used(monkeypatch):
    """Field report 107: a weight-only checkpoint misses nothing and is told nothing."""
    (weights_only,) = serve(monkeypatch, "w4a16")
    assert "ignores its input scales" not in weights_only
    (both,) = serve(monkeypatch, "w4a4")
    assert "the checkpoint is W4A4; backend cpu reads bfloat16 activations (W4A16)" in both
    assert both.count("ignores its input scales") == 1


@pytest.mark.parametrize(
    ("where", "scheme", "named_format"),
    [
        ("cpu", "w4a4", "nvfp4-ue4m3"),
        ("cpu", "w4a4-dynamic", "nvfp4-ue5m3"),
        ("sm_90a", "w4a4", None),
    ],
)
def test_a_format_is_named_where_a_backend_computes_it(monkeypatch, where, scheme, named_format):
    """Hopper has no FP4 activations: naming them there would refuse to serve."""
    (line,) = serve(monkeypatch, scheme, where=where)
    assert "ignores its input scales" in line
    asked = [w for w in line.split() if w.startswith("RUBIN_MOE_ACTIVATION_FORMAT=")]
    assert asked == ([f"RUBIN_MOE_ACTIVATION_FORMAT={named_format}"] if named_format else [])


@pytest.mark.parametrize(("width", "tp", "own"), [(352, 1, 0), (352, 2, 0), (352, 3, 128)])
def test_a_width_that_is_padded_is_named(monkeypatch, width, tp, own):
    """Field report 108: what does not come out even costs something, and is said."""
    (line,) = serve(monkeypatch, width=width, tp=tp)
    assert ("does not come out even" in line) == bool(own)
    assert f"352 does not come out even: {own} a rank" in line or not own
