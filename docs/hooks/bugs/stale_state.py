"""Figures of bugs in which a value of an earlier step is read again."""

from typing import Any

import torch
from pagetwin.contract.v0.sequence_classes import SequenceAttentionMetadata

from .figure import Strip, named, strip


def stale_padding_slots(ops: Any) -> list[Strip]:
    """Block size 4. A graph was captured for 4 tokens. Step 1 has 4 tokens, step 2 has 2."""
    buffers = ops.StepBuffers(
        max_num_reqs=2, max_num_tokens=4, max_blocks=2, block_size=4
    )
    buffers.append_blocks([0, 1], [[7], [2, 5]])
    first = buffers.build([3, 1], [0, 4]).slot_mapping.tolist()
    second = buffers.build([1, 1], [3, 5], num_tokens_padded=4).slot_mapping
    tokens = [f"token {token}" for token in range(4)]
    return [
        strip("block-table row, request 0", [7], "a"),
        strip("block-table row, request 1", [2, 5], "b"),
        strip("slot_mapping, step 1", first, "aaab", tokens),
        strip("slot_mapping, step 2", second, ["a", "b", "off", "off"], tokens),
    ]


def stale_table_tail(ops: Any) -> list[Strip]:
    """A captured table has 4 columns. Step 1 fills all of them; the table of step 2 has one."""
    state = ops.CommonAttentionState(max_blocks=4, max_seq_len_to_capture=16)
    with state.graph_capture(max_batch_size=1):
        captured = state.graph_capture_get_metadata_for_batch(1)
    buffers = state.get_graph_input_buffers(captured)
    strips = []
    for step, kind, row in ((1, "a", [7, 2, 5, 3]), (2, "b", [6])):
        batch = SequenceAttentionMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=1,
            slot_mapping=torch.tensor([row[-1] * 4]),
            multi_modal_placeholder_index_maps=None,
            enable_kv_scales_calculation=False,
            seq_lens_tensor=torch.tensor([4 * len(row) - 3], dtype=torch.int32),
            max_decode_seq_len=4 * len(row) - 3,
            block_tables=torch.tensor([row], dtype=torch.int32),
        )
        state.prepare_graph_input_buffers(buffers, batch)
        found = captured.block_tables[0].tolist()
        # an entry of step 1 that is left has its colour
        kinds = [
            kind if entry < len(row) else "a" if block else "off"
            for entry, block in enumerate(found)
        ]
        strips += [
            strip(f"row of the request, step {step}", row, kind),
            strip(f"row in the captured table, step {step}", found, kinds),
        ]
    return strips


def fresh_tensor_each_step(ops: Any) -> list[Strip]:
    """A graph is captured on the tensors of step 1. Step 2 has the same requests, longer by 1."""
    buffers = ops.StepBuffers(
        max_num_reqs=2, max_num_tokens=2, max_blocks=2, block_size=4
    )
    buffers.append_blocks([0, 1], [[7], [2, 5]])
    captured = buffers.build([1, 1], [2, 4]).seq_lens
    first = captured.tolist()
    second = buffers.build([1, 1], [3, 5]).seq_lens
    names = ["request 0", "request 1"]
    return [
        strip("seq_lens of step 1", first, "ab", names),
        strip("seq_lens of step 2", second, "ab", names),
        strip("what the graph reads in step 2", captured, "ab", names),
    ]


def padding_rows_keep_old_output(ops: Any) -> list[Strip]:
    """2 decodes in a batch padded to 4 rows. The output tensor holds results of a larger step."""
    out = torch.tensor([3.0, 7.0, 4.0, 8.0]).view(4, 1, 1)
    before = out.flatten().tolist()
    ops.paged_attention(
        torch.zeros(4, 1, 1),
        torch.zeros(2, 4, 1, 1),
        torch.tensor([5.0, 6.0]).view(2, 1, 1, 1).expand(2, 4, 1, 1),
        torch.tensor([[0], [1]], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([3, 2], dtype=torch.int32),
        1,
        3,
        out=out,
    )
    rows = ["request 0", "request 1", "padding", "padding"]
    kinds = ["a", "b", "off", "off"]
    return [
        strip("output before the step", before, "off", rows),
        strip("output after the step", out.flatten(), kinds, rows),
    ]


def evicted_block_still_known(ops: Any) -> list[Strip]:
    """2 blocks of 4 slots. Request a ends. Request b needs both blocks. The prompt of a returns."""
    first, second = list(range(10, 18)), list(range(50, 58))
    manager = ops.BlockManager(num_blocks=2, block_size=4)
    contents: dict[int, list[int]] = {}
    for name, tokens in (("a", first), ("b", second)):
        manager.allocate_slots(name, 0, 8)
        row = manager.get_block_ids(name)
        contents |= {block: tokens[4 * n : 4 * n + 4] for n, block in enumerate(row)}
        manager.cache_full_blocks(name, tokens, 8)
        manager.free(name)
    found = manager.get_computed_blocks([*first, 99])
    return [
        strip("tokens of request a", first, "a"),
        *(
            strip(f"block {block} holds the keys of tokens", contents[block], "b")
            for block in sorted(contents)
        ),
        strip("found for the prompt of a", named(found), "b"),
    ]
