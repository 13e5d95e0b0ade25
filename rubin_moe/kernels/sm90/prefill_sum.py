"""The weighted sum beside FC2's multiplications, while the rows are in the L2. Device code.

FC2 walks its units panel by panel, 256 features of all passes. Warps that would idle take tickets,
a few tokens of a panel each, in the panels' order:

    consumers --board[1 + panel], in device memory--> summing warps, of whatever block

A warp has several tokens' rows under way in slots of shared memory; a lane adds up the 16 bytes of
each row that it copied itself. Choices are added in float32, in order; one without an expert here
is not read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from rubin_moe.kernels.cute import async_copy, ptx, votes
from rubin_moe.kernels.cute import blocks as wide
from rubin_moe.kernels.sm90.prefill_plan import PANEL
from rubin_moe.kernels.sm90.sort import local_expert

ROW = 2 * PANEL
TICKET = 16  # tokens
DTYPES = {"bf16": "bfloat16", "f16": "float16"}


class PanelSum:
    """Device methods of one layer; ``slots``: of a warp."""

    def __init__(self, num_experts: int, top_k: int, hidden: int, kind: str, slots: int):
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden = hidden
        self.dtype = DTYPES[kind]
        self.slots = slots
        self.slot_bytes = top_k * ROW
        self.panels = -(-hidden // PANEL)

    @cute.jit
    def run(self, area, lane, target, num_tokens, y, ids, expert_map, out, board):
        """One warp.

        ``area``: its slots in shared memory. ``y`` 16-bit ``[M, top_k, hidden]``, ids and map as
        `sort` takes them, ``out`` ``[M, hidden]``. ``board``: int32 ``[1 + panels]``, zero at
        first: tickets taken; of each panel its arrivals, ``target`` of which complete it.
        """
        each = (num_tokens + (TICKET - 1)) // TICKET  # tickets of a panel
        masks = cute.make_rmem_tensor((self.slots,), Uint32)
        tos = cute.make_rmem_tensor((self.slots,), Int64)
        for s in cutlass.range_constexpr(self.slots):
            masks[s] = Uint32(0)
            tos[s] = Int64(0)  # nothing there
        ticket = ptx.broadcast(self.take(lane, board), 0)
        panel, token, end = self.start(lane, ticket, each, num_tokens, target, board)
        ticket = self.take(lane, board)
        expert = self.choice(lane, panel, token, ids, expert_map)
        going = Int32(1)
        while going > 0:
            going = Int32(0)
            for s in cutlass.range_constexpr(self.slots):
                slot = area + s * self.slot_bytes + lane * 16
                ptx.cp_async_wait(self.slots - 1)
                if tos[s] != 0:
                    self.add(slot, masks[s], tos[s])
                tos[s] = Int64(0)
                if panel < self.panels:
                    going = Int32(1)
                    masks[s] = votes.ballot(expert)
                    tos[s] = self.fetch(slot, lane, panel, token, masks[s], y, out)
                    token += 1
                    if token == end:
                        panel, token, end = self.start(
                            lane, ptx.broadcast(ticket, 0), each, num_tokens, target, board
                        )
                        ticket = self.take(lane, board)
                    expert = self.choice(lane, panel, token, ids, expert_map)
                ptx.cp_async_commit()

    @cute.jit
    def take(self, lane, board) -> Int32:
        """The next ticket, in lane 0; what waits for it is asked later."""
        ticket = Int32(0)
        if lane == 0:
            ticket = votes.fetch_add(board, Int32(1))
        return ticket

    @cute.jit
    def start(self, lane, ticket, each, num_tokens, target, board):
        """Panel, first token and the one behind the last, once the panel is complete."""
        panel = ptx.div_u32(ticket, each)
        token = (ticket - panel * each) * TICKET
        end = token + TICKET
        end = end if end < num_tokens else num_tokens
        if panel < self.panels:
            if lane == 0:
                arrivals = board + Int64(1 + panel) * 4
                seen = ptx.load_acquire(arrivals)
                while seen < target:
                    seen = ptx.load_acquire(arrivals)
            cute.arch.sync_warp()
        return panel, token, end

    @cute.jit
    def choice(self, lane, panel, token, ids, expert_map) -> Int32:
        """A lane a choice of the token: its expert here, or -1."""
        expert = Int32(-1)
        if lane < self.top_k and panel < self.panels:
            expert = local_expert(ids, token * self.top_k + lane, expert_map, self.num_experts)
        return expert

    @cute.jit
    def fetch(self, slot, lane, panel, token, mask, y, out) -> Int64:
        """Starts the copies of a token's rows; where their sum goes, or 1 behind the features."""
        column = panel * PANEL + lane * 8
        to = Int64(1)
        if column < self.hidden:
            at = Int64(token) * self.hidden + Int64(column)
            to = out + at * 2
            rows = y + (at + Int64(token) * ((self.top_k - 1) * self.hidden)) * 2
            for k in cutlass.range_constexpr(self.top_k):
                if (mask >> Uint32(k)) & Uint32(1) != 0:
                    async_copy.copy_16(slot + k * ROW, rows + k * (2 * self.hidden))
        return to

    @cute.jit
    def add(self, slot, mask, to):
        total = [Float32(0.0) for _ in range(8)]
        for k in cutlass.range_constexpr(self.top_k):
            if (mask >> Uint32(k)) & Uint32(1) != 0:
                words = ptx.load_shared_v4(slot + k * ROW)
                values = [v for word in words for v in wide.widen(word, self.dtype)]
                total = [t + v for t, v in zip(total, values, strict=True)]
        if to != 1:
            wide.store_v4(to, wide.narrow(total, self.dtype))
