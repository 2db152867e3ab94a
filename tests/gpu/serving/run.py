"""Serving runs: throughput and latency of several attention backends in real engines of vLLM.

    python tests/gpu/serving/run.py OUTDIR --backends FLASH_ATTN CUSTOM TRITON_ATTN --loads a b c

Each engine is a process of its own. All of them start at once, and each serves every load once,
untimed. Then one engine after the other is timed, alone, so that the backends alternate within one
session. A backend with the suffix +record has the flight recorder. OUTDIR/serving.jsonl has one
JSON object per line, and OUTDIR/NAME.log what each engine printed. The exit code is 1 if an engine
was not ready in time. vLLM 0.25.1 has to be importable. No weights or network are needed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from models import MODELS, write_model

HERE = Path(__file__).resolve().parent
WORK = Path("/tmp/pagetwin_serving")
"""Default folder of what engines keep from run to run."""

MODES = ("eager", "decode graphs", "default", "speculative")
"""The last one is the default mode with draft tokens."""


def environment(folder: Path) -> dict[str, str]:
    """Return what an engine needs on a machine without network."""
    return {
        **os.environ,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        # the default needs the package blake3
        "VLLM_MM_HASHER_ALGORITHM": "sha256",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(folder / "vllm_cache"),
        "VLLM_CONFIG_ROOT": str(folder / "vllm_config"),
    }


class Engine:
    """A process with one engine.

    Args:
        asked: the arguments of the command.
        backend: of the engine; with the suffix "+record", the flight recorder checks it.
        mode: one of MODES.
    """

    def __init__(self, asked: argparse.Namespace, backend: str, mode: str) -> None:
        self.name = f"{backend}-{mode.replace(' ', '-')}"
        backend, _, self.recorded = backend.partition("+")
        self.results = asked.out / f"{self.name}.jsonl"
        self.results.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "engine.py"), "--backend", backend]
        command += ["--mode", mode, "--results", str(self.results)]
        command += ["--model", str(write_model(asked.work, asked.model))]
        command += ["--kv-gib", str(asked.kv_gib)]
        if self.recorded:
            command += ["--record", str(asked.work / f"cases-{self.name}")]
            command += ["--record-every", str(asked.record_every)]
        with (asked.out / f"{self.name}.log").open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(asked.work),
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has written."""
        if not self.results.exists():
            return []
        text = self.results.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def tell(self, command: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            print(f"{self.name} has ended: {command} is not run", flush=True)

    def wait(self, command: str, until: float) -> bool:
        """Wait for the end of a command, or for "ready"; return whether it came in time."""
        while time.time() < until and self.process.poll() is None:
            for line in self.lines:
                if line["event"] == command or line.get("command") == command:
                    return True
            time.sleep(0.02)
        return False


def run(asked: argparse.Namespace) -> bool:
    """Start the engines, warm them up, and time one after the other.

    Returns:
        Whether all engines were ready in time.
    """
    began = time.time()
    engines = [
        Engine(asked, backend, mode)
        for mode in asked.modes
        for backend in asked.backends
    ]
    for engine in engines:
        for load in asked.loads:
            engine.tell(f"load {load} warm")
    until = began + asked.start_limit
    last = f"load {asked.loads[-1]} warm"
    ready = [engine for engine in engines if engine.wait(last, until)]
    for engine in engines:
        if engine not in ready:
            engine.process.kill()
            print(f"{engine.name} was not ready after {time.time() - began:.0f} s")
    print(
        f"ready after {time.time() - began:.1f} s: {[e.name for e in ready]}",
        flush=True,
    )
    (asked.out / "ready").touch()
    while asked.go is not None and not asked.go.exists():
        if time.time() > began + asked.patience:
            break
        time.sleep(0.1)
    until = time.time() + asked.limit
    jobs = [
        f"load {load} {number}" for number in range(asked.runs) for load in asked.loads
    ]
    jobs += [f"profile {load}" for load in asked.profile]
    for job in jobs:
        for engine in ready:
            if time.time() < until:
                engine.tell(job)
                engine.wait(job, until)
    for engine in ready:
        if engine.recorded:
            engine.tell("recorder")
            engine.wait("recorder", time.time() + 5)
        engine.tell("quit")
    time.sleep(1)
    with (asked.out / "serving.jsonl").open("w") as file:
        for engine in engines:
            engine.process.kill()
            file.writelines(json.dumps(line) + "\n" for line in engine.lines)
    (asked.out / "ended").touch()
    return len(ready) == len(engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--backends", nargs="+", default=["FLASH_ATTN", "CUSTOM", "TRITON_ATTN"])
    add("--model", default="llama-8", choices=list(MODELS))
    add("--modes", nargs="+", default=["decode graphs"], choices=MODES)
    add("--loads", nargs="+", default=["a", "b", "c"])
    add("--runs", type=int, default=2, help="timed runs of each load")
    add("--profile", nargs="*", default=[], help="loads whose kernels are listed")
    add("--kv-gib", type=int, default=10)
    add("--work", type=Path, default=WORK)
    add("--record-every", type=int, default=256, help="one of so many steps is sampled")
    add("--start-limit", type=float, default=200, help="seconds until all are warm")
    add("--go", type=Path, help="file to wait for before the timed runs")
    add("--patience", type=float, default=600, help="seconds to wait for that file")
    add("--limit", type=float, default=200, help="seconds of the timed runs")
    asked = parser.parse_args()
    asked.out, asked.work = asked.out.resolve(), asked.work.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    raise SystemExit(0 if run(asked) else 1)


if __name__ == "__main__":
    main()
