"""Laws of the lengths and block tables of encoders and decoders, and of padded rows.

The functions return fields of the metadata: the same objects, not copies. A table lists which
fields each kind of attention uses.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ....contract.kinds import AttentionType
from ....contract.v0.sequence_classes import SequenceAttentionMetadata
from ...candidates.setting import Setting
from ...cases.steps import Runs, counts, padded, several
from ...checks.canaries import packed
from ...checks.expect import expect_rejection, expect_same
from ...checks.metadata import expect_unchanged, remember
from ..crowds import rows_of
from ..law import law

OF_THE_ENCODER = (
    "encoder_seq_lens",
    "encoder_seq_lens_tensor",
    "max_encoder_seq_len",
)
OF_THE_CROSS = ("cross_slot_mapping", "cross_block_tables")


def both_sides(device: torch.device) -> SequenceAttentionMetadata:
    """Return metadata with every field set; no two fields have the same value."""
    return SequenceAttentionMetadata(
        num_prefills=2,
        num_prefill_tokens=70_005,
        num_decode_tokens=70_003,
        slot_mapping=torch.arange(8, device=device),
        seq_lens=[2, 3, 14, 15, 16],
        seq_lens_tensor=counts([2, 3, 14, 15, 16], device),
        max_prefill_seq_len=70_031,
        max_decode_seq_len=70_032,
        max_query_len=33,
        max_decode_query_len=1,
        query_start_loc=counts([0, 2, 5, 6, 7, 8], device),
        block_tables=counts(range(10), device).view(5, 2),
        encoder_seq_lens=[4, 6, 7, 8, 9],
        encoder_seq_lens_tensor=counts([4, 6, 7, 8, 9], device),
        max_encoder_seq_len=70_034,
        num_encoder_tokens=70_010,
        cross_slot_mapping=torch.arange(50, 60, device=device),
        cross_block_tables=counts(range(20, 35), device).view(5, 3),
    )


@dataclass(frozen=True)
class Missing:
    """Fields that are missing from the metadata.

    Args:
        names: Names of the missing fields, which are None.
        empty: Names of fields that are set but empty.
    """

    names: tuple[str, ...]
    empty: tuple[str, ...] = ()


ALL_FIELDS = OF_THE_ENCODER + OF_THE_CROSS
EVERY_WAY = [
    Missing(names)
    for names in chain.from_iterable(
        combinations(ALL_FIELDS, count) for count in range(len(ALL_FIELDS) + 1)
    )
] + [Missing((), ALL_FIELDS), Missing(OF_THE_CROSS, OF_THE_ENCODER)]


@law(
    "is_all_encoder_attn_metadata_set",
    "is_all_cross_attn_metadata_set",
    cases=EVERY_WAY,
)
def metadata_is_complete_if_no_field_of_its_side_is_missing(
    setting: Setting, missing: Missing
) -> None:
    """An empty list, an empty tensor and a maximum length of 0 are not missing."""
    nothing: dict[str, Any] = {
        "encoder_seq_lens": [],
        "encoder_seq_lens_tensor": counts([]),
        "max_encoder_seq_len": 0,
        "cross_slot_mapping": torch.zeros(0, dtype=torch.int64),
        "cross_block_tables": torch.zeros(0, 0, dtype=torch.int32),
    }
    changes: dict[str, Any] = {name: nothing[name] for name in missing.empty}
    changes |= dict.fromkeys(missing.names)
    metadata = replace(
        both_sides(setting.device),
        **changes,
    )
    encoder = not set(missing.names) & set(OF_THE_ENCODER)
    found = setting.candidate.is_all_encoder_attn_metadata_set(metadata)
    expect_same("complete for the encoder", found, encoder)
    found = setting.candidate.is_all_cross_attn_metadata_set(metadata)
    expect_same("complete for both", found, not missing.names)


@dataclass(frozen=True)
class Kind:
    """A requested kind of attention.

    Args:
        attn_type: The string value of the kind.
        is_prompt: Whether the maximum length of the prompts is requested.
    """

    attn_type: str
    is_prompt: bool = True


KINDS = [Kind(kind.value, prompt) for kind in AttentionType for prompt in (True, False)]
LENGTHS = {
    ("decoder", True): ("seq_lens_tensor", "max_prefill_seq_len", "block_tables"),
    ("decoder", False): ("seq_lens_tensor", "max_decode_seq_len", "block_tables"),
    ("encoder_only", True): ("seq_lens_tensor", "max_prefill_seq_len", ""),
    ("encoder", True): ("encoder_seq_lens_tensor", "max_encoder_seq_len", ""),
    ("encoder", False): ("encoder_seq_lens_tensor", "max_encoder_seq_len", ""),
    ("encoder_decoder", True): (
        "encoder_seq_lens_tensor",
        "max_encoder_seq_len",
        "cross_block_tables",
    ),
    ("encoder_decoder", False): (
        "encoder_seq_lens_tensor",
        "max_encoder_seq_len",
        "cross_block_tables",
    ),
}
"""Expected lengths, maximum length and block table. An encoder-only model has no decodes."""


@law("get_seq_len_block_table_args", cases=KINDS)
def each_kind_of_attention_reads_its_own_lengths_and_table(
    setting: Setting, kind: Kind
) -> None:
    metadata = both_sides(setting.device)
    before = remember(metadata)
    get = setting.candidate.get_seq_len_block_table_args
    names = LENGTHS.get((kind.attn_type, kind.is_prompt))
    for attn_type in (kind.attn_type, AttentionType(kind.attn_type)):
        if names is None:
            expect_rejection(
                repr(kind), partial(get, metadata, kind.is_prompt, attn_type)
            )
            continue
        found = get(metadata, kind.is_prompt, attn_type)
        right = [getattr(metadata, name) if name else None for name in names]
        expect_same("answers", len(found), 3)
        for name, one, other in zip(names, found, right, strict=True):
            expect_same(
                f"the very {name or 'table that is not there'}", one is other, True
            )
    expect_unchanged("the metadata", metadata, before)


@law("get_seq_len_block_table_args", cases=KINDS, claim="rejects shapes")
def a_kind_without_its_lengths_is_rejected(setting: Setting, kind: Kind) -> None:
    """Other kinds are accepted: a missing encoder field does not affect the decoder."""
    get = setting.candidate.get_seq_len_block_table_args
    names = LENGTHS.get((kind.attn_type, kind.is_prompt), ())
    for name in (
        "encoder_seq_lens_tensor",
        "max_encoder_seq_len",
        "cross_block_tables",
    ):
        change: dict[str, Any] = {name: None}
        lacking = replace(both_sides(setting.device), **change)
        if name in names or not names:
            expect_rejection(
                f"{kind} without {name}",
                partial(get, lacking, kind.is_prompt, kind.attn_type),
            )
        else:
            get(lacking, kind.is_prompt, kind.attn_type)
    for other in ("", "cross", "Decoder"):
        expect_rejection(
            f"attn_type = {other!r}",
            partial(get, both_sides(setting.device), True, other),
        )


TOKENS = {
    "decoder": (70_005, 70_005, 70_003),
    "encoder_only": (70_005, 70_005, 70_003),
    "encoder": (70_010, 70_010, 0),
    "encoder_decoder": (70_005, 70_010, 70_003),
}


@law("get_num_prefill_decode_query_kv_tokens", cases=KINDS[::2])
def each_kind_of_attention_counts_its_own_tokens(setting: Setting, kind: Kind) -> None:
    """The counts are queries and keys of the prompts, then queries of the decodes."""
    metadata = both_sides(setting.device)
    get = setting.candidate.get_num_prefill_decode_query_kv_tokens
    right = TOKENS[kind.attn_type]
    for attn_type in (kind.attn_type, AttentionType(kind.attn_type)):
        expect_same("tokens", tuple(get(metadata, attn_type)), right)
    idle = replace(metadata, num_encoder_tokens=0)
    none = tuple(0 if number == 70_010 else number for number in right)
    expect_same("tokens beside no encoder's", tuple(get(idle, kind.attn_type)), none)
    lacking = replace(metadata, num_encoder_tokens=None)
    if kind.attn_type.startswith("encoder") and kind.attn_type != "encoder_only":
        expect_rejection("no encoder tokens", lambda: get(lacking, kind.attn_type))
    else:
        found = tuple(get(lacking, kind.attn_type))
        expect_same("tokens", found, TOKENS[kind.attn_type])
    expect_rejection("no such kind", lambda: get(metadata, "self"))


@dataclass(frozen=True)
class Tables:
    """Block-table rows by sequence id, or a value given instead of them.

    Args:
        tables: The argument of the call.
        is_empty: Whether `tables` means that the sequences do not have a cache.
    """

    tables: Any
    is_empty: bool


@law(
    "is_block_tables_empty",
    cases=[
        Tables(None, True),
        Tables({}, True),
        Tables({0: None}, True),
        Tables({0: None, 1: None}, True),
        Tables({0: []}, False),
        Tables({0: [], 1: None}, False),
        Tables({0: None, 1: [3]}, False),
        Tables({0: None, 1: []}, False),
        Tables({0: [0]}, False),
        Tables([], False),
        Tables([None], False),
    ],
)
def block_tables_are_empty_if_no_sequence_has_a_row(
    setting: Setting, case: Tables
) -> None:
    """A row with zero blocks counts as a row."""
    found = setting.candidate.is_block_tables_empty(case.tables)
    expect_same("empty", type(found) is bool and found, case.is_empty)


@dataclass(frozen=True)
class UnevenRows:
    """Rows to pad.

    Args:
        rows: Rows of numbers.
        pad: The value after the end of each row.
        dtype: The dtype of the tensor.
        max_len: Optional. The width of the tensor. If None, the length of the longest row.
    """

    rows: tuple[tuple[int, ...], ...]
    pad: int
    dtype: torch.dtype
    max_len: int | None


@st.composite
def rows(draw: st.DrawFn) -> UnevenRows:
    """Return rows of zero, one or more numbers, as long as the width or shorter."""
    pick = Random(draw(st.integers(0, 2**20)))
    lens = [pick.choice([0, 1, 2, 5]) for _ in range(pick.choice([0, 1, 2, 4]))]
    width = max(lens, default=0)
    return UnevenRows(
        tuple(tuple(pick.randint(1, 99) for _ in range(count)) for count in lens),
        pick.choice([0, -1, 7]),
        pick.choice([torch.int32, torch.int64, torch.float32]),
        pick.choice([None, width, width + 3]),
    )


LARGE_ROWS = [
    UnevenRows(((7, 300), (1000,)), 0, torch.int32, None),
    UnevenRows((Runs((70_000, 300)), (), (65_600,)), 300, torch.int64, 400),
    UnevenRows((Runs((3, 65_600), (2**31 - 1, 1)), (1,)), 70_000, torch.int32, None),
    UnevenRows(Runs(((5,), 299), ((5, 6), 1)), -1, torch.int64, 300),
    UnevenRows(((5,), (6, 7)), -1, torch.int64, 65_600),
]
"""Numbers, rows and widths that do not fit 8 and 16 bits."""


@law(
    "make_tensor_with_pad",
    cases=several(rows()),
    edges=[[rows] for rows in LARGE_ROWS],
)
def rows_are_padded_into_one_tensor(setting: Setting, cases: list[UnevenRows]) -> None:
    for rows in cases:
        given = [list(row) for row in rows.rows]
        make = setting.candidate.make_tensor_with_pad
        found = make(given, rows.pad, rows.dtype, rows.max_len, setting.device)
        longest = max(map(len, given), default=0)
        width = longest if rows.max_len is None else rows.max_len
        flat = [number for row in rows.rows for number in padded(row, width, rows.pad)]
        right = torch.tensor(flat, dtype=rows.dtype).view(len(given), width)
        expect_same("the tensor", found, right)
        expect_same("where it lies", found.device.type, setting.device.type)
        expect_same("the rows afterwards", given, [list(row) for row in rows.rows])
        for short in {longest - 1, -1} - ({-1} if not given else set()):
            expect_rejection(
                f"max_len = {short}",
                partial(make, given, rows.pad, rows.dtype, short),
            )


@law("make_tensor_with_pad", cases=[300])
def more_rows_than_fit_16_bits_are_padded(setting: Setting, pad: int) -> None:
    rows, right = rows_of([9])
    right[:, 2] = right[-1, 1] = pad
    found = setting.candidate.make_tensor_with_pad(
        rows, pad, torch.int32, 3, setting.device
    )
    expect_same("the tensor", packed(found), right)
