"""A captured graph without a GPU: the calls of a step, repeated on the same tensors.

As in a CUDA graph, Python does not run in a replay: what a call takes from the host is that of the
capture, and its tensors are read and written in place.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SimulatedGraph(TorchDispatchMode):
    """The calls that were made while the mode was active."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self._is_inside = False
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __enter__(self) -> Any:
        self.is_capturing = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.is_capturing = False
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.call(function, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function; in a capture its call becomes a part of the graph."""
        if not self.is_capturing or self._is_inside:
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._is_inside = False
        self._calls.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Repeat the calls, each with the results of those before it."""
        for function, args, kwargs, result in self._calls:
            new = function(*args, **kwargs)
            if isinstance(new, Tensor) and new.data_ptr() != result.data_ptr():
                result.copy_(new)


class GraphOperations:
    """An implementation whose attention and cache writes are one call each in a graph.

    Args:
        run: the implementation.
        graph: the graph.
    """

    def __init__(self, run: Any, graph: SimulatedGraph) -> None:
        self._run, self._graph, self.name = run, graph, run.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def reshape_and_cache(self, *args: Any, **kwargs: Any) -> None:
        """Write each new token's key and value to its slot."""
        self._graph.call(self._run.reshape_and_cache, args, kwargs)

    def paged_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return attention of each new token over its sequence in the paged cache."""
        out: Tensor = self._graph.call(self._run.paged_attention, args, kwargs)
        return out
