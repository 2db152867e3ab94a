"""One step: buffers longer than the batch, boundaries, micro-batches."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from golden.deviations import deviation

BUILD = "build_attn_metadata"
COMMON = "calls[].common_attn_metadata"


# ---- metadata of every layer


def cut_starts(inputs: dict[str, Any]) -> list[int]:
    starts: list[int] = inputs["query_start_loc"]["np"][: inputs["num_reqs"] + 1]
    return starts


def num_slots(inputs: dict[str, Any]) -> int:
    padded = inputs.get("num_tokens_padded")
    return int(inputs["num_tokens"] if padded is None else padded)


def has_too_few_tables(inputs: dict[str, Any]) -> bool:
    groups = len(inputs["kv_cache_groups"])
    names = ("block_tables", "slot_mappings")
    return any(len(inputs[name]) < groups for name in names)


def per_group(inputs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the table and slots of every group; none if both sides raise."""
    groups = range(len(inputs["kv_cache_groups"]))
    if has_too_few_tables(inputs) or not inputs["num_reqs"]:
        return []
    return [(inputs["block_tables"][i], inputs["slot_mappings"][i]) for i in groups]


@deviation(BUILD, fields=["raises"], right="a ValueError that names the buffer")
def a_buffer_is_shorter_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM slices a shorter buffer without an error."""
    reqs, groups = inputs["num_reqs"], len(inputs["kv_cache_groups"])
    counts = [len(inputs[name]) for name in ("block_tables", "slot_mappings")]
    if not reqs or min(*counts, len(inputs.get("builders", [0] * groups))) < groups:
        return False  # both raise
    starts, lens = inputs["query_start_loc"]["np"], inputs["seq_lens"]["np"]
    is_short = len(starts) <= reqs or len(lens) < reqs
    is_short |= len(inputs["num_computed_tokens_cpu"]) < reqs
    return is_short or any(
        len(table) < reqs or len(slots) < num_slots(inputs)
        for table, slots in per_group(inputs)
    )


@deviation(
    BUILD,
    fields=[f"{COMMON}.max_query_len"],
    right="the most new tokens of one request",
)
def several_requests_have_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM takes the largest start, which is the number of tokens, as the longest query."""
    starts = cut_starts(inputs)
    if len(starts) < 2 or has_too_few_tables(inputs):
        return False
    lens = [end - begin for begin, end in pairwise(starts)]
    return bool(inputs["kv_cache_groups"]) and max(starts) != max(lens)


@deviation(BUILD, fields=[f"{COMMON}.block_table_tensor"], right="one row per request")
def a_table_is_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on, with rows of other requests."""
    return any(len(table) > inputs["num_reqs"] for table, _ in per_group(inputs))


@deviation(BUILD, fields=[f"{COMMON}.slot_mapping"], right="one slot per token")
def slots_are_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on."""
    return any(len(slots) > num_slots(inputs) for _, slots in per_group(inputs))


@deviation(
    BUILD, fields=[f"{COMMON}.num_computed_tokens_cpu"], right="one count per request"
)
def counts_are_longer_than_the_batch(inputs: dict[str, Any]) -> bool:
    """vLLM passes the whole buffer on."""
    is_used = bool(per_group(inputs))
    return is_used and len(inputs["num_computed_tokens_cpu"]) > inputs["num_reqs"]


# ---- boundaries


def query_lens(common: dict[str, Any]) -> list[int]:
    lens: list[int] = common["query_start_loc_cpu"].diff().tolist()
    return lens


def first_other(lens: list[int], allowed: set[int]) -> int:
    """Return the index of the first request of another length, or their number."""
    others = (index for index, each in enumerate(lens) if each not in allowed)
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
    measure = next((each for each in lens if each), 0)
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
    if uniform and takes_extends and all(each in (lens[0], 0) for each in lens):
        return len(lens)
    later = [each not in (lens[0], 0) if uniform else each > most for each in lens]
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
    measure = next((each for each in lens if each), 0)
    marked = [False] * len(lens)
    if not inputs["treat_short_extends_as_decodes"]:
        marked = marks.tolist()
    for req, (each, is_marked) in enumerate(zip(lens, marked, strict=True)):
        is_other = inputs["require_uniform"] and each not in (measure, 0)
        if each > most or is_marked or is_other:
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


# ---- micro-batches


@deviation("slice_query_start_locs", fields=["raises"], right="a ValueError")
def a_slice_is_reversed_or_counts_from_the_end(inputs: dict[str, Any]) -> bool:
    """vLLM slices as Python does: nothing, or requests that are counted from the end."""
    if inputs["request_slice"][1] is None:
        return False  # both raise
    starts, (first, stop) = len(inputs["query_start_loc"]), inputs["request_slice"]
    return bool(-starts <= first < starts and not 0 <= first <= stop)


SLICE, SPLIT = "make_metadata_with_slice", "split_attn_metadata"


class Cut:
    """A micro-batch: its tokens `first` to `stop` of the requests of a slice.

    Args:
        ubatch_slice: slices of the requests and of the tokens.
        common: the step.
    """

    def __init__(self, ubatch_slice: dict[str, Any], common: dict[str, Any]) -> None:
        self.starts = common["query_start_loc_cpu"].tolist()
        self.req, self.req_stop = ubatch_slice["request_slice"]
        self.first, self.stop = ubatch_slice["token_slice"]
        self.slots = len(common["slot_mapping"])

    @property
    def is_inside(self) -> bool:
        """Whether both slices have something, and all of it exists."""
        return self.has_requests and self.stop <= self.slots

    @property
    def has_requests(self) -> bool:
        """Whether both slices have something, and all requests exist."""
        is_some = 0 <= self.req < self.req_stop and 0 <= self.first < self.stop
        return is_some and self.req_stop < len(self.starts)

    @property
    def ends_of_first(self) -> tuple[int, int]:
        return self.starts[self.req], self.starts[self.req + 1]

    @property
    def ends_of_last(self) -> tuple[int, int]:
        return self.starts[self.req_stop - 1], self.starts[self.req_stop]

    @property
    def fits_vllm(self) -> bool:
        """Whether the first token is in the first request, and the last in the last."""
        begin, end = self.ends_of_first
        last_begin, last_end = self.ends_of_last
        return begin <= self.first < end and last_begin <= self.stop - 1 < last_end

    @property
    def fits_here(self) -> bool:
        """The same, but an empty request may be at either end, and padding after the last."""
        begin, end = self.ends_of_first
        last_begin, last_end = self.ends_of_last
        lowest = last_begin + 1 if last_begin < last_end else last_end
        highest = self.slots if self.req_stop == len(self.starts) - 1 else last_end
        starts_inside = begin <= self.first < max(end, begin + 1)
        return starts_inside and lowest <= self.stop <= highest

    @property
    def splits_first(self) -> bool:
        return bool(self.first > self.ends_of_first[0])

    @property
    def splits_last(self) -> bool:
        return bool(self.stop < self.ends_of_last[1])


def cuts(inputs: dict[str, Any]) -> Iterator[Cut]:
    common = step_of(inputs)
    for each in inputs.get("ubatch_slices") or [inputs["ubatch_slice"]]:
        yield Cut(each, common)


def step_of(inputs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        inputs.get("attn_metadata") or inputs["common_attn_metadata"]
    )
    return found


def is_returned(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM cuts every micro-batch, and the shares of its rank stay known."""
    is_cut = all(each.is_inside and each.fits_vllm for each in cuts(inputs))
    return is_cut and not cuts_a_share(inputs)


def cuts_a_share(inputs: dict[str, Any]) -> bool:
    """Return whether a sequence is cut at its end whose tokens are counted for one rank."""
    has_shares = step_of(inputs).get("dcp_local_seq_lens") is not None
    return has_shares and any(
        each.is_inside and each.splits_last for each in cuts(inputs)
    )


def a_share_of_a_rank_is_cut(inputs: dict[str, Any]) -> bool:
    """vLLM drops the lengths on this rank, which change with the sequence."""
    is_cut = all(each.is_inside and each.fits_vllm for each in cuts(inputs))
    return is_cut and cuts_a_share(inputs)


def is_rejected_by_vllm_alone(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that no request at an end of a micro-batch is empty, as padding is."""
    every = list(cuts(inputs))
    if not all(each.is_inside and each.fits_here for each in every):
        return False
    return not all(each.fits_vllm for each in every)


def is_cut_at_its_end(inputs: dict[str, Any]) -> bool:
    """vLLM subtracts a token index of the step from a start of the micro-batch, which is wrong
    unless the micro-batch begins with the step."""
    if not is_returned(inputs):
        return False
    return any(each.splits_last and each.first > 0 for each in cuts(inputs))


def is_cut_at_its_start(inputs: dict[str, Any]) -> bool:
    """vLLM does not count the tokens of a divided request that the previous micro-batch
    computes."""
    return is_returned(inputs) and any(each.splits_first for each in cuts(inputs))


def is_not_causal(inputs: dict[str, Any]) -> bool:
    """vLLM drops `causal`, so that a micro-batch is causal though the step is not."""
    return is_returned(inputs) and step_of(inputs).get("causal") is False


LATER_FIELDS = (
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_seq_lens",
    "dcp_local_seq_lens",
)


def has_later_fields(inputs: dict[str, Any]) -> bool:
    """vLLM drops all fields after `causal`."""
    given = (step_of(inputs).get(name) for name in LATER_FIELDS)
    return is_returned(inputs) and any(each is not None for each in given)


def begins_in_its_first_request(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM 0.33 cuts every micro-batch: it does not validate the last token."""
    return all(
        each.has_requests
        and each.ends_of_first[0] <= each.first < each.ends_of_first[1]
        for each in cuts(inputs)
    )


def fits_here(inputs: dict[str, Any]) -> bool:
    is_fit = all(each.is_inside and each.fits_here for each in cuts(inputs))
    return is_fit and not cuts_a_share(inputs)


def begins_with_padding(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that the first request of a micro-batch is not empty, as padding is."""
    return fits_here(inputs) and not begins_in_its_first_request(inputs)


def ends_outside_its_last_request(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 accepts a last token outside of the last request, and drops the lengths on this
    rank, which change with a sequence that is cut."""
    return begins_in_its_first_request(inputs) and not fits_here(inputs)


def is_cut_in_033(inputs: dict[str, Any]) -> bool:
    return begins_in_its_first_request(inputs) and fits_here(inputs)


def is_not_causal_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM drops `causal`, so that a micro-batch is causal though the step is not."""
    return is_cut_in_033(inputs) and step_of(inputs).get("causal") is False


def has_later_fields_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 drops all fields after `causal`."""
    given = (step_of(inputs).get(name) for name in LATER_FIELDS)
    return is_cut_in_033(inputs) and any(each is not None for each in given)


def ends_with_padding_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 counts padding as tokens."""
    tokens = step_of(inputs)["num_actual_tokens"]
    return is_cut_in_033(inputs) and any(each.stop > tokens for each in cuts(inputs))


CUT_FIELDS = ("query_start_loc", "seq_lens", "max_query_len", "max_seq_len")
for _file, _result in ((SLICE, "result"), (SPLIT, "result[]")):
    deviation(_file, fields=["raises"], right="an empty request stays empty")(
        is_rejected_by_vllm_alone
    )
    deviation(
        _file,
        fields=[f"{_result}.{name}" for name in CUT_FIELDS],
        right="each request clipped to the tokens of the micro-batch",
    )(is_cut_at_its_end)
    deviation(
        _file,
        fields=[f"{_result}.num_computed_tokens_cpu"],
        right="the request's tokens before the micro-batch count as computed",
    )(is_cut_at_its_start)
    deviation(_file, fields=[f"{_result}.causal"], right="as in the step")(
        is_not_causal
    )
    deviation(_file, fields=["raises"], right="a NotImplementedError")(
        a_share_of_a_rank_is_cut
    )
    for _condition in (begins_with_padding, ends_outside_its_last_request):
        deviation(
            _file,
            fields=["raises"],
            right="the slice's tokens are those of its requests, or padding",
            versions=("0.33.0",),
        )(_condition)
    for _condition, _fields, _right in (
        (is_not_causal_in_033, ("causal",), "as in the step"),
        (has_later_fields_in_033, LATER_FIELDS, "every field is sliced or copied"),
        (ends_with_padding_in_033, ("num_actual_tokens",), "without padding"),
    ):
        deviation(
            _file,
            fields=[f"{_result}.{name}" for name in _fields],
            right=_right,
            versions=("0.33.0",),
        )(_condition)
    deviation(
        _file,
        fields=[f"{_result}.{name}" for name in LATER_FIELDS],
        right="every field is sliced or copied",
    )(has_later_fields)


# ---- methods of the metadata


@deviation(
    "v033_common_attention_metadata_methods",
    fields=["unpadded.positions"],
    right="the positions of the tokens that remain",
)
def positions_are_given(inputs: dict[str, Any]) -> bool:
    """vLLM drops the positions when it removes the padding."""
    return inputs["common_attn_metadata"].get("positions") is not None


@deviation(
    "v033_common_attention_metadata_methods",
    fields=["unpadded.mm_req_doc_ranges"],
    right="the ranges of the requests that remain",
)
def ranges_of_images_are_given(inputs: dict[str, Any]) -> bool:
    """vLLM drops the ranges when it removes the padding."""
    return inputs["common_attn_metadata"].get("mm_req_doc_ranges") is not None
