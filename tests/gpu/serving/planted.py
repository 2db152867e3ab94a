"""The recorder inside of vLLM: a clean run raises nothing, and planted bugs are found.

    python tests/gpu/serving/planted.py RESULTS --kind plain
    python tests/gpu/serving/planted.py RESULTS --kind fp8
    python tests/gpu/serving/planted.py RESULTS --kind window
    python tests/gpu/serving/planted.py RESULTS --kind groups
    python tests/gpu/serving/planted.py RESULTS --kind replays
    python tests/gpu/serving/planted.py RESULTS --kind fp8 --clean 10000 --every 4 --graphs

One engine serves the same requests once per bug: 16 requests, and a cache that is too small for
them, so that requests are preempted. RESULTS gets one JSON line per run: in which step a bug first
changed something, when it was found, and the message. With `--clean N` no bug is planted, and other
prompts follow until the engine has run N steps. On a machine without a GPU the engine is vLLM's for
CPUs with the reference.
"""

import argparse
import json
import logging
import os
import random
import re
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bugs
import torch
from bugs import Plant, planted
from models import DRAFTS, write_model
from weights import seed_weights

CUDA = torch.cuda.is_available()
DUE_FROM = 20
"""The first step of a run in which its bug may act."""

_NAMES = {plant: name for name, plant in bugs.BUGS.items()}


def _named(*plants: Callable[[Plant], Any]) -> list[str]:
    """Return the names of bugs, in the same order."""
    return [_NAMES[plant] for plant in plants]


KINDS: dict[str, dict[str, Any]] = {
    # on a GPU
    "replays": {"bugs": _named(bugs.padded_slot, bugs.moved_replay), "graphs": True},
    # the last one may end the engine
    "plain": {"bugs": _named(bugs.other_layout, bugs.early_reuse, bugs.stale_row)},
    "fp8": {
        "bugs": _named(bugs.unscaled_read, bugs.dropped_scale),
        "engine": {"kv_cache_dtype": "fp8"},
    },
    "window": {"bugs": _named(bugs.wide_window), "model": "windowed"},
    # layers with a window and layers without one: two groups, which take blocks from one pool
    "groups": {
        "bugs": _named(bugs.early_given_up, bugs.early_reuse, bugs.stale_row),
        "model": "small-groups",
        "engine": {"enable_prefix_caching": True},
    },
    # in the model runner of vLLM's builds for CPUs; that of GPUs in 0.25.1 has other methods
    "rows": {"bugs": _named(bugs.stale_slots, bugs.unmoved_row)},
    # drafts are verified, and some of them rejected
    "drafts": {
        "bugs": _named(bugs.early_reuse, bugs.stale_row),
        "engine": {"speculative_config": DRAFTS},
    },
    # each of them may end the engine
    "prefixes": {
        "bugs": _named(bugs.early_reuse, bugs.stale_row),
        "engine": {"enable_prefix_caching": True},
    },
}
"""The engines: their bugs, and what differs from the first one."""


def has_graphs(asked: argparse.Namespace) -> bool:
    """Return whether decodes are captured; a replay does not run the methods that bugs replace."""
    return CUDA and (asked.graphs or KINDS[asked.kind].get("graphs", False))


class Sentences(logging.Handler):
    """Keeps what the recorder logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.kept.append(record.getMessage())


def build(asked: argparse.Namespace, folder: Path) -> Any:
    """Return an `LLM` with a cache of 24 blocks."""
    from pagetwin.integrations.vllm import register
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    register()
    if not CUDA:
        os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = "reference"
    DummyModelLoader.load_weights = lambda self, model, config: seed_weights(model)
    kind = KINDS[asked.kind]
    graphs = has_graphs(asked)
    compilation: dict[str, Any] = {"mode": 0}
    if graphs:
        compilation |= {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        }
    options = {"enable_prefix_caching": False, **kind.get("engine", {})}
    llm = LLM(
        model=str(write_model(folder, kind.get("model", "small"))),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=not graphs,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 28,
        num_gpu_blocks_override=24,
        block_size=16,
        attention_backend=asked.backend,
        compilation_config=compilation,
        seed=0,
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    for module in runner.model.modules():
        if hasattr(module, "_k_scale"):
            module._k_scale.fill_(0.05)
            module._v_scale.fill_(0.02)
    return llm


def serve(llm: Any, seed: int) -> int:
    """Serve 16 requests with shared prefixes; return how many preemptions there were."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    shared = [rng.randrange(3, 500) for _ in range(40)]
    prompts = [
        {
            "prompt_token_ids": [
                *shared[: rng.choice((0, 20, 40))],
                *(rng.randrange(3, 500) for _ in range(rng.randrange(5, 60))),
            ]
        }
        for _ in range(16)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=40, detokenize=False, ignore_eos=True
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    plain, count = scheduler._preempt_request, [0]

    def preempt(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return plain(*args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        scheduler._preempt_request = plain
    return count[0]


def run(
    llm: Any, bug: str | None, recorder: Any, sentences: Sentences, steps: int = 1
) -> dict[str, Any]:
    """Serve with a bug, and return what was found.

    Args:
        llm: the engine.
        bug: Optional. One of `bugs.BUGS`.
        recorder: of the engine.
        sentences: what it logs.
        steps: the requests are served again, with other prompts, until the engine has run so many.
    """
    start, checked = recorder.step, dict(recorder.checked)
    recorder.findings.clear()
    sentences.kept.clear()
    plant = Plant(llm, lambda: recorder.step - start, DUE_FROM)
    error, preemptions = None, []
    try:
        with planted(bug, plant) if bug else nullcontext():
            while recorder.step - start < steps and recorder.is_on:
                preemptions.append(serve(llm, 1 + len(preemptions)))
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    recorder.finish()
    # a bug leaves its traces in the cache
    recorder.blocks_changed(range(24))
    done = {name: recorder.checked[name] - checked[name] for name in checked}
    result: dict[str, Any] = {"bug": bug, "checked": done}
    result["preemptions"] = None if error else sum(preemptions)
    if not recorder.is_on:
        result["recorder"] = "failed"
    if error:
        result["error"] = error
    if plant.effects:
        result["effect"] = plant.effects[0]
    found = []
    for sentence in sentences.kept:
        text = sentence.removeprefix("flight recorder: ")
        text = re.sub(r"\. To check it again: .*", "", text)
        match = re.match(r"step (\d+)(.*)", text, flags=re.DOTALL)
        found.append(f"step {int(match[1]) - start}{match[2]}" if match else text[:900])
    return {**result, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--kind", choices=list(KINDS), default="plain")
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument(
        "--every", type=int, default=1, help="one of so many steps is sampled"
    )
    parser.add_argument("--clean", type=int, metavar="N", help="N steps without a bug")
    parser.add_argument(
        "--graphs", action="store_true", help="capture decodes, with --clean alone"
    )
    asked = parser.parse_args()
    if asked.graphs and not asked.clean:
        parser.error("--graphs: expected --clean too; some bugs do not act in a replay")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PAGETWIN_RECORD"] = f"{folder}/cases"
        os.environ["PAGETWIN_RECORD_EVERY"] = str(asked.every)
        llm = build(asked, Path(folder))
        import vllm
        from pagetwin.recorder.wrappers.vllm_schedule import STEPS

        [recorder] = STEPS.recorders
        sentences = Sentences()
        logging.getLogger("pagetwin.recorder").addHandler(sentences)
        first = {
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name() if CUDA else "cpu",
            "torch": torch.__version__,
            "kind": asked.kind,
            "backend": asked.backend if CUDA else "CUSTOM, reference",
            "graphs": has_graphs(asked),
            "sampled": asked.every,
            "clean": asked.clean,
        }
        chosen = [] if asked.clean else KINDS[asked.kind]["bugs"]
        for bug in (None, *chosen):
            result = run(llm, bug, recorder, sentences, asked.clean or 1)
            with asked.results.open("a") as file:
                file.write(json.dumps({**first, **result}) + "\n")
            if "error" in result:
                break  # the engine is of no use any more
        # vLLM's shutdown takes seconds
        os._exit(0)


if __name__ == "__main__":
    main()
