"""Bars of progress in units of their own: how much of how much, how fast, how long still."""

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn

UNITS = {"calibrate": (1, "tokens")}
"""Stage -> size and name of its unit; megabytes where it is not here."""


class Bars(Progress):
    """One bar a stage, on the error stream."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self._stages: dict[str, TaskID] = {}

    def report(self, stage: str, done: int, total: int) -> None:
        """``done`` more of ``total`` bytes, or of what the stage counts."""
        if stage not in self._stages:
            self._stages[stage] = self.add_task(stage, total=total, told="")
        self.advance(self._stages[stage], done)
        task = next(t for t in self.tasks if t.id == self._stages[stage])
        self.update(task.id, told=told(task, *UNITS.get(stage, (1_000_000, "MB"))))


def told(task: Task, size: int, unit: str) -> str:
    """Such as ``3/7 MB, 1,200 MB/s``."""
    speed = task.finished_speed or task.speed
    rate = "" if speed is None else f", {speed / size:,.0f} {unit}/s"
    return f"{task.completed / size:,.0f}/{(task.total or 0) / size:,.0f} {unit}{rate}"
