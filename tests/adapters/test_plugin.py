"""Who gets which method, and what is said where nothing can be served."""

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from rubin_moe.errors import ConfigError

from . import serving, stored, tiny_models
from .test_greedy import CASES

pytestmark = pytest.mark.serve


@pytest.fixture
def config_class() -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    from rubin_moe.adapters.vllm.plugin import register

    register()
    register()
    return get_quantization_config("rubin_moe")


def test_a_checkpoint_is_taken_over_only_when_asked(config_class: Any) -> None:
    for *_, raw in CASES.values():
        assert config_class.override_quantization_method(raw, "rubin_moe") == "rubin_moe"
        assert config_class.override_quantization_method(raw, None) is None
        assert config_class.override_quantization_method(raw, "modelopt_fp4") is None
        assert config_class.from_config(raw).get_name() == "rubin_moe"
    with pytest.raises(ConfigError, match="FOO"):
        config_class.from_config({"quant_method": "modelopt", "quant_algo": "FOO"})


def test_another_vllm_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report 109."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from rubin_moe.adapters.vllm import compat, plugin

    try:
        with monkeypatch.context() as patch:
            patch.setattr(compat, "vllm_version", lambda: Version("0.99.0"))
            plugin.register()  # must not disturb those who do not use it
        refusing = get_quantization_config("rubin_moe")
        assert refusing.override_quantization_method({}, None) is None
        for use in (
            lambda: refusing.override_quantization_method({}, "rubin_moe"),
            lambda: refusing.from_config({"quant_method": "rubin_moe"}),
        ):
            with pytest.raises(ConfigError, match=r"0\.26 up to.*0\.99\.0"):
                use()
    finally:
        plugin.register()


def test_stacked_tensors_of_our_layers_alone_are_renamed(config_class: Any, tmp_path: Path) -> None:
    from rubin_moe.loader.names import LayerKey

    config = config_class.from_config({"quant_method": "mxfp4"})
    config._ours.add(LayerKey("layers", 1))
    mapper = config.get_cache_scale_mapper()
    mapped = mapper.apply_list(
        [
            "model.layers.1.mlp.experts.gate_up_proj_blocks",
            "model.layers.1.mlp.experts.down_proj",
            "model.layers.10.mlp.experts.gate_up_proj_blocks",
            "model.layers.1.mlp.experts.7.gate_proj.weight",
            "model.layers.1.mlp.shared_experts.gate_proj.weight",
            "model.layers.1.self_attn.k_proj.k_scale",
        ]
    )
    assert mapped == [
        "model.layers.1.mlp.experts.routed_experts.stacked_gate_up_proj_blocks",
        "model.layers.1.mlp.experts.routed_experts.stacked_down_proj_weight",
        "model.layers.10.mlp.experts.gate_up_proj_blocks",
        "model.layers.1.mlp.experts.7.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.self_attn.attn.k_scale",
    ]


def test_an_incomplete_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    arch, fmt, _, raw = CASES["qwen3-nvfp4-modelopt"]

    def without_one(module: str, layer: stored.Layer) -> dict[str, Any]:
        tensors = stored.modelopt(module, layer)
        del tensors[f"{module}.3.up_proj.weight_scale"]
        return tensors

    model = tiny_models.build(tmp_path, arch, fmt, without_one, raw, 1)
    with (
        pytest.raises(Exception, match=r"layers\.0\.mlp\.experts.*\n.*up\.weight_scale.*\(3\)"),
        serving.engine(model.path),
    ):
        pass


def test_a_backend_that_cannot_is_refused_with_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, fmt, write, raw = CASES["qwen3-nvfp4-modelopt"]
    model = tiny_models.build(tmp_path, arch, fmt, write, raw, 1)
    monkeypatch.setenv("RUBIN_MOE_FORBID", "cpu")
    with (
        pytest.raises(Exception, match="no backend computes nvfp4-ue4m3 experts") as error,
        serving.engine(model.path),
    ):
        pass
    assert "cpu: forbidden by RUBIN_MOE_FORBID" in str(error.value)
    assert "cpu-tcgen05: " in str(error.value)


def test_an_exact_fold_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, fmt, write, raw = CASES["qwen3-nvfp4-modelopt"]
    model = tiny_models.build(tmp_path, arch, fmt, write, raw, 3)
    monkeypatch.setenv("RUBIN_MOE_FOLD", "exact")
    with serving.engine(model.path) as llm:
        tokens = serving.greedy(llm, tiny_models.PROMPTS, 24)
    assert tokens == [model.greedy(p, 24) for p in tiny_models.PROMPTS]


@pytest.mark.parametrize(
    ("case", "activations", "backend"),
    [
        ("qwen3-nvfp4-ue5m3", "nvfp4-ue5m3", "cpu-tcgen05"),
        ("gpt-oss-mxfp4", "fp8-e4m3", "cpu-wgmma"),
    ],
)
def test_the_activation_format_picks_the_backend(
    case: str, activations: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rubin_moe.adapters.vllm import report

    arch, fmt, write, raw = CASES[case]
    model = tiny_models.build(tmp_path, arch, fmt, write, raw, 1)
    said: list[str] = []
    monkeypatch.setattr(report._logger, "info", lambda text, *args: said.append(text % args))
    monkeypatch.setenv("RUBIN_MOE_ACTIVATION_FORMAT", activations)
    with serving.engine(model.path) as llm:
        tokens = serving.greedy(llm, tiny_models.PROMPTS, 24)
    assert f"{activations} activations) on backend {backend}" in said[0]
    assert tokens != [model.greedy(p, 24) for p in tiny_models.PROMPTS]  # fewer bits show
