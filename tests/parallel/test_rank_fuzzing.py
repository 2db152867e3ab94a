"""Fuzzing of operations of several ranks: what is drawn, what ranks store, and planted bugs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants.mutant import load_catalogue
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.calls.rank_calls import run_signed
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.cases.rank_calls import rank_call
from pagetwin.conformance.cases.rank_signatures import (
    MAX_RANKS,
    draw_rank_batch,
    draw_rank_signature,
)
from pagetwin.conformance.cases.ranks import GATHER, RING, STEP
from pagetwin.conformance.cases.signatures import LARGE, SMALL, SignedBatch
from pagetwin.conformance.cases.signed_calls import build_signed
from pagetwin.conformance.running import trial
from pagetwin.conformance.running.screening import screen
from pagetwin.conformance.running.trial import find_law, make_case, make_setting
from rank_functions import FUNCTION, RIGHT, WRONG
from support.planted_bugs import Hunt, hunt

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
LAWS = {
    STEP: "a parallel step is right for every batch of a signature",
    GATHER: "a prefill on several ranks is right for every batch of a signature",
    RING: "a ring prefill is right for every batch of a signature",
}
BUGS = {
    "optimized/parallel/rank_splits/interleave-formula-of-one": (STEP, 8),
    "reference/parallel/key_splits/runs-in-rounds-of-one": (STEP, 8),
    "reference/parallel/decode/partials-in-the-order-of-the-ranks": (STEP, 240),
    "optimized/parallel/combine/log-sum-exp-of-a-token-without-keys": (STEP, 80),
    "reference/parallel/heads/head-offset-without-copies": (STEP, 80),
    "reference/parallel/prefill_chunks/rows-without-the-padding-of-a-rank":
        (GATHER, 40),
    "reference/parallel/ring_rounds/second-chunks-of-earlier-ranks": (RING, 40),
}  # fmt: skip
"""Mutants, the operation, and the number of batches in which each is found at the latest."""


def batches(operation: str, seeds: range, count: int = 1) -> list[SignedBatch]:
    """Return some batches of some signatures."""
    return [
        draw_rank_batch(draw_rank_signature(seed, SMALL, operation), index)
        for seed in seeds
        for index in range(count)
    ]


@pytest.mark.parametrize("operation", LAWS)
def test_a_batch_of_ranks_is_created_again_from_what_a_report_shows(
    operation: str,
) -> None:
    law = find_law(LAWS[operation])
    for batch in batches(operation, range(20)):
        assert make_case(law, repr(batch)) == batch


@pytest.mark.parametrize("limits", [SMALL, LARGE])
@pytest.mark.parametrize("operation", LAWS)
def test_signatures_of_ranks_can_be_distributed(operation: str, limits: Any) -> None:
    for seed in range(300):
        signature = draw_rank_signature(seed, limits, operation)
        assert signature.is_valid and signature.ranks is not None
        assert 1 <= signature.ranks.world_size <= MAX_RANKS


def test_every_class_of_a_step_is_drawn() -> None:
    counts: Counter[Any] = Counter()
    for batch in batches(STEP, range(300)):
        signature = batch.signature
        ranks, size = signature.ranks, signature.block_size
        assert ranks is not None
        counts["ranks", ranks.world_size] += 1
        counts[ranks.exchange] += 1
        counts["splits"] += ranks.splits is not None
        counts["invariant"] += signature.choice["batch_invariant"] == "yes"
        counts["no interleave"] += ranks.interleave_size == 1
        counts["between"] += 1 < ranks.interleave_size < size
        counts["a block"] += 1 < ranks.interleave_size == size
        replicated = ranks.tp_world_size > signature.kv_heads * ranks.world_size
        counts["replicated"] += replicated
        counts["heads and keys"] += ranks.tp_world_size > ranks.world_size > 1
        counts["idle"] += ranks.idle_ranks(batch.key_lens) > 0
        counts["drafts"] += max(batch.query_lens) > 1
        counts["mixed"] += min(batch.query_lens) < max(batch.query_lens)
        counts["FP8"] += signature.choice["cache"] != "as the query"
    classes = 8 + 12 + 1  # world sizes and the rest
    assert len(counts) == classes and min(counts.values()) >= 3, counts


@pytest.mark.parametrize("operation", [GATHER, RING])
def test_all_keys_of_prompts_are_new(operation: str) -> None:
    for batch in batches(operation, range(40), 2):
        assert batch.query_lens == batch.key_lens and not batch.padding
        needles = zip(batch.needles, batch.key_lens, strict=True)
        assert all(-1 <= needle < max(1, keys) for needle, keys in needles)


def test_ranks_that_share_keys_store_each_of_them_once() -> None:
    """And the missing ones of a cache are the new tokens, which the step writes."""
    for batch in batches(STEP, range(40)):
        ranks = batch.signature.ranks
        assert ranks is not None
        plain = {"cache": "as the query", "scales": "none", "layout": "separate"}
        choice = batch.signature.choice | plain
        signature = replace(batch.signature, choice=choice)
        batch = replace(batch, signature=signature, poison="nan", table="scattered")
        built = build_signed(batch, CPU)
        stored, missing = 0, 0
        for rank in range(ranks.world_size):
            call = rank_call(batch, built, rank)
            before, after = (
                int(caches[0][:, :, 0, 0].isfinite().sum())
                for caches in (call.caches, call.after)
            )
            stored, missing = stored + after, missing + after - before
        assert stored == sum(batch.key_lens)
        assert missing == sum(batch.query_lens)


@pytest.mark.parametrize("operation", LAWS)
def test_simpler_batches_of_ranks_are_valid(operation: str) -> None:
    setting = make_setting(load_candidate("reference"), "cpu")
    for batch in batches(operation, range(3)):
        for simpler in list(batch.simpler())[:8]:
            run_signed(setting, simpler, build_signed(simpler, CPU))


# planted bugs


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_ranks_is_found_in_a_bounded_number_of_batches(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS_TO_SHRINK", 0.0)
    operation, most = BUGS[bug]
    (mutant,) = [planted for planted in load_catalogue() if planted.id == bug]
    found = hunt(Hunt(mutant, LAWS[operation], most, count=4), tmp_path)
    assert found is not None
    assert found.case, f"{bug}: not found in {found.cases} batches"
    assert found.case.startswith("SignedBatch(") and found.summary


def function_per_rank(folder: Path, words: dict[str, str]) -> Any:
    """Return the setting of an implementation that is one function per rank."""
    text = FUNCTION
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    # a module of its own for each test
    file = folder / f"{folder.name.replace('-', '_')}.py"
    file.write_text(text, encoding="utf-8")
    return make_setting(load_candidate(str(file)), "cpu")


def test_a_function_per_rank_is_right_for_drawn_batches(tmp_path: Path) -> None:
    """Batches with options or fixed splits, which it does not take, are skipped."""
    setting = function_per_rank(tmp_path, RIGHT)
    tried = 0
    for seed in range(16):
        result = screen(find_law(LAWS[STEP]), setting, seed, 0, 2)
        assert result.status in (Status.HELD, Status.OUTSIDE), result.summary
        tried += result.cases - result.skipped
    assert tried > 8


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_function_per_rank_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS_TO_SHRINK", 0.0)
    setting = function_per_rank(tmp_path, WRONG[what])
    law = find_law(LAWS[STEP])
    found = (screen(law, setting, seed, 0, 4) for seed in range(30))
    broken = next(result for result in found if not result.ok)
    assert broken.status == Status.BROKEN
    ranks = make_case(law, broken.case).signature.ranks
    if what == "interleave size 1":
        assert ranks.interleave_size > 1 and ranks.world_size > 1
