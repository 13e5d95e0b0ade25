"""``rubin-moe inspect``: what a checkpoint holds and whether it would load."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubin_moe.cli.model import layer_ranges, ranges

if TYPE_CHECKING:
    from rubin_moe.convert.scale_survey import LayerScales
    from rubin_moe.loader.sharding import Shard
    from rubin_moe.loader.summary import CheckpointSummary, LayerSummary

app = typer.Typer(add_completion=False)

WIDTH = 150
_SHOWN = 6


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="folder of the checkpoint")],
    tp: Annotated[int, typer.Option(help="ranks that cut every expert")] = 1,
    ep: Annotated[int, typer.Option(help="ranks that share out the experts")] = 1,
    scales: Annotated[
        bool, typer.Option("--scales", help="read the scales: bad codes, spreads, fold loss")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Tell from headers and configs: dialect, formats, coverage, exclusions, sizes, faults.

    Exit code 0 if every layer of FP4 experts would load, 1 if not, 2 if it is no checkpoint.
    """
    from rubin_moe.loader.load import ModelCheckpoint
    from rubin_moe.loader.sharding import Shard
    from rubin_moe.loader.summary import summarize

    with ModelCheckpoint(checkpoint) as opened:
        summary = summarize(opened)
        surveyed: list[LayerScales] = []
        if scales:
            from rubin_moe.convert.scale_survey import survey_scales

            surveyed = list(survey_scales(opened))
    shard = Shard(tp_size=tp, ep_size=ep)
    if as_json:
        typer.echo(json.dumps(_record(summary, surveyed, shard), indent=1))
    else:
        _print(summary, surveyed, shard)
    sound = summary.loads and all(s.sound for s in surveyed)
    raise typer.Exit(int(not sound))


def _record(
    summary: "CheckpointSummary", surveyed: "list[LayerScales]", shard: "Shard"
) -> dict[str, Any]:
    fp4 = [x for x in summary.layers if x.spec is not None]
    return {
        "name": summary.name,
        "loads": summary.loads and all(s.sound for s in surveyed),
        "files": summary.files,
        "tensors": summary.tensors,
        "bytes": summary.nbytes,
        "declared_by": summary.declared_by,
        "formats": summary.formats,
        "exclusions": dict(summary.exclusions),
        "other_bytes": dict(summary.other_bytes),
        "tp_sizes": list(summary.tp_sizes()),
        "tp_sizes_without_padding": list(summary.tp_sizes(pad=False)),
        "ep_sizes": list(summary.ep_sizes()),
        "rank": {
            "tp": shard.tp_size,
            "ep": shard.ep_size,
            "expert_bytes": summary.rank_bytes(shard) if fp4 else 0,
            "padded_width": _padded(fp4, shard),
        },
        "layers": [_layer(x) for x in summary.layers],
        "scales": [s.record() for s in surveyed],
    }


def _layer(layer: "LayerSummary") -> dict[str, Any]:
    spec = layer.spec
    told: dict[str, Any] = {
        "layer": layer.layer,
        "module": layer.module,
        "bytes": layer.nbytes,
        "faults": list(layer.faults),
        "missing_input_scales": {p: list(e) for p, e in layer.uncalibrated.items()},
    }
    if spec is None:
        return {**told, "format": "unquantized" if layer.unquantized else None}
    return {
        **told,
        "format": spec.fmt.name,
        "dialect": spec.dialect.name,
        "scheme": spec.scheme,
        "experts": spec.num_experts,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "gated": spec.gated,
        "bias": spec.has_bias,
        "stacking": None if spec.stacking is None else str(spec.stacking),
        "notes": list(spec.notes),
    }


def _padded(layers: "list[LayerSummary]", shard: "Shard") -> dict[str, int]:
    """Expert width -> width that a rank stores."""
    found = {}
    for layer in layers:
        assert layer.spec is not None
        width = layer.spec.intermediate
        found[str(width)] = shard.columns(width, layer.spec.fmt.sf_vec_size).padded
    return found


def _print(summary: "CheckpointSummary", surveyed: "list[LayerScales]", shard: "Shard") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=WIDTH, highlight=False, soft_wrap=True)
    console.print(
        f"{summary.name}: {summary.tensors:,} tensors in {summary.files} "
        f"file{'s' if summary.files > 1 else ''}, "
        f"{summary.nbytes:,} bytes; precision declared by {summary.declared_by or 'nothing'}",
        markup=False,
    )
    table = Table("experts", "layers", "which", box=None)
    for what, layers in summary.formats.items():
        table.add_row(what, str(len(layers)), layer_ranges(layers))
    console.print(table)
    other = ", ".join(f"{d} {n:,}" for d, n in sorted(summary.other_bytes.items()))
    console.print(f"everything else, bytes: {other or 'nothing'}", markup=False)
    for entry, modules in summary.exclusions.items():
        if not modules:
            console.print(f"exclusion {entry!r} matches no module", markup=False)
    matched = sum(1 for n in summary.exclusions.values() if n)
    if summary.exclusions:
        console.print(f"{matched} of {len(summary.exclusions)} exclusions match a module")
    _print_layers(console, summary)
    for found in surveyed:
        _print_scales(console, found)
    if any(x.spec for x in summary.layers):
        even = summary.tp_sizes(pad=False)
        padded = [t for t in summary.tp_sizes() if t not in even]
        more = f"; with padding {ranges(padded)}" if padded else ""
        console.print(f"TP sizes: {', '.join(map(str, even)) or 'none'}{more}", markup=False)
        console.print(f"EP sizes: {', '.join(map(str, summary.ep_sizes()))}", markup=False)
        where = f"TP {shard.tp_size}, EP {shard.ep_size}"
        console.print(f"expert bytes a rank at {where}: {summary.rank_bytes(shard):,}")
    sound = summary.loads and all(s.sound for s in surveyed)
    if not any(x.spec or x.faults for x in summary.layers):
        console.print("does not load: no layer has FP4 experts; `rubin-moe convert` makes them")
    else:
        console.print("loads" if sound else "does not load")


def _print_layers(console: Any, summary: "CheckpointSummary") -> None:
    for layer in summary.layers:
        for fault in layer.faults:
            console.print(f"fault: {fault}", markup=False)
        for projection, experts in layer.uncalibrated.items():
            console.print(
                f"{layer.module}: no input scale of {projection} for experts {list(experts)}",
                markup=False,
            )
    notes: dict[str, list[str]] = {}
    for layer in summary.layers:
        for note in () if layer.spec is None else layer.spec.notes:
            notes.setdefault(note.replace(layer.module, "a module"), []).append(layer.layer)
    for note, layers in notes.items():
        console.print(f"note: {note} [{layer_ranges(layers)}]", markup=False)


def _print_scales(console: Any, found: "LayerScales") -> None:
    loss = ", ".join(f"{k} {v:.2%}" for k, v in found.fold_loss.items())
    console.print(
        f"{found.module}: scales {found.low:.3g} to {found.high:.3g}, {found.zero} zero"
        + (f"; mean error if folded {loss}" if loss else ""),
        markup=False,
    )
    for kind in ("nan", "negative"):
        if getattr(found, kind):
            console.print(
                f"  {getattr(found, kind)} {kind}: {'; '.join(found.where)}", markup=False
            )
    for line in found.bad_globals[:_SHOWN]:
        console.print(f"  {line}", markup=False)
    if found.unlike:
        worst = max(found.unlike.values(), key=lambda r: max(r, 1 / r))
        console.print(
            f"  gate and up of {len(found.unlike)} experts have global scales of their own, "
            f"at most {max(worst, 1 / worst):.3g} apart: kept apart, no loss"
        )
