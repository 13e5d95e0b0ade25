"""MXFP4 as DeepSeek-V4 releases store their experts: signed bytes and E8M0 scales.

``experts.N.w1.weight`` I8 ``[N, K/2]`` and ``.scale`` F8_E8M0 ``[N, K/32]``; the checkpoint calls
itself ``fp8``. In NVIDIA's NVFP4 release the ``mtp`` layers keep this form.
"""

from rubin_moe.formats.spec import MXFP4
from rubin_moe.loader.dialect import Dialect, Reading

DEEPSEEK_V4 = Dialect(
    "deepseek-v4-mxfp4",
    MXFP4,
    {"weight": Reading("qdata", ("I8",)), "scale": Reading("sf", ("F8_E8M0",))},
    needs_dec=False,
)
