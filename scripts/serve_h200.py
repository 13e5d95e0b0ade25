"""vLLM on one GPU with rubin_moe's experts and with Marlin's: same tokens, how many a second.

``all FOLDER`` makes the checkpoints (`h200_models`; the shipped model is there), starts an engine
for each of them and each implementation, and the CPU backend's model, so that they load side by
side, lets one engine after another generate and time itself, in several rounds, compares the tokens
with the CPU backend's and writes docs/results/h200_serve.json. CUDA graphs are on for decoding.
``compile`` fills the kernel cache for the same layers and needs no GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer

from rubin_moe.provenance import provenance, write_result

app = typer.Typer()
ROOT = Path(__file__).parents[1]
KJV = ROOT / "models" / "kjv" / "nvfp4-ue4m3"
MODELS = ("kjv", "qwen3", "gptoss")
OURS, PEER = "rubin_moe", "marlin"
BATCHES = (1, 8, 64)
PROMPT, CHECKED, SHORT, LONG = 32, 48, 8, 136  # tokens: of a prompt, compared, of two timed runs
STEP, LONG_PROMPT, LONG_PROMPTS = 4096, 500, 64  # prefill: tokens of a step, its prompts
ROUNDS = 3  # of all engines, one after another
NEAR_TIE = 0.1  # standard deviations of a position's logits; bfloat16 against float32
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


def folder_of(model: str, folder: Path) -> Path:
    return KJV if model == "kjv" else folder / model


def prompts(number: int, length: int = PROMPT, vocabulary: int = 2048) -> list[list[int]]:
    """Token ids, the same in every process."""
    import random

    rng = random.Random(number)
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for _ in range(number)]


def engine(model: str, impl: str, folder: Path) -> Any:
    """A vLLM engine with CUDA graphs of every batch that is timed."""
    from vllm import LLM

    experts = {"quantization": OURS} if impl == OURS else {"moe_backend": PEER}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        str(folder_of(model, folder)), dtype="bfloat16", skip_tokenizer_init=True,
        attention_backend="TRITON_ATTN", max_model_len=512, max_num_batched_tokens=STEP,
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False, kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.1,
        compilation_config={**graphs, "cudagraph_capture_sizes": list(BATCHES)}, **experts,
    )  # fmt: skip


def generate(llm: Any, asked: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in asked]
    answers = llm.generate(requests, sampling, use_tqdm=False)
    return [list(a.outputs[0].token_ids) for a in answers]


def tokens_per_second(llm: Any, batch: int) -> float:
    """Of decoding alone: two runs whose answers differ in length."""
    asked, spent = prompts(batch), []
    generate(llm, asked, SHORT)
    for length in (SHORT, LONG):
        start = time.perf_counter()
        generate(llm, asked, length)
        spent.append(time.perf_counter() - start)
    return batch * (LONG - SHORT) / (spent[1] - spent[0])


def prefill_tokens_per_second(llm: Any) -> float:
    """Of long prompts that are answered with one token."""
    asked = prompts(LONG_PROMPTS, LONG_PROMPT)
    generate(llm, asked[:8], 1)
    start = time.perf_counter()
    generate(llm, asked, 1)
    return LONG_PROMPTS * LONG_PROMPT / (time.perf_counter() - start)


def measure(llm: Any) -> dict[str, float]:
    """One round."""
    found = {f"tokens_per_second_{b}": tokens_per_second(llm, b) for b in BATCHES}
    return found | {"prefill_tokens_per_second": prefill_tokens_per_second(llm)}


def step_of(llm: Any) -> dict[str, Any]:
    """What the GPU does in one step of decoding one request: kernels, their microseconds, and those
    that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        generate(llm, prompts(1), LONG)
    rows = [(e.self_device_time_total / LONG, e.count / LONG, e.key) for e in found.key_averages()]
    rows = sorted((row for row in rows if row[0] > 0), reverse=True)
    return {
        "kernels": round(sum(count for _, count, _ in rows), 1),
        "busy_us": round(sum(us for us, _, _ in rows), 1),
        "longest": {f"{count:.1f} x {name[:70]}": round(us, 1) for us, count, name in rows[:12]},
    }


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


@app.command()
def worker(model: str, impl: str, folder: Path) -> None:
    """One engine: ``folder / MODEL.IMPL.json``, medians over the rounds."""
    os.environ.update(ENVIRONMENT)
    stem = f"{folder}/{model}.{impl}"
    start = time.perf_counter()
    llm = engine(model, impl, folder)
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    row: dict[str, Any] = {"model": model, "impl": impl, "cudagraph_mode": mode.name}
    row["start_seconds"] = round(time.perf_counter() - start, 1)
    Path(f"{stem}.ready").touch()
    rounds = []
    for number in range(ROUNDS):
        wait_for(Path(f"{stem}.go{number}"))
        if number == 0:
            row["tokens"] = generate(llm, prompts(8), CHECKED)
        rounds.append(measure(llm))
        medians = {k: round(statistics.median(r[k] for r in rounds), 1) for k in rounds[0]}
        Path(f"{stem}.json").write_text(json.dumps(row | medians | {"rounds": len(rounds)}))
        Path(f"{stem}.done{number}").touch()
    wait_for(Path(f"{stem}.go{ROUNDS}"))
    Path(f"{stem}.step.json").write_text(json.dumps(step_of(llm)))
    Path(f"{stem}.done{ROUNDS}").touch()


@app.command()
def reference(model: str, folder: Path) -> None:
    """Distance of the tokens of `worker` from the CPU backend's: ``folder / MODEL.gaps.json``."""
    from h200_models import gaps, reference_model

    found, out = reference_model(folder_of(model, folder)), {}
    (folder / f"{model}.reference.ready").touch()
    wait_for(folder / f"{model}.reference.go")
    for impl in (OURS, PEER):
        path = folder / f"{model}.{impl}.json"
        if path.exists():
            out[impl] = gaps(found, prompts(8), json.loads(path.read_text())["tokens"])
    (folder / f"{model}.gaps.json").write_text(json.dumps(out))


@app.command()
def compile() -> None:
    """Every kernel that serving these models may ask for, into the cache."""
    from h200_layer import compile_all
    from h200_models import problem_of_shape, problems_of

    from rubin_moe.kernels.sm90.calls import choices

    problems = problems_of(KJV) | {problem_of_shape(name) for name in MODELS[1:]}
    compile_all((plan, p.activation, p.has_bias) for p in problems for plan in choices(p, STEP))


@app.command(name="all")
def run_all(
    folder: Path,
    report: Path = ROOT / "docs" / "results" / "h200_serve.json",
    models: str = ",".join(MODELS),
    ready_s: float = 200,
    total_s: float = 600,
) -> None:
    """Checkpoints, engines, tokens, times, comparison, report; what is not compared in time is not
    in the report."""
    from h200_models import make

    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    names = models.split(",")
    for name in names:
        if name != "kjv" and not (folder / name / "config.json").exists():
            make(name, folder / name)
            print("made", name, flush=True)
    engines = {f"{m}.{i}": _start(folder, "worker", m, i) for m in names for i in (OURS, PEER)}
    references = {f"{m}.reference": _start(folder, "reference", m) for m in names}
    everything = _ready(folder, engines | references, ready_s)
    print(f"{time.monotonic() - start:.0f} s: loaded", *everything, flush=True)
    for number in range(ROUNDS + 1):  # the last for what a step does
        for name in (n for n in engines if n in everything):
            (folder / f"{name}.go{number}").touch()
            _until(folder / f"{name}.done{number}", everything[name], 60)
        print(f"{time.monotonic() - start:.0f} s: round {number}", flush=True)
    for name in references:  # not beside what is timed
        (folder / f"{name}.go").touch()
    for process in everything.values():
        _wait(process, max(1.0, total_s - (time.monotonic() - start)))
    print(f"{time.monotonic() - start:.0f} s: compared", flush=True)
    rows = [_row(folder, name) for name in engines if (folder / f"{name}.json").exists()]
    for row in rows:
        print(row)
    head = provenance(("torch", "triton", "transformers", "vllm"), "cuda")
    head["what"] = (
        f"greedy decoding with CUDA graphs; tokens a second of 1, 8 and 64 requests at once, "
        f"{LONG - SHORT} tokens each, and of prefill, {LONG_PROMPTS} prompts of {LONG_PROMPT} "
        f"tokens, {STEP} a step; medians of {ROUNDS} rounds, each of all engines in turn; "
        f"step: of one request, what the GPU does for a token; "
        f"compared: {CHECKED} tokens after 8 prompts, with the CPU backend in float32 on the same "
        f"tokens, in standard deviations of a position's logits"
    )
    write_result(report, head, rows)
    ours = [row for row in rows if row["impl"] == OURS]
    sys.exit(len(ours) < len(names) or any(row["near_ties_beyond"] != 0 for row in ours))


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """The reference models share the cores; an engine sets its own threads."""
    log = (folder / f"{'.'.join(command)}.log").open("wb")
    threads = max(1, (os.cpu_count() or 1) // len(MODELS))
    return subprocess.Popen(
        [sys.executable, __file__, *command, str(folder)], stdout=log, stderr=subprocess.STDOUT,
        env=dict(os.environ, OMP_NUM_THREADS=str(threads)),
    )  # fmt: skip


Processes = dict[str, subprocess.Popen[bytes]]


def _ready(folder: Path, processes: Processes, seconds: float) -> Processes:
    """Those that are ready in time; the others are ended, and the ends of their logs printed."""
    end, out = time.monotonic() + seconds, {}
    for name, process in processes.items():
        if _until(folder / f"{name}.ready", process, end - time.monotonic()):
            out[name] = process
        else:
            process.kill()
            for log in folder.glob(f"*{name.removesuffix('.reference')}.log"):
                print(name, log.read_text()[-1500:], flush=True)
    return out


def _until(path: Path, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process makes the file in time."""
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    return path.exists()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def _row(folder: Path, name: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    del row["tokens"]
    step = folder / f"{name}.step.json"
    row["step"] = json.loads(step.read_text()) if step.exists() else None
    path = folder / f"{row['model']}.gaps.json"
    found = json.loads(path.read_text()).get(row["impl"], []) if path.exists() else []
    row["compared_tokens"] = len(found)
    row["equal_tokens"] = sum(gap == 0 for gap in found)
    row["largest_gap"] = round(max(found), 4) if found else None
    row["near_ties_beyond"] = sum(gap > NEAR_TIE for gap in found) if found else None
    return row


if __name__ == "__main__":
    app()
