"""Serving runs of several models at once: starts overlap, and each GPU times one model at a time.

    python tests/gpu/serving/several.py OUTDIR --models gpt-oss-8 whisper gemma-8 llama-8

Each model is a run of `run.py` in the folder OUTDIR/MODEL, with the engines of two backends in two
modes. The models are distributed over all visible GPUs. Most of a run is the start of its engines,
which read vLLM's files, compile and capture graphs. So as many models start at once as the memory
of a GPU holds. An engine of gpt-oss-8 took 22 GB and one of gemma-8 14 to 15 GB: four of each did
not fit into 140 GB. When no engine is starting any more, each GPU times its models one after the
other. Then the next models start.

OUTDIR/serving.jsonl has the lines of all models. The exit code is 1 if an engine of a model was not
ready in time.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from run import MODES, WORK

HERE = Path(__file__).resolve().parent
KV_GIB = {"gpt-oss-8": 5, "whisper": 4}
"""GiB of KV cache of one engine. The other models have 8."""
AUDIO = ("audio-a", "audio-b", "audio-c")
LATENT = {"FLASH_ATTN": "FLASH_ATTN_MLA", "TRITON_ATTN": "TRITON_MLA"}
"""What serves latent attention instead of a backend."""


@dataclass
class Run:
    """A run of one model.

    Attributes:
        folder: of its results.
        gpu: index among the visible GPUs.
        process: of `run.py`.
    """

    folder: Path
    gpu: int
    process: subprocess.Popen[bytes]

    def has(self, name: str) -> bool:
        """Return whether it has made this file, or is over."""
        return (self.folder / name).exists() or self.process.poll() is not None


def start(asked: argparse.Namespace, model: str, gpu: int, device: str) -> Run:
    """Start the run of one model.

    Args:
        asked: the arguments of the command.
        model: one of those of `models.py`.
        gpu: index among the visible GPUs.
        device: that GPU as a value of CUDA_VISIBLE_DEVICES.
    """
    folder = asked.out / model
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ready", "go", "ended"):
        (folder / name).unlink(missing_ok=True)
    loads = AUDIO if "whisper" in model else ("a", "b", "c")
    command = [sys.executable, str(HERE / "run.py"), str(folder), "--model", model]
    command += ["--loads", *(asked.loads or loads), "--modes", *asked.modes]
    is_latent = model.startswith("deepseek")
    names = [
        LATENT.get(backend, backend) if is_latent else backend
        for backend in asked.backends
    ]
    command += ["--backends", *names, "--runs", str(asked.runs)]
    command += ["--kv-gib", str(KV_GIB.get(model, 8)), "--work", str(asked.work)]
    command += ["--start-limit", str(asked.start_limit), "--limit", str(asked.limit)]
    command += ["--profile", *asked.profile]
    command += ["--go", str(folder / "go"), "--patience", "3600"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            start_new_session=True,
        )
    return Run(folder, gpu, process)


def wait_until_ready(runs: list[Run]) -> None:
    """Wait until no engine is starting any more."""
    while not all(run.has("ready") for run in runs):
        time.sleep(0.2)


def release_in_turn(runs: list[Run]) -> None:
    """Let each GPU time its models, one after the other, until all have ended."""
    waiting = list(runs)
    timed: dict[int, Run] = {}
    while waiting or timed:
        timed = {gpu: run for gpu, run in timed.items() if not run.has("ended")}
        for run in list(waiting):
            if run.gpu not in timed:
                (run.folder / "go").touch()
                timed[run.gpu] = run
                waiting.remove(run)
        time.sleep(0.2)


def join(folders: list[Path], path: Path) -> None:
    """Write the lines of all models to one file."""
    files = [folder / "serving.jsonl" for folder in folders]
    text = "".join(file.read_text() for file in files if file.exists())
    path.write_text(text)


def serve(asked: argparse.Namespace, devices: list[str]) -> bool:
    """Run all models, and return whether all their engines were ready in time.

    Args:
        asked: the arguments of the command.
        devices: values of CUDA_VISIBLE_DEVICES, one per GPU.
    """
    at_once = asked.at_once * len(devices)
    were_ready = []
    try:
        for first in range(0, len(asked.models), at_once):
            models = asked.models[first : first + at_once]
            were_ready.append(serve_together(asked, models, devices))
    finally:
        join([asked.out / model for model in asked.models], asked.out / "serving.jsonl")
    return all(were_ready)


def serve_together(
    asked: argparse.Namespace, models: list[str], devices: list[str]
) -> bool:
    """Run models that start at once; arguments and result as in `serve`."""
    runs = [
        start(asked, model, number % len(devices), devices[number % len(devices)])
        for number, model in enumerate(models)
    ]
    try:
        wait_until_ready(runs)
        release_in_turn(runs)
        codes = [run.process.wait() for run in runs]
    finally:
        for run in runs:
            # its engines are processes of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
    return not any(codes)


def visible_devices() -> list[str]:
    """Return the visible GPUs; one empty name without a GPU."""
    if names := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return names.split(",")
    import torch

    return [str(index) for index in range(torch.cuda.device_count())] or [""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("out", type=Path)
    add("--models", nargs="+", default=["gpt-oss-8", "whisper", "gemma-8", "llama-8"])
    add("--backends", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    add("--modes", nargs="+", default=["decode graphs", "default"], choices=MODES)
    add("--loads", nargs="+", help="default: a, b, c, or those with audio")
    add("--at-once", type=int, default=2, help="models per GPU that start at once")
    add("--runs", type=int, default=2, help="timed runs of each load")
    add("--profile", nargs="*", default=[], help="loads whose kernels are listed")
    add("--work", type=Path, default=WORK, help="what engines keep from run to run")
    add("--start-limit", type=float, default=240, help="seconds until all are warm")
    add("--limit", type=float, default=80, help="seconds of the timed runs of a model")
    asked = parser.parse_args()
    asked.out, asked.work = asked.out.resolve(), asked.work.resolve()
    raise SystemExit(0 if serve(asked, visible_devices()) else 1)


if __name__ == "__main__":
    main()
