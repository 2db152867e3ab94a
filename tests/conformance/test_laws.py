"""Every law of the conformance suite on both twins, with annotated shapes and dtypes checked.

`make test` tries each law in one case. `make test-long` tries all edges and EXAMPLES drawn cases;
of listed ones it tries all on the reference, and LISTED on the optimized twin. conftest.py gives
the first law of each area `mark.quick`.
"""

import atexit
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance import parametrize_with_laws
from pagetwin.conformance.api.check import (
    choose_device,
    choose_laws,
    load_candidate,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.api.pytest_support import LawToTry
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.cases.rank_signatures import (
    draw_rank_batch,
    draw_rank_signature,
)
from pagetwin.conformance.cases.ranks import RING, STEP
from pagetwin.conformance.cases.signatures import SMALL
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.batch_invariance import DecodesAround
from pagetwin.conformance.laws.large_batches import MANY
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.laws.parallel_step import Dealt
from pagetwin.conformance.laws.prefill_parallel import Prompts
from pagetwin.conformance.laws.scheduler import DIRECTED_TRAFFIC
from pagetwin.conformance.running.trial import find_law, try_case
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.contract.operations import CONCEPTS

EXAMPLES = 3
MORE_EXAMPLES = 25
MORE = ("masks", "latents", "window")
"""Words of the laws that `make test-long` tries on more drawn cases."""
SMALL_CASES: dict[str, Any] = {
    "an invalid call between two calls changes nothing in the scheduler": (
        DIRECTED_TRAFFIC[0],
    ),
    "a late rank of a ring changes no bit": Prompts(
        (5,), 2, "sinks", (1,), operation=RING
    ),
    "fixed splits give the same bits on any number of ranks": Dealt(
        (1,), (20,), 1, 1, "sinks", (4,), group=8, seed=3
    ),
    "a ring prefill is right for every batch of a signature": draw_rank_batch(
        draw_rank_signature(2, SMALL, RING), 1
    ),
    "a parallel step is right for every batch of a signature": draw_rank_batch(
        draw_rank_signature(7, SMALL, STEP), 1
    ),
    "a long row is bitwise equal in any large batch if that is claimed": DecodesAround(
        3, 130, (64, 1), (16,), 16, "interleaved", seed=0
    ),
    "latent attention changes nothing that it reads": (
        "latent_decode_attention", "slots first"
    ),
    "there may be more than 255 requests": (1, 1),
    "there may be any number of requests": MANY["prompts and idle ones up to the 64th"],
}  # fmt: skip
"""Cases of `make test` in place of the first one, which takes up to ten seconds."""
LAW_NAMES = [law.name for law in ALL_LAWS]
LISTED = 4 if not torch.cuda.is_available() else None
"""Listed cases of a law that the interpreter runs; `make mutants` and a GPU run all of them."""


class ThisProcess(Worker):
    """Tries laws as a worker does, but here: the imports of its process take six seconds."""

    @cached_property
    def _setting(self) -> Setting:
        return make_setting(load_candidate(self.implementation), self.device)

    def try_law(self, job: Job, area: str) -> Result:
        """Return the result of a law."""
        law = find_law(job.law)
        if job.case is not None:
            return try_case(law, self._setting, job.case)
        return try_law(law, self._setting, job.seed, job.examples, listed=job.listed)


def in_one_case(twin: str) -> list[LawToTry]:
    """Return all laws, each with its shortest edge, or else the first listed or drawn case."""
    # a fault on a GPU ends its process
    kind = Worker if torch.cuda.is_available() else ThisProcess
    process = kind(f"support.annotated_{twin}", choose_device(None))
    atexit.register(process.stop)
    found = []
    for law in ALL_LAWS:
        tried = LawToTry(law, process, seed=0, examples=1, reason=None, listed=1)
        case = min(map(repr, law.edges), key=len, default=None)
        if law.name in SMALL_CASES:
            case = repr(SMALL_CASES[law.name])
        tried.job = replace(tried.job, case=case)
        found.append(tried)
    return found


@pytest.mark.parametrize("law", in_one_case("reference"), ids=LAW_NAMES)
def test_a_law_holds_in_one_case_on_the_reference(law: LawToTry) -> None:
    assert not law().skipped


@pytest.mark.parametrize("law", in_one_case("optimized"), ids=LAW_NAMES)
def test_a_law_holds_in_one_case_on_the_optimized_twin(law: LawToTry) -> None:
    assert not law().skipped


@pytest.mark.extended
@parametrize_with_laws("support.annotated_reference", examples=EXAMPLES)
def test_the_reference_obeys(law: LawToTry) -> None:
    assert not law().skipped


@pytest.mark.extended
@parametrize_with_laws("support.annotated_optimized", examples=EXAMPLES, listed=LISTED)
def test_the_optimized_twin_obeys(law: LawToTry) -> None:
    assert not law().skipped


def with_more_draws(twin: str) -> list[LawToTry]:
    """Return the laws of MORE, with more drawn cases than the others have."""
    worker = Worker(f"support.annotated_{twin}", choose_device(None))
    chosen = {law.name: law for words in MORE for law in choose_laws(words)}
    return [
        LawToTry(law, worker, 1, MORE_EXAMPLES, None)
        for law in chosen.values()
        if isinstance(law.cases, SearchStrategy)
    ]


@pytest.mark.long
@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_masks_latents_and_windows_hold_with_more_draws(twin: str) -> None:
    laws = with_more_draws(twin)
    assert len(laws) > 8
    try:
        for law in laws:
            assert not law().skipped, law
    finally:
        laws[0].worker.stop()


@pytest.mark.sample(40)
@pytest.mark.parametrize("law", ALL_LAWS, ids=LAW_NAMES)
def test_a_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = replace(law, needs=(), claim=None, body=lambda setting, case: None)
    setting = make_setting(load_candidate("reference"), "cpu")
    try_law(
        nothing,
        setting,
        seed_of_cases=5,
        examples=6,
        at=lambda case, held: shown.append(case),
    )
    assert shown
    for case in shown:
        assert repr(make_case(law, case)) == case


def test_a_law_with_a_small_case_exists() -> None:
    assert SMALL_CASES.keys() <= set(LAW_NAMES)


def test_every_operation_has_a_law() -> None:
    operations = {name for concept in CONCEPTS for name in concept.operations}
    assert operations | {"BACKENDS"} == {need for law in ALL_LAWS for need in law.needs}
