"""Tiles, stages and addresses of the sm_107a grouped GEMMs. Standard library only.

Both GEMMs share a mainloop: A is 128 rows of weights a CTA (one bulk copy a stage, in the order of
`layouts.sm107_tiles`), B is up to ``tile_n`` tokens by row index. A K tile is 128 bytes of a
token's codes and two instructions of 64 bytes: 256 elements of FP4, 128 of FP8. Scales of tokens go
to shared memory with 4-byte ``cp.async`` straight into 128 x 4 chunks and from there by UTCCP: a K
tile of NVFP4 has ``4 tile_n`` such words, 4 a thread at 128 tokens, where transform warps with
``tcgen05.st`` would cost four more warps, four stages of 16 TMEM columns and 64 shared loads.
"""

from dataclasses import dataclass
from functools import lru_cache

from rubin_moe.arch import SM107A, barriers, instr_desc
from rubin_moe.arch.mma_rules import Mma
from rubin_moe.arch.smem_plan import Buffer, SmemPlan, plan_smem
from rubin_moe.arch.tmem_plan import TmemPlan, TmemRequest, plan_tmem
from rubin_moe.errors import PlanError

TILE_M = 128
TOKEN_ROW_BYTES = 128
CHUNK_BYTES = 512
EPILOGUE_WARPS = 4
GATHER_WARPS = 4
MMA_WARP = EPILOGUE_WARPS
WEIGHT_WARP = MMA_WARP + 1
FIRST_GATHER_WARP = WEIGHT_WARP + 1
THREADS = 32 * (EPILOGUE_WARPS + 2 + GATHER_WARPS)
LAG = 3  # cp.async groups a gather thread keeps in flight
TILES_N = (32, 64, 128, 256)
GATHERED = ("sB", "sSFB")
"""Buffers that `cp.async.cg` fills."""
SUBTILE = 32  # tokens that an epilogue warp drains at once
TOKEN_STAGES = 6
"""Of a split ring at most: tokens are few and lie in L2, weights come from HBM."""
MAX_STAGES = 24
SCALE_STAGES = 2
"""K tiles of scales in tensor memory at most: one being read, one being copied."""
EXCHANGE_OFFSET = 1024
"""Shared memory between the barriers and the first buffer, which alignment leaves unused."""


@dataclass(frozen=True)
class Operands:
    """What an instruction multiplies: FP4 weights with tokens of one activation format.

    Attributes:
        kind: of ``tcgen05.mma``; token: element type of B; scale: of both operands' blocks of
            ``sf_vec`` elements; tile_k: elements of a K tile.
    """

    kind: str
    token: str
    scale: str
    sf_vec: int
    tile_k: int

    @property
    def weight_row_bytes(self) -> int:
        """Of a K tile: packed FP4, in the mixed kind too."""
        return self.tile_k // 2

    @property
    def scales_k(self) -> int:
        """Scales of a row and K tile."""
        return self.tile_k // self.sf_vec

    @property
    def groups(self) -> int:
        """Chunks of four scales along a K tile."""
        return self.scales_k // 4

    @property
    def weight_bytes(self) -> int:
        """Of a K tile of 128 rows: codes, then scales."""
        return TILE_M * self.weight_row_bytes + CHUNK_BYTES * self.groups


OPERANDS = {
    "nvfp4-ue4m3": Operands("mxf4nvf4", "e2m1", "ue4m3", 16, 256),
    "nvfp4-ue5m3": Operands("mxf4nvf4", "e2m1", "ue5m3", 16, 256),
    "mxfp8": Operands("mxf8f6f4", "e4m3", "ue8m0", 32, 128),
}
"""By activation format."""


@dataclass(frozen=True)
class GemmPlan:
    """One grouped GEMM's kernel.

    Attributes:
        fmt: activation format; operands: what it means for the instruction.
        tile_n: tokens of a tile at most; the instruction's N is set at run time.
        cta_group: CTAs that share a tile of tokens: each has 128 rows of weights, its part of the
            tokens' codes and all of their scales.
        scale_stages: K tiles of scales in tensor memory.
        idesc: of the two instructions of a K tile, with N = 0.
    """

    fmt: str
    operands: Operands
    tile_n: int
    cta_group: int
    scale_stages: int
    smem: SmemPlan
    tmem: TmemPlan
    idesc: tuple[int, int]

    def offset(self, buffer: str) -> int:
        """Byte address of a buffer in the block's shared memory."""
        return next(p.offset for p in self.smem.placed if p.name == buffer)

    def stride(self, buffer: str) -> int:
        """Bytes from one stage of a buffer to the next."""
        return next(p.nbytes // p.stages for p in self.smem.placed if p.name == buffer)

    @property
    def weight_stages(self) -> int:
        return self.smem.stages["weights"]

    @property
    def token_stages(self) -> int:
        return self.smem.stages["tokens"]

    @property
    def token_rows(self) -> int:
        """Rows of codes that one CTA holds."""
        return self.tile_n // self.cta_group

    @property
    def token_chunks(self) -> int:
        """Chunks of 128 tokens for each four scales of K."""
        return -(-self.tile_n // 128)

    @property
    def smem_bytes(self) -> int:
        return self.smem.used

    @property
    def weight_edge(self) -> barriers.Edge:
        """Of each CTA for itself; the second one of a pair passes it on."""
        return barriers.tma_to_mma("weights", self.operands.weight_bytes)

    @property
    def token_edge(self) -> barriers.Edge:
        return barriers.threads_to_mma("tokens", GATHER_WARPS)

    @property
    def accumulator_edge(self) -> barriers.Edge:
        return barriers.mma_to_epilogue("accumulator", EPILOGUE_WARPS, cta_group=self.cta_group)

    def __str__(self) -> str:
        return (
            f"{self.fmt} tile {TILE_M * self.cta_group}x{self.tile_n}x{self.operands.tile_k}, "
            f"{self.weight_stages} weight and {self.token_stages} token stages, "
            f"{self.smem_bytes} bytes of shared memory, {self.tmem.allocated} TMEM columns"
        )


@lru_cache(maxsize=64)
def plan_gemm(fmt: str, tile_n: int, cta_group: int = 1) -> GemmPlan:
    """The plan for tiles of ``tile_n`` tokens. Raises PlanError for one that is not built."""
    if fmt not in OPERANDS:
        raise PlanError(f"{fmt} activations: built are {', '.join(OPERANDS)}")
    if tile_n not in TILES_N:
        raise PlanError(f"tile_n = {tile_n}: built are {', '.join(map(str, TILES_N))}")
    o = OPERANDS[fmt]
    mma = Mma(
        o.kind, TILE_M * cta_group, tile_n, o.tile_k // 2, cta_group, b=o.token, scale=o.scale,
        sf_vec_size=o.sf_vec,
    )  # fmt: skip
    base = instr_desc.build(SM107A, mma) & ~(0x3F << 17)
    second = _scale_id(o)  # of the tile's second instruction; the first one's is 0
    stages, tmem = _plan_scales(o, tile_n)
    return GemmPlan(
        fmt, o, tile_n, cta_group, stages, _plan_rings(o, tile_n, cta_group), tmem,
        (base, base | second << 29 | second << 4),
    )  # fmt: skip


def _scale_id(o: Operands) -> int:
    """First byte in a column of four scales that the second instruction of a K tile reads: 0 where
    an instruction takes whole columns."""
    return o.scales_k // 2 % 4


def _plan_scales(o: Operands, tile_n: int) -> tuple[int, TmemPlan]:
    """Two K tiles of scales where they leave two disjoint accumulators, else one. Overlapping
    accumulators would cost an early release, and FC1 transposes in them."""
    for stages in range(SCALE_STAGES, 0, -1):
        request = TmemRequest(
            tile_n, o.tile_k, o.sf_vec, sfb_rows=tile_n, sfa_stages=stages, sfb_stages=stages
        )
        try:
            plan = plan_tmem(SM107A, request)
        except PlanError:
            continue
        if not plan.overlap:
            return stages, plan
    raise PlanError(f"tile_n = {tile_n}: no two disjoint accumulators beside the scales")


def _plan_rings(o: Operands, tile_n: int, cta_group: int) -> SmemPlan:
    """A token ring of its own, as deep as `TOKEN_STAGES` or what the gather needs in flight, if
    that gives the weights more stages; else one depth for both."""
    scale_bytes = CHUNK_BYTES * o.groups * -(-tile_n // 128)
    buffers = [
        Buffer("sB", tile_n // cta_group * TOKEN_ROW_BYTES, "tokens", cp_async=True),
        Buffer("sSFB", scale_bytes, "tokens", cp_async=True),
        Buffer("sA", o.weight_bytes, "weights"),
    ]
    for depth in range(TOKEN_STAGES, LAG, -1):
        try:
            return plan_smem(SM107A, buffers, token_stages=depth, max_stages=MAX_STAGES)
        except PlanError:  # gains nothing
            continue
    return plan_smem(SM107A, buffers, max_stages=MAX_STAGES)


def tiles_of(fmt: str, k: int) -> int:
    """K tiles of a GEMM over ``k`` elements."""
    return -(-k // OPERANDS[fmt].tile_k)


def choose_tile_n(num_tokens: int, top_k: int, num_experts: int) -> int:
    """The smallest tile that holds the tokens an expert gets when they spread evenly over all of
    the model's ``num_experts``, other ranks' included; a tile more for a skewed routing costs a
    second pass over that expert's weights, no wrong result."""
    mean = -(-num_tokens * top_k // max(1, num_experts))
    return next((n for n in TILES_N if n >= mean), TILES_N[-1])


def choose_cta_group(fmt: str, tile_n: int) -> int:
    """A pair of CTAs where a stage has more bytes of tokens, which a pair shares, than of weights,
    which it does not."""
    o = OPERANDS[fmt]
    tokens = tile_n * (TOKEN_ROW_BYTES + o.scales_k)
    return 2 if tokens > o.weight_bytes else 1
