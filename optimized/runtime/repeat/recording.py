"""Recording: where the pointers of a call's launches come from, so that they can be made again."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

from torch import Tensor

from ..attention_call import AttentionCall
from ..launcher import LaunchNote
from ..workspace import WorkspaceNote, find_addresses
from .repeated_call import RepeatedCall, Step
from .signatures import make_comparison

MAX_MAPS = 128
"""Combinations of addresses whose tensor maps a launch keeps: one per layer, or a few."""


def record(
    notes: Sequence[Any], call: AttentionCall, out: Tensor
) -> RepeatedCall | None:
    """Return a call as a repeated one.

    Args:
        notes: what the call did, see `Recording`.
        call: the call, before its output was made if it had none.
        out: its output.

    Returns:
        None if the call cannot be repeated.
    """
    launches = [note for note in notes if isinstance(note, LaunchNote)]
    if not launches or any(note is None for note in notes):
        return None
    options, tensors = call.options, (*call[:6], out, call.lse)
    names = tuple(
        name for name in options.given if isinstance(getattr(options, name), Tensor)
    )
    everything = (*tensors, *(getattr(options, name) for name in names))
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in everything]
    if any(address & 15 for address in addresses):
        return None
    pairs: list[tuple[int, int]] = []
    used = [address for address in addresses if address]
    if len(set(used)) < len(used):
        pairs = [
            (one, other)
            for one, other in combinations(range(len(addresses)), 2)
            if addresses[one] == addresses[other] != 0
        ]
    sources = _Sources(addresses, [getattr(options, name) for name in names])
    for index, note in enumerate(notes):
        if isinstance(note, WorkspaceNote):
            sources.add_workspace(note, notes[index + 1 :])
    steps = [sources.launch(launch) for launch in launches]
    if None in steps:
        return None
    choose = itemgetter(
        *(at for at, argument in enumerate(call) if isinstance(argument, Tensor))
    )
    return RepeatedCall(
        choose=choose,
        fits=make_comparison(choose(call)),
        device=launches[0].direct.device,
        out_shape=out.shape,
        option_names=names,
        equal=tuple(pairs),
        steps=tuple(step for step in (sources.request(), *steps) if step is not None),
    )


class _Sources:
    """Where the pointers of launches come from: indexes into the addresses of a repeated call.

    Args:
        addresses: of the tensors and the options of the recorded call.
        options: its options that are tensors; their addresses are the last ones.
    """

    def __init__(self, addresses: list[int], options: list[Tensor]) -> None:
        self._found = {
            address: index for index, address in enumerate(addresses) if address
        }
        self._given = set(self._found)
        self._num_given = len(addresses)
        self._origins: list[tuple[int, int]] = []
        self._place: Any = None
        self._sizes = (0, 0)
        first = len(addresses) - len(options)
        self._options = {id(option): first + at for at, option in enumerate(options)}

    def add_workspace(self, note: WorkspaceNote, later: Sequence[Any]) -> None:
        """Add the addresses of a workspace that are used.

        All requests of a call become one, the largest: launches of one stream run in order.

        Args:
            note: the request for the workspace.
            later: what the call did afterwards. Launches use the latest workspace.
        """
        tensors = note.counters, note.numbers
        sizes = note.num_counters, note.num_numbers
        used = set(_pointers_until_request(later)) - self._given - {0}
        for which, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            begin = tensor.data_ptr()
            end = begin + max(4 * size, 1)
            for pointer in sorted(
                address for address in used if begin <= address < end
            ):
                origin = (which, pointer - begin)
                if origin not in self._origins:
                    self._origins.append(origin)
                self._found[pointer] = self._num_given + self._origins.index(origin)
        self._place = (note.device, note.index)
        self._sizes = (max(self._sizes[0], sizes[0]), max(self._sizes[1], sizes[1]))

    def request(self) -> Step | None:
        """Return the request for workspace, or None if the call uses none."""
        if not self._origins:
            return None
        origins, (device, index) = tuple(self._origins), self._place
        num_counters, num_numbers = self._sizes

        def request(stream: int, addresses: list[int]) -> Any:
            kept, begins = find_addresses(
                device, index, stream, num_counters, num_numbers
            )
            for which, offset in origins:
                addresses.append(begins[which] + offset)
            return kept

        return request

    def launch(self, note: LaunchNote) -> Step | None:
        """Return a launch again, or None if the origin of one of its pointers is not known."""
        # after all addresses: 0, for absent tensors, and options that are not tensors
        constants: list[Any] = [0]
        first = self._num_given + len(self._origins)
        pointers: list[int] = []
        for pointer in note.pointers:
            if pointer and pointer not in self._found:
                return None
            pointers.append(self._found[pointer] if pointer else first)
        options: list[int] = []
        for option in note.options:
            if not isinstance(option, Tensor):
                options.append(first + len(constants))
                constants.append(option)
                continue
            # an option of the call, or numbers in the workspace
            found = self._options.get(id(option), self._found.get(option.data_ptr()))
            if found is None:
                return None
            options.append(found)
        if not self._found.keys() >= set(note.map_addresses):
            return None
        in_maps = [self._found[address] for address in note.map_addresses]
        return _make_launch(
            note, pointers, options, tuple(constants), _pick(in_maps or [0, 1, 2, 6])
        )


def _make_launch(
    note: LaunchNote,
    pointers: list[int],
    options: list[int],
    constants: tuple[Any, ...],
    places: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> Step:
    """Return a launch again.

    Args:
        note: the launch.
        pointers, options: where they are in the addresses and the constants after these.
        constants: 0, and the options that are not tensors.
        places: returns the addresses of queries, keys, values and the output from them.
    """
    is_grouped, rest = note.is_grouped, note.rest
    pick_options: Any = None
    if not any(isinstance(option, Tensor) for option in note.options):
        constants = constants[:1]
        rest = (note.options, *rest) if is_grouped else (*note.options, *rest)
    elif is_grouped:
        pick_options = _pick(options)
    else:
        pointers = pointers + options
    pick = _pick(pointers)
    function, fixed, packs, _ = note.direct
    grid_x, grid_y, grid_z = note.grid
    make_maps = note.make_maps
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
        changing = pick(values)
        if pick_options is not None:
            changing = (changing, pick_options(values))
        elif is_grouped:
            changing = (changing,)
        # the arguments are copied once, not into a tuple and then into the call's
        if packs:
            function(grid_x, grid_y, grid_z, stream, *fixed, (*maps, *changing, *rest))
        else:
            function(grid_x, grid_y, grid_z, stream, *fixed, *maps, *changing, *rest)

    return launch


def _pick(indexes: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that returns some elements of a tuple, as a tuple."""
    if len(indexes) > 1:
        return itemgetter(*indexes)
    return lambda values: tuple(values[index] for index in indexes)


def _pointers_until_request(notes: Sequence[Any]) -> Iterator[int]:
    """Yield the addresses in the launches before the next request for workspace."""
    for note in notes:
        if isinstance(note, WorkspaceNote):
            return
        yield from note.pointers
        yield from note.map_addresses
        for option in note.options:
            if isinstance(option, Tensor):
                yield option.data_ptr()
