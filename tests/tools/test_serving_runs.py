"""The programs in `tests/gpu/serving/` without vLLM: phases, models, weights, order of runs."""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "gpu" / "serving"))
import engine
import models
import phases
import run
import several
import weights

SERVING = Path(phases.__file__).parent


def made(out: Path, **given: Any) -> dict[str, list[str]]:
    """Return the phases of a command line."""
    asked: dict[str, Any] = {"smallest": False, "backends": None, "limit": 90}
    return phases.phases(argparse.Namespace(out=out, **(asked | given)))


@pytest.mark.parametrize("smallest", [False, True])
def test_every_phase_names_a_program_a_model_and_loads_that_exist(
    smallest: bool, tmp_path: Path
) -> None:
    for name, command in made(tmp_path, smallest=smallest).items():
        assert (SERVING.parent / command[0]).is_file(), name
        words = dict(pairwise(command))
        if "--model" in words:
            assert words["--model"] in models.MODELS, name
        if "--loads" in words:
            loads = command[command.index("--loads") + 1 : command.index("--backends")]
            assert set(loads) <= set(engine.LOADS), name


def is_running(stat: Path) -> bool:
    """Return whether a process is neither gone nor a zombie that nothing has waited for."""
    try:
        return stat.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_phase_is_ended_at_its_limit_with_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    ended = phases.run([str(program)], tmp_path / "phase", limit=2)
    assert ended["code"] == "ended by its limit"
    stat = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    until = time.time() + 20
    while is_running(stat):
        assert time.time() < until
        time.sleep(0.1)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_is_a_configuration_that_transformers_knows(
    name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path = models.write_model(tmp_path, name)
    config = transformers.AutoConfig.from_pretrained(path)
    assert config.vocab_size == models.MODELS[name]["vocab_size"]


class Moe(nn.Module):
    """Parameters with vLLM's names of a model with experts."""

    def __init__(self, experts: int, hidden: int = 64, tokens: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.o_proj = nn.Linear(hidden, hidden)
        self.router = nn.Linear(hidden, experts)
        self.w2_weight = nn.Parameter(torch.empty(experts, hidden, 8))


@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (32, 4)])
def test_tokens_choose_their_experts_far_from_ties(experts: int, chosen: int) -> None:
    """With random routers, bfloat16 rounding selected other experts."""
    model = Moe(experts)
    weights.seed_weights(model)
    with torch.no_grad():
        states = model.embedding.weight + model.o_proj(torch.randn(200, 64))
        scores = model.router(states).sort(1, descending=True)
    gaps = scores.values[:, chosen - 1] - scores.values[:, chosen]
    assert float(gaps.min()) > 1.9
    used = scores.indices[:, :chosen].flatten().bincount(minlength=experts)
    assert int(used.min()) > 0, "each expert is chosen by some tokens"
    columns = slice(64 - experts, 64)
    assert not model.w2_weight[:, columns].any()


def test_weights_follow_from_the_names_of_the_parameters_alone() -> None:
    one, two = nn.Linear(16, 16), nn.Linear(16, 16)
    weights.seed_weights(one)
    torch.manual_seed(5)
    weights.seed_weights(two)
    assert torch.equal(one.weight, two.weight) and not one.bias.any()


FAKE_ENGINE = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for name in ("backend", "model", "mode", "results", "kv-gib", "record", "record-every"):
    parser.add_argument("--" + name)
asked = parser.parse_args()
def say(**fields):
    with open(asked.results, "a") as file:
        file.write(json.dumps({"backend": asked.backend, **fields}) + "\\n")
say(event="ready", record=asked.record)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    say(event="load", command=line.strip(), at=time.time())
    say(event="done", command=line.strip())
"""


def test_timed_runs_alternate_between_engines_that_are_all_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.py").write_text(FAKE_ENGINE)
    monkeypatch.setattr(run, "HERE", tmp_path)
    asked = argparse.Namespace(
        out=tmp_path, work=tmp_path, model="small", backends=["A", "A+record"],
        modes=["eager"], loads=["a", "b"], runs=2, profile=[], kv_gib=1, go=None,
        start_limit=30, patience=1, limit=30, record_every=256,
    )  # fmt: skip
    assert run.run(asked)
    lines = list(map(json.loads, (tmp_path / "serving.jsonl").open()))
    records = [line["record"] for line in lines if line["event"] == "ready"]
    assert records == [None, str(tmp_path / "cases-A+record-eager")]
    timed = [line for line in lines if line["event"] == "load"]
    jobs = {"load a 0", "load b 0", "load a 1", "load b 1"}
    order = sorted((line["at"], line["command"]) for line in timed)
    order = [command for _, command in order if command in jobs]
    assert order[::2] == order[1::2] == ["load a 0", "load b 0", "load a 1", "load b 1"]


def test_an_engine_that_is_not_ready_in_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(run, "HERE", tmp_path)
    asked = argparse.Namespace(
        out=tmp_path, work=tmp_path, model="small", backends=["A"], modes=["eager"],
        loads=["a"], runs=1, profile=[], kv_gib=1, go=None, start_limit=1, patience=1,
        limit=1,
    )  # fmt: skip
    assert not run.run(asked)


FAKE_RUN = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--model")
parser.add_argument("--go", type=pathlib.Path)
parser.add_argument("--backends", nargs="+")
asked, _ = parser.parse_known_args()
if asked.model == "dies":
    sys.exit(1)
time.sleep({"slow": 1.0}.get(asked.model, 0.1))
ready = time.time()
(asked.out / "ready").touch()
while not asked.go.exists():
    time.sleep(0.01)
began = time.time()
time.sleep(0.4)
line = {"model": asked.model, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "ready": ready,
        "began": began, "ended": time.time(), "backends": asked.backends}
(asked.out / "serving.jsonl").write_text(json.dumps(line) + "\\n")
(asked.out / "ended").touch()
"""


def serve_several(
    out: Path, models: list[str], monkeypatch: pytest.MonkeyPatch, at_once: int = 2
) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Run models on two pretended GPUs; return the verdict and each one's line."""
    (out / "run.py").write_text(FAKE_RUN)
    monkeypatch.setattr(several, "HERE", out)
    asked = argparse.Namespace(
        out=out, work=out, models=models, backends=["FLASH_ATTN"], modes=["eager"],
        loads=None, runs=1, start_limit=30, limit=30, at_once=at_once, profile=[],
    )  # fmt: skip
    verdict = several.serve(asked, ["3", "5"])
    lines = map(json.loads, (out / "serving.jsonl").open())
    return verdict, {line["model"]: line for line in lines}


def test_each_gpu_times_one_model_at_a_time_and_none_while_another_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["one", "slow", "deepseek-8", "two"]
    verdict, lines = serve_several(tmp_path, names, monkeypatch)
    assert verdict and [lines[name]["gpu"] for name in names] == ["3", "5", "3", "5"]
    last = max(line["ready"] for line in lines.values())
    assert min(line["began"] for line in lines.values()) > last
    assert lines["one"]["ended"] < lines["deepseek-8"]["began"]
    assert lines["slow"]["ended"] < lines["two"]["began"]
    assert lines["one"]["backends"] == ["FLASH_ATTN"]
    assert lines["deepseek-8"]["backends"] == ["FLASH_ATTN_MLA"]


def test_models_beyond_the_memory_of_the_gpus_start_when_the_first_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU the engines of four models would need 176 of 141 GB (computed)."""
    names = ["one", "slow", "two"]
    verdict, lines = serve_several(tmp_path, names, monkeypatch, at_once=1)
    assert verdict and [lines[name]["gpu"] for name in names] == ["3", "5", "3"]
    assert lines["two"]["ready"] > max(lines[name]["ended"] for name in names[:2])


def test_a_model_that_cannot_start_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, lines = serve_several(tmp_path, ["dies", "one", "two"], monkeypatch)
    assert not verdict and set(lines) == {"one", "two"}
