"""Loading holds its result and little else: no second copy of a tensor, not even for a moment."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.sharding import Shard

from .checkpoints import Style, folder, layer


class Allocations(TorchDispatchMode):
    """Sizes of all storages that operators made, in bytes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))

        def storages(tree):
            return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}  # fmt: skip

        known = storages((args, kwargs))
        self.sizes += [size for ptr, size in storages(out).items() if ptr not in known]
        return out


STYLES = {
    "modelopt": Style(),
    "compressed_nvfp4": Style("compressed_nvfp4"),
    "modelopt_stacked": Style("modelopt_stacked"),
    "gpt_oss": Style("gpt_oss"),
    "rubin_ue5m3": Style("rubin_ue5m3"),
}


@pytest.mark.parametrize("shard", [Shard(), Shard(tp_size=2), Shard(tp_size=3), Shard(ep_size=4)])
@pytest.mark.parametrize("name", STYLES)
def test_nothing_beyond_the_result_and_one_projection(tmp_path, name, shard):
    style = STYLES[name]
    source = layer(style.fmt, num_experts=16, hidden=256, intermediate=160)
    path = folder(source, style, model_type="gpt_oss").write(tmp_path)
    with ModelCheckpoint(path) as checkpoint, Allocations() as allocations:
        weights = load_experts(checkpoint, 0, shard)
    result = [t.nbytes for p in (weights.w13, weights.w2) for t in p.tensors().values()]
    extra = list(allocations.sizes)
    for size in result:
        extra.remove(size)
    expert = source.w13.qdata[0].nbytes + source.w2.qdata[0].nbytes
    assert max(extra, default=0) <= expert / 4
