"""Decode steps of a model whose metadata are in persistent buffers, for the recorder's checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pagetwin.recorder import Recorder
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow
from pagetwin.recorder.step import StepTensors

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
HIDDEN, INNER = 4096, 14336


def cuda_graph(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of a step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@dataclass
class Decoder:
    """Decode steps of a model; its metadata are in persistent buffers, as in an engine.

    Args:
        run: operations, recorded or not.
        reqs, seq_len, layers: sizes; every step makes each sequence one token longer.
        with_linear: whether the layers have their projections too. Without them, the newest key
            of each sequence is a needle: it has nearly all weight in one of four heads. So a
            length that is one too small changes every row, also in bfloat16.
        device: where.
        capture_step: returns a graph of a step, which has a method `replay`.
    """

    run: Any
    reqs: int
    seq_len: int
    layers: int
    with_linear: bool
    device: str = "cuda"
    capture_step: Callable[[Callable[[], None]], Any] = cuda_graph

    def __post_init__(self) -> None:
        width = -(-(self.seq_len + 2048) // BLOCK)
        self._draw = torch.Generator().manual_seed(0)
        order = torch.randperm(self.reqs * width, generator=self._draw)
        self.rows = order.view(self.reqs, width).to(torch.int32)
        self.lens = torch.full((self.reqs,), self.seq_len, dtype=torch.int32)
        self._given: list[tuple[int, ...]] = [()] * self.reqs
        self.block_table = self.rows.to(self.device)
        self.seq_lens = self.lens.to(self.device)
        starts = torch.arange(self.reqs + 1, dtype=torch.int32)
        self.query_start_loc = starts.to(self.device)
        # as in a dummy run: nothing is stored
        self.slots = torch.full((self.reqs,), -1, device=self.device)
        shape = (self.reqs * width, BLOCK, KV_HEADS, SIZE)
        self.caches = [
            tuple(self._randn(*shape) for _ in "kv") for _ in range(self.layers)
        ]
        self.x = self._randn(self.reqs, HIDDEN)
        if self.with_linear:
            wide = (HEADS + 2 * KV_HEADS) * SIZE
            shapes = [(HIDDEN, wide), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER)]
            shapes.append((INNER, HIDDEN))
            self.weights = [
                [self._randn(*shape) * 0.01 for shape in shapes]
                for _ in range(self.layers)
            ]
        self.qkv = self._randn(self.reqs, HEADS + 2 * KV_HEADS, SIZE)
        self.max_seq_len = width * BLOCK

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def _send(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Write values of the host to a buffer, without waiting for the device."""
        values = values.pin_memory() if buffer.is_cuda else values
        buffer.copy_(values, non_blocking=True)

    def tensors(self) -> StepTensors:
        """Return the metadata of the step in the buffers."""
        return StepTensors(
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.slots,
            1,
            int(self.lens.max()),
            BLOCK,
        )

    def advance(self) -> None:
        """Write the next step to the buffers."""
        self.lens += 1
        last = self.lens.long() - 1
        blocks = self.rows.gather(1, (last // BLOCK)[:, None])[:, 0].long()
        self._send(self.seq_lens, self.lens)
        self._send(self.slots, blocks * BLOCK + last % BLOCK)
        if not self.with_linear:
            # with the same key in every step, one of them less would not change a row
            qkv = 2 * torch.randn(self.qkv.shape, generator=self._draw)
            qkv[:, HEADS : HEADS + KV_HEADS] = qkv[:, : HEADS : HEADS // KV_HEADS]
            self._send(self.qkv, qkv.bfloat16())

    def scheduled(self) -> list[ScheduledRow]:
        """Return what a scheduler would tell; rows that do not grow are the same objects."""
        lens = self.lens.tolist()
        for index, length in enumerate(lens):
            used = -(-length // BLOCK)
            if len(self._given[index]) != used:
                self._given[index] = tuple(self.rows[index, :used].tolist())
        return [
            ScheduledRow(index, length - 1, 1, self._given[index])
            for index, length in enumerate(lens)
        ]

    def layers_forward(self) -> None:
        """Run all layers on the buffers."""
        x = self.x
        for index, (key_cache, value_cache) in enumerate(self.caches):
            qkv = self.qkv
            if self.with_linear:
                qkv = (x @ self.weights[index][0]).view(self.reqs, -1, SIZE)
            query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            self.run.reshape_and_cache(key, value, key_cache, value_cache, self.slots)
            out = self.run.paged_attention(
                query,
                key_cache,
                value_cache,
                self.block_table,
                self.query_start_loc,
                self.seq_lens,
                1,
                self.max_seq_len,
            )
            if self.with_linear:
                x = x + out.flatten(1) @ self.weights[index][1]
                gate, up = (x @ self.weights[index][2]).chunk(2, dim=1)
                x = x + torch.nn.functional.silu(gate) * up @ self.weights[index][3]

    def capture(self, recorder: Recorder | None) -> Any:
        """Return a graph of a step."""
        self.layers_forward()
        if self.device == "cuda":
            torch.cuda.synchronize()
        if recorder is not None:
            recorder.begin_capture(self.tensors())
        return self.capture_step(self.layers_forward)
