"""The table of modelled instructions: every opcode with every modifier it may carry.

A pattern is an opcode in which ``{a,b}`` stands for one of several texts and ``[x]`` for optional
text. What no pattern matches is refused by name and line when a module is loaded. The family says
who implements the instruction and how the code around it is cut:

- ``sync``: all lanes named by the member mask (or the whole warp) must arrive together;
- ``retry``: execution may resume at the instruction itself (waits);
- ``leaves``: the native function may return to the scheduler after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from rubin_moe.emulator.errors import EmulatorError


class UnsupportedInstructionError(EmulatorError, ValueError):
    """An instruction outside the table; names the opcode and its line."""

    def __init__(self, opcode: str, line: int, reason: str = "") -> None:
        self.opcode, self.line = opcode, line
        detail = f": {reason}" if reason else ""
        super().__init__(f"line {line}: {opcode} is not modelled{detail}")


@dataclass(frozen=True, slots=True)
class Family:
    """How instructions of one kind are compiled; ``dests`` leading operands are written."""

    name: str
    dests: int = 1
    sync: bool = False
    retry: bool = False
    leaves: bool = False
    reads_dest: bool = False


_I = "{u,s}{16,32,64}"
_B = "b{16,32,64}"
_CMP = "{eq,ne,lt,le,gt,ge}"
_FCMP = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
_MEM = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"
_HALF = "{f16,f16x2,bf16,bf16x2}"
_ORDER = "[{.weak,.volatile,.relaxed,.acquire,.mmio.relaxed}][{.cta,.cluster,.gpu,.sys}]"
_STORE_ORDER = "[{.weak,.volatile,.relaxed,.release,.mmio.relaxed}][{.cta,.cluster,.gpu,.sys}]"
_SPACE = "[{.global,.shared,.shared::cta,.shared::cluster,.local}]"
_CACHE = (
    "[{.ca,.cg,.cs,.lu,.cv,.wb,.wt}][.nc][{.L1::evict_normal,.L1::evict_unchanged,"
    ".L1::evict_first,.L1::evict_last,.L1::no_allocate}][.L2::evict_{first,last,normal}]"
    "[.L2::cache_hint][.L2::{64,128,256}B]"
)
_ATOM_ORDER = "[{.relaxed,.acquire,.release,.acq_rel}][{.cta,.cluster,.gpu,.sys}]"
_ATOM_SPACE = "[{.global,.shared,.shared::cta,.shared::cluster}]"
_ATOM_HEAD = _ATOM_ORDER + _ATOM_SPACE
_ATOM_SCOPED = _ATOM_SPACE + "[{.cta,.cluster,.gpu,.sys}][{.relaxed,.acquire,.release,.acq_rel}]"
_ATOM_OPS = (
    ".{add.{u32,s32,u64,s64,f32,f64,noftz.f16x2,noftz.bf16x2},{min,max}.{u32,s32,u64,s64},"
    "{and,or,xor,exch,cas}.{b32,b64},{inc,dec}.u32}[.L2::cache_hint]"
)
_CLUSTER_DST = "{shared::cluster,shared::cta}"

_TABLE: tuple[tuple[Family, str], ...] = (
    (Family("integer"), f"""
        {{add,sub}}.{_I} {{add,sub}}.sat.s32 mul.{{lo,hi}}.{_I} mul.wide.{{u,s}}{{16,32}}
        mad.{{lo,hi}}.{_I} mad.wide.{{u,s}}{{16,32}} {{div,rem}}.{_I} {{abs,neg}}.s{{16,32,64}}
        {{min,max}}.{_I} {{min,max}}.relu.s32 {{mul24,mad24}}.lo.{{u,s}}32 sad.{_I}
        dp4a.{{u,s}}32.{{u,s}}32"""),
    (Family("bits"), f"""
        {{and,or,xor}}.{{pred,b16,b32,b64}} not.{{pred,b16,b32,b64}} cnot.{_B} shl.{_B}
        shr.{{b,u,s}}{{16,32,64}} {{shf.l,shf.r}}.{{wrap,clamp}}.b32 lop3.b32 bfi.b{{32,64}}
        bfe.{{u,s}}{{32,64}} brev.b{{32,64}} {{popc,clz}}.b{{32,64}}
        bfind[.shiftamt].{{u,s}}{{32,64}} prmt.b32 szext.{{clamp,wrap}}.{{u,s}}32
        bmsk.{{clamp,wrap}}.b32"""),
    (Family("float"), f"""
        {{add,sub,mul}}[.rn][.ftz][.sat].f32 {{add,sub,mul}}[.rn].f64
        {{add,sub,mul}}[.rn][.ftz].f32x2
        fma.rn[.ftz][.sat].f32 fma.rn.f64 fma.rn[.ftz].f32x2 {{add,sub,mul}}[.rn][.ftz].{_HALF}
        {{add,sub}}.rn.f32.{{f16,bf16}} fma.rn.f32.{{f16,bf16}}
        fma.rn[.ftz][.relu].{_HALF} {{neg,abs}}[.ftz].f32 {{neg,abs}}.f64 {{neg,abs}}[.ftz].{_HALF}
        {{min,max}}[.ftz][.NaN][.xorsign.abs].f32 {{min,max}}.f64
        {{min,max}}[.ftz][.NaN][.xorsign.abs].{_HALF} copysign.f{{32,64}}"""),
    (Family("special_function"), """
        div.{approx,full,rn}[.ftz].f32 div.rn.f64 rcp.{approx,rn}[.ftz].f32 rcp.rn.f64
        sqrt.{approx,rn}[.ftz].f32 sqrt.rn.f64 rsqrt.approx[.ftz].f32 ex2.approx[.ftz].f32
        lg2.approx[.ftz].f32 {sin,cos}.approx[.ftz].f32 tanh.approx.f32
        {ex2.approx,tanh.approx}.{f16,f16x2,bf16,bf16x2} ex2.approx.ftz.{bf16,bf16x2}"""),
    (Family("compare"), f"""
        setp.{_CMP}.{{b,u,s}}{{16,32,64}} setp.{{lo,ls,hi,hs}}.u{{16,32,64}}
        setp.{_CMP}.{{and,or,xor}}.{{b,u,s}}{{16,32,64}} setp.{_FCMP}[.ftz].f{{32,64}}
        setp.{_FCMP}.{{and,or,xor}}[.ftz].f{{32,64}} setp.{_FCMP}[.ftz].{{f16,bf16}}
        set.{_CMP}.{{u32,s32}}.{{u,s}}{{16,32,64}} set.{_FCMP}[.ftz].{{u32,s32,f32}}.f32
        selp.{{b,u,s,f}}{{16,32,64}} slct.{{b,u,s,f}}{{32,64}}.s32
        testp.{{finite,infinite,number,notanumber,normal,subnormal}}.f32"""),
    (Family("move"), """
        mov.{pred,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64,b128} cvta[.to].{param,global,shared,
        local,const,shared::cluster,shared::cta}.{u32,u64} mapa[.shared::cluster].{u32,u64}
        getctarank[.shared::cluster].{u32,u64} isspacep.{global,shared,local,shared::cluster}"""),
    (Family("convert_integer"), """
        cvt.{u,s}{8,16,32,64}.{u,s}{8,16,32,64} cvt.sat.{u,s}{8,16,32}.{u,s}{8,16,32,64}
        cvt.pack.sat.{u16,s16,u8,s8}.s32[.b32]"""),
    (Family("convert_float"), """
        cvt.{rn,rz,rm,rp}[.ftz].f{32,64}.{u,s}{8,16,32,64} cvt.rn.f16.{u,s}{8,16,32,64}
        cvt.rn.bf16.{u,s}{8,16,32,64} cvt.{rni,rzi,rmi,rpi}[.ftz][.sat].{u,s}{8,16,32,64}.f{32,64}
        cvt.{rni,rzi,rmi,rpi}.{u,s}{8,16,32,64}.{f16,bf16}
        cvt.{rni,rzi,rmi,rpi}[.ftz].f32.f32 cvt[.ftz][.sat].f32.f32 cvt[.rn].f32.f64
        cvt[.ftz].f64.f32 cvt[.ftz].f32.{f16,bf16} cvt[.rn].{bf16,f16}.{f16,bf16}
        cvt.{rn,rz}[.relu][.satfinite].bf16.f32
        cvt.{rn,rz}[.ftz][.relu].f16.f32 cvt.{rn,rz}[.relu][.satfinite].{bf16x2,f16x2}.f32"""),
    (Family("convert_small"), """
        cvt.rn.satfinite[.relu].{e4m3x2,e5m2x2,e2m1x2,e2m3x2,e3m2x2}.f32
        cvt.rn.satfinite[.relu].{e4m3x2,e5m2x2}.f16x2
        cvt.{rn,rp}[.satfinite].ue5m3x2.f32 cvt.{rz,rp}[.satfinite].ue8m0x2.{f32,bf16x2}
        cvt.rn[.relu].f16x2.{e4m3x2,e5m2x2,e2m1x2,e2m3x2,e3m2x2} cvt.rn.f16x2.ue5m3x2
        cvt.rn.bf16x2.{ue8m0x2,ue5m3x2}
        cvt.rn.satfinite.scaled::n1::ue8m0.{e4m3x2,e5m2x2}.f32"""),
    (Family("load"), f"""
        ld.param[{{.v2,.v4}}].{_MEM} ld{_ORDER}{_SPACE}{_CACHE}[{{.v2,.v4,.v8}}].{_MEM}
        ld.const[{{.v2,.v4}}].{_MEM} ldu.global[{{.v2,.v4}}].{_MEM}"""),
    (Family("store", dests=0), f"st{_STORE_ORDER}{_SPACE}{_CACHE}[{{.v2,.v4,.v8}}].{_MEM}"),
    (Family("atomic"), f"""
        atom{_ATOM_HEAD}{_ATOM_OPS} atom{_ATOM_SPACE}{_ATOM_ORDER}{_ATOM_OPS}
        atom{_ATOM_SCOPED}{_ATOM_OPS}"""),
    (Family("reduce", dests=0), f"""
        red{_ATOM_HEAD}{_ATOM_OPS} red{_ATOM_SPACE}{_ATOM_ORDER}{_ATOM_OPS}
        red{_ATOM_SCOPED}{_ATOM_OPS}
        red{_ATOM_ORDER}.global[.v{{2,4,8}}].add[.noftz].{{f32,bf16x2,f16x2}}
        red.async{_ATOM_ORDER}.global.add.{{s32,u32,u64}}"""),
    (Family("cp_async", dests=0), """
        cp.async.{ca,cg}.shared[::cta].global[.L2::cache_hint][.L2::{64,128,256}B]"""),
    (Family("cp_async_group", dests=0), "cp.async.{commit_group,wait_group,wait_all}"),
    (Family("cp_async_arrive", dests=0), "cp.async.mbarrier.arrive[.noinc][.shared[::cta]].b64"),
    (Family("warp_shuffle", sync=True), "shfl.sync.{idx,up,down,bfly}.b32"),
    (Family("warp_vote", sync=True), "vote.sync.{ballot.b32,{any,all,uni}.pred}"),
    (Family("warp_reduce", sync=True), """
        redux.sync.{add,min,max}.{u32,s32} redux.sync.{and,or,xor}.b32
        redux.sync.{min,max}[.abs][.NaN].f32"""),
    (Family("warp_match", sync=True), "match.{any,all}.sync.{b32,b64}"),
    (Family("warp_elect", sync=True), "elect.sync"),
    (Family("warp_mask"), "activemask.b32"),
    (Family("warp_barrier", dests=0, sync=True), "bar.warp.sync"),
    (Family("transpose", sync=True), "movmatrix.sync.aligned.m8n8.trans.b16"),
    (Family("matrix_load", sync=True),
        "ldmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared[::cta].b16"),
    (Family("matrix_store", dests=0, sync=True),
        "stmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared[::cta].b16"),
    (Family("barrier", dests=0, sync=True, leaves=True),
        "bar[.cta].{sync,arrive} barrier[.cta].{sync,arrive}[.aligned]"),
    (Family("cluster_arrive", dests=0, sync=True),
        "barrier.cluster.arrive[{.release,.relaxed}][.aligned]"),
    (Family("cluster_wait", dests=0, sync=True, leaves=True),
        "barrier.cluster.wait[.acquire][.aligned]"),
    (Family("mbarrier_init", dests=0), "mbarrier.{init,inval}[.shared[::cta]].b64"),
    (Family("mbarrier_arrive"), """
        mbarrier.{arrive,arrive_drop}[.expect_tx][{.release,.relaxed}][{.cta,.cluster}]
        [.shared[::{cta,cluster}]].b64 mbarrier.arrive.noComplete[.shared[::cta]].b64"""
        ),
    (Family("mbarrier_tx", dests=0), """
        mbarrier.{expect_tx,complete_tx}[.relaxed][{.cta,.cluster}][.shared[::{cta,cluster}]].b64"""),
    (Family("mbarrier_wait", retry=True),
        "mbarrier.{try_wait,test_wait}[.parity][{.acquire,.relaxed}][{.cta,.cluster}]"
        "[.shared[::cta]].b64"),
    (Family("hint", dests=0), """
        fence[.proxy.{alias,async[.{global,shared::{cta,cluster}}],tensormap::generic.{acquire,
        release}.{cta,cluster,gpu,sys}}] fence.{sc,acq_rel,acquire,release}.{cta,cluster,gpu,sys}
        fence.{acquire,release}.sync_restrict::shared::{cta,cluster}.cluster
        fence.mbarrier_init.release.cluster membar.{cta,gl,sys}
        prefetch.{tensormap,param.tensormap,global.{L1,L2}} prefetchu.L1
        cp.async.bulk.prefetch.L2.global[.L2::cache_hint] griddepcontrol.launch_dependents
        wgmma.fence.sync.aligned
        tcgen05.fence::{before,after}_thread_sync discard.global.L2
        applypriority.global.L2::evict_normal
        createpolicy.fractional.L2::evict_{last,normal,first,unchanged}[.L2::evict_unchanged].b64"""),
    (Family("sleep", dests=0), "nanosleep.u32"),
    (Family("register_budget", dests=0, sync=True, leaves=True),
        "setmaxnreg.{inc,dec}.sync.aligned.u32"),
    (Family("branch", dests=0), "bra[.uni]"),
    (Family("leave", dests=0), "{ret,exit}"),
    (Family("trap", dests=0), "{trap,brkpt}"),
    (Family("grid_wait", dests=0, leaves=True), "griddepcontrol.wait"),
    (Family("bulk_copy", dests=0, leaves=True), f"""
        cp.async.bulk.{_CLUSTER_DST}.global.mbarrier::complete_tx::bytes[.multicast::cluster]
        [.L2::cache_hint] cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        cp.async.bulk.global.shared::cta.bulk_group[.L2::cache_hint]
        cp.reduce.async.bulk.global.shared::cta.bulk_group[.L2::cache_hint].{{add[.noftz],min,max,
        and,or,xor,inc,dec}}.{{u32,s32,u64,s64,b32,b64,f16,bf16,f32,f64}}
        cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{{add,min,max,
        and,or,xor,inc,dec}}.{{u32,s32,u64,b32}}"""),
    (Family("bulk_tensor", dests=0, leaves=True), f"""
        cp.async.bulk.tensor.{{1,2,3,4,5}}d.{_CLUSTER_DST}.global[.tile[::gather4]]
        .mbarrier::complete_tx::bytes[.multicast::cluster][.L2::cache_hint]
        [.cta_group::{{1,2}}][.L2::cache_hint]
        cp.async.bulk.tensor.{{1,2,3,4,5}}d.global.shared::cta[.tile[::scatter4]].bulk_group
        [.L2::cache_hint]
        cp.reduce.async.bulk.tensor.{{1,2,3,4,5}}d.global.shared::cta.{{add,min,max,and,or,xor,inc,
        dec}}[.tile].bulk_group[.L2::cache_hint]
        """),
    (Family("bulk_group", dests=0, leaves=True),
        "cp.async.bulk.{commit_group,wait_group[.read]}"),
    (Family("async_store", dests=0, leaves=True), """
        st.async[.weak].shared::cluster.mbarrier::complete_tx::bytes[{.v2,.v4}].{b,u,s,f}{32,64}
        red.async[.relaxed.cluster].shared::cluster.mbarrier::complete_tx::bytes.{add,min,max,and,or,
        xor,inc,dec}.{u32,s32,u64,b32}"""),
    (Family("tmem_alloc", dests=0, sync=True, leaves=True), """
        tcgen05.alloc[.exclusive].cta_group::{1,2}.sync.aligned[.shared::cta].b32
        tcgen05.dealloc[.exclusive].cta_group::{1,2}.sync.aligned.b32
        tcgen05.relinquish_alloc_permit.cta_group::{1,2}.sync.aligned"""),
    (Family("tmem_wait", dests=0, sync=True, leaves=True), "tcgen05.wait::{ld,st}.sync.aligned"),
    (Family("tmem_load", sync=True, leaves=True), """
        tcgen05.ld.sync.aligned.{32x32b,16x64b,16x128b,16x256b}.x{1,2,4,8,16,32,64,128}[.pack::16b].b32
        tcgen05.ld.sync.aligned.16x32bx2.x{1,2,4,8,16,32,64,128}[.pack::16b].b32"""),
    (Family("tmem_store", dests=0, sync=True, leaves=True), """
        tcgen05.st.sync.aligned.{32x32b,16x64b,16x128b,16x256b,16x32bx2}.x{1,2,4,8,16,32,64,128}
        [.unpack::16b].b32"""),
    (Family("tmem_copy", dests=0, leaves=True), """
        tcgen05.cp.cta_group::{1,2}.{128x256b,4x256b,128x128b,64x128b.warpx2::02_13,
        64x128b.warpx2::01_23,32x128b.warpx4}[.b8x16.{b6x16_p32,b4x16_p64}]
        tcgen05.shift.cta_group::{1,2}.down"""),
    (Family("tmem_commit", dests=0, leaves=True), """
        tcgen05.commit.cta_group::{1,2}.mbarrier::arrive::one[.shared::cluster][.multicast::cluster]
        .b64"""),
    (Family("tcgen05_mma", dests=0, leaves=True), """
        tcgen05.mma.cta_group::{1,2}.kind::{mxf8f6f4,mxf4,mxf4nvf4}.block_scale
        [.{scale_vec::{1X,2X,4X},block16,block32}][.collector::a::{fill,use,lastuse,discard}]
        [.collector::b::{fill,use,lastuse,discard}]
        tcgen05.mma.cta_group::{1,2}.kind::{f16,tf32,f8f6f4,i8}[.collector::a::{fill,use,lastuse,
        discard}]"""),
    (Family("wgmma", sync=True, leaves=True, reads_dest=True), """
        wgmma.mma_async.sync.aligned.m64n{8,16,24,32,40,48,56,64,72,80,88,96,104,112,120,128,136,144,
        152,160,168,176,184,192,200,208,216,224,232,240,248,256}k{8,16,32}.{f32,f16,s32}.{f16.f16,
        bf16.bf16,tf32.tf32,{e4m3,e5m2}.{e4m3,e5m2},{s8,u8}.{s8,u8}}[.satfinite]"""),
    (Family("wgmma_group", dests=0, sync=True, leaves=True),
        "wgmma.{commit_group,wait_group}.sync.aligned"),
    (Family("mma_sync", sync=True, leaves=True), """
        mma.sync.aligned.{m16n8k16,m16n8k8,m16n8k32,m16n8k4,m8n8k4,m16n8k64}.row.col[.kind::f8f6f4]
        .{f32.{f16,bf16,tf32,e4m3,e5m2}.{f16,bf16,tf32,e4m3,e5m2}.f32,f16.f16.f16.f16,
        s32.{s8,u8}.{s8,u8}.s32} mma.sync.aligned.{m16n8k16,m16n8k32,m8n8k16}.row.col.satfinite
        .s32.{s8,u8}.{s8,u8}.s32"""),
)  # fmt: skip


def _regex(pattern: str) -> str:
    out = []
    for char in pattern:
        out.append(
            {"{": "(?:", "}": ")", ",": "|", "[": "(?:", "]": ")?", ".": r"\."}.get(char, char)
        )
    return "".join(out)


def _split(text: str) -> list[str]:
    """Patterns separated by white space outside braces; white space inside them is dropped, and
    a piece that starts with ``.`` or ``[`` continues the pattern before it."""
    patterns, current, depth = [], "", 0
    for char in text:
        if char.isspace():
            if depth == 0 and current:
                patterns.append(current)
                current = ""
            continue
        if not current and patterns and char in ".[":
            current = patterns.pop()  # no opcode starts so: the pattern goes on
        depth += (char in "{[") - (char in "}]")
        current += char
    return [*patterns, current] if current else patterns


@lru_cache(maxsize=1)
def _compiled() -> dict[str, list[tuple[re.Pattern[str], Family]]]:
    table: dict[str, list[tuple[re.Pattern[str], Family]]] = {}
    for family, text in _TABLE:
        for pattern in _split(text):
            compiled = re.compile(_regex(pattern) + r"\Z")
            for head in _heads(pattern):
                table.setdefault(head, []).append((compiled, family))
    return table


def _heads(pattern: str) -> list[str]:
    """The first components that a pattern can start with."""
    match = re.match(r"\{([^{}]*)\}", pattern)
    if match:
        return sorted({item.split(".")[0] for item in match.group(1).split(",")})
    return [re.split(r"[.\[{]", pattern)[0]]


@cache
def family_of(opcode: str) -> Family | None:
    """The family of a modelled opcode, or None."""
    for pattern, family in _compiled().get(opcode.split(".")[0], []):
        if pattern.match(opcode):
            return family
    return None


def patterns() -> list[tuple[str, str]]:
    """Every (family name, pattern) of the table."""
    return [(family.name, pattern) for family, text in _TABLE for pattern in _split(text)]
