"""Pictures of where a kernel keeps things: tensor-memory columns and shared-memory bytes.

``draw_report(path, report)`` writes a PNG of a launch, ``draw_maps(path, tmem, smem, ...)`` one of
regions of your own; matplotlib is imported when they are called.
:class:`Region` is one labelled range; regions that overlap get rows of their own, so that reuse of
the same columns is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .state.tmem import CAPACITY

if TYPE_CHECKING:
    from .report import Report


@dataclass(frozen=True)
class Region:
    """``[start, stop)`` in columns or bytes; ``writer`` names what wrote it (TMA, MMA, cp, st)."""

    start: int
    stop: int
    label: str
    writer: str = ""


def pack_rows(regions: Sequence[Region]) -> list[list[Region]]:
    """Put regions into as few rows as their overlaps allow, each row in ascending order."""
    rows: list[list[Region]] = []
    for region in sorted(regions, key=lambda r: (r.start, -r.stop, r.label)):
        for row in rows:
            if row[-1].stop <= region.start:
                row.append(region)
                break
        else:
            rows.append([region])
    return rows


def draw_maps(
    path: Path,
    tmem: Sequence[Region],
    smem: Sequence[Region],
    *,
    tmem_columns: int,
    smem_bytes: int,
    title: str = "",
) -> None:
    """Write the picture of one kernel's tensor and shared memory to ``path`` (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    maps = [
        ("tensor memory, columns", tmem, tmem_columns, 1),
        ("shared memory, KiB", smem, smem_bytes, 1024),
    ]
    packed = [pack_rows(regions) for _, regions, _, _ in maps]
    heights = [max(len(rows), 1) for rows in packed]
    figure = Figure(figsize=(12, 1.2 + 0.45 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 1, height_ratios=heights)
    writers = sorted({r.writer for regions in (tmem, smem) for r in regions})
    colours = {writer: f"C{i}" for i, writer in enumerate(writers)}
    for axis, (name, _, extent, unit), rows in zip(axes, maps, packed, strict=True):
        _draw(axis, rows, extent, unit, colours)
        axis.set_xlabel(name)
    named = [Patch(color=colours[w], alpha=0.6, label=w) for w in writers if w]
    if named:
        figure.legend(handles=named, loc="outside right upper")
    figure.savefig(path, dpi=110, format="png")


def draw_report(path: Path, report: Report) -> None:
    """Write the picture of a finished launch: what its copies and products used, by kind."""
    maps = [
        [Region(p.start, p.start + p.size, p.use, p.use) for p in places]
        for places in (report.tmem_map, report.smem_map)
    ]
    ends = [region.stop for region in maps[1]]
    draw_maps(
        path,
        *maps,
        tmem_columns=CAPACITY.get(report.target, 512),
        smem_bytes=max([report.shared_bytes, *ends]),
        title=f"{report.kernel[:80]} ({report.target})",
    )


def _draw(
    axis: Any, rows: list[list[Region]], extent: int, unit: int, colours: dict[str, str]
) -> None:
    for level, row in enumerate(rows):
        for region in row:
            left, width = region.start / unit, (region.stop - region.start) / unit
            axis.barh(
                level,
                width,
                left=left,
                height=0.8,
                color=colours[region.writer],
                alpha=0.6,
                edgecolor="black",
                linewidth=0.6,
            )
            if region.stop - region.start > extent / 60:
                axis.text(left + width / 2, level, region.label, ha="center", va="center", size=7)
    axis.set_xlim(0, extent / unit)
    axis.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axis.set_yticks([])
