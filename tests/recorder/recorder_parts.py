"""Parts of recorded steps: tensors, calls, captures and reports."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.scheduler_classes import Request
from pagetwin.recorder.case import StoredCase, save_case
from pagetwin.recorder.findings import Corruption
from pagetwin.recorder.graphs import GraphSamples
from pagetwin.recorder.guard import guarded
from pagetwin.recorder.laws.attention import RecordedCall
from pagetwin.recorder.laws.cache import RecordedWrite
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow
from pagetwin.recorder.reports import Reports
from pagetwin.recorder.reproduce import reproduce_case
from pagetwin.recorder.samples import Samples
from pagetwin.recorder.settings import RecorderSettings
from pagetwin.recorder.step import HostStep, StepTensors

FOUND = Corruption("slots", "wrong", 0)


def step(number: int = 5, group: str = "layers", **given: Any) -> HostStep:
    """Return a step of a prefill of 3 tokens and a decode, in blocks of 4 slots."""
    fields = {
        "query_start_loc": [0, 3, 4],
        "seq_lens": [6, 5],
        "block_table": [[2, 3], [7, 8]],
        "slot_mapping": [11, 12, 13, 32],
    } | given
    arrays: Any = {name: np.array(values) for name, values in fields.items()}
    return HostStep(
        number, group, **arrays, max_query_len=3, max_seq_len=8, block_size=4
    )


def stored(finding: Corruption = FOUND, **given: Any) -> StoredCase:
    fields: dict[str, Any] = {"step": step(), "ring": (), "versions": {}} | given
    return StoredCase(finding, "step 5: wrong", 5, **fields)


def tensors(slots: int = 6, **given: Any) -> StepTensors:
    fields = {
        "query_start_loc": torch.tensor([0, 3, 4]),
        "seq_lens": torch.tensor([6, 5]),
        "block_table": torch.tensor([[2, 3, 9, 9], [7, 8, 9, 9]]),
        "slot_mapping": torch.tensor([11, 12, 13, 32, -1, -1][:slots]),
    } | given
    return StepTensors(**fields, max_query_len=3, max_seq_len=8, block_size=4)


def reproduced(
    tmp_path: Path, law: str, evidence: dict[str, Any], **given: Any
) -> bool:
    """Return whether a stored case still violates its law."""
    finding = Corruption(law, "wrong", 0, "a", evidence)
    path = save_case(tmp_path, stored(finding, **given), 64)
    return reproduce_case(path, "cpu").still is not None


def reports(tmp_path: Path, **given: Any) -> Reports:
    return Reports(RecorderSettings(tmp_path, **given))


class Guarded:
    """A recorder with two methods."""

    def __init__(self) -> None:
        self.is_on = self.wants_layers = True
        self.step, self._depth = 1, 0
        self._lock = threading.RLock()
        self.calls = 0

    @guarded
    def run(self, error: Exception | None = None) -> int:
        """Count the calls, and raise an error if one is given."""
        self.calls += 1
        assert self._depth == 1
        if error is not None:
            raise error
        return 7


def samples(tmp_path: Path, **given: Any) -> tuple[Samples, Reports]:
    own = reports(tmp_path, **given)
    checked = dict.fromkeys(("writes", "rows", "blocks"), 0)
    return Samples(own.settings, own, checked), own


def write_of(layer: str, tokens: int) -> RecordedWrite:
    key = torch.arange(tokens * 2.0).view(tokens, 1, 2)
    return RecordedWrite(layer, key, key + 1, key[:, None], key[:, None], {})


def call_of(layer: str, tokens: int) -> RecordedCall:
    query = torch.arange(tokens * 2.0).view(tokens, 1, 2)
    return RecordedCall(
        layer,
        query,
        query + 1,
        query[:, None],
        query[:, None],
        None,
        AttentionOptions(),
        "own",
    )


def capture(graphs: GraphSamples, slots: int, *layers: str) -> None:
    graphs.prepare(tensors(slots))
    for layer in layers:
        graphs.capture_write(write_of(layer, slots))
        graphs.capture(call_of(layer, slots), "layers")


def replay(
    graphs: GraphSamples, slots: int, runs: int = 1, first: int = 0
) -> list[Any]:
    """Return what graphs copied that ran some times since the replay began."""
    graphs.begin_replay(slots, first)
    for _ in range(runs):
        graphs._graphs[slots].replays.add_(1)
    return graphs.replayed()


def requests(count: int, seed: int = 0) -> list[Request]:
    """Return requests of random lengths, some with a common beginning."""
    draw = random.Random(seed)
    common = [draw.randrange(50) for _ in range(9)]
    made = []
    for number in range(count):
        prompt = [draw.randrange(50) for _ in range(draw.randrange(3, 22))]
        prompt = common + prompt[:4] if number % 5 == 0 else prompt
        made.append(Request(f"r{number}", prompt, draw.randrange(3, 26)))
    return made


ROWS = [ScheduledRow("a", 3, 3, [2, 3]), ScheduledRow("b", 4, 1, [7, 8])]
"""The requests of `tensors`."""
