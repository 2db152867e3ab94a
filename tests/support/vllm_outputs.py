"""What vLLM's scheduler tells its workers, from the results of this project's scheduler."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pagetwin.contract.scheduler_classes import SchedulerOutput


class WorkerOutputs:
    """The messages of one engine: new requests, and the blocks that were added to others.

    Args:
        rows_of: returns a request's row of blocks in each group of layers.
        resumes_as_new: whether a request that continues after a preemption is among the new ones,
            as vLLM's second model runner has it.
    """

    def __init__(
        self,
        rows_of: Callable[[Sequence[int]], tuple[list[int], ...]],
        resumes_as_new: bool = False,
    ) -> None:
        self.rows_of, self.resumes_as_new = rows_of, resumes_as_new
        self.told: dict[Any, int] = {}
        """Blocks of each request that were told; 0 after a preemption."""
        self.finished: list[Any] = []

    def tell(self, output: SchedulerOutput) -> Any:
        """Return a step with the fields of vLLM's `SchedulerOutput`."""
        for req_id in output.preempted_req_ids:
            self.told[req_id] = 0
        new, ids, resumed, added, computed = [], [], set(), [], []
        for scheduled_request in output.scheduled_requests:
            req_id, row = (
                scheduled_request.request.request_id,
                scheduled_request.block_ids,
            )
            told = self.told.get(req_id)
            rows = self.rows_of(row[told or 0 :])
            self.told[req_id] = len(row)
            if told is None or (not told and self.resumes_as_new):
                fields = {"req_id": req_id, "block_ids": rows}
                fields["num_computed_tokens"] = scheduled_request.num_computed_tokens
                new.append(SimpleNamespace(**fields))
                continue
            ids.append(req_id)
            computed.append(scheduled_request.num_computed_tokens)
            added.append(rows if any(rows) else None)
            resumed |= set() if told else {req_id}
        cached = SimpleNamespace(
            req_ids=ids,
            resumed_req_ids=resumed,
            new_block_ids=added,
            num_computed_tokens=computed,
        )
        return SimpleNamespace(
            finished_req_ids=set(self.finished),
            preempted_req_ids=set(output.preempted_req_ids),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=output.num_scheduled_tokens,
            kv_cache_block_copies=None,
        )

    def ended(self, output: SchedulerOutput) -> None:
        """Note the requests that a step has finished, which the next message tells."""
        done = [
            scheduled_request.request for scheduled_request in output.scheduled_requests
        ]
        self.finished = [output.request_id for output in done if output.is_finished]
