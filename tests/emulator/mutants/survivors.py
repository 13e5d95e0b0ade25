"""What is known of mutants that were neither caught nor shown to be equivalent."""

from __future__ import annotations

#: By operator and the start of the opcode: the first that fits.
_REASONS = (
    ("shift barrier", "mbarrier.init", "probably equivalent, not shown: the mbarrier that is left "
     "out belongs to a stage that the launch does not reach (its use would be a trap)"),
    ("drop commit", "tcgen05.commit", "probably equivalent, not shown: the ring of stages does "
     "not come around to the stage that the commit releases"),
    ("swap", "tcgen05.mma", "probably equivalent, not shown: nobody waits for the stage that the "
     "commit releases early"),
    ("drop wait", "bar.warp.sync", "probably equivalent, not shown: no lane reads what another "
     "lane of the warp wrote on the way here"),
    ("drop wait", "mbarrier", "open: no schedule of those tried shows it"),
    ("second CTA", "cp.async.bulk.tensor", "open: the launch gives the same bytes"),
)  # fmt: skip


def reason(operator: str, fault: str) -> str:
    """The reason for a survivor, or that none is known."""
    for known, opcode, text in _REASONS:
        if operator == known and f": {opcode}" in fault:
            return text
    return "open"
