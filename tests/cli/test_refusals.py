"""Whatever a user gives: a sentence and exit code 2, never a traceback."""

import importlib
import sys
from pathlib import Path

import pytest

from rubin_moe import cli

ROOT = Path(__file__).parents[2]

FILES = {
    "binary.ptx": b"\xff\xfe\x00",
    "list.json": b"[]",
    "cut.json": b"{",
    "junk.launch": b"junk",
    "other.json": b'{"rows": []}',
}

CALLS = {
    "select nope": "unknown model 'nope'; known: ",
    "select qwen3-30b-a3b --target sun": "target 'sun': expected cpu",
    "select qwen3-30b-a3b --target cpu --activations fp3": "activation format 'fp3' is unknown",
    "plan qwen3-30b-a3b --target cpu --tokens -1": "tokens '-1': expected numbers from 1 on",
    "plan qwen3-30b-a3b --target cpu --tokens 1,x": "tokens '1,x': expected numbers from 1 on",
    "plan qwen3-30b-a3b --target sm_89 --activations mxfp8": "stay NVFP4",
    "plan nope": "unknown model 'nope'; known: ",
    "select qwen3-30b-a3b --target cpu --tp 0": "TP size 0: expected 1 or more",
    "select qwen3-30b-a3b --target cpu --tp 64": "TP 64 over an expert width of 768, 48 blocks",
    "plan qwen3-30b-a3b --target cpu --ep 129": "EP 129 leaves ranks without any of 128 experts",
    "select .": ".: no safetensors files",
    "plan ./nope": "nope: does not exist",
    "select list.json": "list.json: truncated or no safetensors file",
    "select ROOT/models/kjv/bf16": "layers.0.mlp.experts: weight is BF16, not quantized",
    "plan ROOT/models/kjv/nvfp4-ue4m3 --activations mxfp8": "nvfp4-ue4m3 experts stay NVFP4",
    "select ROOT/models/kjv/mxfp4 --target sm_100a": "no backend computes mxfp4 experts",
    "select ROOT/models/kjv/nvfp4-ue5m3 --target cpu --activations nvfp4-ue4m3": "want nvfp4-ue4m3",
    "doctor --target sun": "target 'sun': expected cpu",
    "check-port binary.ptx": "no .target directive",
    "check-port .": "is a directory",
    "check-port": "nothing to check",
    "check-port --plan nvfp4-ue5m3": "expected FORMAT:TOKENS",
    "check-port --plan nvfp4-ue5m3:64:3": "1 or 2",
    "check-port --plan nvfp4:64": "nvfp4 activations: built are",
    "emulate junk.launch": "is not a saved launch",
    "demo none": "does not exist",
    "demo .": "no safetensors files",
    "demo ROOT/models/kjv/bf16": "no quantization_config",
    "eval none": "does not exist",
    "eval ROOT/models/kjv/nvfp4-ue4m3 --tokens -4": "tokens -4: at least 2",
    "eval --show list.json": "no result file",
    "eval --show cut.json": "no result file",
    "eval --show other.json": "no result of eval, it has no 'text'",
    "eval --show .": "no result file",
    "convert none out --to bf16": "does not exist",
    "convert . out --to bf16": ".: no safetensors files",
    "convert ROOT/models/kjv/bf16 out --to mxfp4 --exclude mpl.experts": "matches no module",
    "convert ROOT/models/kjv/bf16 out --to nvfp4-ue4m3 --calibrate binary.ptx": "no UTF-8 at byte",
    "convert ROOT/models/kjv/bf16 out --to nvfp4-ue4m3 --calibrate none": "none: No such file",
    "convert ROOT/models/kjv/bf16 out --to mxfp4 --fold full": "there is nothing to fold",
    "convert ROOT/models/kjv/nvfp4-ue4m3 out --to bf16 --fold full": "there is nothing to fold",
    "inspect .": ".: no safetensors files",
    "inspect /dev/null": "null: no regular file",
    "inspect ROOT/models/kjv/mxfp4 --tp 0": "TP size 0: expected 1 or more",
    "diff . none": ".: no safetensors files",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_is_a_sentence(call, tmp_path, monkeypatch, capsys):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rubin-moe", *call.replace("ROOT", str(ROOT)).split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2
    # What is no option's business is one line; the parser draws a box around its own.
    assert CALLS[call] in " ".join(said.replace("\u2502", " ").split())


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    # vLLM leaves a placeholder where triton is missing
    monkeypatch.delitem(sys.modules, "triton.language", raising=False)
    monkeypatch.setattr(cli, "app", lambda: importlib.import_module("triton.language"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "rubin-moe: this needs triton, which is not installed: pip install 'rubin-moe[triton]'\n"
    )
    monkeypatch.setattr(cli, "app", lambda: importlib.import_module("rubin_moe.no_such_module"))
    with pytest.raises(ModuleNotFoundError):  # a defect of ours stays one
        cli.main()


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", lambda: (tmp_path / "no" / "file").write_text(""))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"rubin-moe: {tmp_path}/no/file: No such file or directory\n"
