"""The 32-bit instruction descriptor of block-scaled ``tcgen05.mma``.

The opcode does not tell an sm_107a instruction from an sm_100a one; this word does. Sources: PTX
ISA, instruction descriptor; first seed, sections 1.3, 2.3 and 5.1; what CuTe DSL 4.8.1 emits.
"""

from dataclasses import dataclass

from rubin_moe.arch.bits import Field, Word
from rubin_moe.arch.mma_rules import Mma, check
from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

_COMMON = (
    Field("sparse", 2, 1),
    Field("b_sf_id", 4, 2),
    Field("a_format", 7, 3),
    Field("b_format", 10, 3),
    Field("a_negate", 13, 1),
    Field("b_negate", 14, 1),
    Field("a_major", 15, 1),
    Field("b_major", 16, 1),
    Field("n_dim", 17, 6),
    Field("m_dim", 27, 2),
    Field("a_sf_id", 29, 2),
    Field("k_size", 31, 1),
)
SM100_WORD = Word("idesc", 32, (*_COMMON, Field("scale_format", 23, 1)))
SM107_WORD = Word(
    "idesc",
    32,
    (
        *_COMMON,
        Field("k_size_upper", 3, 1),
        Field("scale_format", 23, 2),
        Field("sfa_layout", 26, 1),
    ),
)

SCALE_CODES = {"ue4m3": 0, "ue8m0": 1, "ue5m3": 2}
# One code, two meanings: 1 is E2M1 in a pure FP4 kind and E5M2 in a mixed one.
FORMAT_CODES = {
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
}
# (k_size_upper, k_size) of each K of each kind.
_FP4_K = {"sm_100a": {64: (0, 0)}, "sm_103a": {64: (0, 0), 96: (0, 1)}}
_FP4_K["sm_107a"] = {64: (0, 0), 128: (1, 0)}
_FP8_K = {"sm_100a": {32: (0, 0)}, "sm_103a": {32: (0, 0)}, "sm_107a": {32: (0, 0), 64: (0, 1)}}


def word_of(arch: ArchSpec) -> Word:
    """The fields that ``arch`` defines."""
    if not arch.blocks_scale:
        raise PlanError(f"{arch.name} has no block-scaled instruction descriptor")
    return SM107_WORD if arch.capability >= (10, 7) else SM100_WORD


def _k_bits(arch: ArchSpec, kind: str) -> dict[int, tuple[int, int]]:
    return (_FP8_K if kind == "mxf8f6f4" else _FP4_K)[arch.name]


def build(arch: ArchSpec, mma: Mma, *, a_mn_major: bool = False, b_mn_major: bool = False) -> int:
    """The descriptor with scale-factor ids 0. Raises PlanError for an instruction that is not."""
    check(arch, mma)
    upper, lower = _k_bits(arch, mma.kind)[mma.k]
    values = {
        "a_format": FORMAT_CODES[mma.kind][mma.a],
        "b_format": FORMAT_CODES[mma.kind][mma.b],
        "a_major": int(a_mn_major),
        "b_major": int(b_mn_major),
        "n_dim": mma.n // 8,
        "scale_format": SCALE_CODES[mma.scale],
        "m_dim": mma.m // 128,
        "k_size": lower,
    }
    if upper:
        values["k_size_upper"] = upper
    return word_of(arch).encode(values)


@dataclass(frozen=True)
class Decoded:
    """What a descriptor says, for a kind that the opcode gives."""

    m: int
    n: int
    k: int
    a: str
    b: str
    scale: str
    a_sf_id: int
    b_sf_id: int
    a_negate: bool
    b_negate: bool


def decode(arch: ArchSpec, kind: str, word: int) -> Decoded:
    """The instruction that ``word`` stands for. Raises PlanError for undefined bits or codes."""
    f = word_of(arch).decode(word)
    formats = {code: name for name, code in FORMAT_CODES[kind].items()}
    scales = {code: name for name, code in SCALE_CODES.items()}
    ks = {bits: k for k, bits in _k_bits(arch, kind).items()}
    for operand in ("a", "b"):
        if f[f"{operand}_format"] not in formats:
            raise PlanError(f"idesc {word:#x}: {kind} has no format code {f[f'{operand}_format']}")
    bits = (f.get("k_size_upper", 0), f["k_size"])
    if bits not in ks:
        raise PlanError(f"idesc {word:#x}: bits 3 and 31 = {bits} select no K of {kind}")
    if f["scale_format"] not in scales:
        raise PlanError(f"idesc {word:#x}: scale format code {f['scale_format']}")
    return Decoded(
        m=f["m_dim"] * 128,
        n=f["n_dim"] * 8,
        k=ks[bits],
        a=formats[f["a_format"]],
        b=formats[f["b_format"]],
        scale=scales[f["scale_format"]],
        a_sf_id=f["a_sf_id"],
        b_sf_id=f["b_sf_id"],
        a_negate=bool(f["a_negate"]),
        b_negate=bool(f["b_negate"]),
    )


def runtime_n(valid_tokens: int, tile_n: int = 256, cta_group: int = 2) -> int:
    """Instruction N of a tile that holds ``valid_tokens``: up to the next multiple of 16, of 8 for
    a 1-CTA instruction. Raises PlanError for an empty or overfull tile."""
    if valid_tokens <= 0:
        raise PlanError("a tile of zero tokens has no instruction: N = 0 is illegal, skip the tile")
    if valid_tokens > tile_n:
        raise PlanError(f"{valid_tokens} tokens in a tile of {tile_n}")
    step = 8 * cta_group
    return -(-valid_tokens // step) * step


def patch_runtime(static: int, valid_tokens: int, sfa_taddr: int, sfb_taddr: int) -> int:
    """The descriptor of one tile, as 32-bit signed device code computes it.

    ``static`` has N and both scale-factor ids zero. The ids are bits 30-31 of the TMEM addresses;
    the mask comes after the shift, since a signed right shift fills with copies of bit 31.
    """
    n = runtime_n(valid_tokens)
    a_id = (_signed(sfa_taddr & 0xC0000000) >> (30 - 29)) & (0x3 << 29)
    b_id = (_signed(sfb_taddr & 0xC0000000) >> (30 - 4)) & (0x3 << 4)
    return (static | (n >> 3) << 17 | a_id | b_id) & 0xFFFFFFFF


def _signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


def tiled_tma_shift(valid_tokens: int, tile_n: int) -> int:
    """Rows by which the second CTA of a pair moves its tiled TMA view of the tokens.

    ``tma_partition`` gives it ``tile_n / 2``, the instruction wants half of the run-time N.
    """
    return runtime_n(valid_tokens, tile_n) // 2 - tile_n // 2


def sfb_chunk_slots(n: int, sf_vec_size: int, k: int, tile_n: int) -> list[tuple[int, int]]:
    """(shared-memory chunk, TMEM chunk) copies of SFB for one instruction of run-time ``n``.

    A chunk is 128 rows x 4 scales; shared memory holds, for each 4 scales of K, ``tile_n / 128``
    chunks. With n <= 128 the MMA expects only the first 128 rows, compactly.
    """
    groups = -(-k // (sf_vec_size * 4))
    per_group = -(-tile_n // 128)
    wanted = 1 if n <= 128 else per_group
    return [(g * per_group + r, g * wanted + r) for g in range(groups) for r in range(wanted)]
