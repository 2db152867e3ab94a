"""Laws of the indexer: its keys as codes and scales, its scores, and the selected positions.

The expected results come from numbers in float64, one block of bytes at a time.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..candidates.setting import Setting
from ..checks.canaries import kept
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..oracles.latent_formats import E4M3, meant, nearest, tiles_of
from .law import law

WRITE, SCORE, SELECT = "indexer_k_quant_and_cache", "index_scores", "select_keys"
FILL = 85


def stored_by_hand(k: Tensor, scale_fmt: str | None) -> tuple[Any, Any]:
    """Return the codes and the scales of keys."""
    rows = k.float().numpy()
    tiles, sizes = tiles_of(rows, rows.shape[1])
    scales = np.maximum(sizes, np.float32(1e-4)) / np.float32(448)
    if scale_fmt:
        scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64)))).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        quotients = tiles / scales[..., None]
    return nearest(quotients, E4M3, 127, 128).reshape(rows.shape), scales[:, 0]


def put_by_hand(page: Any, slot: int, size: int, code: Any, scale: Any) -> None:
    """Store a key in the bytes of its page: all codes first, then all scales."""
    dim = len(code)
    page[slot * dim : (slot + 1) * dim] = code
    start = size * dim + 4 * slot
    page[start : start + 4] = np.array([scale], dtype="<f4").view(np.uint8)


@dataclass(frozen=True)
class IndexWrite:
    """A write of the indexer's keys.

    Args:
        tokens, dim, block_size: Sizes.
        scale_fmt: Format of the scales.
        spare: Bytes after each block.
    """

    tokens: int
    dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    scale_fmt: str | None = None
    spare: int = 0
    seed: int = 0


@law(
    WRITE,
    cases=[
        IndexWrite(9, 16, 4),
        IndexWrite(7, 128, 64, torch.bfloat16, "ue8m0", spare=64, seed=1),
        IndexWrite(5, 20, 1, torch.float16, seed=2),
        IndexWrite(6, 4, 3, scale_fmt="ue8m0", seed=3),
        IndexWrite(0, 4, 3, seed=4),
    ],
)
def an_indexer_key_is_stored_as_codes_and_its_scale_after_all_codes(
    setting: Setting, case: IndexWrite
) -> None:
    """Zeros, tiny and large numbers, powers of two, NaN and infinity; no other byte changes."""
    pick, size, dim = Random(case.seed), case.block_size, case.dim
    generator = torch.Generator().manual_seed(case.seed)
    k = torch.randn(case.tokens, dim, generator=generator)
    for token, row in enumerate(k):
        row *= 10.0 ** pick.choice([-7, -5, -2, 0, 4])
        if token % 4 == 0:
            row[pick.randrange(dim)] = pick.choice([torch.inf, -torch.inf, torch.nan])
        if token % 4 == 1:
            row.copy_(torch.exp2(torch.randint(-9, 9, (dim,), generator=generator)))
        if token % 4 == 2:
            row.zero_()
    k = k.to(case.dtype)
    blocks, width = case.tokens // size + 2, size * (dim + 4)
    pages = torch.full((blocks, width + case.spare), FILL, dtype=torch.uint8)
    order = pick.sample(range(blocks * size), case.tokens)
    slots = [-1 if token % 5 == 3 else slot for token, slot in enumerate(order)]
    right = pages.numpy().copy()
    for slot, code, scale in zip(
        slots, *stored_by_hand(k, case.scale_fmt), strict=True
    ):
        if slot >= 0:
            put_by_hand(right[slot // size], slot % size, size, code, scale)
    pages = pages.to(setting.device)
    strides = (width + case.spare, dim + 4, 1)
    cache = pages.as_strided((blocks, size, dim + 4), strides)
    # a slice of a wider tensor, as of a fused projection
    wide = torch.zeros(case.tokens, dim + 5, dtype=case.dtype, device=setting.device)
    wide[:, 2:-3] = k.to(setting.device)
    mapping = torch.tensor(slots, dtype=torch.int64, device=setting.device)
    getattr(setting.candidate, WRITE)(wide[:, 2:-3], cache, mapping, case.scale_fmt)
    expect_same("cache", pages.cpu(), torch.from_numpy(right))


@dataclass(frozen=True)
class Indexed:
    """Requests whose keys are scored.

    Args:
        query_lens, seq_lens: New tokens and keys of each request.
        heads, dim, block_size: Sizes.
        is_exact: Whether all numbers are small integers, so that scores are exact.
        padding: Rows after the last request.
        spare: Columns that exceed the longest sequence.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 4
    dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    is_exact: bool = False
    padding: int = 0
    spare: int = 0
    seed: int = 0


@dataclass(frozen=True)
class IndexedCall:
    """The arguments of `index_scores` by name, the exact scores, and how large their terms are."""

    given: dict[str, Any]
    scores: Tensor
    sizes: Tensor


def build_indexed(case: Indexed, device: torch.device) -> IndexedCall:
    """Return a call. Blocks that no request has hold NaN, as codes and as scales."""
    pick, generator = Random(case.seed), torch.Generator().manual_seed(case.seed)
    size, dim, tokens = case.block_size, case.dim, sum(case.query_lens) + case.padding
    shape = (tokens, case.heads, dim)
    query = torch.randn(shape, generator=generator)
    weights = torch.randn(shape[:2], generator=generator)
    if case.is_exact:
        query = query.round().clamp(-2, 2)
        weights = weights.round().clamp(-2, 2)
    query = query.to(case.dtype)
    counts = [-(-length // size) for length in case.seq_lens]
    ids = pick.sample(range(sum(counts) + 3), sum(counts))
    width = max(counts, default=0) + 1
    table = torch.full((len(counts), width), 10**6, dtype=torch.int32)
    pages = np.full((sum(counts) + 3, size * (dim + 4)), 0xFF, dtype=np.uint8)
    longest = max(case.seq_lens, default=0) + case.spare
    scores = torch.full((tokens, longest), -torch.inf, dtype=torch.float64)
    sizes, first, start = torch.zeros_like(scores), 0, 0
    for req, (new, length) in enumerate(
        zip(case.query_lens, case.seq_lens, strict=True)
    ):
        row = ids[first : first + counts[req]]
        first += counts[req]
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
        k = torch.randn(length, dim, generator=generator)
        if case.is_exact:
            k = k.round().clamp(-3, 3)
            k[:, 0] = 3.5
        codes, scales = stored_by_hand(k, "ue8m0" if case.is_exact else None)
        for position in range(length):
            page = pages[row[position // size]]
            put_by_hand(page, position % size, size, codes[position], scales[position])
        numbers = torch.from_numpy(meant(codes, E4M3, 128))
        q = query[start : start + new].double()
        factor = torch.from_numpy(scales.astype(np.float64))
        products = torch.einsum("qhd,kd->qhk", q, numbers).relu()
        weight = weights[start : start + new, :, None].double()
        score = (products * weight).sum(1) * factor
        largest = torch.einsum("qhd,kd->qhk", q.abs(), numbers.abs()) * weight.abs()
        for token in range(new):
            end = max(0, length - new + token + 1)
            scores[start + token, :end] = score[token, :end]
            sizes[start + token, :end] = (largest.sum(1) * factor)[token, :end]
        start += new
    starts = np.cumsum([0, *case.query_lens]).astype(np.int32)
    cache = torch.from_numpy(pages).view(len(pages), size, dim + 4)
    given = {
        "query": query,
        "weights": weights,
        "kv_cache": cache,
        "block_table": table,
        "query_start_loc": torch.from_numpy(starts),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
    }
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in given.items()}
    return IndexedCall(moved | {"max_seq_len": longest}, scores, sizes)


SCORED = [
    Indexed((3, 1, 0), (9, 20, 4), padding=2, spare=3),
    Indexed((2, 5), (70, 5), heads=2, dim=128, block_size=64, dtype=torch.float8_e4m3fn,
            seed=1),
    Indexed((1, 2), (130, 1), heads=1, dim=20, block_size=1, dtype=torch.float16, seed=2),
    Indexed((4,), (4,), heads=33, dim=8, block_size=3, dtype=torch.bfloat16, seed=3),
    Indexed((), (), padding=2, spare=5, seed=4),
    Indexed((0,), (0,), seed=5),
]  # fmt: skip


@law(SCORE, cases=SCORED)
def an_index_score_is_the_weighted_sum_of_what_heads_have_above_zero(
    setting: Setting, case: Indexed
) -> None:
    """Keys of other requests, later keys and padding have none."""
    call = build_indexed(case, setting.device)
    tensors = {n: value for n, value in call.given.items() if isinstance(value, Tensor)}
    with kept(**tensors):
        found = getattr(setting.candidate, SCORE)(**call.given)
    expect_scores(found, call, case.heads + case.dim)


def expect_scores(found: Tensor, call: IndexedCall, terms: int) -> None:
    """Raise a Disagreement if a score differs by more than roundings of its terms in float32."""
    right = call.scores
    expect_same("dtype of the scores", found.dtype, torch.float32)
    expect_same("shape of the scores", list(found.shape), list(right.shape))
    stored = found.cpu().double()
    expect_same("keys without a score", stored == -torch.inf, right == -torch.inf)
    budget = terms * torch.finfo(torch.float32).eps * call.sizes
    off = torch.where(right == -torch.inf, 0.0, (stored - right).abs())
    wrong = ~(off <= budget)
    if bool(wrong.any()):
        token, key = wrong.nonzero()[0].tolist()
        raise Disagreement(
            "score", f"of token {token} and key {key}", float(stored[token, key]),
            float(right[token, key]),
        )  # fmt: skip


EXACT = [
    Indexed((3, 1, 9), (9, 20, 9), is_exact=True, spare=3),
    Indexed((16,), (70,), heads=2, is_exact=True, dtype=torch.float8_e4m3fn, seed=1),
    Indexed((2, 1), (5, 66), dim=8, block_size=64, is_exact=True, padding=1, seed=2),
]


@law(SCORE, SELECT, cases=[(case, topk) for case in EXACT for topk in (1, 4, 100)])
def the_selected_keys_are_those_of_exact_scores(
    setting: Setting, case: tuple[Indexed, int]
) -> None:
    """Of equal scores, which integers often have, those at the lowest positions.

    Each token selects the same keys as one request alone: whatever chunk or draft it is in.
    """
    plan, topk = case
    call = build_indexed(plan, setting.device)
    right = torch.full((len(call.scores), topk), -1, dtype=torch.int32)
    for token, row in enumerate(call.scores.tolist()):
        keys = [key for key, score in enumerate(row) if score > -torch.inf]
        best = sorted(keys, key=lambda key: (-row[key], key))[:topk]
        right[token, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    found = getattr(setting.candidate, SCORE)(**call.given)
    selected = getattr(setting.candidate, SELECT)(found, topk)
    expect_same("selected positions", selected.cpu(), right)
    # the last request's last token alone, as a decode
    given, last = call.given, sum(plan.query_lens) - 1
    alone = {
        "query": given["query"][last : last + 1],
        "weights": given["weights"][last : last + 1],
        "block_table": given["block_table"][-1:],
        "query_start_loc": given["query_start_loc"][:2].clamp(max=1),
        "seq_lens": given["seq_lens"][-1:],
    }
    found = getattr(setting.candidate, SCORE)(**given | alone)
    selected = getattr(setting.candidate, SELECT)(found, topk)
    expect_same(
        "selected positions of a decode", selected.cpu(), right[last : last + 1]
    )


@law(SELECT, cases=[(0, 3, 2), (5, 0, 2), (4, 7, 3), (3, 300, 64), (2, 5, 5)])
def keys_without_a_score_are_never_selected(
    setting: Setting, case: tuple[int, int, int]
) -> None:
    """Scores of -inf and NaN are none; infinite ones are the largest."""
    tokens, width, topk = case
    pick = Random(tokens * width)
    numbers = [-torch.inf, torch.nan, torch.inf, 0.0, -0.0, 1.0, -3.0, 3e38]
    rows = [[pick.choice(numbers) for _ in range(width)] for _ in range(tokens)]
    for row in rows:
        # and some that no other key has
        for key in pick.sample(range(width), width // 2):
            row[key] = float(np.float32(pick.gauss(0, 2)))
    right = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, row in enumerate(rows):
        keys = [key for key, score in enumerate(row) if score > -torch.inf]
        best = sorted(keys, key=lambda key: (-row[key], key))[:topk]
        right[token, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    # every other element of a wider tensor
    wide = torch.full((tokens, 2 * width), 9.0, device=setting.device)
    wide[:, ::2] = torch.tensor(rows).view(tokens, width).to(setting.device)
    with kept(scores=wide):
        found = getattr(setting.candidate, SELECT)(wide[:, ::2], topk)
    expect_same("selected positions", found.cpu(), right)


def arguments_of_write(device: torch.device) -> dict[str, Any]:
    """Return a write of two keys to a cache of 2 blocks of 4 slots."""
    return {
        "k": torch.ones(2, 8, device=device),
        "kv_cache": torch.full((2, 4, 12), FILL, dtype=torch.uint8, device=device),
        "slot_mapping": torch.tensor([7, -1], device=device),
        "scale_fmt": None,
    }


BAD_WRITES: dict[str, Any] = {
    "another width": {"k": torch.ones(2, 12)},
    "another scale format": {"scale_fmt": "fp32"},
    "too many slots": {"slot_mapping": torch.tensor([0, 1, 2])},
    "a cache of elements": {"kv_cache": torch.zeros(2, 4, 12)},
    "a width that no scale fits": {
        "k": torch.ones(2, 7),
        "kv_cache": torch.zeros(2, 4, 11, dtype=torch.uint8),
    },
    "gaps between the tokens of a block": {
        "kv_cache": torch.zeros(2, 4, 16, dtype=torch.uint8),
        "used": 12,
    },
}


@law(WRITE, cases=sorted(BAD_WRITES), claim="rejects shapes")
def a_write_that_does_not_fit_the_indexer_cache_is_rejected(
    setting: Setting, what: str
) -> None:
    given = arguments_of_write(setting.device)
    given |= {
        name: value.to(setting.device) if isinstance(value, Tensor) else value
        for name, value in BAD_WRITES[what].items()
    }
    # a copy to a device would pack the tokens of a slice
    given["kv_cache"] = given["kv_cache"][..., : given.pop("used", None)]
    write = getattr(setting.candidate, WRITE)
    expect_rejection(what, lambda: write(**given), {"cache": given["kv_cache"]})


@law(WRITE, cases=[(8, -1), (3, 3)], claim="rejects contents")
def a_key_without_a_slot_of_its_own_in_the_indexer_cache_is_rejected(
    setting: Setting, slots: tuple[int, int]
) -> None:
    given = arguments_of_write(setting.device)
    given["slot_mapping"] = torch.tensor(slots, device=setting.device)
    write = getattr(setting.candidate, WRITE)
    expect_rejection("slots", lambda: write(**given), {"cache": given["kv_cache"]})


@law(SCORE, cases=["page size", "length", "bound"], claim="rejects contents")
def scores_of_keys_that_the_indexer_cache_lacks_are_rejected(
    setting: Setting, what: str
) -> None:
    """With pages of twice the size there are half as many, and block ids are past them."""
    case = replace(SCORED[0], seq_lens=(9, 40, 4))
    given = build_indexed(case, setting.device).given
    score = getattr(setting.candidate, SCORE)
    score(**given)
    if what == "page size":
        cache = given["kv_cache"]
        blocks = len(cache) // 2
        given["kv_cache"] = cache[: 2 * blocks].reshape(blocks, 8, 20)
    if what == "length":
        given["seq_lens"] = given["seq_lens"] + 100
    if what == "bound":
        given["max_seq_len"] = 39
    expect_rejection(f"another {what}", lambda: score(**given))


BAD_SCORES: dict[str, dict[str, tuple[int, ...]]] = {
    "a weight too few": {"weights": (6, 3)},
    "heads of another size": {"query": (6, 4, 12)},
    "a request too few": {"seq_lens": (2,)},
    "starts of fewer requests": {"query_start_loc": (3,)},
}


@law(SCORE, SELECT, cases=sorted(BAD_SCORES), claim="rejects shapes")
def impossible_scores_are_rejected(setting: Setting, what: str) -> None:
    given = build_indexed(SCORED[0], setting.device).given
    for name, shape in BAD_SCORES[what].items():
        given[name] = given[name].new_zeros(shape)
    expect_rejection(what, lambda: getattr(setting.candidate, SCORE)(**given))
    scores = torch.zeros(2, 3, device=setting.device)
    select = getattr(setting.candidate, SELECT)
    expect_rejection("scores of one axis", lambda: select(scores[0], 1))
    expect_rejection("scores in float64", lambda: select(scores.double(), 1))
    expect_rejection("no key", lambda: select(scores, 0))
