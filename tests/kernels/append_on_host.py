"""The scheduler of the Hopper append kernel as functions of Python, on numpy arrays."""

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import sm90_on_host
from pagetwin.optimized.kernels.sm90.append import segments
from pagetwin.optimized.kernels.sm90.common import (
    scheduler,
    stream_k,
    tile_range,
    work_item,
)
from pagetwin.optimized.kernels.sm90.common.config import Sm90Config

CONSTANTS = ("REQS_PER_PASS", "MAX_SEGMENTS", "SPANS", "MIN_TILES")


class Int32(sm90_on_host.Int32):
    """An integer as a kernel's, which may also meet an array."""

    def __add__(self, other: Any) -> Any:
        return Int32(int(self) + int(other)) if _is_scalar(other) else int(self) + other

    def __sub__(self, other: Any) -> Any:
        return Int32(int(self) - int(other)) if _is_scalar(other) else int(self) - other

    def __mul__(self, other: Any) -> Any:
        return Int32(int(self) * int(other)) if _is_scalar(other) else int(self) * other

    def __floordiv__(self, other: int) -> "Int32":
        return Int32(super().__floordiv__(other))


class Numbers(np.ndarray):
    """An array with the method of a kernel's tensor that numpy lacks."""

    def to(self, _: Any) -> "Numbers":
        """Return the numbers as int32."""
        return self.astype(np.int32)


class Pointer(NamedTuple):
    """An address in an array."""

    numbers: Any
    offset: Any

    def __add__(self, offset: Any) -> "Pointer":  # type: ignore[override]
        return Pointer(self.numbers, self.offset + offset)


class Item(NamedTuple):
    """A work item, and the segment whose program has it."""

    segment: int
    work: work_item.WorkItem


def _load(pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
    index = np.asarray(pointer.offset)
    inside = np.ones(index.shape, dtype=bool) if mask is None else np.asarray(mask)
    found = np.where(
        inside, np.asarray(pointer.numbers)[np.where(inside, index, 0)], other
    )
    return found.view(Numbers) if found.shape else Int32(found)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, np.ndarray)


def _either(of_arrays: Any, of_numbers: Any) -> Any:
    def function(*values: Any) -> Any:
        if all(map(_is_scalar, values)):
            return Int32(of_numbers(*values))
        return of_arrays(*values).view(Numbers)

    return function


def run_segments(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_segments: int,
    config: Sm90Config,
    tile_tokens: int,
    mutations: tuple[tuple[str, str], ...] = (),
) -> list[Item]:
    """Return all work items of a KV head.

    Args:
        query_lens, kv_lens: of the requests.
        num_segments: programs of the KV head.
        tile_tokens: tokens of a query tile.
        mutations: text of the source, each found once, and what replaces it.
    """
    functions = (
        tile_range.first_visible_key,
        stream_k.ceil_div,
        segments.count_request_tiles,
        segments._count_tiles,
        stream_k.choose_length,
        segments._count_requests,
        segments.find_segment,
        segments.locate_item,
        segments.produce_segment,
    )
    source = "\n".join(
        inspect.getsource(function.fn)
        .replace("@gluon.jit\n", "")
        .replace("@triton.jit\n", "")
        for function in functions
    )
    for old, new in mutations:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    items: list[Item] = []
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    batch = SimpleNamespace(
        query_start_loc=Pointer(starts, 0),
        kv_lens=Pointer(np.asarray(kv_lens), 0),
        num_reqs=len(kv_lens),
    )

    def load_request(_: Any, req: int, paged: bool) -> scheduler.RequestBounds:
        bounds = starts[req], query_lens[req], kv_lens[req], 0
        return scheduler.RequestBounds(*map(Int32, bounds))

    for segment in range(num_segments):
        gl = SimpleNamespace(
            constexpr=None,
            int32=None,
            load=_load,
            sum=lambda x, axis: Int32(x.sum()),
            max=lambda x, axis: Int32(x.max()),
            maximum=_either(np.maximum, max),
            minimum=_either(np.minimum, min),
            where=_either(np.where, lambda is_it, one, two: one if is_it else two),
            arange=lambda begin, end, layout: np.arange(begin, end).view(Numbers),
            associative_scan=lambda x, axis, add: x.cumsum(),
            to_tensor=Int32,
            num_warps=lambda: 4,
            program_id=lambda axis, segment=segment: (0, segment)[axis],
            num_programs=lambda axis: (1, num_segments)[axis],
        )
        names: dict[str, Any] = {
            **{
                name: getattr(member, "fn", member)
                for module in (tile_range, scheduler, segments)
                for name, member in vars(module).items()
            },
            "count_tokens": lambda config: tile_tokens,
            "load_request": load_request,
            "start_loads": lambda config: SimpleNamespace(work=None),
            "load_item": lambda shared, loads, states, work, config, segment=segment: (
                items.append(Item(segment, work)) or states
            ),
            "publish_end": lambda *_: None,
            "gl": gl,
            "tl": SimpleNamespace(
                **vars(gl), cdiv=lambda a, b: Int32((a + (b - 1)) // b)
            ),
        }
        for name in CONSTANTS:
            names[name] = names[name].value
        names["requests_layout"] = lambda reqs, num_warps: None
        exec(source, names)
        found = names["find_segment"](batch, segment, num_segments, config, tile_tokens)
        loads = SimpleNamespace(batch=batch)
        # `count_tokens` above is that of all warpgroups
        of_one = config._replace(CONSUMERS=1)
        names["produce_segment"](None, loads, found, of_one)
    return items
