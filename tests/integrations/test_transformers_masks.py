"""Masks and biases of transformers: what the integration reads from them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from pagetwin.integrations.transformers import register
from pagetwin.integrations.transformers.masks import (
    PADDING,
    PaddedColumns,
    VisibleRange,
    read_bidirectional_window,
    read_padded_columns,
    read_position_bias,
)
from transformers import AttentionInterface


def mask_of(*rows: str) -> Tensor:
    """Return a mask of one request; a query attends to the keys with a 1."""
    return torch.tensor([[[[character == "1" for character in row] for row in rows]]])


def flags(columns: Tensor) -> str:
    """Return the columns of one request as text."""
    return "".join(str(int(flag)) for flag in columns[0])


# ruff: noqa: E501
# each mask with the queries and the keys that are computed; a query is one of the last keys
MASKS = {
    "causal": (("100", "110", "111"), VisibleRange(True), "111", "111"),
    "left padding": (("000", "010", "011"), VisibleRange(True), "011", "011"),
    "padding between": (("1000", "1100", "0000", "1101"), VisibleRange(True), "1101", "1101"),
    "window": (("100", "110", "011"), VisibleRange(True, 2), "111", "111"),
    "chunks": (("100", "110", "001"), VisibleRange(True, None, 2), "111", "111"),
    "window and chunks": (("1000", "1100", "0010", "0011"), VisibleRange(True, 2, 2), "1111", "1111"),
    "chunks after left padding": (("000", "010", "011"), VisibleRange(True, None, 2), "011", "011"),
    "no token": (("000", "000", "000"), VisibleRange(True), "000", "000"),
    "one query, room for more keys": (("100",), VisibleRange(True), "1", "100"),
    "a prompt, room for more keys": (("1000", "1100"), VisibleRange(True), "11", "1100"),
    "a chunk of a prompt, room": (("1110", "1111"), VisibleRange(True), "11", "1111"),
    "left padding, room": (("0000", "0100", "0110"), VisibleRange(True), "011", "0110"),
    "window that has left its first keys": (("01100",), VisibleRange(True, 2), "1", "01100"),
    "chunk that has left its first keys": (("00110",), VisibleRange(True, None, 2), "1", "00110"),
    "static window, full": (("0111", "0011"), VisibleRange(True, 3), None, None),
    "encoder": (("110", "110", "110"), VisibleRange(False), "111", "110"),
    "encoder with bias": (("110", "110", "110"), VisibleRange(False, has_bias=True), "110", "110"),
    "encoder with window": (("110", "111", "011"), VisibleRange(False, 2), "111", "111"),
    "encoder with padding between": (("101", "101", "101"), VisibleRange(False), "111", "101"),
    "cross-attention, longer mask": (("1100", "1100"), VisibleRange(False), "11", "1100"),
    "a query that does not see itself": (("100", "110", "110"), VisibleRange(True), None, None),
    "a hole": (("100", "110", "101"), VisibleRange(True), None, None),
    "a later key": (("110", "110", "111"), VisibleRange(True), None, None),
    "more than the window": (("100", "110", "111"), VisibleRange(True, 2), None, None),
    "less than causal": (("100", "010", "011"), VisibleRange(True), None, None),
    "a window across padding": (("100", "000", "001"), VisibleRange(True, 2), None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_converted_to_columns_or_raises(case: str) -> None:
    """Keys after the queries' own positions were taken for padding, and such queries gave 0."""
    rows, visible, queries, keys = MASKS[case]
    mask = mask_of(*rows)
    shape = (1, len(rows), len(rows[0]))
    if queries is None:
        with pytest.raises(
            NotImplementedError, match=r"attention_mask\[0, 0, \d, \d\] ="
        ):
            read_padded_columns(mask, *shape, visible)
        return
    columns = read_padded_columns(mask, *shape, visible)
    assert (flags(columns.queries), flags(columns.keys)) == (queries, keys)


# the others need a bias, or a window whose end a layer counts in one of two ways
ATTENDED = [
    name
    for name, (_, visible, queries, _) in MASKS.items()
    if queries is not None
    and not visible.has_bias
    and (visible.causal or visible.sliding_window is None)
    and None in (visible.sliding_window, visible.attention_chunk_size)
]


@pytest.mark.parametrize("implementation", ["reference", "optimized"])
@pytest.mark.parametrize("case", ATTENDED)
def test_attention_is_the_mean_of_the_keys_that_the_mask_shows(
    case: str, implementation: str
) -> None:
    """All scores are equal. Queries that are padding give 0."""
    rows, visible, queries, _ = MASKS[case]
    mask, attend = mask_of(*rows), AttentionInterface()[register(implementation)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = 2.0 ** torch.arange(mask.shape[3])
    value = values[None, None, :, None].expand(1, 1, -1, 16).contiguous()
    module = torch.nn.Module()
    kind = "chunked_attention" if visible.attention_chunk_size else None
    kind = kind or ("sliding_attention" if visible.sliding_window else "full_attention")
    module.config = Config([kind], visible.attention_chunk_size)
    module.layer_idx = 0
    query = torch.zeros(1, 1, mask.shape[2], 16)
    found, _ = attend(
        module,
        query.to(device),
        torch.zeros_like(value).to(device),
        value.to(device),
        mask.to(device),
        is_causal=visible.causal,
        sliding_window=visible.sliding_window,
    )
    shown = mask[0, 0].float()
    right = shown @ values / shown.sum(1).clamp(min=1)
    right = right * torch.tensor([float(query) for query in queries])
    torch.testing.assert_close(found[0, :, 0, 0].cpu(), right)


class Config:
    """The fields of a configuration that say what kind of layer it is."""

    def __init__(self, layer_types: list[str], chunk: int | None) -> None:
        self.layer_types, self.attention_chunk_size = layer_types, chunk


def test_the_library_s_padding_says_which_queries_are_not_tokens() -> None:
    """A query after the last token attends to all tokens, as the last token does."""
    mask = mask_of("100", "110", "110")
    mask.__dict__[PADDING] = torch.tensor([[False, False, True]])
    columns = read_padded_columns(mask, 1, 3, 3, VisibleRange(True))
    assert (flags(columns.queries), flags(columns.keys)) == ("110", "110")


def test_causal_attention_without_a_mask_needs_as_many_queries_as_keys() -> None:
    columns = read_padded_columns(None, 2, 1, 3, VisibleRange(True))
    assert columns.keys.all() and columns.keys.shape == (2, 3)
    assert read_padded_columns(None, 2, 2, 3, VisibleRange(False)).queries.all()
    with pytest.raises(
        NotImplementedError, match="2 queries and 3 keys without a mask"
    ):
        read_padded_columns(None, 2, 2, 3, VisibleRange(True))


WRITES: dict[str, Callable[[Tensor], None]] = {
    "in place": lambda mask: mask[..., 0].fill_(False),
    "through .data": lambda mask: mask.data[..., 0].fill_(False),
    "through NumPy": lambda mask: np.asarray(mask)[..., 0].fill(False),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_was_written_to_is_read_again(write: str, inference: bool) -> None:
    """The columns that were read first were kept with the tensor."""
    with torch.inference_mode(inference):
        mask, visible = mask_of("100", "110", "111"), VisibleRange(True)
        first = read_padded_columns(mask, 1, 3, 3, visible)
        assert read_padded_columns(mask, 1, 3, 3, visible) is first
        WRITES[write](mask)
        assert flags(read_padded_columns(mask, 1, 3, 3, visible).keys) == "011"


def test_what_is_kept_with_a_mask_depends_on_everything_else_that_was_asked() -> None:
    mask = mask_of("100", "110", "011")
    found = read_padded_columns(mask, 1, 3, 3, VisibleRange(True, 2))
    assert len(found.keys) == 1
    assert len(read_padded_columns(mask, 4, 3, 3, VisibleRange(True, 2)).keys) == 4
    with pytest.raises(NotImplementedError, match="other masks are not supported"):
        read_padded_columns(mask, 1, 3, 3, VisibleRange(True))
    # a row of floats per request has no axis of queries
    padding = torch.tensor([[[[0.0, 0.0, torch.finfo().min]]]])
    for query_len in (3, 1, 2):
        found = read_padded_columns(padding, 1, query_len, 3, VisibleRange(False))
        assert found.queries.shape == (1, query_len)


def test_the_mask_shows_whether_a_bidirectional_window_includes_its_end() -> None:
    mask = mask_of("1100", "1110", "0111", "0011")
    assert read_bidirectional_window(mask, 2) == 2
    assert read_bidirectional_window(mask, 1) == 2
    assert read_bidirectional_window(mask, 9) == 9
    mask[0, 0, 0, 2] = True
    assert read_bidirectional_window(mask, 2) == 3


def columns_of(queries: str, keys: str) -> PaddedColumns:
    """Return the columns of one request."""
    of_queries, of_keys = (
        torch.tensor([[character == "1" for character in text]])
        for text in (queries, keys)
    )
    return PaddedColumns(of_queries, of_keys)


@pytest.mark.parametrize(
    ("queries", "keys", "first"),
    [("11", "11111", 3), ("11", "11000", 0), ("1", "11110", 3), ("011", "01110", 1)],
)
def test_a_bias_by_distance_becomes_a_table(
    queries: str, keys: str, first: int
) -> None:
    """The last query is at the last key, wherever the last column is."""
    columns = columns_of(queries, keys)
    table = torch.randn(3, 11)
    query = torch.arange(len(queries)) + first
    distance = torch.arange(5)[None, :] - query[:, None]
    bias = table[:, distance + 5][None]
    found = read_position_bias(bias, columns)
    assert found is not None
    reach = found.shape[1] // 2
    assert torch.equal(found[:, distance + reach], bias[0])
    assert read_position_bias(torch.zeros(1, 3, len(queries), 5), columns) is None
    bias = bias.clone()
    bias[0, 1, 0, 2] += 1
    if len(queries) > 1:
        with pytest.raises(NotImplementedError, match="by key - query alone"):
            read_position_bias(bias, columns)


def test_a_bias_that_was_written_to_is_read_again() -> None:
    bias, columns = torch.ones(1, 1, 1, 3), columns_of("1", "111")
    first = read_position_bias(bias, columns)
    bias[..., 0] = 5.0
    second = read_position_bias(bias, columns)
    assert first is not None and second is not None
    assert first[0, 0] == 1 and second[0, 0] == 5


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (columns_of("111", "101"), "padding among the tokens"),
        (
            PaddedColumns(
                torch.ones(2, 1, dtype=torch.bool),
                torch.tensor([[True, False], [True, True]]),
            ),
            r"at columns \[0, 1\]",
        ),
    ],
)
def test_a_bias_that_counts_padding_raises(columns: PaddedColumns, words: str) -> None:
    bias = torch.ones(1, 1, columns.queries.shape[1], columns.keys.shape[1])
    with pytest.raises(NotImplementedError, match=words):
        read_position_bias(bias, columns)
