"""Checks in real engines of vLLM, one phase after the other, each with a limit of 90 seconds.

    python tests/gpu/serving/phases.py OUTDIR                all phases
    python tests/gpu/serving/phases.py OUTDIR --list         their names
    python tests/gpu/serving/phases.py OUTDIR --only equal-gemma recorder-eager
    python tests/gpu/serving/phases.py OUTDIR --smallest     tiny models, also on a CPU

A phase that takes longer is ended, and the next one begins; what it has written stays. OUTDIR gets
a folder per phase with the records and logs, and phases.jsonl with one line per phase. Times of
models are runs of `several.py`.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from run import WORK, environment

HERE = Path(__file__).resolve().parent
LIMIT = 90
"""Seconds that a phase may take."""

TIMED = ["FLASH_ATTN", "CUSTOM"]
"""The backends of the phases that time steps with the recorder."""

COMPARED = ("tiny", "gpt-oss", "gemma", "whisper")
"""The models whose greedy tokens are compared in bfloat16."""

SMALLEST = {
    "whisper": "small-whisper",
    "gpt-oss": "small-gpt-oss",
    "gemma": "small-gemma",
}
"""The model that takes the place of another one with --smallest; for the others: "small"."""


def phases(asked: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each phase, in order."""
    out, smallest, backends = asked.out.resolve(), asked.smallest, asked.backends
    made: dict[str, list[str]] = {}

    def timed(
        name: str, model: str, given: list[str], *more: str, loads: str = "abc"
    ) -> None:
        command = ["serving/run.py", str(out / name), "--model", of(model)]
        command += ["--loads", *(["try"] if smallest else loads)]
        command += ["--backends", *given]
        # engines start in two thirds of the time
        command += ["--start-limit", str(asked.limit * 2 // 3)]
        command += ["--limit", str(asked.limit // 4)]
        made[name] = [*command, *more]

    def of(model: str) -> str:
        if not smallest:
            return model
        kinds = [small for kind, small in SMALLEST.items() if model.startswith(kind)]
        return kinds[0] if kinds else "small"

    def compared(name: str, model: str, given: list[str], *more: str) -> None:
        command = ["serving/equality.py", str(out / name / "equality.jsonl")]
        command += ["--model", of(model), "--backends", *(backends or given)]
        if model == "whisper" or smallest:
            command += ["--longest", "20"]
        if smallest:
            command += ["--prompts", "2", "--new", "4", "--implementation", "reference"]
        made[name] = [*command, *more]

    llama = backends or TIMED
    # reads the files of vLLM, which takes a minute on a machine that has not read them before
    timed("files", "llama-8", llama, "--runs", "0", "--modes", "eager")
    made["recorder-checks"] = ["recorder.py", str(out / "recorder-checks")]
    made["recorder-checks"] += ["--only", "checks"]
    recorded = [f"{backend}+record" for backend in llama]
    timed("recorder-eager", "llama-8", [*llama, *recorded], "--modes", "eager")
    # steps of a whole model, which CUDA graphs compute; its start needs more than the usual limit
    whole = ["--modes", "default", "--runs", "3"]
    whole += [] if smallest else ["--kv-gib", "36"]
    pair = [llama[-1], recorded[-1]]
    timed("recorder-whole", "llama", pair, *whole, loads="b")
    # rows of all layers, each within its error budget
    each_step = ["--modes", "eager", "--runs", "1", "--record-every", "1"]
    timed("budgets-deep", "deep", recorded, *each_step)
    latent = [f"{backend}+record" for backend in ("FLASH_ATTN_MLA", "CUSTOM")]
    timed("budgets-latent", "deepseek", backends or latent, *each_step)
    for kind in ("replays", "groups"):
        command = ["serving/planted.py", str(out / f"planted-{kind}" / "planted.jsonl")]
        made[f"planted-{kind}"] = [*command, "--kind", kind]
    made["recorder-steps"] = ["recorder.py", str(out / "recorder-steps")]
    made["recorder-steps"] += ["--only", "cost"]
    for model in COMPARED:
        compared(f"equal-{model}", model, [*TIMED, "TRITON_ATTN"])
    for model in ("tiny", "gpt-oss"):
        # TRITON_ATTN multiplies float32 in TF32, so the reference is the yardstick
        given = ["CUSTOM:reference", "CUSTOM", "TRITON_ATTN"]
        compared(f"equal-{model}-float32", model, given, "--dtype", "float32")
    return made


def run(command: list[str], folder: Path, limit: int) -> dict[str, object]:
    """Run the command of a phase; return how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE.parent / command[0]), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(WORK),
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "ended by its limit"
        finally:
            # its engines are processes of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {"seconds": round(time.time() - began, 1), "code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", help="names of phases")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    parser.add_argument("--smallest", action="store_true", help="to try the programs")
    parser.add_argument("--backends", nargs="+", help="instead of those of each phase")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of a phase")
    asked = parser.parse_args()
    made = phases(asked)
    unknown = [name for name in asked.only or () if name not in made]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: expected names of {', '.join(made)}")
    for name in asked.only or made:
        if asked.list:
            print(name)
            continue
        line = {"phase": name, **run(made[name], asked.out / name, asked.limit)}
        print(json.dumps(line), flush=True)
        with (asked.out / "phases.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
