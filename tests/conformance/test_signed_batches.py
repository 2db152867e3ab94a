"""Batches of signatures: what is drawn, and the tensors that are built from it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.corpus import Corpus
from pagetwin.conformance.cases.batches import GARBAGE, TABLES
from pagetwin.conformance.cases.drawn_numbers import CPU, NUMBERS, Numbers
from pagetwin.conformance.cases.signatures import (
    ENTRIES,
    LARGE,
    POISONS,
    SMALL,
    VERSION,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.cases.signed_calls import SignedCall, build_signed
from pagetwin.tools.cli import USER_ERROR, app
from typer.testing import CliRunner

OPERATIONS = ("paged_attention", "encoder_attention")
PROGRAM = """
from pagetwin.conformance import reproduce
reproduce(
    "reference",
    "paged attention is right for every batch of a signature",
    "{case}",
    device="cpu",
)
"""


def drawn(operation: str, limits: Any, seeds: int, count: int) -> list[SignedBatch]:
    """Return some batches of some signatures."""
    return [
        draw_batch(draw_signature(seed, limits, operation), index)
        for seed in range(seeds)
        for index in range(count)
    ]


@pytest.mark.parametrize("limits", [SMALL, LARGE])
def test_every_class_of_batches_is_drawn(limits: Any) -> None:
    batches = drawn("paged_attention", limits, 40, 16)
    counts: Counter[Any] = Counter()
    for drawn_batch in batches:
        size = drawn_batch.signature.block_size
        reqs = list(
            zip(
                drawn_batch.query_lens,
                drawn_batch.key_lens,
                drawn_batch.needles,
                strict=True,
            )
        )
        counts[drawn_batch.table] += 1
        counts["poison", drawn_batch.poison] += 1
        counts["entries", drawn_batch.entries] += 1
        counts["padding"] += drawn_batch.padding > 0
        counts["ragged"] += len(set(drawn_batch.key_lens)) > 1
        counts["needles"] += any(needle >= 0 for needle in drawn_batch.needles)
        counts["no needle"] += any(needle < 0 for needle in drawn_batch.needles)
        counts["no new token"] += 0 in drawn_batch.query_lens
        counts["prompts"] += any(new == keys > 1 for new, keys, _ in reqs)
        counts["chunks"] += any(1 < new < keys for new, keys, _ in reqs)
        for past in (-1, 0, 1):
            at_edge = any((keys - past) % size == 0 for keys in drawn_batch.key_lens)
            counts["edge", past] += size > 3 and at_edge
    names: list[Any] = [*TABLES, *(("poison", name) for name in POISONS)]
    names += [*(("entries", name) for name in ENTRIES), "padding", "ragged", "needles"]
    names += ["no needle", "no new token", "prompts", "chunks"]
    names += [("edge", past) for past in (-1, 0, 1)]
    rare = [name for name in names if counts[name] < len(batches) / 20]
    assert not rare, counts


def contents(batch: SignedBatch, built: SignedCall) -> dict[str, torch.Tensor]:
    """Return the slots of each cache that no request stores anything in."""
    size, found = batch.signature.block_size, {}
    for name in ("key_cache", "value_cache"):
        cache = built.call.arguments[name]
        free = torch.ones(cache.shape[:2], dtype=torch.bool)
        for length, row in zip(batch.key_lens, built.call.rows, strict=True):
            for position in range(length):
                free[row[position // size], position % size] = False
        found[name] = cache.float()[free]
    return found


def test_everything_that_must_not_be_read_is_poisoned() -> None:
    for batch in drawn("paged_attention", SMALL, 40, 4):
        built = build_signed(batch, CPU)
        stored = built.keys.dtype
        for numbers in contents(batch, built).values():
            assert len(numbers) >= sum(batch.key_lens) // batch.signature.block_size
            if batch.poison == "nan":
                assert numbers.isnan().all()
            elif batch.poison == "inf" and stored != torch.float8_e4m3fn:
                assert (numbers == torch.inf).all()
            else:
                assert (numbers == torch.finfo(stored).max).all()
        table = built.call.arguments["block_table"]
        ids = {block for row in built.call.rows for block in row}
        for entries, row in zip(table.tolist(), built.call.rows, strict=True):
            assert entries[: len(row)] == row
            past = set(entries[len(row) :])
            if batch.entries == "far outside":
                assert past <= set(GARBAGE)
            else:
                assert past <= (ids if "another" in batch.entries else {0}) | {0}
        padding = built.call.query[sum(batch.query_lens) :].float()
        assert (padding == 0.5).all() if batch.seed % 2 else padding.isnan().all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_tensors_store_what_the_oracle_reads(operation: str) -> None:
    for batch in drawn(operation, SMALL, 40, 3):
        built = build_signed(batch, CPU)
        requests = built.call.requests()
        for name, right in (
            ("query", built.query),
            ("key", built.keys),
            ("value", built.values),
        ):
            found = torch.cat([getattr(request, name).float() for request in requests])
            assert torch.equal(found, right.float())
            assert not right.float().isnan().any()


def test_each_slot_holds_a_key_of_its_own() -> None:
    compared = 0
    for batch in drawn("paged_attention", SMALL, 40, 6):
        batch = replace(batch, needles=(-1,) * len(batch.needles))
        size, built = batch.signature.block_size, build_signed(batch, CPU)
        slots = {
            (row[position // size], position % size)
            for length, row in zip(batch.key_lens, built.call.rows, strict=True)
            for position in range(length)
        }
        if built.keys.dtype == torch.float32 and built.keys[:1].numel() >= 8:
            assert len(torch.unique(built.keys, dim=0)) == len(slots)
            compared += batch.table != "scattered"
    assert compared > 10


def test_blocks_are_scattered_shared_and_repeated_as_drawn() -> None:
    shared = repeated = 0
    for batch in drawn("paged_attention", SMALL, 40, 6):
        rows = build_signed(batch, CPU).call.rows
        ids = [block for row in rows for block in row]
        if batch.table == "scattered":
            assert len(set(ids)) == len(ids)
            continue
        for row in rows[1:]:
            same = min(len(row), len(rows[0])) // 2
            if batch.table == "shared prefix":
                assert row[:same] == rows[0][:same]
                shared += same > 0
        for row in rows:
            if batch.table == "repeated block" and len(row) > 1:
                assert row[-1] == row[0] and len(set(row)) == len(row) - 1
                repeated += 1
    assert shared > 20 and repeated > 20


def test_a_needle_has_the_largest_score_of_its_request() -> None:
    needles = 0
    for batch in drawn("paged_attention", LARGE, 8, 4):
        plain = batch.signature.choice | {"scale": "none", "cache": "as the query"}
        signature = replace(batch.signature, choice=plain | {"scales": "none"})
        batch = replace(batch, signature=signature, table="scattered")
        for req, request in zip(
            batch.needles, build_signed(batch, CPU).call.requests(), strict=True
        ):
            if req < 0 or not len(request.query):
                continue
            group = int(plain["group"])
            keys = request.key.double().repeat_interleave(group, 1)
            score = torch.einsum("qhd,khd->qhk", request.query.double(), keys)
            score = score * request.query.shape[2] ** -0.5
            assert (score.argmax(2) == req).float().mean() > 0.99
            assert abs(score[:, :, req].mean() - 24) < 4
            needles += 1
    assert needles > 20


def test_equal_batches_give_equal_tensors_and_other_seeds_give_others() -> None:
    for batch in drawn("paged_attention", SMALL, 12, 2):
        one, same = build_signed(batch, CPU), build_signed(batch, CPU)
        for name, argument in one.call.arguments.items():
            other = same.call.arguments[name]
            if isinstance(argument, torch.Tensor):
                assert torch.equal(
                    argument.double().nan_to_num(), other.double().nan_to_num()
                )
            else:
                assert argument == other
        changed = build_signed(replace(batch, seed=batch.seed + 2), CPU)
        if one.keys.numel() > 8:
            assert not torch.equal(one.keys.float(), changed.keys.float())


def test_drawn_numbers_are_normal_and_no_two_keys_are_equal_when_they_repeat() -> None:
    rows = Numbers(NUMBERS - 1000, CPU).take((2 * NUMBERS // 64, 64), torch.float32)
    assert abs(rows.mean()) < 0.01 and abs(rows.std() - 1) < 0.01
    assert len(torch.unique(rows[:, :3], dim=0)) == len(rows)
    numbers = Numbers(NUMBERS - 3, CPU)
    first, second = (numbers.take((5,), torch.float32) for _ in range(2))
    whole = Numbers(NUMBERS - 3, CPU).take((10,), torch.float32)
    assert torch.equal(torch.cat([first, second]), whole)


def test_what_another_version_has_drawn_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers cannot be drawn again, so its failure would seem to be fixed."""
    monkeypatch.chdir(tmp_path)
    case = repr(drawn("paged_attention", SMALL, 1, 1)[0])
    older = case.replace(f", version={VERSION}", "")
    assert older != case
    for text in (older, case.replace(f"version={VERSION}", "version=99")):
        Path("program.py").write_text(PROGRAM.format(case=text), encoding="utf-8")
        done = CliRunner().invoke(app, ["reproduce", "program.py"])
        assert done.exit_code == USER_ERROR, done.output
        assert "drawn by another version of pagetwin" in done.output
    Path("program.py").write_text(PROGRAM.format(case=case), encoding="utf-8")
    assert CliRunner().invoke(app, ["reproduce", "program.py"]).exit_code == 0
    folder = tmp_path / "corpus" / "reference"
    folder.mkdir(parents=True)
    line = {"law": "a law", "signature": 0, "first": 0, "cases": 32}
    (folder / "tried.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"drawn by version 1 .* remove it"):
        Corpus(tmp_path / "corpus", "reference")
    line |= {"version": VERSION}
    (folder / "tried.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert len(Corpus(tmp_path / "corpus", "reference").lines) == 1
