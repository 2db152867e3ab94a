"""Law of the blocks of scheduled requests: what their rows hold when the step begins.

A plain model of the cache holds, for each slot, all tokens of the sequence up to the one that was
stored in it.
"""

from ..candidates.setting import Setting
from ..cases.block_model import Content, content_of
from ..cases.traffic import (
    Arrival,  # noqa: F401 (a failing case is evaluated here)
    Traffic,
)
from ..checks.expect import expect_same
from .law import law
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
        slots: dict[int, dict[int, Content]] = {}
        for step in serve_case(setting, traffic):
            for source, target in step.output.blocks_to_copy:
                slots[target] = dict(slots.get(source, {}))
            for block_id in step.output.new_block_ids:
                slots[block_id] = {}
            for scheduled in step.output.scheduled_requests:
                number, tokens = (
                    scheduled.request.request_id,
                    scheduled.request.token_ids,
                )
                assert isinstance(number, int)
                extra, first = traffic.arrivals[number].extra, 0
                if traffic.window is not None:
                    first = max(0, scheduled.num_computed_tokens - traffic.window + 1)
                for position in range(first, scheduled.num_computed_tokens):
                    index, offset = divmod(position, size)
                    expect_same(
                        f"request {number}, position {position}",
                        slots.get(scheduled.block_ids[index], {}).get(offset),
                        content_of(tokens, extra, position + 1),
                    )
            for scheduled in step.output.scheduled_requests:
                number, tokens = (
                    scheduled.request.request_id,
                    scheduled.request.token_ids,
                )
                assert isinstance(number, int)
                extra = traffic.arrivals[number].extra
                first = scheduled.num_computed_tokens
                for position in range(first, first + scheduled.num_scheduled_tokens):
                    index, offset = divmod(position, size)
                    stored = slots.setdefault(scheduled.block_ids[index], {})
                    stored[offset] = content_of(tokens, extra, position + 1)
