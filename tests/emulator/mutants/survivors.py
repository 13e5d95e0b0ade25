"""What is known of mutants that were neither caught nor shown to be equivalent."""

from __future__ import annotations

#: By operator and the start of the opcode: the first that fits.
_REASONS = (
    ("drop fence", "fence.proxy.async", "probably equivalent, not shown: the fence stands before "
     "an mbarrier arrival that hands on bytes which threads alone read; no asynchronous access "
     "of the launch lacks another fence"),
    ("drop fence", "tcgen05.fence", "missed: the letter of the ISA, checked for part of the "
     "tcgen05 operations only; no peer kernel has this fence"),
    ("shift barrier", "mbarrier.init", "probably equivalent, not shown: the mbarrier that is left "
     "out belongs to a stage that the launch does not reach (its use would be a trap)"),
    ("drop commit", "tcgen05.commit", "probably equivalent, not shown: the ring of stages does "
     "not come around to the stage that the commit releases"),
    ("swap", "tcgen05.mma", "probably equivalent, not shown: nobody waits for the stage that the "
     "commit releases early"),
    ("drop wait", "bar.sync", "missed: a wgmma is performed for the four warps as a whole, so one "
     "warp's wait_group also covers the others' reads of shared memory"),
    ("drop wait", "mbarrier", "open: no schedule of those tried shows it"),
    ("second CTA", "cp.async.bulk.tensor", "open: the launch gives the same bytes"),
)  # fmt: skip


def reason(operator: str, fault: str) -> str:
    """The reason for a survivor, or that none is known."""
    for known, opcode, text in _REASONS:
        if operator == known and f": {opcode}" in fault:
            return text
    return "open"
