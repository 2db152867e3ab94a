"""Samples from CUDA graphs: a captured graph copies some rows of one layer to buffers of its own.

Python does not run while a graph is replayed. So while a graph is captured, the recorder adds five
small kernels to it: they copy some rows of the keys, values, queries and outputs of one layer, and
count the replays. Before a replay the recorder writes the numbers of the rows. After it, and before
the next step writes to the cache, the rows are compared as in a step without a graph. Nothing is
read on the host during the capture.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .findings import Corruption
from .laws.attention import RecordedCall
from .laws.cache import RecordedWrite
from .step import ARRAYS, StepTensors


@dataclass
class _Graph:
    """What the recorder knows of one captured graph.

    Args:
        num_tokens: tokens of the graph, padding included.
        addresses: address of each metadata tensor, by the name of the layers that share them and
            its own.
        rows: [rows] int64 on the device, the tokens to copy.
        replays: [1] int64 on the device, the number of replays since `begin_replay`.
        layers: the layers captured so far, in order.
        turn: index of the layer whose rows are copied.
        call: Optional. That layer's call, with the buffers of its rows. None if not captured.
        write: Optional. That layer's cache write, with the buffers of its rows. None if the layer
            writes nothing.
        group: the layers whose metadata that layer uses.
        tokens: the tokens of the current replay on the host, in rising order.
        is_sampled: whether the rows of the current step are compared.
    """

    num_tokens: int
    addresses: dict[str, dict[str, int]]
    rows: Tensor
    replays: Tensor
    layers: list[str]
    turn: int
    call: RecordedCall | None = None
    write: RecordedWrite | None = None
    group: str = ""
    tokens: tuple[int, ...] = ()
    is_sampled: bool = False

    def is_turn(self, layer: str) -> bool:
        """Return whether the rows of a layer are copied, before its attention is captured."""
        return layer not in self.layers and len(self.layers) == self.turn


@dataclass(frozen=True)
class CopiedRows:
    """What a graph has copied in a replay.

    Args:
        call: the layer's attention, with the queries and outputs of the tokens alone.
        write: Optional. Its cache write, with the keys and values of the tokens alone. If None,
            the layer writes nothing.
        tokens: [rows] the tokens, in rising order. Some may be padding.
        group: the layers whose metadata the layer uses.
    """

    call: RecordedCall
    write: RecordedWrite | None
    tokens: tuple[int, ...]
    group: str


class GraphSamples:
    """The samples of all captured graphs, by the number of their tokens.

    Args:
        rows: rows per sample.
    """

    def __init__(self, rows: int) -> None:
        self._num_rows = rows
        self._prepared: dict[int, _Graph] = {}
        """Graphs that may be captured. Engines prepare a graph for a warm-up too, or for a batch
        without requests while they serve."""
        self._graphs: dict[int, _Graph] = {}
        self._num_layers = 1

    def prepare(self, tensors: StepTensors, group: str = "layers") -> object:
        """Return what holds the buffers of a graph, before it is captured with these metadata.

        The graph reads and writes them in each replay, also after another graph of its size was
        captured. So the object must live as long as the graph.

        Args:
            tensors: the metadata.
            group: name of the layers that share them. Each group prepares the graph.
        """
        num_tokens, device = tensors.slot_mapping.shape[0], tensors.slot_mapping.device
        known = self._prepared.get(num_tokens)
        if known is None or known.rows.device != device:
            others = [size for size in self._graphs if size != num_tokens]
            self._prepared[num_tokens] = _Graph(
                num_tokens=num_tokens,
                addresses={},
                rows=torch.zeros(self._num_rows, dtype=torch.int64, device=device),
                replays=torch.zeros(1, dtype=torch.int64, device=device),
                layers=[],
                # the first graph copies rows of the first layer, the second of the second
                turn=len(others) % self._num_layers,
            )
        graph = self._prepared[num_tokens]
        graph.addresses[group] = tensors.addresses()
        return graph

    def _captured(self, num_tokens: int) -> _Graph | None:
        """Return the graph that is being captured; None if it was not prepared."""
        graph = self._prepared.pop(num_tokens, None)
        if graph is None:
            return self._graphs.get(num_tokens)
        self._graphs[num_tokens] = graph
        return graph

    def capture_write(self, write: RecordedWrite) -> None:
        """Add the copies of keys and values to the graph, if it is the turn of the layer.

        Args:
            write: the write. `capture` of the same layer comes after it.
        """
        graph = self._captured(write.key.shape[0])
        if graph is None or not graph.is_turn(write.layer):
            return
        graph.write = write.take(graph.rows)

    def capture(self, call: RecordedCall, group: str) -> None:
        """Add the copies to the graph that is being captured, if it is the turn of the layer."""
        graph = self._captured(call.query.shape[0])
        if graph is None or call.layer in graph.layers:
            return
        is_turn = graph.is_turn(call.layer)
        graph.layers.append(call.layer)
        self._num_layers = max(self._num_layers, len(graph.layers))
        if not is_turn:
            return
        if graph.write is not None and graph.write.layer != call.layer:
            graph.write = None
        graph.replays.add_(1)
        graph.group = group
        graph.call = call.take(graph.rows)

    def begin_replay(self, num_tokens: int, first: int) -> None:
        """Choose the rows of the next replay.

        Args:
            num_tokens: tokens of the step, padding included.
            first: any number; it determines the first row.
        """
        graph = self._graphs.get(num_tokens)
        if graph is None or graph.call is None:
            return
        stride = max(1, num_tokens // self._num_rows)
        first %= stride
        tokens = [first + index * stride for index in range(self._num_rows)]
        graph.tokens = tuple(min(token, num_tokens - 1) for token in tokens)
        rows = torch.tensor(graph.tokens)
        # without waiting: from pinned memory, in the order of the stream
        graph.rows.copy_(
            rows.pin_memory() if graph.rows.is_cuda else rows, non_blocking=True
        )
        graph.replays.zero_()
        graph.is_sampled = True

    def replayed(self) -> list[CopiedRows]:
        """Return what the graphs that ran once since `begin_replay` have copied."""
        found = []
        for graph in self._graphs.values():
            was_sampled, graph.is_sampled = graph.is_sampled, False
            if was_sampled and graph.call is not None and int(graph.replays) == 1:
                found.append(
                    CopiedRows(graph.call, graph.write, graph.tokens, graph.group)
                )
        return found

    def check_buffers(self, tensors: StepTensors, group: str) -> Corruption | None:
        """Return a violation if a graph would read other buffers than those of the step.

        Args:
            tensors: the metadata of the step.
            group: name of the layers that share them.
        """
        num_tokens = tensors.slot_mapping.shape[0]
        known = {**self._prepared, **self._graphs}
        graph = known.get(num_tokens)
        if graph is None:
            return Corruption(
                "graph buffers",
                f"a graph for {num_tokens} tokens is replayed: expected one of those that"
                f" were captured, {sorted(known)}",
            )
        now, captured = tensors.addresses(), graph.addresses.get(group, {})
        for name in ARRAYS if captured else ():
            if now[name] != captured[name]:
                return Corruption(
                    "graph buffers",
                    f"{name} of the step is at address {now[name]:#x}, and the graph for"
                    f" {num_tokens} tokens reads {captured[name]:#x}: expected the"
                    " step's metadata in the buffers of the graph",
                )
        return None
