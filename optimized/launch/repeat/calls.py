"""Repeated calls: the launches of one call, made again with other addresses.

The layers of a model make the same call in every step: shapes, strides, bounds and options are
equal, and only addresses differ. Kernels, grids, sizes and the choice of a path follow from what is
equal. So the launches of one call are recorded, and later calls with the same exact signature fill
in addresses and call the driver's launch directly.

A call is recorded when its exact signature occurs for the first time with kernels that are
compiled. Recording demands that a call does nothing on the device but launches through `Launcher`
and requests through `find_workspace`, and that each pointer is the address of a tensor of the call,
of an option, or in the workspace. Other calls are not repeated. What an exact signature leaves out
is checked at each call, and a call that differs is planned and launched as before:

- Every address is a multiple of 16, because the recorded kernels are specialized for that.
- Tensors that share an address when the call was recorded share one again, since their pointers
  cannot be told apart.
- The current device is the recorded one, and no profiler has hooks.

Tensor maps depend on addresses. They come from the launch plan, which keeps them, and a repeated
call keeps those of the combinations of addresses that it has seen.

A repeated call holds sizes, kernels and tensor maps, no tensors. Several threads may launch one:
nothing in it changes but the dictionary of tensor maps, of which each operation is atomic. On one
stream a thread waits until another one has made all launches of its call, because they share the
stream's workspace.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ....validation import values_checked
from ..attention_call import AttentionCall, Signature, sign_options
from ..launcher import (
    INTERPRETED,
    RECORDING,
    LaunchNote,
    current_device,
    current_stream,
    is_profiled,
)
from ..plan_cache import SignatureCache
from ..workspace import WorkspaceNote, find_on_stream, launch_lock

MAX_MAPS = 128
"""Combinations of addresses whose tensor maps a launch keeps: one per layer, or a few."""

Step: TypeAlias = Callable[[int, list[int]], Any]
"""A launch or a request for workspace. It gets the stream and the addresses so far, which a request
adds to. A request returns what it found."""


class RepeatedCall:
    """The launches of all calls with one exact signature.

    Args:
        device: index of the device.
        out_shape: shape of the output.
        option_names: options that are tensors.
        equal: pairs of indexes of addresses that must be equal.
        steps: launches and requests for workspace, in their order.
    """

    def __init__(
        self,
        device: int,
        out_shape: torch.Size,
        option_names: tuple[str, ...],
        equal: tuple[tuple[int, int], ...],
        steps: tuple[Step, ...],
    ) -> None:
        self.device = device
        self.out_shape = out_shape
        self._option_names = option_names
        self._equal = equal
        self._steps = steps

    def launch(
        self,
        call: AttentionCall,
        out: Tensor,
    ) -> bool:
        """Launch a call with this exact signature, whose output is `out`.

        Returns:
            False if nothing was launched, because the addresses are not as recorded.
        """
        (
            query, key, value, block_table, query_start_loc, lengths, _, _, _, _, lse,
            options,
        ) = call  # fmt: skip
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        table = 0 if block_table is None else block_table.data_ptr()
        starts, ends = query_start_loc.data_ptr(), lengths.data_ptr()
        sums = 0 if lse is None else lse.data_ptr()
        union = q | k | v | o | table | starts | ends | sums
        addresses = [q, k, v, table, starts, ends, o, sums]
        for name in self._option_names:
            address = getattr(options, name).data_ptr()
            union |= address
            addresses.append(address)
        if union & 15 or current_device() != self.device or is_profiled():
            return False
        for one, other in self._equal:
            if addresses[one] != addresses[other]:
                return False
        stream = current_stream(self.device)
        with launch_lock(self.device, stream):
            # workspace is referenced until the launches are made
            _kept = [step(stream, addresses) for step in self._steps]
        return True


def repeat_or_record(
    call: AttentionCall,
    more: Signature,
    known: "SignatureCache[RepeatedCall]",
    anew: Callable[..., Tensor],
    *arguments: Any,
) -> Tensor:
    """Launch a call, again if its exact signature is known, and return its output.

    Args:
        call: the call. Its `scale` and `out` may be None.
        more: what else its launches follow from.
        known: repeated calls by exact signature. A call that can be repeated is added.
        anew: validates, plans and launches a call that is not known.
        arguments: of `anew`, after the call.
    """
    signature = sign_exactly(call, more)
    if signature is None:
        return _launch_alone(call, anew, *arguments)
    repeated = known.get(signature)
    if repeated is not None and not values_checked():
        out = call.out
        if out is None:
            out = call.query.new_empty(repeated.out_shape)
        if repeated.launch(call, out):
            return out
    RECORDING.notes = []
    try:
        result = _launch_alone(call, anew, *arguments)
        repeated = repeat(RECORDING.notes, call, result)
    finally:
        RECORDING.notes = None
    if repeated is not None:
        known.put(signature, repeated)
    return result


def _launch_alone(
    call: AttentionCall, anew: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Plan and launch a call while no other thread launches on its stream."""
    if INTERPRETED or call.query.get_device() < 0:
        return anew(call, *arguments)
    device = current_device()
    with launch_lock(device, current_stream(device)):
        return anew(call, *arguments)


def sign_exactly(call: AttentionCall, more: Signature = ()) -> Signature | None:
    """Return everything that the launches of a call follow from, except addresses.

    Args:
        call: the call, as `repeat_or_record` receives it.
        more: what else its launches follow from.

    Returns:
        a hashable tuple. None if the call is not repeated: in the interpreter, if an option is a
        tensor that belongs to this batch alone, and with numbers of other types.
    """
    (
        query, key, value, block_table, query_start_loc, lengths, max_query_len,
        max_key_len, scale, out, lse, options,
    ) = call  # fmt: skip
    if (
        INTERPRETED
        or type(max_query_len) is not int
        or type(max_key_len) is not int
        or (scale is not None and type(scale) is not float)
    ):
        return None
    of_options = sign_options(options)
    if of_options is None:
        return None
    # without a call per tensor, which costs as much as what it returns
    return (
        query.shape, query.stride(), query.dtype, query.get_device(),
        key.shape, key.stride(), key.dtype, key.get_device(),
        value.shape, value.stride(), value.dtype, value.get_device(),
        None if block_table is None else sign_tensor(block_table),
        query_start_loc.shape, query_start_loc.stride(), query_start_loc.dtype,
        query_start_loc.get_device(),
        lengths.shape, lengths.stride(), lengths.dtype, lengths.get_device(),
        None if out is None else sign_tensor(out),
        None if lse is None else sign_tensor(lse),
        max_query_len, max_key_len, scale, of_options, more,
    )  # fmt: skip


def sign_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor but its address and contents."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def repeat(
    notes: Sequence[Any], call: AttentionCall, out: Tensor
) -> RepeatedCall | None:
    """Return a recorded call as a repeated one.

    Args:
        notes: what the call did, see `Recording`.
        call: the call.
        out: its output.

    Returns:
        None if the call cannot be repeated.
    """
    launches = [each for each in notes if isinstance(each, LaunchNote)]
    if not launches or any(each is None for each in notes):
        return None
    options, tensors = call.options, (*call[:6], out, call.lse)
    names = tuple(
        name for name in options.given if isinstance(getattr(options, name), Tensor)
    )
    everything = (*tensors, *(getattr(options, name) for name in names))
    addresses = [0 if each is None else each.data_ptr() for each in everything]
    if any(each & 15 for each in addresses):
        return None
    sources = _Sources(addresses, [getattr(options, name) for name in names])
    for index, note in enumerate(notes):
        if isinstance(note, WorkspaceNote):
            sources.add_workspace(note, notes[index + 1 :])
    steps = [sources.launch(each) for each in launches]
    if None in steps:
        return None
    return RepeatedCall(
        device=launches[0].direct.device,
        out_shape=out.shape,
        option_names=names,
        equal=tuple(
            (one, other)
            for one, other in combinations(range(len(addresses)), 2)
            if addresses[one] == addresses[other] != 0
        ),
        steps=tuple(each for each in (sources.request(), *steps) if each is not None),
    )


class _Sources:
    """Where the pointers of launches come from: indexes into the addresses of a repeated call.

    Args:
        addresses: of the tensors and the options of the recorded call.
        options: its options that are tensors; their addresses are the last ones.
    """

    def __init__(self, addresses: list[int], options: list[Tensor]) -> None:
        self._found = {each: index for index, each in enumerate(addresses) if each}
        self._given = set(self._found)
        self._num_given = len(addresses)
        self._origins: list[tuple[int, int]] = []
        self._place: Any = None
        self._sizes = (0, 0)
        first = len(addresses) - len(options)
        self._options = {id(each): first + at for at, each in enumerate(options)}

    def add_workspace(self, note: WorkspaceNote, later: Sequence[Any]) -> None:
        """Add the addresses of a workspace that are used.

        All requests of a call become one, the largest: launches of one stream run in order.

        Args:
            note: the request for the workspace.
            later: what the call did afterwards. Launches use the latest workspace.
        """
        tensors = note.counters, note.numbers
        sizes = note.num_counters, note.num_numbers
        used = set(_pointers_until_request(later)) - self._given
        for which, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            begin = tensor.data_ptr()
            end = begin + max(4 * size, 1)
            for each in sorted(each for each in used if begin <= each < end):
                origin = (which, each - begin)
                if origin not in self._origins:
                    self._origins.append(origin)
                self._found[each] = self._num_given + self._origins.index(origin)
        self._place = (note.device, note.index)
        self._sizes = (max(self._sizes[0], sizes[0]), max(self._sizes[1], sizes[1]))

    def request(self) -> Step | None:
        """Return the request for workspace, or None if the call uses none."""
        if not self._origins:
            return None
        origins, (device, index) = tuple(self._origins), self._place
        num_counters, num_numbers = self._sizes

        def request(stream: int, addresses: list[int]) -> Any:
            found = find_on_stream(device, index, stream, num_counters, num_numbers)
            begins = found[0].data_ptr(), found[1].data_ptr()
            for which, offset in origins:
                addresses.append(begins[which] + offset)
            return found

        return request

    def launch(self, note: LaunchNote) -> Step | None:
        """Return a launch again, or None if the origin of one of its pointers is not known."""
        # after all addresses: 0, for absent tensors, and options that are not tensors
        constants: list[Any] = [0]
        first = self._num_given + len(self._origins)
        indexes: list[int] = []
        for pointer in note.pointers:
            if pointer and pointer not in self._found:
                return None
            indexes.append(self._found[pointer] if pointer else first)
        pick, tail = _pick(indexes), (*note.options, *note.rest)
        if note.is_grouped:
            tail = (note.options, *note.rest)
        options: Any = None
        if any(isinstance(option, Tensor) for option in note.options):
            of_options: list[int] = []
            for option in note.options:
                if not isinstance(option, Tensor):
                    of_options.append(first + len(constants))
                    constants.append(option)
                    continue
                # an option of the call, or numbers in the workspace
                found = self._options.get(
                    id(option), self._found.get(option.data_ptr())
                )
                if found is None:
                    return None
                of_options.append(found)
            options, tail = _pick(of_options), note.rest
        if not self._found.keys() >= set(note.map_addresses):
            return None
        in_maps = [self._found[each] for each in note.map_addresses]
        places = _pick(in_maps or [0, 1, 2, 6])
        function, fixed, packs, _ = note.direct
        grid_x, grid_y, grid_z = note.grid
        make_maps, is_grouped = note.make_maps, note.is_grouped
        known_maps: dict[tuple[int, ...], Sequence[Any]] = {}

        def launch(stream: int, addresses: list[int]) -> None:
            values = (*addresses, *constants)
            maps: Sequence[Any] = ()
            if make_maps is not None:
                place = places(values)
                maps = known_maps.get(place, ())
                if not maps:
                    if len(known_maps) >= MAX_MAPS:
                        known_maps.clear()
                    maps = known_maps[place] = make_maps(*place)
            arguments: tuple[Any, ...]
            if options is None:
                if is_grouped:
                    arguments = (*maps, pick(values), *tail)
                else:
                    arguments = (*maps, *pick(values), *tail)
            elif is_grouped:
                arguments = (*maps, pick(values), options(values), *tail)
            else:
                arguments = (*maps, *pick(values), *options(values), *tail)
            if packs:
                function(grid_x, grid_y, grid_z, stream, *fixed, arguments)
            else:
                function(grid_x, grid_y, grid_z, stream, *fixed, *arguments)

        return launch


def _pick(indexes: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that returns some elements of a tuple, as a tuple."""
    if len(indexes) > 1:
        return itemgetter(*indexes)
    return lambda values: tuple(values[each] for each in indexes)


def _pointers_until_request(notes: Sequence[Any]) -> Iterator[int]:
    """Yield the addresses in the launches before the next request for workspace."""
    for each in notes:
        if isinstance(each, WorkspaceNote):
            return
        yield from each.pointers
        yield from each.map_addresses
        for option in each.options:
            if isinstance(option, Tensor):
                yield option.data_ptr()
