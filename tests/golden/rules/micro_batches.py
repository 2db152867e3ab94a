"""Micro-batches: slices of the requests and tokens of a step."""

from collections.abc import Iterator
from typing import Any

from golden.deviations import deviation


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
    is_one = "ubatch_slice" in inputs
    for bounds in [inputs["ubatch_slice"]] if is_one else inputs["ubatch_slices"]:
        yield Cut(bounds, common)


def step_of(inputs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        inputs.get("attn_metadata") or inputs["common_attn_metadata"]
    )
    return found


def is_returned(inputs: dict[str, Any]) -> bool:
    """Return whether there are micro-batches, vLLM cuts every one, and the shares of its rank stay
    known."""
    every = list(cuts(inputs))
    is_cut = all(cut.is_inside and cut.fits_vllm for cut in every)
    return bool(every) and is_cut and not cuts_a_share(inputs)


def cuts_a_share(inputs: dict[str, Any]) -> bool:
    """Return whether a sequence is cut at its end whose tokens are counted for one rank."""
    has_shares = step_of(inputs).get("dcp_local_seq_lens") is not None
    return has_shares and any(cut.is_inside and cut.splits_last for cut in cuts(inputs))


def a_share_of_a_rank_is_cut(inputs: dict[str, Any]) -> bool:
    """vLLM drops the lengths on this rank, which change with the sequence."""
    is_cut = all(cut.is_inside and cut.fits_vllm for cut in cuts(inputs))
    return is_cut and cuts_a_share(inputs)


def is_rejected_by_vllm_alone(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that no request at an end of a micro-batch is empty, as padding is."""
    every = list(cuts(inputs))
    if not all(cut.is_inside and cut.fits_here for cut in every):
        return False
    return not all(cut.fits_vllm for cut in every)


def is_cut_at_its_end(inputs: dict[str, Any]) -> bool:
    """vLLM subtracts a token index of the step from a start of the micro-batch, which is wrong
    unless the micro-batch begins with the step."""
    if not is_returned(inputs):
        return False
    return any(cut.splits_last and cut.first > 0 for cut in cuts(inputs))


def is_cut_at_its_start(inputs: dict[str, Any]) -> bool:
    """vLLM does not count the tokens of a divided request that the previous micro-batch
    computes."""
    return is_returned(inputs) and any(cut.splits_first for cut in cuts(inputs))


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
    return is_returned(inputs) and any(field is not None for field in given)


def begins_in_its_first_request(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM 0.33 cuts every micro-batch: it does not validate the last token."""
    return all(
        cut.has_requests and cut.ends_of_first[0] <= cut.first < cut.ends_of_first[1]
        for cut in cuts(inputs)
    )


def fits_here(inputs: dict[str, Any]) -> bool:
    is_fit = all(cut.is_inside and cut.fits_here for cut in cuts(inputs))
    return is_fit and not cuts_a_share(inputs)


def begins_with_padding(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that the first request of a micro-batch is not empty, as padding is."""
    return fits_here(inputs) and not begins_in_its_first_request(inputs)


def ends_outside_its_last_request(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 accepts a last token outside of the last request, and drops the lengths on this
    rank, which change with a sequence that is cut."""
    return begins_in_its_first_request(inputs) and not fits_here(inputs)


def is_cut_in_033(inputs: dict[str, Any]) -> bool:
    is_fit = begins_in_its_first_request(inputs) and fits_here(inputs)
    return bool(list(cuts(inputs))) and is_fit


def is_not_causal_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM drops `causal`, so that a micro-batch is causal though the step is not."""
    return is_cut_in_033(inputs) and step_of(inputs).get("causal") is False


def has_later_fields_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 drops all fields after `causal`."""
    given = (step_of(inputs).get(name) for name in LATER_FIELDS)
    return is_cut_in_033(inputs) and any(field is not None for field in given)


def ends_with_padding_in_033(inputs: dict[str, Any]) -> bool:
    """vLLM 0.33 counts padding as tokens."""
    tokens = step_of(inputs)["num_actual_tokens"]
    return is_cut_in_033(inputs) and any(cut.stop > tokens for cut in cuts(inputs))


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
