"""Do the laws of caches hold for both twins, and does each break where a small fault is?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.harness.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.harness.expect import Disagreement
from pagetwin.conformance.harness.law import Law, Setting
from pagetwin.conformance.harness.report import Status
from pagetwin.conformance.harness.trial import (
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.contract.kinds import FP8_DTYPES
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.operations import CONCEPTS
from torch import Tensor

CONCEPTS_OF_CACHES = (
    "block_table",
    "slot_mapping",
    "block_table_rows",
    "kv_cache",
    "kv_cache_init",
    "cache_ops",
)
LAWS = [law for law in ALL_LAWS if law.area in ("slots", "blocks", "cache", "layouts")]
RIGHT = load_candidate("reference")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_both_twins_hold_it(law: Law, device: torch.device) -> None:
    for name in ("reference", "optimized"):
        setting = make_setting(load_candidate(name), str(device))
        result = try_law(law, setting, seed_of_cases=3, examples=4)
        assert result.status == Status.HELD, (name, result)
        assert result.cases and not result.refused


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = Law(law.name, law.area, (), law.cases, lambda setting, case: None)
    setting = make_setting(RIGHT, "cpu")
    try_law(nothing, setting, seed_of_cases=5, examples=6, at=shown.append)
    assert shown
    for case in shown:
        assert repr(make_case(law, case)) == case


def test_every_operation_of_a_cache_has_a_law() -> None:
    operations = {
        operation
        for concept in CONCEPTS
        if concept.name in CONCEPTS_OF_CACHES
        for operation in concept.operations
    }
    assert operations == {need for law in LAWS for need in law.needs}


def first_failure(law: Law, setting: Setting) -> BaseException | None:
    """Return what breaks a law, without looking for a smaller case."""
    options = settings(
        max_examples=120,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        if isinstance(law.cases, SearchStrategy):
            options(given(law.cases)(lambda case: law.body(setting, case)))()
        else:
            for case in law.cases:
                law.body(setting, case)
    except Exception as error:
        return error
    return None


def reads_a_row_from_the_start(new: Any, computed: Any, rows: Any, size: int) -> Any:
    return RIGHT.compute_slot_mapping_batch(new, [0] * len(new), rows, size)


def starts_where_the_smallest_does(new: Any, computed: Any, *rest: Any) -> Any:
    least = [min(computed, default=0)] * len(new)
    return RIGHT.compute_slot_mapping_batch(new, least, *rest)


def on_device_in_32_bits(**given: Any) -> Tensor:
    slots = RIGHT.compute_slot_mapping_device(**given)
    return slots.int().long()


def on_device_without_padding(**given: Any) -> Tensor:
    slots = RIGHT.compute_slot_mapping_device(**given)
    slots[given["query_start_loc"][-1] :] = 0
    return slots


def ignores_the_context(**given: Any) -> int:
    return RIGHT.compute_slot_mapping_start_idx(**given | {"context_len": 0})


def starts_one_late(**given: Any) -> Tensor:
    return RIGHT.compute_slot_mapping(**given | {"start_idx": given["start_idx"] + 1})


def profile_run_of_new_tokens_only(*given: Any, **named: Any) -> Tensor:
    slots = RIGHT.compute_slot_mapping(*given, **named)
    is_profile_run, _, context = given[:3]
    return slots[context:] if is_profile_run else slots


def pads_with_minus_one(
    rows: Any, max_blocks: Any = None, device: Any = "cpu"
) -> Tensor:
    table = RIGHT.make_block_table(rows, max_blocks, device)
    for req, row in enumerate(rows):
        table[req, len(row) :] = -1
    return table


def is_as_wide_as_the_longest_row(
    rows: Any, max_blocks: Any = None, device: Any = "cpu"
) -> Any:
    return RIGHT.make_block_table(rows, None, device)


def counts_in_place(table: Tensor, held: Tensor, new: Any) -> Tensor:
    return held.copy_(RIGHT.append_blocks(table, held, new))


def clears_behind(table: Tensor, held: Tensor, new: Any) -> Tensor:
    counts = RIGHT.append_blocks(table, held, new)
    for req, count in enumerate(counts.tolist()):
        table[req, count:] = 0
    return counts


def checks_row_by_row(table: Tensor, held: Tensor, new: Any) -> Tensor:
    counts = [
        RIGHT.append_blocks(table[req : req + 1], held[req : req + 1], [blocks])
        for req, blocks in enumerate(new)
    ]
    return torch.cat(counts) if counts else held.clone()


RightTable: Any = RIGHT.operations["BlockTable"]


class SharesRows(RightTable):
    """A moved row is the same list."""

    def move_row(self, src: int, tgt: int) -> None:
        super().move_row(src, tgt)
        self._rows[tgt] = self._rows[src]


class KeepsTails(RightTable):
    """What a longer owner left stands behind a row."""

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        self.tails = getattr(self, "tails", {})
        self.tails[row_idx] = list(self._rows[row_idx])
        super().add_row(block_ids, row_idx)

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        table = super().get_device_tensor(num_reqs)
        for req, tail in getattr(self, "tails", {}).items():
            held = len(self._rows[req])
            if req < num_reqs and len(tail) > held:
                table[req, held : len(tail)] = torch.tensor(tail[held:])
        return table


class IsOneTensor(RightTable):
    """Every step gets the same memory."""

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        table = super().get_device_tensor(self.max_num_reqs)
        self.kept = getattr(self, "kept", table)
        return self.kept.copy_(table)[:num_reqs]


class ForgetsTurns(RightTable):
    """One position after another goes to the next rank."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.dcp_kv_cache_interleave_size = 1


class WrapsNegativeRows(RightTable):
    """Row -1 is the last one."""

    def swap_row(self, src: int, tgt: int) -> None:
        self._rows[src], self._rows[tgt] = self._rows[tgt], self._rows[src]


def takes_the_block_after(table: Tensor, lens: Tensor, *rest: Any, **named: Any) -> Any:
    if "align" in rest:
        size = rest[0]
        last = (lens // size).clamp(max=table.shape[1] - 1 - rest[1]).long()
        return table.gather(1, last[:, None] + torch.arange(1 + rest[1]))
    return RIGHT.mamba_get_block_table_tensor(table, lens, *rest, **named)


def writes_padding_too(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, **s: Any
) -> None:
    """All tokens of the key are written, those without a slot to slot 0."""
    RIGHT.reshape_and_cache(key, value, k, v, slots, **s)
    if len(key) > len(slots) and 0 not in slots and k.numel():
        k[0, 0] = key[-1].to(k.dtype)


def takes_pads_for_the_last_slot(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, **s: Any
) -> None:
    total = k.shape[0] * k.shape[1]
    wrapped = slots.clone()
    for token in (slots == -1).nonzero().flatten()[:1].tolist():
        wrapped[token] = -1 if total - 1 in slots else total - 1
    RIGHT.reshape_and_cache(key, value, k, v, wrapped, **s)


def writes_as_if_contiguous(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, **s: Any
) -> None:
    packed = v.as_strided(v.shape, v.contiguous().stride(), v.storage_offset())
    RIGHT.reshape_and_cache(key, value, k, packed, slots, **s)


def changes_its_keys(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, **s: Any
) -> None:
    RIGHT.reshape_and_cache(key, value, k, v, slots, **s)
    key[len(slots) :] = 0


def rounds_to_half(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, *s: Any
) -> None:
    key, value = key.half().to(key.dtype), value.half().to(value.dtype)
    RIGHT.reshape_and_cache(key, value, k, v, slots, *s)


def scaled(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., None]:
    """Return a write with other scales."""

    def write(*tensors: Any, k_scale: Any = None, v_scale: Any = None) -> None:
        if k_scale is not None and v_scale is not None:
            k_scale, v_scale = change(k_scale, v_scale)
        RIGHT.reshape_and_cache(*tensors, k_scale=k_scale, v_scale=v_scale)

    return write


def cuts_off_digits(
    key: Tensor,
    value: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """An FP8 number is rounded to zero."""
    RIGHT.reshape_and_cache(key, value, k, v, slots, k_scale=k_scale, v_scale=v_scale)
    if k.dtype in FP8_DTYPES:
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                at = divmod(slot, k.shape[1])
                scale = torch.as_tensor(k_scale, dtype=torch.float32)
                exact = key[token].float() / (scale[:, None] if scale.dim() else scale)
                codes = k[at].contiguous().view(torch.uint8)
                codes -= (k[at].float().abs() > exact.abs()).to(torch.uint8)
                k[at] = codes.view(k.dtype)


def overflows(
    key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor, *s: Any
) -> None:
    """What is too large for FP8 becomes NaN or infinite."""
    RIGHT.reshape_and_cache(key, value, k, v, slots, *s)
    if k.dtype in FP8_DTYPES:
        k.view(-1, *k.shape[2:])[slots] = key.to(k.dtype)


def gathers(change: Callable[..., None]) -> Callable[..., Any]:
    """Return a gather whose answer is changed afterwards."""

    def gather(*given: Any, **named: Any) -> Any:
        key, value = RIGHT.gather_cache(*given, **named)
        change(key, value, **named)
        return key, value

    return gather


def leaves_the_tail(
    key: Tensor, value: Tensor, seq_start_loc: Any = None, **_: Any
) -> None:
    if seq_start_loc is not None:
        key[int(seq_start_loc[-1]) :] = 1


def gathers_from_one_row(*given: Any, **named: Any) -> Any:
    if "block_table" in named and len(named["block_table"]):
        table = named["block_table"]
        held = named["key_cache"].shape[0]
        named["block_table"] = torch.where(table < held, table.clamp(min=0), 0).flip(0)
    return RIGHT.gather_cache(*given, **named)


def gathers_without_scale(*given: Any, **named: Any) -> Any:
    if named.get("v_scale") is not None:
        named["v_scale"] = named["k_scale"]
    return RIGHT.gather_cache(*given, **named)


def multiplies_in_the_dtype(*given: Any, **named: Any) -> Any:
    dtype = named.get("dtype")
    if dtype is None:
        return RIGHT.gather_cache(*given, **named)
    plain = named | {"k_scale": 1.0, "v_scale": 1.0}
    found = RIGHT.gather_cache(*given, **plain)
    scales = [torch.as_tensor(named[name]) for name in ("k_scale", "v_scale")]
    columns = [each[:, None] if each.dim() else each for each in scales]
    return tuple(
        each * column.to(dtype) for each, column in zip(found, columns, strict=True)
    )


def copies_the_first_layer(caches: Any, mapping: Tensor) -> None:
    RIGHT.copy_blocks(caches[:1], mapping)


def copies_keys(caches: Any, mapping: Tensor) -> None:
    values = [cache[1].clone() for cache in caches]
    RIGHT.copy_blocks(caches, mapping)
    for cache, value in zip(caches, values, strict=True):
        cache[1] = value


def copies_back(caches: Any, mapping: Tensor) -> None:
    for cache in caches:
        for source, destination in mapping.tolist():
            cache[:, source] = cache[:, destination]


def copies_in_order(caches: Any, mapping: Tensor) -> None:
    for cache in caches:
        for source, destination in mapping.tolist():
            cache[:, destination] = cache[:, source]


def swaps_both_ways(source: Tensor, destination: Tensor, mapping: Tensor) -> None:
    before = destination.clone()
    RIGHT.swap_blocks(source, destination, mapping)
    for taken, there in mapping.tolist():
        source[:, taken] = before[:, there]


def swaps_into_the_same_ids(
    source: Tensor, destination: Tensor, mapping: Tensor
) -> None:
    RIGHT.swap_blocks(source, destination, mapping)
    for taken, there in mapping.tolist():
        if taken < destination.shape[1]:
            destination[:, taken] = source[:, taken]
        destination[:, there] = source[:, taken]


def takes_the_order_for_its_inverse(
    raw: Tensor, dtype: Any, shape: Any, order: Any
) -> Any:
    inverse = [list(order).index(axis) for axis in range(len(shape))]
    return RIGHT.view_kv_cache(raw, dtype, shape, inverse)


def copies_the_bytes(raw: Tensor, *given: Any) -> Tensor:
    return RIGHT.view_kv_cache(raw, *given).clone()


def ignores_the_order(raw: Tensor, spec: Any, *order: Any) -> Tensor:
    return RIGHT.reshape_kv_cache(raw, spec)


def keys_before_values(raw: Tensor, spec: Any, num_layers: int, layout: Any) -> Tensor:
    """All keys of a layer lie before its values."""
    caches = RIGHT.reshape_layered_kv_cache(raw, spec, num_layers, layout)
    return (
        torch.empty(0, dtype=spec.dtype).set_(raw.view(spec.dtype)).view(caches.shape)
    )


def gives_values_first(cache: Tensor) -> tuple[Tensor, Tensor]:
    return cache[1], cache[0]


def forgets_the_parts(cache: Tensor, heads: int, size: int) -> Any:
    key, value = RIGHT.split_packed_kv_cache(cache, heads, size)
    blocks, _, parts, slots, part = key.shape
    return cache[0].view(blocks, heads, slots, parts, part).transpose(2, 3), value


def allocates_for_each_layer(config: Any, device: Any = "cpu") -> Any:
    found = RIGHT.allocate_kv_caches(config, device)
    return {name: raw.clone() for name, raw in found.items()}


def asks_for_one_layout(
    config: Any, raw: Any, backends: Any, layout: Any = None
) -> Any:
    return RIGHT.reshape_kv_caches(config, raw, backends, KVCacheLayout.NHD)


def sorts_by_name(caches: Any, layers: Any) -> Any:
    found = RIGHT.bind_kv_cache(caches, layers)
    return {name: found[name] for name in sorted(found)}


def forgets_who_shares(caches: Any, layers: Any) -> Any:
    own = {name: layer for name, layer in layers.items() if name in caches}
    return RIGHT.bind_kv_cache(caches, own)


def asks_once_more(layers: Any, block_size: int, dtype: Any) -> Any:
    found = RIGHT.get_kv_cache_spec(layers, block_size, dtype)
    return {name: found[name] for name in sorted(found)}


def leaves_what_was_there(spec: Any, num_blocks: int, device: Any = "cpu") -> Tensor:
    raw = RIGHT.allocate_kv_cache(spec, num_blocks, device)
    return raw.fill_(1) if num_blocks == 7 else raw


SLOTS = "slots on the device are those of the host"
WRITE = "each token lands in its slot and all else stays"
CODES = "an eight bit cache holds the codes next to the quotients"
READ = "a gathered sequence is its slots in order"
NUMBERS = "gathered codes are their numbers times the scale"
COPY = "a copied block is its source in every layer"
SWAP = "a swapped block arrives and its source stays"
ROWS = "rows are what was last done to them"
TABLE = "a table holds the rows and zero behind them"
APPEND = "new blocks stand behind what a row held and nothing else changes"
NEW = "every new token gets the slot that its row says"
FEWEST = "blocks needed are the fewest that hold the tokens"
LEAVES = "what would leave the cache is refused and nothing written"
FAULTS: list[tuple[str, Any, str]] = [
    ("blocks_needed", lambda num_tokens, block_size: num_tokens // block_size, FEWEST),
    (
        "blocks_needed",
        lambda num_tokens, block_size: num_tokens // block_size + 1,
        FEWEST,
    ),
    (
        "blocks_needed",
        lambda num_tokens, block_size: int(-(-float(num_tokens) // block_size)),
        FEWEST,
    ),
    ("make_block_table", pads_with_minus_one, TABLE),
    ("make_block_table", is_as_wide_as_the_longest_row, TABLE),
    ("append_blocks", counts_in_place, APPEND),
    ("append_blocks", clears_behind, APPEND),
    ("append_blocks", checks_row_by_row, "blocks that no table can hold are refused"),
    ("BlockTable", SharesRows, ROWS),
    ("BlockTable", KeepsTails, ROWS),
    ("BlockTable", IsOneTensor, "a tensor of the rows stays as it was made"),
    (
        "BlockTable",
        ForgetsTurns,
        "the ranks slots of a row are filled one after another",
    ),
    ("BlockTable", WrapsNegativeRows, "a refused move changes no row"),
    (
        "mamba_get_block_table_tensor",
        takes_the_block_after,
        "a state is read from the block of the last token",
    ),
    ("compute_slot_mapping_batch", reads_a_row_from_the_start, NEW),
    ("compute_slot_mapping_batch", starts_where_the_smallest_does, NEW),
    ("compute_slot_mapping_device", on_device_in_32_bits, SLOTS),
    ("compute_slot_mapping_device", on_device_without_padding, SLOTS),
    (
        "compute_slot_mapping_start_idx",
        ignores_the_context,
        "a prompt stores just the keys that its window leaves",
    ),
    (
        "compute_slot_mapping",
        starts_one_late,
        "tokens before the start get no slot and all others theirs",
    ),
    (
        "compute_slot_mapping",
        profile_run_of_new_tokens_only,
        "a dry run gives no token a slot",
    ),
    ("reshape_and_cache", writes_padding_too, WRITE),
    ("reshape_and_cache", takes_pads_for_the_last_slot, WRITE),
    ("reshape_and_cache", writes_as_if_contiguous, WRITE),
    ("reshape_and_cache", changes_its_keys, WRITE),
    ("reshape_and_cache", rounds_to_half, "every bit pattern survives"),
    ("reshape_and_cache", scaled(lambda k, v: (1 / k, 1 / v)), CODES),
    ("reshape_and_cache", scaled(lambda k, v: (v, k)), CODES),
    ("reshape_and_cache", scaled(lambda k, v: (k, v * 1.01)), CODES),
    ("reshape_and_cache", cuts_off_digits, CODES),
    (
        "reshape_and_cache",
        overflows,
        "numbers past the largest become it and nan stays",
    ),
    ("gather_cache", gathers(leaves_the_tail), READ),
    ("gather_cache", gathers_from_one_row, READ),
    ("gather_cache", gathers_without_scale, NUMBERS),
    ("gather_cache", multiplies_in_the_dtype, NUMBERS),
    ("copy_blocks", copies_the_first_layer, COPY),
    ("copy_blocks", copies_keys, COPY),
    ("copy_blocks", copies_back, COPY),
    ("copy_blocks", copies_in_order, LEAVES),
    ("swap_blocks", swaps_both_ways, SWAP),
    ("swap_blocks", swaps_into_the_same_ids, SWAP),
    (
        "view_kv_cache",
        takes_the_order_for_its_inverse,
        "axes lie in memory in the order that is asked for",
    ),
    (
        "view_kv_cache",
        copies_the_bytes,
        "axes lie in memory in the order that is asked for",
    ),
    (
        "reshape_kv_cache",
        ignores_the_order,
        "a layers cache is its bytes in the order of its axes",
    ),
    (
        "reshape_layered_kv_cache",
        keys_before_values,
        "each layer of one allocation lies where its layout says",
    ),
    ("split_kv_cache", gives_values_first, "halves of a cache are views of it"),
    (
        "split_packed_kv_cache",
        forgets_the_parts,
        "a packed cache is cut into parts of sixteen bytes",
    ),
    (
        "allocate_kv_cache",
        leaves_what_was_there,
        "a fresh cache has a page a block and is zero",
    ),
    (
        "allocate_kv_caches",
        allocates_for_each_layer,
        "each tensor is allocated once and is zero",
    ),
    (
        "reshape_kv_caches",
        asks_for_one_layout,
        "each layer sees its bytes as its backend says",
    ),
    (
        "bind_kv_cache",
        sorts_by_name,
        "each layer is handed its own cache or the one it shares",
    ),
    (
        "bind_kv_cache",
        forgets_who_shares,
        "each layer is handed its own cache or the one it shares",
    ),
    (
        "get_kv_cache_spec",
        asks_once_more,
        "layers that keep a cache are asked and others passed over",
    ),
]


@pytest.mark.parametrize(
    ("operation", "fault", "law"),
    FAULTS,
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_small_fault_breaks_the_law_that_is_about_it(
    operation: str, fault: Any, law: str
) -> None:
    wrong = Candidate("wrong", RIGHT.operations | {operation: fault}, Support())
    error = first_failure(find_law(law), make_setting(wrong, "cpu"))
    assert isinstance(error, Disagreement), error
