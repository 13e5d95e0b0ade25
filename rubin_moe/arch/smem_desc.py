"""The 64-bit shared-memory descriptor of ``tcgen05.mma`` and ``tcgen05.cp``.

Sources: PTX ISA, shared memory descriptor; on Rubin the start address has 15 bits (328 KiB in
units of 16 bytes), seen in compiled kernels.
"""

from rubin_moe.arch.bits import Field, Word
from rubin_moe.arch.spec import ArchSpec
from rubin_moe.errors import PlanError

SWIZZLES = {"none": 0, "128b_atom_32b": 1, "128b": 2, "64b": 4, "32b": 6}
VERSION = 1


def word_of(arch: ArchSpec) -> Word:
    """The fields that ``arch`` defines; the leading-dimension mode came with sm_103a."""
    wide = arch.capability >= (10, 7)
    fields = [
        Field("start_address", 0, 15 if wide else 14),
        Field("leading_byte_offset", 16, 15 if wide else 14),
        Field("stride_byte_offset", 32, 14),
        Field("version", 46, 3),
        Field("base_offset", 49, 3),
        Field("swizzle", 61, 3),
    ]
    if "circular_smem_descriptor" in arch.features or wide:
        fields.append(Field("leading_mode", 52, 1))
    return Word("sdesc", 64, tuple(fields))


def build(
    arch: ArchSpec, start: int, leading: int, stride: int, swizzle: str, *, absolute: bool = False
) -> int:
    """The descriptor; ``start``, ``leading`` and ``stride`` in bytes, multiples of 16.

    ``absolute``: the leading field holds the address of the next buffer (sm_103a's K = 96).
    """
    for name, value in (("start", start), ("leading", leading), ("stride", stride)):
        if value % 16:
            raise PlanError(f"sdesc {name} = {value}: must be a multiple of 16 bytes")
    if swizzle not in SWIZZLES:
        raise PlanError(f"sdesc swizzle {swizzle!r}; known: {', '.join(SWIZZLES)}")
    values = {
        "start_address": start // 16,
        "leading_byte_offset": leading // 16,
        "stride_byte_offset": stride // 16,
        "version": VERSION,
        "swizzle": SWIZZLES[swizzle],
    }
    if absolute:
        values["leading_mode"] = 1
    return word_of(arch).encode(values)


def decode(arch: ArchSpec, word: int) -> dict[str, int]:
    """Every field, offsets in bytes. Raises PlanError for undefined bits or swizzle codes."""
    fields = word_of(arch).decode(word)
    if fields["swizzle"] not in SWIZZLES.values():
        raise PlanError(f"sdesc {word:#x}: swizzle code {fields['swizzle']}")
    scaled = ("start_address", "leading_byte_offset", "stride_byte_offset")
    return {name: value * 16 if name in scaled else value for name, value in fields.items()}
