"""Does the sequence-group form hold what the groups say?"""

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract import sequence_classes
from pagetwin.contract.kinds import PAD_SLOT_ID
from pagetwin.contract.sequence_classes import (
    IndexMap,
    MultiModalPlaceholderMap,
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)

GARBAGE = 10**6


# ---- steps


@st.composite
def placeholder_maps(draw: st.DrawFn, tokens: int) -> MultiModalPlaceholderMap:
    """Draw a map of a sequence of so many new tokens: each image fills some of them."""
    edges = draw(st.lists(st.integers(0, tokens), max_size=4).map(sorted))
    dest = tuple(map(range, edges[::2], edges[1::2]))
    src, rows = [], 0
    for each in dest:
        rows += draw(st.integers(0, 2))  # rows whose tokens came in an earlier chunk
        src.append(range(rows, rows + len(each)))
        rows += len(each)
    return MultiModalPlaceholderMap(
        src_ranges=tuple(src),
        src_len=rows + draw(st.integers(0, 2)),
        dest_ranges=dest,
        dest_len=tokens,
    )


@st.composite
def seq_groups(draw: st.DrawFn, first_id: int, block_size: int, is_prompt: bool) -> Any:
    """Draw a group whose rows may have spare entries behind the sequence."""
    count = draw(st.integers(1, 3))
    query_len = draw(st.integers(0, 9)) if is_prompt else 1
    context_len = draw(st.sampled_from([0, 0, 1, 7, 16]) | st.integers(0, 40))
    has_cache = draw(st.integers(0, 4)) > 0
    blocks = 0 if is_prompt else draw(st.integers(0, 4))
    sequences, rows = [], {}
    for seq_id in range(first_id, first_id + count):
        sequences.append(
            SequenceInput(
                seq_id=seq_id,
                query_len=query_len,
                context_len=context_len,
                curr_sliding_window_block=blocks,
            )
        )
        needed = -(-(context_len + query_len) // block_size)
        ids = draw(st.lists(st.integers(0, 99), min_size=needed, max_size=needed))
        rows[seq_id] = [*ids, *[GARBAGE] * draw(st.integers(0, 2))]
    no_tables = draw(st.sampled_from([None, {each: None for each in rows}]))
    modalities = draw(st.sets(st.sampled_from(["image", "audio"]))) if is_prompt else ()
    return SequenceGroup(
        is_prompt=is_prompt,
        sequences=tuple(sequences),
        block_tables=rows if has_cache else no_tables,
        prefix_cache_hit=is_prompt and has_cache and draw(st.booleans()),
        multi_modal_placeholder_maps={
            each: draw(placeholder_maps(query_len)) for each in sorted(modalities)
        },
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[str, Any], list[SequenceGroup]]:
    """Draw a builder's arguments and a step's groups, at least one new token among them."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    groups: list[SequenceGroup] = []
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=4).map(sorted))
    for is_decode in kinds:
        groups.append(draw(seq_groups(10 * len(groups), block_size, not is_decode)))
    if not any(each.query_len for group in groups for each in group.sequences):
        groups.append(draw(seq_groups(90, block_size, False)))
    arguments = {
        "block_size": block_size,
        "sliding_window": draw(st.none() | st.integers(0, 12)),
        "chunked_prefill_enabled": draw(st.booleans()),
    }
    return arguments, groups


def kept_blocks(
    arguments: dict[str, Any], group: SequenceGroup, sequence: SequenceInput
) -> tuple[list[int], int]:
    """Return the row attention may read, and how many tokens it holds of the sequence."""
    seq_len, block_size = sequence.orig_seq_len, arguments["block_size"]
    row = list(group.row(sequence))
    if not row:
        return [], seq_len
    if group.is_prompt:
        all_new = sequence.context_len == 0 and not group.prefix_cache_hit
        unread = all_new and not arguments.get("chunked_prefill_enabled")
        return [] if unread else row, seq_len
    window = sequence.curr_sliding_window_block
    used = -(-seq_len // block_size)
    first = used - window if 0 < window < used else 0
    return row[first:], seq_len - first * block_size


def slots_by_hand(
    arguments: dict[str, Any], group: SequenceGroup, sequence: SequenceInput
) -> list[int]:
    block_size, window = arguments["block_size"], arguments.get("sliding_window")
    slots = []
    for position in range(sequence.context_len, sequence.orig_seq_len):
        seen_later = (
            not group.is_prompt
            or window is None
            or position >= sequence.orig_seq_len - window
        )
        row = group.row(sequence)
        stored = bool(row) and seen_later
        slots.append(
            row[position // block_size] * block_size + position % block_size
            if stored
            else PAD_SLOT_ID
        )
    return slots


def indices_by_hand(groups: list[SequenceGroup]) -> dict[str, IndexMap]:
    """Give each placeholder token its row, token by token of the whole batch."""
    found: dict[str, IndexMap] = {}
    rows_before: dict[str, int] = {}
    first_token = 0
    for group in groups:
        for sequence in group.sequences:
            for modality, each in group.multi_modal_placeholder_maps.items():
                index = found.setdefault(modality, IndexMap([], []))
                pairs = zip(each.src_ranges, each.dest_ranges, strict=True)
                for rows, tokens in pairs:
                    for row, token in zip(rows, tokens, strict=True):
                        index.src.append(rows_before.get(modality, 0) + row)
                        index.dest.append(first_token + token)
            first_token += sequence.query_len
        for modality, each in group.multi_modal_placeholder_maps.items():
            rows_before[modality] = rows_before.get(modality, 0) + each.src_len
    return found


def built(
    twin: Twin, arguments: dict[str, Any], groups: list[SequenceGroup], **graph: Any
) -> tuple[Any, SequenceAttentionMetadata]:
    """Return a builder and what it built of some groups."""
    builder = twin.CommonMetadataBuilder(**arguments)
    builder.prepare()
    for group in groups:
        builder.add_seq_group(group)
    members = [(group, each) for group in groups for each in group.sequences]
    seq_lens = [kept_blocks(arguments, *member)[1] for member in members]
    seq_lens += [1] * graph.get("cuda_graph_pad_size", 0)
    query_lens = [each.query_len for _, each in members]
    return builder, builder.build(seq_lens, query_lens, **graph)


def starts(lens: list[int]) -> list[int]:
    return [sum(lens[:place]) for place in range(len(lens) + 1)]


def numbers(metadata: SequenceAttentionMetadata) -> dict[str, Any]:
    """Return all fields as plain values, each tensor with its dtype and shape."""
    return {
        name: (each.dtype, tuple(each.shape), each.tolist())
        if isinstance(each, torch.Tensor)
        else each
        for name, each in metadata.asdict_zerocopy().items()
    }


# ---- the builder


@given(step=steps())
def test_the_metadata_is_what_the_groups_say(
    step: tuple[dict[str, Any], list[SequenceGroup]], twin: Twin
) -> None:
    """Blocks, slots and places are found for each token alone; entries behind a row are garbage."""
    arguments, groups = step
    before = deepcopy(groups)
    _, metadata = built(twin, arguments, groups)
    assert groups == before
    members = [(group, each) for group in groups for each in group.sequences]
    rows = [kept_blocks(arguments, *member)[0] for member in members]
    seq_lens = [kept_blocks(arguments, *member)[1] for member in members]
    query_lens = [each.query_len for _, each in members]
    prompts = sum(group.is_prompt for group, _ in members)
    width = max(map(len, rows))
    expected = {
        "num_prefills": prompts,
        "num_prefill_tokens": sum(query_lens[:prompts]),
        "num_decode_tokens": len(members) - prompts,
        "slot_mapping": [
            slot for member in members for slot in slots_by_hand(arguments, *member)
        ],
        "multi_modal_placeholder_index_maps": indices_by_hand(groups),
        "enable_kv_scales_calculation": True,
        "seq_lens": seq_lens,
        "seq_lens_tensor": seq_lens,
        "max_prefill_seq_len": max(seq_lens[:prompts], default=0),
        "max_decode_seq_len": max(seq_lens[prompts:], default=0),
        "max_query_len": max(query_lens),
        "query_start_loc": starts(query_lens),
        "seq_start_loc": starts(seq_lens),
        "context_lens_tensor": [each.context_len for _, each in members],
        "block_tables": [row + [0] * (width - len(row)) for row in rows],
        "use_cuda_graph": False,
    }
    for name, each in metadata.asdict_zerocopy().items():
        if isinstance(each, torch.Tensor):
            dtype = torch.int64 if name == "slot_mapping" else torch.int32
            assert each.dtype == dtype, name
            each = each.tolist()
        assert each == expected.get(name), name


@given(step=steps(), padding=st.integers(0, 3), spare=st.integers(0, 2))
def test_a_graph_gets_whole_rows_and_an_entry_for_every_sequence(
    step: tuple[dict[str, Any], list[SequenceGroup]],
    padding: int,
    spare: int,
    twin: Twin,
) -> None:
    """Ids of an earlier step once stayed behind shorter rows, and contexts were not padded."""
    arguments, groups = step
    decodes = [group for group in groups if not group.is_prompt]
    if not decodes:
        return
    members = [(group, each) for group in decodes for each in group.sequences]
    rows = [kept_blocks(arguments, *member)[0] for member in members]
    width = max(map(len, rows)) + spare
    size = len(members) + padding
    _, metadata = built(
        twin,
        arguments,
        decodes,
        cuda_graph_pad_size=padding,
        batch_size=size,
        max_blocks=width,
    )
    assert metadata.use_cuda_graph
    assert metadata.num_decode_tokens == size
    assert metadata.block_tables is not None
    assert metadata.block_tables.shape == (size, width)
    for row, found in zip(
        rows + [[]] * padding, metadata.block_tables.tolist(), strict=True
    ):
        assert found == row + [0] * (width - len(row))
    assert metadata.slot_mapping.tolist()[len(members) :] == [PAD_SLOT_ID] * padding
    contexts = [each.context_len for _, each in members] + [0] * padding
    assert metadata.context_lens_tensor.tolist() == contexts
    assert metadata.query_start_loc.tolist() == list(range(size + 1))
    assert metadata.seq_lens_tensor.tolist()[len(members) :] == [1] * padding
    assert metadata.max_decode_seq_len == max(metadata.seq_lens[: len(members)])


@given(step=steps())
def test_building_again_changes_nothing(
    step: tuple[dict[str, Any], list[SequenceGroup]], twin: Twin
) -> None:
    """A second build once took all groups a second time."""
    arguments, groups = step
    builder, metadata = built(twin, arguments, groups)
    before = numbers(metadata)
    query_lens = metadata.query_start_loc.diff().tolist()
    again = builder.build(metadata.seq_lens, query_lens)
    assert numbers(again) == before
    with pytest.raises(RuntimeError, match="prepare"):
        builder.add_seq_group(groups[0])
    builder.prepare()
    assert builder.slot_mapping == [] and builder.block_tables == []
    assert builder.num_prefills == builder.num_decode_tokens == 0
    assert builder.multimodal_placeholder_maps == {}
    assert numbers(metadata) == before


def test_a_later_step_leaves_the_metadata_of_this_one_alone(twin: Twin) -> None:
    """The table of a graph was once a view of a buffer that every step writes to."""
    groups = [
        SequenceGroup(
            is_prompt=False,
            sequences=(SequenceInput(seq_id=0, query_len=1, context_len=4),),
            block_tables={0: row},
        )
        for row in ([7, 2], [5, 3])
    ]
    builder = twin.CommonMetadataBuilder(block_size=4)
    tables = []
    for group in groups:
        builder.prepare()
        builder.add_seq_group(group)
        metadata = builder.build([5], [1], 0, batch_size=1, max_blocks=3)
        tables.append(metadata.block_tables)
    assert [each.tolist() for each in tables] == [[[7, 2, 0]], [[5, 3, 0]]]


def test_a_row_that_grows_after_it_was_added_changes_nothing(twin: Twin) -> None:
    row = [7, 2]
    builder = twin.CommonMetadataBuilder(block_size=4)
    builder.prepare()
    builder.add_seq_group(
        SequenceGroup(
            is_prompt=False,
            sequences=(SequenceInput(seq_id=0, query_len=1, context_len=4),),
            block_tables={0: row},
        )
    )
    row[:] = [GARBAGE] * 5
    metadata = builder.build([5], [1])
    assert metadata.block_tables.tolist() == [[7, 2]]
    assert metadata.slot_mapping.tolist() == builder.slot_mapping == [8]


def test_two_sequences_of_one_prompt_share_its_images(twin: Twin) -> None:
    """They were once counted once a sequence, so that the next group's rows were wrong."""
    image = MultiModalPlaceholderMap(
        src_ranges=(range(2),), src_len=2, dest_ranges=(range(1, 3),), dest_len=4
    )
    groups = [
        SequenceGroup(
            is_prompt=True,
            sequences=tuple(
                SequenceInput(seq_id=seq_id, query_len=4) for seq_id in ids
            ),
            multi_modal_placeholder_maps={"image": image},
        )
        for ids in ((0, 1), (2,))
    ]
    _, metadata = built(twin, {"block_size": 4}, groups)
    maps = metadata.multi_modal_placeholder_index_maps
    assert maps == {"image": IndexMap(src=[0, 1, 0, 1, 2, 3], dest=[1, 2, 5, 6, 9, 10])}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("context_len", [0, 4])
def test_a_prompt_reads_the_cache_unless_all_its_keys_are_new(
    chunked: bool, hit: bool, context_len: int, twin: Twin
) -> None:
    """A prompt with a context once got no row unless a flag said so."""
    sequence = SequenceInput(seq_id=0, query_len=3, context_len=context_len)
    group = prompt(
        sequences=(sequence,), block_tables={0: [5, 2]}, prefix_cache_hit=hit
    )
    arguments = {"block_size": 4, "chunked_prefill_enabled": chunked}
    builder, _ = built(twin, arguments, [group])
    reads = chunked or hit or context_len > 0
    assert builder.block_tables == [[5, 2] if reads else []]


def test_a_window_is_counted_from_the_last_block_in_use(twin: Twin) -> None:
    """Spare blocks behind the sequence were once counted for blocks of its window."""
    sequence = SequenceInput(
        seq_id=0, query_len=1, context_len=12, curr_sliding_window_block=3
    )
    group = decode(
        sequences=(sequence,), block_tables={0: [7, 2, 5, 3, GARBAGE, GARBAGE]}
    )
    builder, metadata = built(twin, {"block_size": 4, "sliding_window": 8}, [group])
    assert builder.block_tables == [[2, 5, 3, GARBAGE, GARBAGE]]
    # 13 tokens, of which the first block's 4 are out of sight
    assert builder.curr_seq_lens == metadata.seq_lens == [9]
    assert metadata.slot_mapping.tolist() == [3 * 4]


def test_a_later_chunk_stores_the_last_tokens_of_the_sequence(twin: Twin) -> None:
    """The chunk's own count was once compared with positions: everything was stored."""
    sequence = SequenceInput(seq_id=0, query_len=5, context_len=4)
    group = prompt(sequences=(sequence,), block_tables={0: [5, 2, 7]})
    _, metadata = built(twin, {"block_size": 4, "sliding_window": 3}, [group])
    assert metadata.slot_mapping.tolist() == [-1, -1, 10, 11, 28]


# ---- what is refused


def prompt(**changes: Any) -> SequenceGroup:
    values: dict[str, Any] = {
        "is_prompt": True,
        "sequences": (SequenceInput(seq_id=0, query_len=3),),
        "block_tables": {0: [5]},
    }
    return SequenceGroup(**{**values, **changes})


def decode(query_len: int = 1, **changes: Any) -> SequenceGroup:
    sequence = SequenceInput(seq_id=1, query_len=query_len, context_len=4)
    values: dict[str, Any] = {"sequences": (sequence,), "block_tables": {1: [7, 2]}}
    return SequenceGroup(is_prompt=False, **{**values, **changes})


IMAGE = {"image": MultiModalPlaceholderMap(dest_len=8)}


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        ([decode(query_len=2)], ValueError, "decodes query_len = 2"),
        ([decode(), prompt()], ValueError, "expected prompts first"),
        ([prompt(sequences=())], ValueError, "at least one"),
        ([prompt(block_tables={3: [1]})], KeyError, "no row of sequence 0"),
        ([prompt(block_tables={0: []})], IndexError, "position 2 needs entry 0"),
        ([prompt(block_tables={0: None, 1: [3]})], ValueError, r"\[0\] = None"),
        ([prompt(block_tables=None, prefix_cache_hit=True)], ValueError, "a row"),
        ([prompt(multi_modal_placeholder_maps=IMAGE)], ValueError, "expected 3"),
        (
            [prompt(sequences=(SequenceInput(seq_id=0, query_len=-1),))],
            ValueError,
            "query_len = -1",
        ),
    ],
)
def test_a_group_that_no_step_can_have_is_refused_and_not_added(
    groups: list[SequenceGroup], error: type[Exception], words: str, twin: Twin
) -> None:
    builder = twin.CommonMetadataBuilder(block_size=4)
    builder.prepare()
    for group in groups[:-1]:
        builder.add_seq_group(group)
    before = builder.slot_mapping, list(builder.context_lens), builder.num_prefills
    with pytest.raises(error, match=words):
        builder.add_seq_group(groups[-1])
    after = builder.slot_mapping, list(builder.context_lens), builder.num_prefills
    assert after == before


@pytest.mark.parametrize(
    ("groups", "arguments", "error", "words"),
    [
        ([], ([], []), ValueError, "no sequence"),
        ([prompt()], ([3], [2]), ValueError, r"query_lens\[0\] = 2: expected 3"),
        ([prompt()], ([4], [3]), ValueError, r"seq_lens\[0\] = 4: expected 3"),
        ([prompt()], ([3, 3], [3]), ValueError, "seq_lens has 2 entries: expected 1"),
        ([prompt()], ([3], [3], -2), ValueError, "cuda_graph_pad_size = -2"),
        ([prompt()], ([3], [3], 0, 1, 4), ValueError, "expected decodes alone"),
        ([decode()], ([5, 1], [1], 1, 5, 4), ValueError, "batch_size = 5: expected 2"),
        ([decode()], ([5, 9], [1], 1, 2, 4), ValueError, r"seq_lens\[1\] = 9"),
        ([decode()], ([5], [1], 0, 1), ValueError, "max_blocks = None"),
        ([decode()], ([5], [1], 0, 1, 1), IndexError, "1"),
        (
            [prompt(sequences=(SequenceInput(seq_id=0, query_len=0),))],
            ([0], [0]),
            ValueError,
            "expected a new token",
        ),
    ],
)
def test_lengths_that_are_not_the_groups_are_refused(
    groups: list[SequenceGroup],
    arguments: tuple[Any, ...],
    error: type[Exception],
    words: str,
    twin: Twin,
) -> None:
    builder = twin.CommonMetadataBuilder(block_size=4)
    builder.prepare()
    for group in groups:
        builder.add_seq_group(group)
    with pytest.raises(error, match=words):
        builder.build(*arguments)


def test_a_builder_says_that_no_step_has_begun(twin: Twin) -> None:
    """It once failed on the name of a list it had not made."""
    builder = twin.CommonMetadataBuilder(block_size=4)
    with pytest.raises(RuntimeError, match="prepare"):
        builder.add_seq_group(prompt())
    with pytest.raises(RuntimeError, match="prepare"):
        builder.build([3], [3])
    with pytest.raises(ValueError, match="block_size = 0"):
        twin.CommonMetadataBuilder(block_size=0)
    with pytest.raises(ValueError, match="sliding_window = -1"):
        twin.CommonMetadataBuilder(block_size=4, sliding_window=-1)


# ---- tables and padding


@given(
    tables=st.none()
    | st.lists(st.integers(0, 9))
    | st.dictionaries(st.integers(0, 3), st.none() | st.lists(st.integers(0, 9)))
)
def test_tables_are_empty_when_no_sequence_has_a_row(tables: Any, twin: Twin) -> None:
    """A row of no blocks is a row."""
    has_row = isinstance(tables, list)
    if isinstance(tables, dict):
        has_row = any(isinstance(row, list) for row in tables.values())
    assert twin.is_block_tables_empty(tables) is not has_row


@given(
    rows=st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=4),
    pad=st.integers(-3, 3),
    spare=st.none() | st.integers(0, 2),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bfloat16]),
)
def test_rows_stand_in_front_and_padding_behind(
    rows: list[list[int]], pad: int, spare: int | None, dtype: torch.dtype, twin: Twin
) -> None:
    longest = max(map(len, rows), default=0)
    max_len = None if spare is None else longest + spare
    padded = twin.make_tensor_with_pad(rows, pad, dtype, max_len)
    width = longest + (spare or 0)
    assert padded.dtype == dtype and padded.shape == (len(rows), width)
    assert padded.tolist() == [row + [pad] * (width - len(row)) for row in rows]


def test_a_row_longer_than_the_tensor_is_refused(twin: Twin) -> None:
    with pytest.raises(IndexError, match=r"x\[1\] has 3 entries: expected at most"):
        twin.make_tensor_with_pad([[1], [1, 2, 3]], 0, torch.int32, 2)


# ---- the metadata itself


@given(step=steps(), encoders=st.booleans())
def test_both_parts_of_a_step_are_its_rows(
    step: tuple[dict[str, Any], list[SequenceGroup]], encoders: bool, reference: Twin
) -> None:
    """The decodes once lost their starts, and kept the encoder rows of the prompts."""
    arguments, groups = step
    _, whole = built(reference, arguments, groups)
    count = len(whole.seq_lens)
    if encoders:
        lens = list(range(2, 2 + count))
        tensor = torch.tensor(lens, dtype=torch.int32)
        whole = replace(
            whole,
            encoder_seq_lens=lens,
            encoder_seq_lens_tensor=tensor,
            encoder_seq_start_loc=torch.tensor(starts(lens), dtype=torch.int32),
            max_encoder_seq_len=max(lens),
            num_encoder_tokens=5,
            cross_slot_mapping=torch.arange(5),
            cross_block_tables=tensor[:, None],
        )
    before = numbers(whole)
    cut, tokens = whole.num_prefills, whole.num_prefill_tokens
    parts = (
        (whole.prefill_metadata, slice(0, cut), slice(0, tokens)),
        (whole.decode_metadata, slice(cut, count), slice(tokens, None)),
    )
    for part, rows, slots in parts:
        if rows.start == rows.stop:
            assert part is None
            continue
        assert part is not None
        assert part.slot_mapping.tolist() == whole.slot_mapping[slots].tolist()
        for name in sequence_classes.FIELDS_PER_SEQUENCE:
            some, all_rows = getattr(part, name), getattr(whole, name)
            if all_rows is None:
                assert some is None
            elif isinstance(all_rows, list):
                assert some == all_rows[rows]
            else:
                assert some.tolist() == all_rows[rows].tolist(), name
        for name in sequence_classes.FIELDS_OF_STARTS:
            some, all_starts = getattr(part, name), getattr(whole, name)
            if all_starts is not None:
                lens = all_starts.diff().tolist()[rows]
                assert some.tolist() == starts(lens), name
        query_lens = whole.query_start_loc.diff().tolist()[rows]
        assert part.max_query_len >= max(query_lens)
        longest = max(part.max_prefill_seq_len, part.max_decode_seq_len)
        assert longest == max(whole.seq_lens[rows])
    assert whole.prefill_metadata is parts[0][0]
    assert whole.decode_metadata is parts[1][0]
    assert numbers(whole) == before
    if encoders and cut:
        assert whole.prefill_metadata.num_encoder_tokens == 5
        if whole.decode_metadata is not None:
            assert whole.decode_metadata.num_encoder_tokens == 0
            assert whole.decode_metadata.cross_slot_mapping.tolist() == []


def test_every_field_says_what_becomes_of_it_in_a_part() -> None:
    """A field that is added later cannot be forgotten."""
    said = (
        *sequence_classes.FIELDS_PER_SEQUENCE,
        *sequence_classes.FIELDS_OF_STARTS,
        *sequence_classes.FIELDS_CUT_BY_HAND,
        *sequence_classes.FIELDS_CARRIED,
    )
    assert sorted(said) == sorted(
        each.name for each in fields(SequenceAttentionMetadata)
    )


def test_fields_come_as_they_are_stored(reference: Twin) -> None:
    _, metadata = built(reference, {"block_size": 4}, [prompt()])
    names = [each.name for each in fields(metadata)]
    skipped = {"slot_mapping", "no such field"}
    values = metadata.asdict_zerocopy(skipped)
    assert list(values) == [name for name in names if name not in skipped]
    assert all(getattr(metadata, name) is each for name, each in values.items())


def test_metadata_that_cannot_be_cut_says_so() -> None:
    base = sequence_classes.AttentionMetadata(slot_mapping=torch.empty(0).long())
    with pytest.raises(NotImplementedError, match="AttentionMetadata lacks"):
        _ = base.prefill_metadata
    with pytest.raises(NotImplementedError, match="AttentionMetadata lacks"):
        _ = base.decode_metadata


def test_a_map_of_two_lengths_is_refused_when_it_is_written_out() -> None:
    uneven = MultiModalPlaceholderMap(src_ranges=(range(2),), src_len=2)
    with pytest.raises(ValueError, match="4 rows of embeddings for 0 placeholders"):
        uneven.extend(uneven).index_map()
