"""Figures of bugs in which two operations change places."""

from contextlib import suppress
from typing import Any

import torch
from pagetwin.contract.block_classes import OutOfBlocks
from pagetwin.contract.scheduler_classes import Request

from .attention import paged_weights
from .figure import Strip, named, strip


def cap_after_bias(ops: Any) -> list[Strip]:
    """Soft cap 2, ALiBi slope 1, all scores 0. The bias of a key is minus its distance."""
    weights = paged_weights(
        ops, 1, [0.0] * 6, logits_soft_cap=2.0, alibi_slopes=torch.ones(1)
    )[0]
    keys = [f"key {key}" for key in range(6)]
    return [
        strip("bias", [key - 5 for key in range(6)], "a", keys),
        strip("weights of query 5", [round(float(w), 4) for w in weights], "a", keys),
    ]


def axes_in_the_inverse_order(ops: Any) -> list[Strip]:
    """24 bytes become a tensor of shape 2, 3, 4 whose axis 1 is outermost in memory, then 2, 0."""
    shape, order = (2, 3, 4), (1, 2, 0)
    raw = torch.arange(24, dtype=torch.int8)
    view = ops.view_kv_cache(raw, torch.int8, shape, order)
    axes = ["axis 0", "axis 1", "axis 2"]
    return [
        strip("shape that is wanted", shape, "a", axes),
        strip("stride_order", order, "", ["outermost", "", "innermost"]),
        strip("lengths in memory", [shape[axis] for axis in order], "b"),
        strip("shape of the view", view.shape, "a", axes),
        strip("strides of the view", view.stride(), "b", axes),
    ]


def row_overwritten_before_it_is_read(ops: Any) -> list[Strip]:
    """Row 0 of the table has block 7, row 1 has block 2. The batch has row 1 first."""
    buffers = ops.StepBuffers(
        max_num_reqs=2, max_num_tokens=2, max_blocks=1, block_size=4
    )
    buffers.append_blocks([0, 1], [[7], [2]])
    step = buffers.build([1, 1], [0, 0], rows=[1, 0])
    blocks = step.block_table_tensor.flatten().tolist()
    return [
        strip("rows of the table", [7, 2], "ab", ["row 0", "row 1"]),
        strip("order of the batch", ["row 1", "row 0"], "ba"),
        strip("table of the batch", blocks, ["a" if b == 7 else "b" for b in blocks]),
    ]


def preempted_request_waits_last(ops: Any) -> list[Strip]:
    """3 blocks of 2 slots, two running requests at most. Request b loses its block in step 2."""
    manager = ops.BlockManager(num_blocks=3, block_size=2)
    scheduler = ops.Scheduler(manager, 8, 2)
    for name in "abc":
        scheduler.add_request(Request(name, [5, 6], max_tokens=4))
    first = scheduler.schedule()
    running = [request.request_id for request in scheduler.running]
    waiting = [request.request_id for request in scheduler.waiting]
    scheduler.update_from_output(first, {name: 7 for name in running})
    second = scheduler.schedule()
    return [
        strip("running, step 1", running, "ab"),
        strip("waiting, step 1", waiting, "new"),
        strip("preempted, step 2", second.preempted_req_ids, "b"),
        strip(
            "waiting, step 2",
            [request.request_id for request in scheduler.waiting],
            [
                "b" if request.request_id == "b" else "new"
                for request in scheduler.waiting
            ],
        ),
    ]


def blocks_taken_before_the_check(ops: Any) -> list[Strip]:
    """2 blocks of 2 slots. Block 0 is cached. A request that continues it needs 3 more blocks."""
    manager = ops.BlockManager(num_blocks=2, block_size=2)
    manager.allocate_slots("a", 0, 2)
    manager.cache_full_blocks("a", [5, 6], 2)
    manager.free("a")
    tokens = [5, 6, 7, 8, 9, 10, 11]
    found = manager.get_computed_blocks(tokens)
    with suppress(OutOfBlocks):
        manager.allocate_slots("b", 2, 5, found)
    return [
        strip("found for request b", named(found), "a"),
        strip("requests that hold blocks, after", [manager.num_requests]),
        strip("cached, after", named(sorted(manager.cached_blocks())), "a"),
        strip("free blocks, after", [manager.num_free_blocks]),
        strip("used blocks, after", [manager.num_used_blocks]),
    ]
