"""Print which steps of a vLLM layer with shared keys launch a kernel that was not compiled before.

    PYTHONPATH=tests python tests/launch/warmed_ranks.py 90

As in warmed_launches.py, launches are recorded instead of made, and nothing is exchanged. One JSON
object: `warmed`, the number of kernels that the plugin's warm-up compiled; `steps`, how many steps
followed; `missing`, the kernels that they needed besides, with the new tokens of the step.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"

import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layer_pages import split_scaled_cache, state_bytes
from pagetwin.contract.operations import load_implementation
from pagetwin.engine.rank_group import RankGroup
from pagetwin.integrations.vllm import context_parallel
from pagetwin.integrations.vllm.warm_up import StepBounds, warm_up_layers
from support.compile_kernels import pretend
from support.warmed_launches import keys_of

RANKS, MAX_NUM_REQS, MAX_TOKENS, MAX_SEQ_LEN = 2, 200, 600, 9000
BOUNDS = StepBounds(MAX_NUM_REQS, MAX_TOKENS, MAX_SEQ_LEN, 3)
SCALE = torch.tensor(0.5)
LAYERS = (
    (128, "auto", AttentionOptions()),
    (128, "auto", AttentionOptions(logits_soft_cap=30.0, sinks=torch.ones(16))),
    (64, "fp8_e4m3", AttentionOptions(k_scale=SCALE, v_scale=SCALE)),
    (64, "int4_per_token_head", AttentionOptions()),
    (64, "nvfp4", AttentionOptions(k_global_scale=0.5, v_global_scale=0.5)),
)
"""Head size, cache format, and options. Measured scales are those of the cache."""


class QuietRanks(RankGroup):
    """A group whose collectives do nothing."""

    def __init__(self, group: Any, **given: Any) -> None:
        self.world_size, self.rank = RANKS, 0

    def agree(self, **values: Any) -> None:
        """Do nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def all_gather(
        self, tensor: torch.Tensor, out: torch.Tensor, waits: bool
    ) -> torch.Tensor:
        """Return the buffer as it is."""
        return out

    all_to_all = all_gather


class Group:
    """vLLM's group, which nothing reads."""

    device_group = None


def draw_lens(pick: random.Random) -> list[tuple[int, int]]:
    """Return new tokens and keys of the requests of a step within the bounds."""
    kind = pick.choice(["decode", "verify", "prompts", "mixed"])
    num_reqs = pick.choice([1, 2, 3, 16, 33, 66, 67, 129, MAX_NUM_REQS])
    lens, left = [], MAX_TOKENS
    for req in range(num_reqs):
        most = {"decode": 1, "verify": 3, "mixed": 300 if req == 0 else 1}.get(kind, 90)
        new = min(pick.randint(1, most), left - (num_reqs - req - 1))
        left -= new
        lens.append((new, new + pick.choice([0, 1, 99, 2048, MAX_SEQ_LEN - new])))
    return lens


def make_metadata(lens: list[tuple[int, int]]) -> Any:
    """Return what a layer reads of a step."""
    starts = torch.tensor([0, *(new for new, _ in lens)]).cumsum(0).int()
    return SimpleNamespace(
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(new for new, _ in lens),
        max_seq_len=max(keys for _, keys in lens),
        query_start_loc=starts,
        seq_lens=torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        block_table=torch.zeros(len(lens), 300, dtype=torch.int32),
        causal=True,
        shared_batch=None,
    )


def main(chip: int) -> None:
    """Warm up each kind of layer, then make steps."""
    launches: list[Any] = []
    pretend(chip, launches)
    context_parallel.RankGroup = QuietRanks  # type: ignore[assignment,misc]
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_NUM_REQS
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
    )
    run, group, pick = load_implementation("optimized"), Group(), random.Random(0)
    layers: list[Any] = []
    for size, name, options in LAYERS:
        form = FORMATS[name]
        layer = context_parallel.SharedKeys(
            run, 16, size, size**-0.5, 1, form, True, config, group
        )
        caches: tuple[torch.Tensor, ...]
        if form.is_measured:
            page = torch.zeros(20, 1, 16, state_bytes(form, size, size)).to(torch.uint8)
            *caches, k_scale, v_scale = split_scaled_cache(page, size, form)
            options = replace(options, k_scale=k_scale, v_scale=v_scale)
        else:
            states = torch.zeros(
                20, 1, 16, 2 * size, dtype=form.dtype or torch.bfloat16
            )
            caches = states.transpose(1, 2).split(size, -1)
        query = torch.zeros(1, 16, size, dtype=torch.bfloat16)
        kind = layer.allocate(query, query)
        told = warm_up_layers(
            "optimized", tuple(caches), 16, torch.bfloat16, [options], BOUNDS, kind,
            cache_format=name if form.is_measured else None,
        )  # fmt: skip
        assert told
        layers.append((layer, caches, options, size))
    warmed = keys_of(launches)
    missing, steps = [], 0
    for layer, caches, options, size in layers:
        for _ in range(60):
            launches.clear()
            lens = draw_lens(pick)
            metadata = make_metadata(lens)
            tokens = metadata.num_actual_tokens
            query, out = torch.zeros(2, tokens, 16, size, dtype=torch.bfloat16)
            key, value = torch.zeros(2, tokens, 1, size, dtype=torch.bfloat16)
            layer.attend(query, key, value, caches, metadata, out, options)
            steps += 1
            assert launches
            if keys_of(launches) - warmed:
                missing += [
                    [
                        launch[0].__name__,
                        str(options.given),
                        lens[:3],
                        len(lens),
                        tokens,
                    ]
                    for launch in launches
                    if keys_of([launch]) - warmed
                ]
    print(json.dumps({"warmed": len(warmed), "steps": steps, "missing": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
