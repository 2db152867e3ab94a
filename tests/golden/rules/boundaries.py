"""Boundaries of a step: where its decodes, extends and prefills begin."""

from typing import Any

from golden.deviations import deviation


def query_lens(common: dict[str, Any]) -> list[int]:
    lens: list[int] = common["query_start_loc_cpu"].diff().tolist()
    return lens


def first_other(lens: list[int], allowed: set[int]) -> int:
    """Return the index of the first request of another length, or their number."""
    others = (index for index, length in enumerate(lens) if length not in allowed)
    return next(others, len(lens))


@deviation(
    "split_decodes_and_prefills", fields=["result"], right="counts the new tokens"
)
def the_longest_query_is_longer_than_its_maximum(inputs: dict[str, Any]) -> bool:
    """vLLM counts all requests as decodes if `max_query_len` says so."""
    common, most = inputs["common_attn_metadata"], inputs.get("decode_threshold", 1)
    is_trusted = common["max_query_len"] <= most and not (
        inputs.get("require_uniform") and most > 1
    )
    return is_trusted and max(query_lens(common), default=0) > most


THREE = "split_decodes_prefills_and_extends"


@deviation(THREE, fields=["result"], right="counts the new tokens")
def a_request_is_longer_than_the_maximum(inputs: dict[str, Any]) -> bool:
    """vLLM counts all requests as decodes if `max_query_len` says so."""
    common, most = inputs["common_attn_metadata"], inputs.get("decode_threshold", 1)
    return bool(common["max_query_len"] <= most < max(query_lens(common), default=0))


@deviation(THREE, fields=["result"], right="all requests are decodes")
def the_maximum_is_longer_than_all_requests(inputs: dict[str, Any]) -> bool:
    """vLLM counts no request at all if no one is as long as `max_query_len` says."""
    common, most = inputs["common_attn_metadata"], inputs.get("decode_threshold", 1)
    lens = query_lens(common)
    return bool(lens) and max(lens) <= most < common["max_query_len"]


def uniform_cuts(inputs: dict[str, Any]) -> tuple[int, int, list[int]] | None:
    """Return where a uniform split begins its prefills: in vLLM and here, and the lengths.

    None if it is not a uniform split, or if vLLM's first condition already decides.
    """
    common, most = inputs["common_attn_metadata"], inputs.get("decode_threshold", 1)
    lens = query_lens(common)
    if not inputs.get("require_uniform") or not lens:
        return None
    if common["max_query_len"] <= most <= 1:
        return None
    measure = next((length for length in lens if length), 0)
    allowed = {0, measure} if measure <= most else {0}
    here = first_other(lens, allowed)
    there = first_other(lens, {lens[0]}) if lens[0] <= most else 0
    return there, here, lens


@deviation(
    "split_decodes_and_prefills",
    fields=["result"],
    right="padding is skipped: the measure is the first request that has new tokens",
)
def padding_is_among_uniform_decodes(inputs: dict[str, Any]) -> bool:
    """vLLM compares every length with that of the first request, so that empty requests, which are
    padding, end the decodes."""
    cuts = uniform_cuts(inputs)
    return cuts is not None and cuts[0] != cuts[1]


SPLIT_033 = "v033_split_decodes_and_prefills"


def is_all_decodes_in_033(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM 0.33 counts all requests as decodes by `max_query_len`."""
    common, most = inputs["common_attn_metadata"], inputs["decode_threshold"]
    is_ragged = not inputs["require_uniform"] or most <= 1
    is_short = bool(common["max_query_len"] <= most)
    return is_short and is_ragged and bool(inputs["treat_short_extends_as_decodes"])


def cut_in_033(inputs: dict[str, Any]) -> int | None:
    """Return where vLLM 0.33 begins the prefills; None if it raises."""
    common, most = inputs["common_attn_metadata"], inputs["decode_threshold"]
    lens, uniform = query_lens(common), inputs["require_uniform"]
    takes_extends = inputs["treat_short_extends_as_decodes"]
    if is_all_decodes_in_033(inputs):
        return len(lens)
    if not lens:
        return None
    if lens[0] > most:
        return 0
    if uniform and takes_extends and all(length in (lens[0], 0) for length in lens):
        return len(lens)
    later = [
        length not in (lens[0], 0) if uniform else length > most for length in lens
    ]
    if not takes_extends:
        if common["is_prefilling"] is None:
            return None
        pairs = zip(later, common["is_prefilling"].tolist(), strict=True)
        later = [one or other for one, other in pairs]
    return later.index(True) if True in later else len(lens)


def cut_here(inputs: dict[str, Any]) -> int | None:
    """Return where the prefills begin here; None if the split is rejected."""
    common, most = inputs["common_attn_metadata"], inputs["decode_threshold"]
    lens, marks = query_lens(common), common["is_prefilling"]
    if most < 0 or (marks is None and not inputs["treat_short_extends_as_decodes"]):
        return None
    measure = next((length for length in lens if length), 0)
    marked = [False] * len(lens)
    if not inputs["treat_short_extends_as_decodes"]:
        marked = marks.tolist()
    for req, (length, is_marked) in enumerate(zip(lens, marked, strict=True)):
        is_other = inputs["require_uniform"] and length not in (measure, 0)
        if length > most or is_marked or is_other:
            return req
    return len(lens)


@deviation(
    SPLIT_033,
    fields=["raises"],
    right="a ValueError; a batch without requests has no decodes",
)
def a_split_is_rejected_by_one_side(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 accepts negative thresholds, reads `is_prefilling` only if the first request is
    short, and fails for a batch without requests."""
    return (cut_in_033(inputs) is None) != (cut_here(inputs) is None)


@deviation(SPLIT_033, fields=["result"], right="counts the new tokens")
def the_longest_query_of_033_is_longer_than_its_maximum(inputs: dict[str, Any]) -> bool:
    """vLLM counts all requests as decodes if `max_query_len` says so."""
    there, here = cut_in_033(inputs), cut_here(inputs)
    is_run = there is not None and here is not None
    return is_run and is_all_decodes_in_033(inputs) and there != here


@deviation(
    SPLIT_033,
    fields=["result"],
    right="padding is skipped: the measure is the first request that has new tokens",
)
def padding_begins_uniform_decodes(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 takes padding at the start for the measure, and counts a batch that only padding
    interrupts as decodes to its end."""
    there, here = cut_in_033(inputs), cut_here(inputs)
    is_run = there is not None and here is not None
    return is_run and not is_all_decodes_in_033(inputs) and there != here


SPLIT_011 = "split_decodes_and_prefills"


def is_rejected_in_011(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM 0.11 looks for the first request of a batch without requests."""
    common, most = inputs["common_attn_metadata"], inputs.get("decode_threshold", 1)
    is_ragged = not inputs.get("require_uniform") or most <= 1
    is_decided = common["max_query_len"] <= most and is_ragged
    return not query_lens(common) and not is_decided


@deviation(SPLIT_011, fields=["raises"], right="a ValueError")
def a_threshold_is_negative(inputs: dict[str, Any]) -> bool:
    """vLLM counts every request as a prefill."""
    return inputs.get("decode_threshold", 1) < 0 and not is_rejected_in_011(inputs)


@deviation(SPLIT_011, fields=["raises"], right="no decodes and no prefills")
def a_batch_without_requests_is_uniform(inputs: dict[str, Any]) -> bool:
    """vLLM reads the length of the first request."""
    return inputs.get("decode_threshold", 1) >= 0 and is_rejected_in_011(inputs)
