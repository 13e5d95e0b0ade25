"""Loading holds its result and little else: no second copy of a tensor, not even for a moment."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rubin_moe.loader.load import ModelCheckpoint, load_experts
from rubin_moe.loader.sharding import Shard

from .checkpoints import Style, expert_tensors, folder, layer


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
    """Field report 101."""
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


class Copies(TorchDispatchMode):
    """Bytes of codes and scales that were copied into place, bytes that were copied elsewhere, and
    how often a single value was read."""

    def __init__(self):
        super().__init__()
        self.placed, self.elsewhere, self.scalars = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = next((t for t in tree_leaves(args) if isinstance(t, torch.Tensor)), None)
        if first is not None and first.dtype == torch.uint8:
            if func.name() == "aten::copy_":
                self.placed.append(first.nbytes)
            if func.name() in ("aten::clone", "aten::_to_copy", "aten::cat"):
                self.elsewhere += first.nbytes
        self.scalars += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", STYLES)
def test_every_matrix_is_copied_once_and_whole(tmp_path, name):
    """Field report 102: 128 experts in 4 layers. Codes and scales of gate, up and down are one
    copy each, straight into place; no rows, no second pass, no contiguous view of a whole."""
    experts, layers, style = 128, 4, STYLES[name]
    source = layer(style.fmt, num_experts=experts, hidden=64, intermediate=32)
    made = folder(source, style, model_type="gpt_oss", num_hidden_layers=layers)
    for index in range(1, layers):
        made.tensors |= expert_tensors(source, style, index)
    with ModelCheckpoint(made.write(tmp_path)) as checkpoint:
        for index in range(layers):
            with Copies() as copies:
                weights = load_experts(checkpoint, index)
            assert len(copies.placed) == 6 * experts
            result = (t for p in (weights.w13, weights.w2) for t in (p.qdata, p.sf))
            assert sum(copies.placed) == sum(t.nbytes for t in result)
            assert copies.elsewhere <= 1024  # which scale bytes occur, a layer
            assert copies.scalars <= 22 * experts  # scales of a tensor, and their checks
