"""What the CPU backend computes. Standard library only."""

from rubin_moe.errors import PlanError
from rubin_moe.formats.spec import WEIGHT_FORMATS
from rubin_moe.kernels.base import KernelPlan, MoEProblem, Target

WORKSPACE_BYTES = 256 << 20
"""Tokens are taken in chunks that need no more than this, or one by one."""

TILE_ROWS = 16
"""Weight rows that are computed together."""

ITEMS_PER_THREAD = 12
"""Work is cut this fine: what a thread prefetches beyond its item is fetched twice."""

DTYPES = ("bfloat16", "float16", "float32")
NEEDS = ("torch", "llvmlite")


def why_not(problem: MoEProblem, target: Target) -> str | None:
    """None if this backend computes ``problem`` on ``target``, else the reason."""
    if target.device != "cpu":
        return f"computes on the CPU, and the layer's tensors are on {target}"
    if problem.weight_format not in WEIGHT_FORMATS:
        return f"no decoder for {problem.weight_format} weights"
    if problem.dtype not in DTYPES:
        return f"hidden states of {problem.dtype}; computes {', '.join(DTYPES)}"
    if problem.activation_format not in ("16bit", "int8"):
        return f"activation format {problem.activation_format}; computes 16bit (W4A16) and int8"
    missing = [name for name in NEEDS if target.versions and name not in target.versions]
    if missing:
        return f"needs {' and '.join(missing)}: pip install 'rubin-moe[cpu]'"
    return None


def plan(problem: MoEProblem, num_tokens: int) -> KernelPlan:
    """Chunks of tokens, workspace and tiles for ``num_tokens``."""
    for name, size in (("hidden", problem.hidden), ("intermediate", problem.intermediate)):
        if size % TILE_ROWS:
            raise PlanError(f"{name} = {size} is no multiple of {TILE_ROWS} rows")
    chunk = min(num_tokens, chunk_tokens(problem))
    return KernelPlan(
        "cpu",
        {
            "tokens": num_tokens,
            "chunk_tokens": chunk,
            "workspace_bytes": chunk * token_bytes(problem),
            "fc1_tiles_per_expert": problem.intermediate // TILE_ROWS,
            "fc2_tiles_per_expert": problem.hidden // TILE_ROWS,
        },
    )


def token_bytes(problem: MoEProblem) -> int:
    """Most workspace a token takes: per expert, its activations and FC2's result, in fp32."""
    return problem.top_k * 4 * (2 * problem.hidden + problem.intermediate)


def chunk_tokens(problem: MoEProblem) -> int:
    """Tokens that one pass over the experts takes."""
    return max(1, WORKSPACE_BYTES // token_bytes(problem))


def tiles_per_item(rows: int, active_experts: int, threads: int) -> int:
    """Tiles of an expert with ``rows`` rows that a thread takes at a time."""
    return max(1, rows // TILE_ROWS * active_experts // (threads * ITEMS_PER_THREAD))
