"""One engine of vLLM in this process, which reads commands and writes JSON lines.

`tests/gpu/serving/run.py` starts it. Each line on the standard input is a command: `load NAME
RUN`, `profile NAME`, `recorder` or `quit`. Each result is a line of the file `--results`.
"""

import argparse
import json
import os
import random
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from models import DRAFTS, draw_prompt, engine_options, has_audio
from weights import seed_weights

LOADS = {
    "a": (256, 1024, 64),
    "b": (64, 4096, 128),
    "c": (16, 16384, 64),
    # with audio, so their prompts are short
    "audio-a": (64, 4, 128),
    "audio-b": (16, 4, 256),
    "audio-c": (4, 4, 256),
    # to try the programs
    "try": (2, 12, 4),
}
"""Requests, input tokens and output tokens of each load."""

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


CUDA = torch.cuda.is_available()


def synchronize() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def build(asked: argparse.Namespace) -> Any:
    """Return an `LLM` with seeded weights."""
    from pagetwin.integrations.vllm import register
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # as the entry point of an installed package would
    register()
    if not CUDA:
        os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = "reference"
    DummyModelLoader.load_weights = lambda self, model, config: seed_weights(model)
    options: dict[str, Any] = {}
    if asked.mode == "eager":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
        if asked.mode == "speculative":
            options["speculative_config"] = DRAFTS
        if asked.mode == "decode graphs":
            options["compilation_config"] |= {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
            }
    return LLM(
        model=str(asked.model),
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=256,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=asked.kv_gib << 30,
        enable_prefix_caching=False,
        attention_backend=asked.backend,
        seed=0,
        disable_log_stats=True,
        **engine_options(asked.model.name, 20480, 8192),
        **options,
    )


def percentile(values: list[float], part: float) -> float:
    """Return a percentile in milliseconds; the nearest one that occurs."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2)


class Served:
    """An engine with its file of results.

    Args:
        asked: the arguments of the process.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.began = time.time()
        import vllm

        imported = time.time()
        self.llm = build(asked)
        config = self.llm.llm_engine.vllm_config
        self.count = 0
        self.say(
            event="ready",
            vllm=vllm.__version__,
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if CUDA else "cpu",
            import_s=round(imported - self.began, 1),
            build_s=round(time.time() - imported, 1),
            cudagraph_mode=str(config.compilation_config.cudagraph_mode),
            compilation_mode=str(config.compilation_config.mode),
        )

    def say(self, **fields: Any) -> None:
        """Write one line of results."""
        asked = self.asked
        first = {
            "backend": asked.backend + ("+record" if asked.record else ""),
            "model": asked.model.name,
            "mode": asked.mode,
        }
        with asked.results.open("a") as file:
            file.write(json.dumps({**first, **fields}) + "\n")

    def serve(
        self, shape: tuple[int, int, int], seed: int
    ) -> tuple[float, list[list[float]], dict[str, int]]:
        """Serve requests that arrive at once.

        Returns:
            Seconds until the last token, for each request the seconds from the arrival to each of
            its tokens, and the numbers of steps, of draft tokens and of those that were accepted.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        reqs, length, new = shape
        rng = random.Random(seed)
        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompts = [draw_prompt(self.asked.model.name, rng, length) for _ in range(reqs)]
        times: dict[str, list[float]] = {}
        synchronize()
        start = time.perf_counter()
        for prompt in prompts:
            self.count += 1
            name = str(self.count)
            times[name] = []
            engine.add_request(name, prompt, params)
        if has_audio(self.asked.model.name):
            # the host has computed the spectrograms
            start = time.perf_counter()
        counted = {"steps": 0, "drafts": 0, "accepted": 0}
        while engine.has_unfinished_requests():
            counted["steps"] += 1
            for output in engine.step():
                now = time.perf_counter() - start
                new_tokens = len(output.outputs[0].token_ids)
                times[output.request_id] += [now] * new_tokens
                counted["accepted"] += new_tokens - 1
            counted["drafts"] += self.count_drafts()
        synchronize()
        return time.perf_counter() - start, list(times.values()), counted

    def count_drafts(self) -> int:
        """Return the draft tokens of the next step."""
        if self.asked.mode != "speculative":
            return 0
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return sum(len(request.spec_token_ids) for request in scheduler.running)

    def load(self, name: str, run: str) -> None:
        """Serve a load and write its times. Run "warm" is the first one, beside other work."""
        reqs, length, new = shape = LOADS[name]
        seconds, times, counted = self.serve(shape, seed=1 if run == "warm" else 2)
        first = [moments[0] for moments in times]
        per_token = [
            (moments[-1] - moments[0]) / (len(moments) - 1) for moments in times
        ]
        gaps = [b - a for moments in times for a, b in pairwise(moments)]
        self.say(
            event="load",
            load=name,
            run=run,
            requests=reqs,
            input=length,
            output=new,
            tokens=sum(map(len, times)),
            **counted,
            seconds=round(seconds, 4),
            output_tokens_per_s=round(reqs * new / seconds, 1),
            first_token_ms=[percentile(first, 0.5), percentile(first, 0.99)],
            per_token_ms=[percentile(per_token, 0.5), percentile(per_token, 0.99)],
            gap_ms=[percentile(gaps, 0.5), percentile(gaps, 0.99)],
        )

    def recorder(self) -> None:
        """Write what the flight recorder has checked and found."""
        from pagetwin.recorder.wrappers.vllm_schedule import STEPS

        for recorder in STEPS.recorders:
            recorder.finish()
            self.say(
                event="recorder",
                is_on=recorder.is_on,
                checked=recorder.checked,
                findings=[one.found for one in recorder.findings],
            )

    def profile(self, name: str) -> None:
        """Write the 14 kernels with the most device time of a load with 8 output tokens."""
        from torch.profiler import ProfilerActivity, profile

        reqs, length, _ = LOADS[name]
        with profile(activities=[ProfilerActivity.CUDA]) as result:
            self.serve((reqs, length, 8), seed=3)
        rows = sorted(
            result.key_averages(), key=lambda row: -row.self_device_time_total
        )
        self.say(
            event="profile",
            load=name,
            total_ms=round(sum(row.self_device_time_total for row in rows) / 1e3, 2),
            kernels=[
                [row.key[:80], row.count, round(row.self_device_time_total / 1e3, 2)]
                for row in rows[:14]
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--kv-gib", type=int, default=10)
    parser.add_argument("--record", type=Path, help="folder of the flight recorder")
    parser.add_argument("--record-every", default="256")
    asked = parser.parse_args()
    if asked.record:
        os.environ["PAGETWIN_RECORD_EVERY"] = asked.record_every
        os.environ["PAGETWIN_RECORD"] = str(asked.record)
    engine = Served(asked)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "quit":
            break
        try:
            getattr(engine, command)(*words)
        except Exception:
            traceback.print_exc()
            engine.say(
                event="failed", command=line, error=traceback.format_exc()[-900:]
            )
        engine.say(event="done", command=line.strip())
    # vLLM's shutdown takes seconds
    os._exit(0)


if __name__ == "__main__":
    main()
