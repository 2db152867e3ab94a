"""Calls with every option as chosen, on a batch that is drawn from a seed."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...validation.option import Drawing
from .batches import NAN, TABLES, draw_rows, empty_cache, heads_of, table_of_rows
from .option_pairs import Choice
from .options import DTYPES, Call, make_options, starts_of, stored_as


@dataclass(frozen=True)
class _Plan:
    """What a call has besides its numbers and its options.

    Args:
        stored: Element type of the keys and values.
        scale: Optional. Factor of the dot products. If None, 1 / sqrt(size).
        scales: Those of keys and of values; 1 if the cache has none.
        padding: Rows of no request after the last one.
        block_size: Slots in a block. A ragged call has a block table only if it is 16.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    kv_heads: int
    group: int
    size: int
    value_size: int
    dtype: torch.dtype
    stored: torch.dtype
    scale: float | None
    scales: tuple[Tensor | float, Tensor | float]
    padding: int
    layout: str
    block_size: int
    device: torch.device

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def empty(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Return a key cache and a value cache, in the chosen layout."""
        return [
            empty_cache(
                self.layout, num_blocks, block_size, self.kv_heads, size, self.stored,
                self.device,
            )[half]
            for half, size in enumerate((self.size, self.value_size))
        ]  # fmt: skip


@dataclass(frozen=True)
class _Numbers:
    """Queries [tokens, heads, size], and the keys and values of each request, in float32."""

    queries: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def build_call(choice: Choice, seed: int, device: torch.device) -> Call:
    """Return a call with every option as chosen, on a batch drawn from the seed.

    About half of the requests hold a needle: a key that outweighs all others of its sequence.
    Choices with a rejected pair are built as well.
    """
    pick = Random(f"options {seed}")
    generator = torch.Generator().manual_seed(seed)
    plan = _draw_plan(choice, pick, device)
    numbers = _draw_numbers(plan, pick, generator)
    arguments: dict[str, Any] = {} if plan.scale is None else {"scale": plan.scale}
    if choice["scales"] != "none":
        arguments |= dict(zip(("k_scale", "v_scale"), plan.scales, strict=True))
    is_fused = choice["query"] == "fused"
    arguments |= {
        "query": _store_queries(plan, numbers.queries, is_fused),
        "query_start_loc": starts_of(plan.query_lens, device),
        "max_query_len": max(plan.query_lens) + pick.choice([0, 3]),
    }
    rows: list[list[int]] = []
    if choice["operation"] == "encoder_attention":
        arguments |= _store_ragged(plan, numbers, pick)
    else:
        stored, rows = _store_paged(plan, numbers, pick, generator)
        arguments |= stored
    lens = (plan.query_lens, plan.key_lens)
    drawing = Drawing(pick, *lens, plan.heads, plan.padding, device)
    arguments |= make_options(choice, drawing)
    out_dtype = {"given": plan.dtype, "made": None}.get(
        choice["out"], DTYPES.get(choice["out"])
    )
    if out_dtype not in (None, plan.dtype):
        number = pick.choice([0.01, 0.05])
        arguments["out_scale"] = pick.choice(
            [number, torch.tensor(number).to(device), torch.tensor([number]).to(device)]
        )
    return Call(
        operation=choice["operation"],
        arguments=arguments,
        dtype=plan.dtype,
        out_dtype=out_dtype,
        wants_lse=choice["lse"] == "given",
        query_lens=plan.query_lens,
        key_lens=plan.key_lens,
        rows=rows,
    )


def draw_lens(
    pick: Random, batch: str, crosses: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the queries and keys of each request, below and above one chunk or tile."""
    prefill = pick.choice([(5, 5), (20, 20), (33, 33), (1, 1)])
    decode = (1, pick.choice([1, 2, 16, 17, 33, 64, 65, 90]))
    chunk = (7, pick.choice([7, 31, 45, 70]))
    drafts = (pick.randint(2, 5), pick.choice([5, 16, 40, 66]))
    lens = {
        "mixed": [decode, prefill, (0, pick.choice([0, 9])), chunk],
        "prefill": [prefill, (pick.choice([3, 12]),) * 2],
        "decode": [decode, (1, pick.randint(1, 50)), (1, pick.randint(1, 50))],
        "verification": [drafts, (3, pick.randint(3, 50)), (1, 20)],
    }[batch]
    if crosses:
        # any lengths, including an encoder without tokens
        few = [0, pick.choice([1, 3, 33]), pick.choice([0, 2, 17]), 1]
        lens = [
            (query_len, few[req] if req < 3 else key_len)
            for req, (query_len, key_len) in enumerate(lens)
        ]
    pick.shuffle(lens)
    return tuple(one for one, _ in lens), tuple(other for _, other in lens)


def _draw_plan(choice: Choice, pick: Random, device: torch.device) -> _Plan:
    query_lens, key_lens = draw_lens(pick, choice["batch"], choice["causal"] == "cross")
    kv_heads, padding = pick.choice([1, 2]), pick.choice([0, 0, 2])
    size, dtype = int(choice["head_size"]), DTYPES[choice["dtype"]]
    return _Plan(
        query_lens=query_lens,
        key_lens=key_lens,
        kv_heads=kv_heads,
        group=int(choice["group"]),
        size=size,
        value_size={"as the keys": size, "other": size + 5}[choice["value_head_size"]],
        dtype=dtype,
        stored=dtype if choice["cache"] == "as the query" else DTYPES[choice["cache"]],
        scale=None if choice["scale"] == "none" else float(choice["scale"]),
        scales=_make_scales(choice["scales"], kv_heads, device),
        padding=padding,
        layout=choice["layout"],
        block_size=int(choice["block_size"]),
        device=device,
    )


def _make_scales(
    kind: str, kv_heads: int, device: torch.device
) -> tuple[Tensor | float, Tensor | float]:
    if kind == "none":
        return 1.0, 1.0
    if kind == "numbers":
        return 0.11, 0.023
    if kind == "each head":
        steps = torch.arange(1.0, kv_heads + 1, device=device)
        return 0.11 * steps, 0.023 / steps
    return torch.tensor(0.11, device=device), torch.tensor([0.023], device=device)


def _draw_numbers(plan: _Plan, pick: Random, generator: torch.Generator) -> _Numbers:
    """Return queries, keys and values, with needles among the keys."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query_lens, key_lens = plan.query_lens, plan.key_lens
    lean = torch.nn.functional.normalize(random(plan.kv_heads, plan.size), dim=1)
    queries = random(sum(query_lens), plan.heads, plan.size)
    keys = [random(count, plan.kv_heads, plan.size) for count in key_lens]
    values = [random(count, plan.kv_heads, plan.value_size) for count in key_lens]
    factor = plan.size**-0.5 if plan.scale is None else plan.scale
    for req in range(len(query_lens)):
        if not key_lens[req] or pick.random() < 0.5:
            continue
        own = slice(sum(query_lens[:req]), sum(query_lens[: req + 1]))
        queries[own] = 0.25 * queries[own] + 2 * lean.repeat_interleave(plan.group, 0)
        last = key_lens[req] - 1
        edges = [0, last, last - query_lens[req] + 1, last - 6, last - 7, last - 32]
        edges += [last // 8 * 8, last // 33 * 33, last // 32 * 32]
        position = min(max(0, pick.choice(edges)), last)
        keys[req][position] = 12 / factor * lean
        values[req][position] += 3
    return _Numbers(queries, keys, values)


def _store_queries(plan: _Plan, queries: Tensor, is_fused: bool) -> Tensor:
    """Return [tokens + padding, heads, size]. Fused rows hold numbers after the queries."""
    tokens, columns = len(queries), plan.heads * plan.size
    wide = (tokens + plan.padding, columns + (24 if is_fused else 0))
    query = torch.full(wide, NAN, dtype=plan.dtype, device=plan.device)
    query = heads_of(query[:, :columns], plan.heads)
    query[:tokens] = queries.to(plan.dtype).to(plan.device)
    return query


def _store_ragged(plan: _Plan, numbers: _Numbers, pick: Random) -> dict[str, Any]:
    """Return the arguments with keys and values, one request after another."""
    count = sum(plan.key_lens)
    key, value = (part[0] for part in plan.empty(1, count + plan.padding))
    if count:
        for tensor, drawn, scale in (
            (key, numbers.keys, plan.scales[0]),
            (value, numbers.values, plan.scales[1]),
        ):
            tensor[:count] = stored_as(torch.cat(drawn), scale, plan.stored)
    arguments: dict[str, Any] = {
        "key": key,
        "value": value,
        "key_start_loc": starts_of(plan.key_lens, plan.device),
        "max_key_len": max(plan.key_lens) + pick.choice([0, 3]),
    }
    if plan.block_size != 16:
        arguments["block_table"] = None
    return arguments


def _store_paged(
    plan: _Plan, numbers: _Numbers, pick: Random, generator: torch.Generator
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the arguments with keys and values in blocks, and the blocks of each request."""
    size = plan.block_size
    counts = [-(-key_len // size) for key_len in plan.key_lens]
    rows, num_blocks = draw_rows(counts, pick.choice(TABLES), generator)
    max_blocks = max(counts) + pick.choice([0, 1])
    caches = plan.empty(num_blocks, size)
    halves = (numbers.keys, numbers.values)
    for req, row in enumerate(rows):
        for cache, drawn, scale in zip(caches, halves, plan.scales, strict=True):
            stored = stored_as(drawn[req], scale, plan.stored)
            for start in range(0, plan.key_lens[req], size):
                part = stored[start : start + size]
                cache[row[start // size], : len(part)] = part
    most = min(max(plan.key_lens) + pick.choice([0, 3]), max_blocks * size)
    arguments = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table_of_rows(rows, max_blocks).to(plan.device),
        "seq_lens": torch.tensor(plan.key_lens, dtype=torch.int32, device=plan.device),
        "max_seq_len": most,
    }
    return arguments, rows
