"""Fuzzing: drawn batches, the batched oracle and the corpus."""

import json
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants.mutant import load_catalogue
from pagetwin.conformance.api import fuzz
from pagetwin.conformance.api.corpus import Corpus
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.cases.option_pairs import PLAIN
from pagetwin.conformance.cases.signatures import (
    LARGE,
    SMALL,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.cases.signed_calls import build_signed
from pagetwin.conformance.checks.batched import attend_batched
from pagetwin.conformance.checks.group_verdicts import judge_group
from pagetwin.conformance.checks.groups import make_group
from pagetwin.conformance.running.trial import find_law, make_case
from pagetwin.contract.operations import load_implementation
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from support.planted_bugs import Hunt, hunt
from typer.testing import CliRunner

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
PAGED = "paged attention is right for every batch of a signature"
OPERATIONS = ("paged_attention", "encoder_attention")
BUGS = {
    "window-one-too-wide": 400,
    "a-query-does-not-see-itself": 40,
    "no-mask-at-the-end": 100,
    "chunk-from-the-first-new-token": 400,
    "flag-of-the-first-request": 600,
}
"""Mutants of the kernels, and the number of batches in which each is found at the latest."""

DECODES = """
import torch
from pagetwin.conformance import Support

SUPPORT = Support(
    operations=["paged_attention"],
    dtypes=["float32"],
    cache_dtypes=["float32"],
    query_lens=range(2),
    options=["scale", "out"],
    rejects=[],
)


def paged_attention(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
    max_query_len, max_seq_len, scale=None, out=None,
):
    if max_query_len > 1:
        raise NotImplementedError("decodes only")
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    group = query.shape[1] // key_cache.shape[2]
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        if starts[req] == starts[req + 1]:
            continue
        seq_len -= seq_len % 16 == 1  # the bug
        blocks = block_table[req, : -(-seq_len // key_cache.shape[1])].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        out[starts[req]] = torch.nn.functional.scaled_dot_product_attention(
            query[starts[req], :, None],
            key.transpose(0, 1),
            value.transpose(0, 1),
            scale=scale,
        )[:, 0]
    return out
"""


def batches(
    operation: str, seeds: range, count: int, limits: Any = SMALL
) -> list[list[SignedBatch]]:
    """Return some batches of some signatures."""
    return [
        [
            draw_batch(draw_signature(seed, limits, operation), index)
            for index in range(count)
        ]
        for seed in seeds
    ]


# drawing


def test_equal_seeds_draw_equal_batches_and_other_indices_draw_others() -> None:
    one, other = (batches("paged_attention", range(20), 6) for _ in range(2))
    assert one == other
    for group in one:
        assert len({repr(batch) for batch in group}) == len(group)


def test_a_batch_is_created_again_from_what_a_report_shows() -> None:
    law = find_law(PAGED)
    for (batch,) in batches("paged_attention", range(20), 1):
        assert make_case(law, repr(batch)) == batch


@pytest.mark.parametrize("limits", [SMALL, LARGE])
def test_batches_of_a_signature_agree_in_what_kernels_are_compiled_for(
    limits: Any,
) -> None:
    for group in batches("paged_attention", range(6), 4, limits):
        calls = [build_signed(batch, CPU).call for batch in group]
        kinds = set()
        for call in calls:
            tensors = {
                name: (argument.dtype, argument.stride()[1:], argument.shape[2:])
                for name, argument in call.arguments.items()
                if isinstance(argument, torch.Tensor) and name not in ("query_ranges",)
            }
            bounds = call.arguments["max_query_len"], call.arguments["max_seq_len"]
            names = sorted(set(call.arguments) - {"out_scale"})
            kinds.add(repr((tensors | {"block_table": None}, bounds, names)))
        assert len(kinds) == 1


def test_simpler_batches_are_valid() -> None:
    reference = load_implementation("reference")
    for (batch,) in batches("paged_attention", range(4), 1):
        for simpler in list(batch.simpler())[:12]:
            build_signed(simpler, CPU).call.run(reference)


# the batched oracle


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_batched_oracle_equals_the_loop_over_keys(operation: str) -> None:
    for group in batches(operation, range(100, 130), 3):
        calls = [build_signed(batch, CPU) for batch in group]
        exact = attend_batched(padded := make_group(calls, CPU))
        for index, signed in enumerate(calls):
            right, own = signed.call.answer(), padded.index == index
            token = padded.token[own]
            torch.testing.assert_close(
                exact.out[own], right.out[token], rtol=0, atol=1e-12
            )
            torch.testing.assert_close(
                exact.lse[own], right.lse.T[token], rtol=1e-14, atol=1e-12
            )
            torch.testing.assert_close(
                exact.scores[own], right.scores.T[token], rtol=1e-12, atol=1e-9
            )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_batched_oracle_accepts_the_reference_and_rejects_a_lost_needle(
    operation: str,
) -> None:
    reference = load_implementation("reference")
    lost = 0
    for group in batches(operation, range(30), 4):
        calls = [build_signed(batch, CPU) for batch in group]
        padded = make_group(calls, CPU)
        results = [signed.call.run(reference) for signed in calls]
        assert max(judge_group(padded, results)) <= 1
        wrong = []
        for batch, signed, (out, lse) in zip(group, calls, results, strict=True):
            needles = batch.needles

            def flip(req: int, own: int, key: int, needles: Any = needles) -> bool:
                return key == needles[req]

            answer = signed.call.answer(flip)
            scale = float(signed.call.arguments.get("out_scale", 1.0))
            wrong.append(((answer.out / scale).to(out.dtype), lse))
        for signed, share, (out, _) in zip(
            calls, judge_group(padded, wrong), wrong, strict=True
        ):
            is_right = signed.call.judge(out, signed.call.answer(), reference).ok
            assert (share <= 1) == is_right
            lost += not is_right
    assert lost > 20


def test_the_batched_oracle_rejects_padding_rows_that_are_not_empty() -> None:
    reference = load_implementation("reference")
    batch = replace(
        batches("paged_attention", range(1), 1)[0][0], padding=2, query_lens=(1,),
        key_lens=(3,), needles=(-1,),
    )  # fmt: skip
    plain = dict(PLAIN) | {"out": "given", "lse": "given"}
    batch = replace(batch, signature=replace(batch.signature, choice=plain))
    built = build_signed(batch, CPU)
    out, lse = built.call.run(reference)
    group = make_group([built], CPU)
    assert judge_group(group, [(out, lse)])[0] <= 1
    out[-1, 0, 0] = 1e-3
    assert judge_group(group, [(out, lse)])[0] == float("inf")
    out[-1, 0, 0] = 0.0
    assert lse is not None
    lse[0, -1] = 0.0
    assert judge_group(group, [(out, lse)])[0] == float("inf")
    lse[0, -1], out[0, 0, 0] = -torch.inf, torch.nan
    assert judge_group(group, [(out, lse)])[0] == float("inf")


# planted bugs


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_in_a_bounded_number_of_batches(
    bug: str, tmp_path: Path
) -> None:
    (mutant,) = [
        planted
        for planted in load_catalogue()
        if planted.file.startswith("optimized/kernels/")
        and planted.id.endswith(f"/{bug}")
    ]
    found = hunt(Hunt(mutant, PAGED, BUGS[bug], count=8), tmp_path)
    if found is None:
        return  # it reads a block far outside of the cache, which ends a worker too
    assert found.case, f"{bug}: not found in {found.cases} batches"
    assert found.case.startswith("SignedBatch(") and found.summary


# the corpus: each case is tried once


class FakeWorker:
    """Records its jobs, and returns at once."""

    jobs: list[Any] = []  # noqa: RUF012
    failing: set[int] = set()  # noqa: RUF012

    def __init__(
        self, implementation: str, device: str, seconds: float, gpu: str | None = None
    ) -> None:
        self.seconds_of_a_law = seconds

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def try_law(self, job: Any, area: str) -> Result:
        """Return that the law holds, except for the signatures in `failing`."""
        self.jobs.append(job)
        if job.case is None and job.signature in self.failing:
            return Result(
                job.law, area, Status.BROKEN, cases=job.examples, seconds=0.01,
                case="SignedBatch()", what="output", where=f"at {job.signature}",
                found="1.5", right="2.5",
            )  # fmt: skip
        return Result(job.law, area, Status.HELD, cases=job.examples, seconds=0.01)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(fuzz, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "jobs", [])
    monkeypatch.setattr(FakeWorker, "failing", set())
    return FakeWorker


def tried(folder: Path) -> Counter[tuple[str, int, int]]:
    """Return how often each batch of each signature was tried, by the lines of the corpus."""
    return Counter(
        (line.law, line.signature, line.first + number)
        for line in Corpus(folder, "reference").lines
        if line.signature is not None
        for number in range(line.cases)
    )


def go(folder: Path, cases: int, workers: int = 1, **more: Any) -> fuzz.Fuzzing:
    options = {
        "only": "attention is right for every batch",
        "batches": 48,
        "device": "cpu",
    } | more
    return fuzz.fuzz_implementation(
        "reference", 1.0, folder, cases=cases, workers=workers, **options
    )


def test_resuming_neither_repeats_nor_loses_a_case(
    fake: type[FakeWorker], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert go(whole, 300).cases == 300
    for cases in (7, 100, 1, 192):
        run = go(parts, cases)
        assert run.cases == cases
    assert tried(parts) == tried(whole)
    assert run.summary["cases"] == 300
    assert set(tried(whole).values()) == {1}


def test_several_workers_neither_repeat_nor_lose_a_case(
    fake: type[FakeWorker], tmp_path: Path
) -> None:
    for _ in range(2):
        assert go(tmp_path, 500, workers=4).cases == 500
    assert tried(tmp_path).total() == 1000
    assert set(tried(tmp_path).values()) == {1}


def test_a_signature_that_failed_is_left_until_its_case_is_fixed(
    fake: type[FakeWorker], tmp_path: Path
) -> None:
    fake.failing = {1}
    run = go(tmp_path, 200)
    (failure,) = run.failures
    assert failure.law == PAGED and len(run.programs) == 1
    assert tried(tmp_path)[PAGED, 1, 31] == 1 and not tried(tmp_path)[PAGED, 1, 32]
    fake.failing = set()
    again = go(tmp_path, 200)
    assert again.fixed == [PAGED] and not again.failures
    assert not run.programs[0].exists()
    assert tried(tmp_path)[PAGED, 1, 47] == 1
    assert set(tried(tmp_path).values()) == {1}


# the command


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the module `decodes`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "decodes.py"
    file.write_text(textwrap.dedent(DECODES), encoding="utf-8")
    yield file
    sys.modules.pop("decodes", None)


@pytest.mark.long
def test_a_failure_is_minimised_reported_and_reproduced(kernels: Path) -> None:
    words = ["fuzz", "decodes", "--minutes", "5", "--only", PAGED, "--device", "cpu"]
    words += ["--batches", "64", "--cases", "400"]
    files = ["--junit", "r.xml", "--html", "r.html", "--json", "r.json"]
    done = CliRunner().invoke(app, [*words, *files])
    assert done.exit_code == DISAGREE, done.output
    (program,) = Path(".pagetwin").rglob("*.py")
    text = program.read_text(encoding="utf-8")
    assert "query_lens=(1,), key_lens=(1,)" in text or "key_lens=(17,)" in text
    assert "The result equals attention without key" in done.output
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["severities"] == ["wrong result"]
    suite = ElementTree.parse("r.xml").getroot()
    assert suite.attrib["failures"] == "1"
    assert "The block map" in Path("r.html").read_text(encoding="utf-8")
    again = CliRunner().invoke(app, ["reproduce", str(program)])
    assert again.exit_code == DISAGREE and "still broken" in again.output
    kernels.write_text(
        kernels.read_text(encoding="utf-8").replace("seq_len -=", "seq_len -= 0 *"),
        encoding="utf-8",
    )
    sys.modules.pop("decodes")
    fixed = CliRunner().invoke(app, ["reproduce", str(program)])
    assert fixed.exit_code == 0 and "holds for this case now" in fixed.output
    done = CliRunner().invoke(app, [*words, "--cases", "20"])
    assert done.exit_code == 0 and f"fixed: {PAGED}" in done.output
    assert not list(Path(".pagetwin").rglob("*.py"))


def test_a_corpus_or_a_program_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".pagetwin" / "fuzz" / "reference"
    folder.mkdir(parents=True)
    (folder / "corpus.json").write_text("{")
    done = CliRunner().invoke(app, ["fuzz", "reference", "--device", "cpu"])
    assert done.exit_code == USER_ERROR and "remove it to start anew" in done.output
    (tmp_path / "program.py").write_text("import os\nos.abort()\n")
    done = CliRunner().invoke(app, ["reproduce", "program.py"])
    assert done.exit_code == USER_ERROR and "expected a program" in done.output
    done = CliRunner().invoke(app, ["reproduce", "missing.py"])
    assert done.exit_code == USER_ERROR and "does not exist" in done.output
