"""Declared support: laws are tried only within it, and a law that was not tried is not held.

The candidates here claim little, validate nothing or lack half of the operations.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.check import choose_laws
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import (
    BATCH_INVARIANT,
    Candidate,
    Support,
    load_candidate,
)
from pagetwin.conformance.candidates.fitting import fit_case
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import law
from pagetwin.conformance.laws.masks import MaskCase
from pagetwin.conformance.running.trial import (
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.contract.attention_options import pack_options
from torch import Tensor

pytestmark = pytest.mark.long

ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters"
RIGHT = load_candidate("reference")
INVARIANCE = [law for law in ALL_LAWS if law.area == "batch_invariance"]
SHAPES = "paged attention rejects invalid arguments"
PLAIN = [
    "scale",
    "out",
    "lse",
    "sliding_window",
    "attention_chunk_size",
    "logits_soft_cap",
    "alibi_slopes",
    "sinks",
    "k_scale",
    "v_scale",
    "out_scale",
    "value_head_size",
]
"""Options that mean the same if each token is a request of its own."""


def tried(
    sentence: str, support: Support, examples: int = 6, **operations: Any
) -> Result:
    """Return what becomes of a law on a candidate with these operations alone."""
    setting = make_setting(Candidate("mine", operations, support), "cpu")
    return try_law(find_law(sentence), setting, 0, examples)


# ---- a law without calls is not held


def test_kernels_without_layers_do_not_hold_the_laws_about_layers() -> None:
    attend = RIGHT.operations["paged_attention"]
    about = [law for law in ALL_LAWS if "BACKENDS" in law.needs]
    assert len(about) == 11
    for support, status in (
        (Support(), Status.MISSING),
        (Support(operations=["paged_attention"]), Status.OUTSIDE),
    ):
        for law_about in about:
            result = tried(law_about.name, support, paged_attention=attend)
            assert result.status == status and "BACKENDS" in result.reason, result
    rejecting = type(
        "Choosy",
        (RIGHT.operations["BACKENDS"][0],),
        {"validate_configuration": classmethod(lambda *given: ["never"])},
    )
    for law_about in about:
        result = tried(law_about.name, Support(), BACKENDS=(rejecting,))
        assert result.status == Status.OUTSIDE, result
        assert "no backend for heads of" in result.reason


@pytest.mark.parametrize("operation", ["paged_attention", "encoder_attention"])
def test_one_kind_of_attention_is_judged_without_the_other(operation: str) -> None:
    """Six laws once needed both, and said nothing about a kernel that has one."""
    alone = {operation: RIGHT.operations[operation]}
    setting = make_setting(Candidate("mine", alone, Support()), "cpu")
    areas = ("attention", "masks", "invariance", "attention_rejections")
    about = [law for law in ALL_LAWS if law.area in areas]
    assert all(len(law.needs) == 1 for law in about)
    count = 0
    for law_about in about:
        if operation in law_about.needs and "bitwise" in law_about.name:
            result = try_law(law_about, setting, 0, 3)
            assert result.status == Status.HELD, result
            count += 1
    assert count >= 1


def test_a_decode_adapter_is_judged_on_masks_and_on_plans_of_a_laws_own() -> None:
    """Its cases were needles beside prompts, which it rejects, so that no law was about it."""
    adapter = load_candidate(str(ADAPTERS / "torch_sdpa.py"))
    for sentence in (
        "a query attends to all keys up to itself and none after",
        "no key is lost between two tiles or splits",
        "every argument of attention has its effect",
        "checking contents changes nothing",
    ):
        result = try_law(find_law(sentence), make_setting(adapter, "cpu"), 0, 12)
        assert result.status == Status.HELD and result.skipped < result.cases, result

    def one_key_less(*given: Any, causal: bool = True, **named: Any) -> Tensor:
        found: Tensor = adapter.operations["paged_attention"](
            *given, **named | {"seq_lens": (named["seq_lens"] - 1).clamp(min=1)}
        )
        return found

    result = tried(
        "a query attends to all keys up to itself and none after",
        adapter.support,
        12,
        paged_attention=one_key_less,
    )
    assert result.status == Status.BROKEN
    body = find_law(result.law).body
    setting = make_setting(
        Candidate("mine", {"paged_attention": one_key_less}, adapter.support), "cpu"
    )
    case = make_case(find_law(result.law), result.case)
    with pytest.raises(Disagreement):
        body(setting.fitting(), case)


def test_a_mask_case_is_cut_at_the_position_of_its_query() -> None:
    support = Support(query_lens=range(2), options=["sliding_window"])
    mask_case = MaskCase(5, 40, "window to both sides", 7, 2, 37)
    fitted = fit_case(mask_case, support)
    assert (fitted.query_len, fitted.key_len, fitted.own) == (1, 38, 0)
    assert (fitted.kind, fitted.needle) == ("window", 37)
    assert fit_case(fitted, support) is fitted
    assert fit_case(mask_case, Support()) is mask_case


# ---- rejections


def test_who_declares_to_check_nothing_is_not_tried_with_invalid_input() -> None:
    attend = RIGHT.operations["paged_attention"]
    for rejects, asked in (([], 0), (["shapes"], 3), (["contents"], 1), (None, 4)):
        support = Support(operations=["paged_attention"], rejects=rejects)
        results = [
            tried(law_about.name, support, paged_attention=attend)
            for law_about in choose_laws("attention_rejections")
            if "paged_attention" in law_about.needs
        ]
        held = [judged for judged in results if judged.status == Status.HELD]
        assert len(held) == asked and all(judged.ok for judged in results), results
        rest = [judged for judged in results if judged.status != Status.HELD]
        assert all("does not check" in result.reason for result in rest)


DECODES = Support(operations=["paged_attention"], query_lens=range(2), options=PLAIN)


def checks_nothing(query: Tensor, *given: Any, **named: Any) -> Tensor:
    """Return zeros whatever is asked, unless it is a good call."""
    try:
        found: Tensor = RIGHT.paged_attention(query, *given, **pack_options(**named))
    except (ValueError, TypeError, IndexError, NotImplementedError):
        return torch.zeros_like(query)
    return found


def reads_any_integer(*given: Any, **named: Any) -> Any:
    """Attend with tables and lengths of 64 bits too, and with bounds of any size."""
    for name in ("block_table", "query_start_loc", "seq_lens"):
        named[name] = named[name].int()
    longest = named["block_table"].shape[-1] * named["key_cache"].shape[-3]
    named["max_seq_len"] = min(abs(named["max_seq_len"]) * 99, longest)
    named["max_query_len"] = abs(named["max_query_len"])
    return RIGHT.paged_attention(*given, **pack_options(**named))


def test_nonsense_is_rejected_or_means_what_it_can_only_mean() -> None:
    """It used to be enough that a prompt was rejected, with or without nonsense in it."""
    assert tried(SHAPES, DECODES, paged_attention=checks_nothing).status == (
        Status.BROKEN
    )
    lenient = tried(SHAPES, DECODES, paged_attention=reads_any_integer)
    assert lenient.status == Status.HELD and lenient.skipped < lenient.cases, lenient
    strict = tried(SHAPES, Support(), paged_attention=reads_any_integer)
    assert strict.status == Status.BROKEN, strict

    def misreads(*given: Any, **named: Any) -> Any:
        is_wide = named["seq_lens"].dtype == torch.int64
        found = reads_any_integer(*given, **named)
        return found.add_(1) if is_wide else found

    wrong = tried(SHAPES, DECODES, paged_attention=misreads)
    assert wrong.status == Status.BROKEN and "lengths of 64 bits" in wrong.case


def test_a_law_asks_for_a_claim_that_there_is() -> None:
    with pytest.raises(ValueError, match="claim = 'honesty': expected one of"):
        law("paged_attention", cases=[1], claim="honesty")


# ---- batch invariance


def token_by_token(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend as if each token were a batch of its own."""
    size = value_cache.shape[3]
    out = query.new_empty(*query.shape[:2], size) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    starts, one = query_start_loc.tolist(), torch.tensor([0, 1], dtype=torch.int32)
    for req, seq_len in enumerate(seq_lens.tolist()):
        for token in range(starts[req], starts[req + 1]):
            keys = seq_len - (starts[req + 1] - token) + 1
            own = None if lse is None else torch.empty_like(lse[:, :1])
            RIGHT.paged_attention(
                query[token : token + 1],
                key_cache,
                value_cache,
                block_table[req : req + 1],
                one,
                torch.tensor([keys], dtype=torch.int32),
                1,
                keys,
                out=out[token : token + 1],
                lse=own,
                **pack_options(**options),
            )
            if lse is not None and own is not None:
                lse[:, token : token + 1] = own
    return out


def minds(is_so: Callable[..., bool]) -> Callable[..., Tensor]:
    """Return an attention whose last bits are others in some company."""

    def attend(**named: Any) -> Tensor:
        query = named.pop("query")
        names = ("key_cache", "value_cache", "block_table", "query_start_loc")
        names += ("seq_lens", "max_query_len", "max_seq_len")
        wide = query.double() * (1 + 2**-7) if is_so(**named) else query
        given = [named.pop(name) for name in names]
        return token_by_token(wide.to(query.dtype), *given, **named)

    return attend


INVARIANT = Support(operations=["paged_attention"], options=PLAIN, batch_invariant=True)
ALONE, CUT, CROWD = (law.name for law in INVARIANCE)


@pytest.mark.parametrize("sentence", [ALONE, CUT, CROWD])
def test_batch_invariance_is_asked_of_those_who_claim_it(sentence: str) -> None:
    held = tried(sentence, INVARIANT, paged_attention=token_by_token)
    assert held.status == Status.HELD and held.skipped < held.cases, held
    silent = replace(INVARIANT, batch_invariant=False)
    unclaimed = tried(sentence, silent, paged_attention=token_by_token)
    assert unclaimed.status == Status.OUTSIDE
    assert unclaimed.reason == "no batch invariance is claimed"


@pytest.mark.parametrize(
    "is_so, sentences",
    [
        (lambda **named: len(named["seq_lens"]) > 2, [ALONE, CROWD]),
        (lambda **named: named["max_query_len"] > 1, [CUT, CROWD]),
        (lambda **named: named["max_seq_len"] > 64, [CROWD]),
        (lambda **named: int(named["block_table"][0, 0]) % 2 == 0, [ALONE]),
    ],
    ids=["how many", "prefill or decode", "the longest", "where pages lie"],
)
def test_a_last_bit_that_depends_on_its_neighbours_breaks_the_claim(
    is_so: Callable[..., bool], sentences: list[str]
) -> None:
    for sentence in sentences:
        broken = tried(sentence, INVARIANT, 25, paged_attention=minds(is_so))
        assert broken.status == Status.BROKEN, sentence


def test_the_claim_may_be_an_argument_or_another_callable() -> None:
    def attend(*given: Any, batch_invariant: bool = False, **named: Any) -> Any:
        if batch_invariant:
            return token_by_token(*given, **named)
        return RIGHT.paged_attention(*given, **pack_options(**named))

    by_argument = replace(INVARIANT, batch_invariant=False)
    assert tried(CUT, by_argument, paged_attention=attend).status == Status.HELD
    by_callable = replace(INVARIANT, batch_invariant=token_by_token)
    right = RIGHT.operations["paged_attention"]
    assert tried(CUT, by_callable, paged_attention=right).status == Status.HELD
    # the reference itself multiplies a prompt's queries by its keys at once
    assert tried(CUT, INVARIANT, paged_attention=right).status == Status.BROKEN
    twin = Candidate("twin", {"paged_attention": attend}, Support())
    assert twin.why_unclaimed(BATCH_INVARIANT) is None
    assert RIGHT.why_unclaimed("rejects shapes") is None


def test_wrong_inputs_are_rejected_where_contents_are_not_validated_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU. Four laws of contents did not enable their validation, and broke there."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "0")
    setting = make_setting(load_candidate("optimized"), "cpu")
    laws = [about for about in ALL_LAWS if (about.claim or "").startswith("rejects")]
    results = [try_law(about, setting, 0, 2, listed=2) for about in laws]
    assert len(results) > 50
    assert [found.law for found in results if found.status is not Status.HELD] == []
