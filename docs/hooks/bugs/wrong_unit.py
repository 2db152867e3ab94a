"""Figures of bugs in which a number is in another unit than the code that reads it expects."""

import math
from typing import Any

import torch

from .figure import Strip, strip


def log_base_two(ops: Any) -> list[Strip]:
    """The prefix has 3 keys, the rest has 1; all scores are 0. So each key has the weight 1/4."""
    keys = torch.tensor([3.0, 1.0])
    lses = keys.log2()
    output = ops.merge_attn_states(
        torch.tensor([[[1.0]]]),
        lses[:1, None],
        torch.tensor([[[0.0]]]),
        lses[1:, None],
        prefix_lse_base=2.0,
        suffix_lse_base=2.0,
    )
    share = float(output)
    parts = ["prefix", "rest"]
    return [
        strip("keys", [3, 1], "ab", parts),
        strip("log-sum-exp to base 2", lses, "ab", parts),
        strip("the same, natural", lses * math.log(2), "ab", parts),
        strip("share of each part", [share, 1 - share], "ab", parts),
    ]


def value_with_the_scale_of_the_key(ops: Any) -> list[Strip]:
    """One block of an FP8 cache. Keys and values are stored as the same codes, 1 to 4."""
    codes = torch.arange(1.0, 5.0).view(1, 4, 1, 1).to(torch.float8_e4m3fn)
    key, value = ops.gather_cache(
        codes,
        codes,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_start_loc=torch.tensor([0, 4], dtype=torch.int32),
        num_tokens=4,
        k_scale=0.5,
        v_scale=10.0,
        dtype=torch.float32,
    )
    return [
        strip("codes in the cache", codes.flatten().float(), "off"),
        strip("k_scale, v_scale", [0.5, 10.0], "ab"),
        strip("keys", key.flatten(), "a"),
        strip("values", value.flatten(), "b"),
    ]


def block_ids_of_two_sizes(ops: Any) -> list[Strip]:
    """Blocks of the manager have 4 slots, those of the kernel have 2."""
    table = ops.BlockTable(
        block_size=4, max_num_reqs=1, max_num_blocks_per_req=2, kernel_block_size=2
    )
    table.add_row([7, 2], 0)
    slots = table.compute_slot_mapping([0] * 8, list(range(8)))
    return [
        strip("row of the manager", [7, 2], "ab", ["slots 28-31", "slots 8-11"]),
        strip("row of the kernel", table.get_device_tensor(1)[0], "aabb"),
        strip("slot of each token", slots, "aaaabbbb", range(8)),
    ]


def one_block_per_tile(ops: Any) -> list[Strip]:
    """Block size 4, row [2, 0], 6 tokens. The key in slot n is the number n."""
    cache = torch.arange(12.0).view(3, 4, 1, 1)
    key, _ = ops.gather_cache(
        cache,
        cache,
        block_table=torch.tensor([[2, 0]], dtype=torch.int32),
        seq_start_loc=torch.tensor([0, 6], dtype=torch.int32),
        num_tokens=6,
    )
    blocks = [int(number) // 4 for number in key.flatten().tolist()]
    return [
        strip("block-table row", [2, 0], "ab"),
        strip("gathered keys", key.flatten(), ["b.a"[b] for b in blocks], range(6)),
    ]


def tokens_for_a_length(ops: Any) -> list[Strip]:
    """Three requests with 1, 1 and 3 new tokens."""
    step = ops.build_common_attn_metadata([1, 1, 3], [5, 2, 0], [[7, 2], [5], [3]], 4)
    lens = step.query_start_loc_cpu.diff()
    return [
        strip("new tokens", lens, ["a", "b", "new"], ["req 0", "req 1", "req 2"]),
        strip("query_start_loc", step.query_start_loc),
        strip("max_query_len", [step.max_query_len]),
    ]
