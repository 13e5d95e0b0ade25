"""Which dialect a layer's experts are stored in, by the tensors that are there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.compressed_tensors import COMPRESSED_MXFP4, COMPRESSED_NVFP4
from rubin_moe.loader.deepseek_v4 import DEEPSEEK_V4
from rubin_moe.loader.dialect import Dialect
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.rubin_ue5m3 import RUBIN_UE5M3

DIALECTS: Mapping[str, Dialect] = {
    d.name: d
    for d in (MODELOPT, COMPRESSED_NVFP4, COMPRESSED_MXFP4, GPT_OSS, DEEPSEEK_V4, RUBIN_UE5M3)
}
LEAVES = frozenset(leaf for d in DIALECTS.values() for leaf in d.leaves)
"""Every leaf that any dialect knows."""


@dataclass(frozen=True)
class NotFp4:
    """Experts stored as something else.

    Attributes:
        kind: ``unquantized`` experts are another loader's; the others nobody's here.
        reason: a sentence.
    """

    kind: Literal["unquantized", "fp8", "int4", "unknown"]
    reason: str


def identify(
    stored: Iterable[tuple[str, str]], scale_format: Literal["ue4m3", "ue5m3"], where: str
) -> Dialect | NotFp4:
    """The dialect of one ``experts`` module.

    Args:
        stored: (leaf, safetensors dtype) of its tensors.
        scale_format: what the config says U8 block scales of group 16 are.

    Raises:
        CheckpointError: tensors of several dialects in one module, or U8 scales whose type the
            config does not give.
    """
    kinds: dict[str, set[str]] = {}
    for leaf, dtype in stored:
        kinds.setdefault(leaf, set()).add(dtype)
    payloads = {
        leaf: kinds[leaf] for leaf in ("weight", "weight_packed", "blocks") if leaf in kinds
    }
    found = [(leaf, dtype) for leaf, dtypes in payloads.items() for dtype in sorted(dtypes)]
    if len(found) > 1:
        told = ", ".join(f"{leaf} {dtype}" for leaf, dtype in found)
        raise CheckpointError(f"{where}: experts are stored in several ways: {told}")
    if not found:
        return NotFp4("unknown", f"{where}: no weight among {sorted(kinds)}")
    scales = kinds.get("weight_scale", set())
    match found[0]:
        case ("blocks", "U8"):
            return GPT_OSS
        case ("weight", "I8") if "scale" in kinds:
            return DEEPSEEK_V4
        case ("weight_packed", "U8"):
            return COMPRESSED_MXFP4 if scales and "F8_E4M3" not in scales else COMPRESSED_NVFP4
        case ("weight", "U8") if scales == {"U8"}:
            if scale_format != "ue5m3":
                raise CheckpointError(
                    f"{where}: block scales are U8, and the config has no scale_format that says "
                    "what the bytes are"
                )
            return RUBIN_UE5M3
        case ("weight", "U8"):
            return MODELOPT
        case (leaf, "BF16" | "F16" | "F32" as dtype):
            return NotFp4("unquantized", f"{where}: {leaf} is {dtype}, not quantized")
        case (leaf, "F8_E4M3" | "F8_E5M2" as dtype):
            return NotFp4("fp8", f"{where}: {leaf} is {dtype}, 8 bits a weight, not FP4")
        case (leaf, "I32" | "I4" | "U32" as dtype):
            return NotFp4("int4", f"{where}: {leaf} is {dtype}, packed integers, not FP4")
        case (leaf, dtype):
            return NotFp4("unknown", f"{where}: {leaf} is {dtype}, which no FP4 dialect has")
