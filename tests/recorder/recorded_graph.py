"""Decode steps of a few layers in a simulated graph. Their cache writes can be made wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import Recorder, RecorderSettings
from pagetwin.recorder.laws.schedule import ScheduledRow
from pagetwin.recorder.step import StepTensors
from simulated_graph import GraphOperations, SimulatedGraph
from torch import Tensor

REFERENCE = load_implementation("reference")
FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
REQUESTS, TOKENS = 3, 4
"""The graph has one token more than requests: the last token is padding."""
Call = dict[str, Any]


def without_scales(call: Call) -> Call:
    """The write does not divide by the scales of an FP8 cache."""
    return {**call, "k_scale": 1.0, "v_scale": 1.0}


def heads_first(call: Call) -> Call:
    """The value is written as if its heads came before its tokens."""
    value = call["value"]
    return {**call, "value": value.transpose(0, 1).reshape(value.shape)}


def next_slot(call: Call) -> Call:
    """The write goes one slot further; padding is not written."""
    slots = call["slot_mapping"]
    return {**call, "slot_mapping": torch.where(slots < 0, slots, slots + 1)}


class WritesWith:
    """The reference, whose cache writes can get other arguments.

    `change` returns the arguments of a write from the right ones. If None, they are right.
    """

    name = "reference"
    change: Callable[[Call], Call] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(REFERENCE, name)

    def reshape_and_cache(self, *args: Tensor, **scales: Any) -> None:
        """Write each new token's key and value to its slot."""
        names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        call = {**dict(zip(names, args, strict=True)), **scales}
        REFERENCE.reshape_and_cache(**(self.change(call) if self.change else call))


class CapturedSteps:
    """Decode steps of three requests, "a" to "c", and a padded token.

    Args:
        recorder: the recorder.
        graph: what the steps are captured in.
        layers: number of layers.
        cache_dtype: dtype of the caches.
        shared: layers that write nothing, and read the cache of the first layer.
    """

    def __init__(
        self,
        recorder: Recorder,
        graph: SimulatedGraph,
        layers: int = 1,
        cache_dtype: torch.dtype = torch.float32,
        shared: tuple[int, ...] = (),
    ) -> None:
        self.recorder, self.graph, self.shared = recorder, graph, shared
        self.operations = WritesWith()
        self.run = GraphOperations(self.operations, graph)
        self.lens = [5, 9, 6]
        self.blocks = [[7, 2, 5], [1, 8, 3], [4, 0, 6]]
        self.block_table = torch.tensor(self.blocks, dtype=torch.int32)
        self.query_start_loc = torch.arange(REQUESTS + 1, dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32)
        self.slots = torch.full((TOKENS,), -1)
        shape = (9, BLOCK, KV_HEADS, SIZE)
        self.caches = [
            (torch.zeros(shape).to(cache_dtype), torch.zeros(shape).to(cache_dtype))
            for _ in range(layers)
        ]
        self.scales: dict[str, Any] = {}
        if cache_dtype == FP8:
            self.scales = {"k_scale": torch.tensor(0.05), "v_scale": torch.tensor(0.1)}
        self.inputs = torch.zeros(layers, TOKENS, HEADS + 2 * KV_HEADS, SIZE)
        self.key = torch.zeros(TOKENS, KV_HEADS, SIZE)
        self.draw = torch.Generator().manual_seed(0)
        recorder.begin_capture(self.tensors())
        with graph:
            self.forward()

    def tensors(self) -> StepTensors:
        """Return the metadata in the buffers of the graph."""
        longest = max(self.lens)
        arrays = (self.query_start_loc, self.seq_lens, self.block_table, self.slots)
        return StepTensors(*arrays, 1, longest, BLOCK)

    def forward(self) -> None:
        """Run all layers on the buffers, through the recorder's calls."""
        for index, caches in enumerate(self.caches):
            query, key, value = self.inputs[index].split([HEADS, KV_HEADS, KV_HEADS], 1)
            # the keys of all layers are in one buffer, which is changed in place before the write
            self.key.copy_(key)
            self.key.neg_()
            name = f"layer {index}"
            if index in self.shared:
                caches = self.caches[0]
            else:
                self.run.reshape_and_cache(
                    self.key, value, *caches, self.slots, **self.scales
                )
                self.recorder.wrote(name, self.key, value, *caches, self.scales)
            options = AttentionOptions(**self.scales)
            metadata = (self.block_table, self.query_start_loc, self.seq_lens)
            output = self.run.paged_attention(
                query, *caches, *metadata, 1, 3 * BLOCK, options=options
            )
            self.recorder.attended(name, query, output, *caches, None, options)

    def step(self) -> None:
        """Make each sequence one token longer, and replay the graph."""
        self.recorder.schedule(
            [
                ScheduledRow(name, length, 1, blocks[: length // BLOCK + 1])
                for name, length, blocks in zip(
                    "abc", self.lens, self.blocks, strict=True
                )
            ],
            BLOCK,
        )
        slots = [
            blocks[length // BLOCK] * BLOCK + length % BLOCK
            for length, blocks in zip(self.lens, self.blocks, strict=True)
        ]
        self.lens = [length + 1 for length in self.lens]
        self.seq_lens.copy_(torch.tensor(self.lens))
        self.slots[:REQUESTS] = torch.tensor(slots)
        self.inputs.copy_(torch.randn(self.inputs.shape, generator=self.draw))
        self.recorder.begin_step(self.tensors(), replays_graph=True)
        self.graph.replay()


def captured_recorder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> tuple[Recorder, SimulatedGraph]:
    """Return a recorder of which every step is sampled, and the graph that it captures."""
    graph = SimulatedGraph()
    capturing = property(lambda self: graph.is_capturing)
    monkeypatch.setattr(Recorder, "is_capturing", capturing)
    return Recorder(RecorderSettings(folder, sample_every=1, rows=rows)), graph
