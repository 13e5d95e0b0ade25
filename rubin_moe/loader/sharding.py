"""Which experts and which part of the intermediate width a rank holds, on logical axes.

Tensor parallelism cuts the expert width ``I``: rows of gate and of up each, columns of down. A
scale block is never cut: ranks get whole blocks, the first ones one more where they do not come out
even, and a rank that got fewer is padded *per half* with zero codes and zero scales, which add
exactly nothing. So 2880 wide experts on 8 ranks are 4 x 368 and 4 x 352, all stored as 368. A size
that would leave a rank with no block is refused, with the sizes that work.

Expert parallelism gives each rank whole experts: the first ``E % ep_size`` ranks hold one more.
"""

from dataclasses import dataclass

from rubin_moe.errors import CheckpointError


@dataclass(frozen=True)
class Shard:
    """One rank's place.

    Attributes:
        tp_rank, tp_size: of the cut through every expert.
        ep_rank, ep_size: of the cut through the list of experts.
        expert_ids: global ids in local order where a server places experts itself (round robin,
            redundant copies); overrides ep_rank and ep_size.
        pad: whether blocks may be padded; if not, uneven TP sizes are refused.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_ids: tuple[int, ...] | None = None
    pad: bool = True

    def __post_init__(self) -> None:
        for kind, rank, size in (
            ("TP", self.tp_rank, self.tp_size),
            ("EP", self.ep_rank, self.ep_size),
        ):
            if size < 1:
                raise CheckpointError(f"{kind} size {size}: expected 1 or more")
            if not 0 <= rank < size:
                raise CheckpointError(f"{kind} rank {rank} is not within 0..{size - 1}")

    def experts(self, num_experts: int) -> tuple[int, ...]:
        """Global ids of this rank's experts, in local order."""
        if self.expert_ids is None:
            return expert_partition(num_experts, self.ep_size)[self.ep_rank]
        wrong = [e for e in self.expert_ids if not 0 <= e < num_experts]
        if wrong:
            raise CheckpointError(f"expert ids {wrong} are not within 0..{num_experts - 1}")
        return self.expert_ids

    def columns(self, intermediate: int, sf_vec_size: int) -> "Columns":
        """This rank's part of the expert width. Raises CheckpointError if it cannot be cut."""
        reason = why_not_tp(intermediate, sf_vec_size, self.tp_size, pad=self.pad)
        if reason is not None:
            sizes = legal_tp_sizes(intermediate, sf_vec_size, pad=self.pad)
            raise CheckpointError(f"{reason}; TP sizes that work: {', '.join(map(str, sizes))}")
        start, stop = _range(intermediate // sf_vec_size, self.tp_size, self.tp_rank)
        _, widest = _range(intermediate // sf_vec_size, self.tp_size, 0)
        return Columns(start * sf_vec_size, stop * sf_vec_size, widest * sf_vec_size)


@dataclass(frozen=True)
class Columns:
    """A range of the expert width.

    Attributes:
        start, stop: of the checkpoint's width; padded: width stored, ``>= stop - start``.
    """

    start: int
    stop: int
    padded: int

    @property
    def width(self) -> int:
        """Columns that come from the checkpoint."""
        return self.stop - self.start


def expert_partition(num_experts: int, ep_size: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous experts of every rank: 10 over 4 are 3, 3, 2, 2."""
    if ep_size > num_experts:
        raise CheckpointError(f"EP {ep_size} leaves ranks without any of {num_experts} experts")
    return tuple(tuple(range(*_range(num_experts, ep_size, r))) for r in range(ep_size))


def _range(count: int, parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of ``parts`` contiguous parts; the first ones have one more."""
    base, more = divmod(count, parts)
    start = part * base + min(part, more)
    return start, start + base + (part < more)


def why_not_tp(
    intermediate: int, sf_vec_size: int, tp_size: int, *, pad: bool = True
) -> str | None:
    """None if every rank of ``tp_size`` gets whole scale blocks, else the reason."""
    if intermediate % sf_vec_size:
        return f"an expert width of {intermediate} is no multiple of the scale block {sf_vec_size}"
    blocks = intermediate // sf_vec_size
    what = f"an expert width of {intermediate}, {blocks} blocks of {sf_vec_size}"
    if tp_size > blocks:
        return f"TP {tp_size} over {what}, leaves a rank with none"
    if not pad and blocks % tp_size:
        return f"TP {tp_size} over {what}, needs padding"
    return None


def legal_tp_sizes(
    intermediate: int, sf_vec_size: int, *, pad: bool = True, limit: int = 64
) -> tuple[int, ...]:
    """TP sizes up to ``limit`` that can be loaded; without ``pad``, only those that divide."""
    sizes = range(1, limit + 1)
    return tuple(t for t in sizes if why_not_tp(intermediate, sf_vec_size, t, pad=pad) is None)
