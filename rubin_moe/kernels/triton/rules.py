"""What the Triton backend computes. Standard library only."""

import os

from rubin_moe.formats.spec import WEIGHT_FORMATS
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target
from rubin_moe.kernels.triton import plan as plans

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0))
"""Compute capabilities that it compiles for; `registry` says on which it never ran."""

DTYPES = ("bfloat16", "float16", "float32")
OLDEST = (3, 6)
PACKAGE = "triton"


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.device == "cpu" and not interpreted():
        return "computes on a GPU (TRITON_INTERPRET=1: on a CPU, minutes a token, to test it)"
    if target.capability is not None and target.capability not in CAPABILITIES:
        known = ", ".join("sm_{}{}".format(*c) for c in CAPABILITIES)
        return f"is compiled for {known}; this is {target}"
    return _why_not_problem(problem) or _why_not_compiler(target)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter; it reads the same variable on import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """Groups and memory of a launch; more tokens than ``tokens`` take several launches."""
    made = plans.make_plan(problem, num_tokens)
    return KernelPlan(
        "triton",
        {
            "tokens": min(num_tokens, plans.max_tokens(problem)),
            "group": made.group,
            "max_groups": made.max_groups,
            "num_warps": made.num_warps,
            "num_stages": made.num_stages,
            "workspace_bytes": plans.workspace_bytes(problem, num_tokens),
        },
    )


def _why_not_problem(problem: MoEProblem) -> str | None:
    if problem.weight_format not in WEIGHT_FORMATS:
        return f"no decoder for {problem.weight_format} weights"
    if problem.activation_format != "16bit":
        return f"multiplies the model's own activations, not {problem.activation_format}"
    if problem.dtype not in DTYPES:
        return f"hidden states of {problem.dtype}; computes {', '.join(DTYPES)}"
    if problem.num_experts > plans.MAX_EXPERTS:
        return f"at most {plans.MAX_EXPERTS} experts; these are {problem.num_experts}"
    return None


def _why_not_compiler(target: Target) -> str | None:
    found = target.versions.get(PACKAGE)
    if found is None or tuple(int(p) for p in found.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"needs triton {oldest} to compile its kernels: pip install 'rubin-moe[triton]'"
    return None
