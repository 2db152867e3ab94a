"""Law of the blocks of scheduled requests: what their rows hold when the step begins.

A plain model of the cache holds, for each slot, all tokens of the sequence up to the one that was
stored in it.
"""

from ..generators.traffic import (
    Arrival,  # noqa: F401 (a failing case is evaluated here)
    Traffic,
)
from ..harness.expect import expect_same
from ..harness.law import Setting, law
from .scheduler import TRAFFIC, serve_case


@law("Scheduler", cases=TRAFFIC)
def a_request_is_scheduled_after_the_tokens_that_earlier_steps_stored(
    setting: Setting, cases: tuple[Traffic, ...]
) -> None:
    """No request reads what another one stores in the same step.

    So the requests of a step can be computed in any order, for example in two micro-batches.
    """
    for traffic in cases:
        size = traffic.block_size
        slots: dict[int, dict[int, tuple[int, ...]]] = {}
        for step in serve_case(setting, traffic):
            for source, target in step.output.blocks_to_copy:
                slots[target] = dict(slots.get(source, {}))
            for block_id in step.output.new_block_ids:
                slots[block_id] = {}
            for each in step.output.scheduled_requests:
                tokens = tuple(each.request.token_ids)
                for position in range(each.num_computed_tokens):
                    index, offset = divmod(position, size)
                    expect_same(
                        f"request {each.request.request_id}, position {position}",
                        slots.get(each.block_ids[index], {}).get(offset),
                        tokens[: position + 1],
                    )
            for each in step.output.scheduled_requests:
                tokens = tuple(each.request.token_ids)
                first = each.num_computed_tokens
                for position in range(first, first + each.num_scheduled_tokens):
                    index, offset = divmod(position, size)
                    stored = slots.setdefault(each.block_ids[index], {})
                    stored[offset] = tokens[: position + 1]
