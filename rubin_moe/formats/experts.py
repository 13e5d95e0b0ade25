"""The canonical container of one MoE layer's routed experts.

Every loader dialect produces it, every kernel's weight layout is made from it. Frozen, on logical
axes, with no behaviour beyond shape checks. Rows of ``w13`` are ``[gate; up]`` as two contiguous
halves (never interleaved), or only ``up`` for activations without a gate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rubin_moe.errors import CheckpointError
from rubin_moe.formats.spec import BlockFormat


@dataclass(frozen=True, eq=False)
class ProjectionWeights:
    """One projection of all local experts.

    Attributes:
        qdata: uint8 ``[E, N, K / 2]``, two E2M1 codes a byte, even K in the low nibble.
        sf: uint8 ``[E, N, K / sf_vec_size]``, raw block scale codes of the layer's format.
        dec: float32 ``[E, halves]``, multiplies on decode; one per half of ``w13``, one for ``w2``;
            ones where the format has no global scale.
        bias: float32 ``[E, N]`` in real units, or None.
        input_dec: float32 ``[E, halves]`` activation scale (multiplies on decode), NaN where an
            expert was never calibrated, or None where the checkpoint has none at all.
    """

    qdata: Tensor
    sf: Tensor
    dec: Tensor
    bias: Tensor | None = None
    input_dec: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by attribute name."""
        named = {n: getattr(self, n) for n in ("qdata", "sf", "dec", "bias", "input_dec")}
        return {n: t for n, t in named.items() if t is not None}


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Routed experts of one layer, as stored in value.

    Attributes:
        fmt: weight format of both projections.
        hidden: width the experts read and write (a latent width in some models).
        intermediate: expert width ``I``; ``w13`` has ``2 I`` rows when gated, else ``I``.
        gated: whether ``w13`` holds gate and up.
        w13: ``N = 2 I or I``, ``K = hidden``.
        w2: ``N = hidden``, ``K = intermediate``.
        expert_ids: global id of each local expert, in order.
        name: module name in the checkpoint, for messages.
        layer_input_dec: the largest ``w13.input_dec`` of all experts of the layer, other ranks'
            included: FC1's activation scale where a token is quantized once for all its experts
            (`kernels.input_scales`). NaN where one was never calibrated, None where the checkpoint
            has none at all or nobody looked at the other ranks' experts.

    Raises:
        CheckpointError: a tensor whose dtype or shape is not the one stated above.
    """

    fmt: BlockFormat
    hidden: int
    intermediate: int
    gated: bool
    w13: ProjectionWeights
    w2: ProjectionWeights
    expert_ids: tuple[int, ...]
    name: str = "experts"
    layer_input_dec: float | None = None

    @property
    def num_experts(self) -> int:
        """Local experts."""
        return len(self.expert_ids)

    @property
    def halves(self) -> int:
        """Row groups of ``w13`` with a decode scale of their own."""
        return 2 if self.gated else 1

    @property
    def has_bias(self) -> bool:
        return self.w13.bias is not None or self.w2.bias is not None

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (*self.w13.tensors().values(), *self.w2.tensors().values())
        return sum(t.numel() * t.element_size() for t in parts)

    def __post_init__(self) -> None:
        rows = self.intermediate * self.halves
        self._check("w13", self.w13, rows, self.hidden, self.halves)
        self._check("w2", self.w2, self.hidden, self.intermediate, 1)

    def _check(self, proj: str, w: ProjectionWeights, n: int, k: int, halves: int) -> None:
        e = self.num_experts
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "qdata": (torch.uint8, (e, n, self.fmt.packed_k(k))),
            "sf": (torch.uint8, (e, n, self.fmt.scales_k(k))),
            "dec": (torch.float32, (e, halves)),
            "bias": (torch.float32, (e, n)),
            "input_dec": (torch.float32, (e, halves)),
        }
        for attr, tensor in w.tensors().items():
            dtype, shape = expected[attr]
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.name}.{proj}.{attr}: {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {dtype} {list(shape)} for {e} experts of {self.fmt}"
                )
