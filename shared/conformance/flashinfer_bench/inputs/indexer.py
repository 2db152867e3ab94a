"""Scores as the inputs of an indexer's definition, and the slots that it selects as positions.

A law has scores of any numbers. The indexer computes scores from codes, scales, queries and
weights. Here the ranks of a row's scores are its scores: a key has its rank as its scale, and a
code in one of two columns that says the sign. Some heads count keys of one sign, some those of the
other, and the products of the remaining heads are below 0, so they are cut off. All numbers are
exact. Keys of a row without a score are left out. A row has as many more keys with larger scores as
the definition selects more than the law.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..definitions import Definition

FP8 = torch.float8_e4m3fn
SPARE_PAGES = 3
"""Pages that no request has. They hold NaN."""
NAN_BYTE = 0x7F


@dataclass(frozen=True)
class IndexedRow:
    """The keys of a row of scores.

    Args:
        positions: The position in the row of each key; -1 for a key that is not of the row.
        values: The score of each key: its rank, or a larger number.
        pages: Page ids in sequence order.
    """

    positions: list[int]
    values: list[int]
    pages: list[int]


def draw_rows(
    scores: Tensor, more: int, page_size: int, pick: Random
) -> list[IndexedRow]:
    """Return the keys of each row, in any pages.

    Args:
        scores: [tokens, keys].
        more: Keys with larger scores in each row.
        page_size: Keys per page.
    """
    drawn = []
    for row in scores.tolist():
        keys = [key for key, score in enumerate(row) if score > -torch.inf]
        ranks = {score: n for n, score in enumerate(sorted({row[key] for key in keys}))}
        middle = len(ranks) // 2
        own = [(key, ranks[row[key]] - middle) for key in keys]
        others = [(-1, len(ranks) + n) for n in range(more)]
        # the keys keep their order, which counts for equal scores
        places = set(pick.sample(range(len(own) + more), more))
        turn, rest = iter(own), iter(others)
        drawn.append(
            [next(rest if n in places else turn) for n in range(len(own) + more)]
        )
    counts = [-(-len(row) // page_size) for row in drawn]
    ids = pick.sample(range(sum(counts) + SPARE_PAGES), sum(counts))
    rows = []
    for row, count in zip(drawn, counts, strict=True):
        pages, ids = ids[:count], ids[count:]
        rows.append(IndexedRow([key for key, _ in row], [n for _, n in row], pages))
    return rows


def index_inputs(
    definition: Definition, rows: list[IndexedRow], device: torch.device, pick: Random
) -> dict[str, Any]:
    """Return the inputs of a definition whose scores are those of some rows."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device="cpu")

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")

    sizes = definition.constants
    heads, dim, size = (
        sizes["num_index_heads"],
        sizes["index_head_dim"],
        sizes["page_size"],
    )
    plus, minus = pick.sample(range(dim), 2)
    order = pick.sample(range(heads), heads)
    count = max(1, heads // 4)
    # powers of two, so that the sums of weights are exact
    count = 1 << (count.bit_length() - 1)
    signs = {head: 1 for head in order[:count]} | {
        head: -1 for head in order[count : 2 * count]
    }
    tokens = len(rows)
    query, weights = zeros(tokens, heads, dim), zeros(tokens, heads)
    for head in range(heads):
        sign = signs.get(head, 0)
        # of a head without a sign, every product is below 0
        query[:, head, plus] = 1.0 if sign > 0 else -1.0
        query[:, head, minus] = 1.0 if sign < 0 else -1.0
        weights[:, head] = sign / count if sign else pick.choice([-3.0, 5.0])
    free = [column for column in range(dim) if column not in (plus, minus)]
    query[:, :, free] = float(pick.choice([2, 8, 64]))  # keys are 0 there
    most = max((len(row.pages) for row in rows), default=0)
    num_pages = sum(len(row.pages) for row in rows) + SPARE_PAGES
    cache = torch.full(
        (num_pages, size * (dim + 4)), NAN_BYTE, dtype=torch.uint8, device="cpu"
    )
    table = torch.full(
        (tokens, most), num_pages + 2**20, dtype=torch.int32, device="cpu"
    )
    for token, row in enumerate(rows):
        if not row.values:
            continue
        value = torch.tensor(row.values, dtype=torch.float32, device="cpu")
        code = zeros(len(value), dim)
        code[value > 0, plus] = 4.0
        code[value < 0, minus] = 4.0
        scale = (value.abs() / 4).masked_fill(value == 0, 1.0)
        for turn, page in enumerate(row.pages):
            some = slice(turn * size, min((turn + 1) * size, len(value)))
            stored = code[some].to(FP8).view(torch.uint8).flatten()
            cache[page, : len(stored)] = stored
            stored = scale[some].contiguous().view(torch.uint8).flatten()
            cache[page, size * dim : size * dim + len(stored)] = stored
        table[token, : len(row.pages)] = ints(row.pages)
    lens = ints([len(row.values) for row in rows])
    found: dict[str, Tensor] = {
        "q_index_fp8": query.to(FP8),
        "k_index_cache_fp8": cache.view(num_pages, size, 1, dim + 4).view(torch.int8),
        "weights": weights,
        "seq_lens": lens.view(tokens),
        "block_table": table,
    }
    return {name: found[name].to(device) for name in definition.inputs}


def random_inputs(
    definition: Definition, tokens: int, most: int, device: torch.device
) -> dict[str, Any]:
    """Return random queries, weights and keys of requests of different lengths, in any pages.

    Args:
        definition: The definition.
        tokens: Requests.
        most: Keys of the last one. The others have 1 to `most` keys.
    """
    sizes, pick = definition.constants, Random(f"{tokens} {most}")
    heads, dim = sizes["num_index_heads"], sizes["index_head_dim"]
    size, generator = sizes["page_size"], torch.Generator("cpu").manual_seed(most)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    lens = [*(pick.randint(1, most) for _ in range(tokens - 1)), most]
    counts = [-(-keys // size) for keys in lens]
    ids = pick.sample(range(sum(counts) + SPARE_PAGES), sum(counts))
    num_pages = sum(counts) + SPARE_PAGES
    cache = torch.full(
        (num_pages, size * (dim + 4)), NAN_BYTE, dtype=torch.uint8, device="cpu"
    )
    table = torch.zeros(tokens, max(counts), dtype=torch.int32, device="cpu")
    for token, (keys, count) in enumerate(zip(lens, counts, strict=True)):
        for turn in range(count):
            page = table[token, turn] = ids.pop()
            here = min(size, keys - turn * size)
            codes = (normal(here, dim) * 100).clamp(-448, 448).to(FP8)
            cache[page, : here * dim] = codes.view(torch.uint8).flatten()
            scale = normal(here).abs() / 128 + 2**-9
            start = size * dim
            cache[page, start : start + 4 * here] = scale.view(torch.uint8)
    found: dict[str, Tensor] = {
        "q_index_fp8": (normal(tokens, heads, dim) * 50).clamp(-448, 448).to(FP8),
        "k_index_cache_fp8": cache.view(num_pages, size, 1, dim + 4).view(torch.int8),
        "weights": normal(tokens, heads) / 64,
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cpu"),
        "block_table": table,
    }
    return {name: found[name].to(device) for name in definition.inputs}


def positions_of(
    slots: list[int], row: IndexedRow, page_size: int, topk: int
) -> list[int]:
    """Return the positions in a row of scores that some slots mean, in order.

    Of equal scores any are right, and the lowest positions are returned.

    Args:
        slots: What was selected; -1 is nothing.
        row: The keys.
        page_size: Keys per page.
        topk: Positions that are expected at most.

    Raises:
        ValueError: A slot is not of the row, is selected twice, or a larger score is missing.
    """
    at = {page: turn for turn, page in enumerate(row.pages)}
    chosen = []
    for slot in slots:
        if slot == -1:
            continue
        page, offset = divmod(slot, page_size)
        key = at.get(page, len(row.values)) * page_size + offset
        if slot < 0 or key >= len(row.values):
            raise ValueError(f"topk_indices has {slot}: expected a slot of the request")
        chosen.append(key)
    if len(set(chosen)) < len(chosen):
        raise ValueError("topk_indices has a slot twice: expected different slots")
    own = [key for key in chosen if row.positions[key] >= 0]
    larger = row.positions.count(-1)
    expected = min(topk, len(row.values) - larger)
    if len(chosen) - len(own) < larger or len(own) != expected:
        raise ValueError(
            f"topk_indices has {len(chosen)} slots, {len(own)} of them below the"
            f" {larger} largest scores: expected {expected}"
        )
    if not own:
        return []
    least = min(row.values[key] for key in own)
    every = [key for key, position in enumerate(row.positions) if position >= 0]
    above = [key for key in every if row.values[key] > least]
    equal = [key for key in every if row.values[key] == least]
    if not set(above) <= set(own):
        return sorted(row.positions[key] for key in own)
    own = above + equal[: len(own) - len(above)]
    return sorted(row.positions[key] for key in own)
