"""The first run of a load in vLLM: its time, and the kernels that it compiled, by their package.

    PYTHONPATH=$PYTHONPATH:$VLLM_PATH python tests/gpu/serving/first_run.py OUTDIR \
        --backends CUSTOM FLASH_ATTN --models llama-8 --loads a b

Each engine is a process of its own with an empty cache of compiled kernels, one after the other. It
serves each load three times. OUTDIR/first_run.jsonl has a line per engine with what its start
compiled, and one per run: its seconds, and the kernels that Triton or Gluon compiled in it, by the
first part of their module's name (`pagetwin`, `vllm`, ...). The exit code is 1 if a run compiled a
kernel of pagetwin. A backend that the installed vLLM does not know is left out, so PAGETWIN may be
among them: vLLM takes that name from 0.32 on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from models import MODELS, write_model
from run import MODES, WORK, environment

HERE = Path(__file__).resolve()


class Compiled(NamedTuple):
    """One kernel that was compiled.

    Args:
        module, name: of its function.
        seconds: that it took.
        hit: whether it was found on disk.
    """

    module: str
    name: str
    seconds: float
    hit: bool

    @property
    def package(self) -> str:
        """The first part of the module's name."""
        return self.module.split(".")[0]


class Compilations:
    """Every compilation of this process, in its order. It listens as long as the process runs."""

    def __init__(self) -> None:
        self.found: list[Compiled] = []

    def listen(self) -> "Compilations":
        """Let Triton tell of each compilation, also of one whose result is on disk."""
        import triton

        triton.knobs.compilation.listener = self.note
        return self

    def note(
        self,
        src: Any,
        metadata: Any,
        metadata_group: Any,
        times: Any,
        cache_hit: bool,
    ) -> None:
        """Keep one compilation. Triton calls it with these names."""
        plain = getattr(src, "fn", None)
        plain = getattr(plain, "fn", plain)
        module = getattr(plain, "__module__", None) or "unknown"
        stages = sum(stage for _, stage in times.lowering_stages)
        seconds = (times.ir_initialization + stages) / 1e6
        self.found.append(Compiled(module, str(src.name), round(seconds, 2), cache_hit))

    def since(self, count: int) -> dict[str, Any]:
        """Return the compilations after the first ones, as fields of a line."""
        new = self.found[count:]
        packages = Counter(kernel.package for kernel in new if not kernel.hit)
        return {
            "compiled": dict(sorted(packages.items())),
            "compiled_s": round(sum(kernel.seconds for kernel in new), 2),
            "read_from_disk": sum(kernel.hit for kernel in new),
            "names": sorted(
                f"{kernel.module}.{kernel.name}" for kernel in new if not kernel.hit
            ),
        }


def serve(asked: argparse.Namespace) -> int:
    """Serve the loads with one engine; return how many kernels of pagetwin a run compiled."""
    compilations = Compilations().listen()
    from engine import LOADS, Served

    begun = time.perf_counter()
    engine = Served(asked)
    engine.say(
        event="start",
        seconds=round(time.perf_counter() - begun, 1),
        **compilations.since(0),
    )
    late = 0
    for load in asked.loads:
        for run in range(3):
            before = len(compilations.found)
            seconds, _, _ = engine.serve(LOADS[load], seed=run)
            found = compilations.since(before)
            late += found["compiled"].get("pagetwin", 0)
            engine.say(
                event="run", load=load, run=run, seconds=round(seconds, 3), **found
            )
    return late


def knows(backend: str) -> bool:
    """Return whether the installed vLLM has a backend of that name."""
    from pagetwin.integrations.vllm import register
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return backend in AttentionBackendEnum.__members__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("outdir", type=Path)
    add("--backends", nargs="+", default=["CUSTOM", "PAGETWIN", "FLASH_ATTN"])
    add("--models", nargs="+", default=["llama-8"], choices=sorted(MODELS))
    add("--loads", nargs="+", default=["a", "b"])
    add("--mode", default="decode graphs", choices=MODES)
    add("--kv-gib", type=int, default=20)
    add("--limit", type=float, default=240, help="seconds for one engine")
    add("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.outdir.mkdir(parents=True, exist_ok=True)
    asked.results, asked.record = asked.outdir / "first_run.jsonl", None
    if asked.one:
        asked.backend, model = asked.one
        asked.model = write_model(WORK / "models", model)
        late = serve(asked)
        sys.stdout.flush()
        # vLLM's shutdown takes seconds
        os._exit(1 if late else 0)
    failed = False
    for model in asked.models:
        for backend in filter(knows, asked.backends):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(HERE), *sys.argv[1:]]
                command += ["--one", backend, model]
                log = asked.outdir / f"{backend}-{model}.log"
                with log.open("w") as file:
                    try:
                        done = subprocess.run(
                            command,
                            env={
                                **environment(Path(folder)),
                                "TRITON_CACHE_DIR": f"{folder}/triton",
                            },
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            timeout=asked.limit,
                        ).returncode
                    except subprocess.TimeoutExpired:
                        done = 124
            print(json.dumps({"backend": backend, "model": model, "exit": done}))
            failed |= done != 0
    print(
        asked.results.read_text() if asked.results.exists() else "no engine was ready"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
