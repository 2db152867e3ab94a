"""Laws of needles in long contexts: from codes of any format one key among 131,072 is found.

Before a needle is stored, its weight is 1 - 3e-6. It must be at least 0.99 after that, unless the
format declares which rows it loses (`CacheFormat.loses`). On a CPU there are 1,024 keys, because
Triton's interpreter is slow.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import FORMATS, CacheFormat
from ..base.support import OutsideSupport
from ..candidates.calls.calling import run_call
from ..candidates.setting import Setting
from ..cases.batches import GARBAGE, BatchPlan, empty_cache
from ..cases.caches import CacheSizes
from ..cases.options import Call, stored_as
from ..checks.coded_caches import CODED, PACKED, fits, make_coded, put
from ..checks.expect import Disagreement
from ..oracles.cache_formats import encode_by_hand, most_off
from .cache_formats import name_of
from .law import law

KEYS, KEYS_ON_A_CPU = 131_072, 1_024
LEVEL = 25.0
"""Score of a needle. Those of other keys are normally distributed, with a variance of 1."""
LOST = 0.01
"""The weight that a needle may lose to codes."""
GIVEN_SCALE = 0.25
"""Scale of keys and values, where it is given."""
HEADS = 8
"""Query heads, each with a needle of its own."""
FRONT = 256
"""Blocks before those of the request, whose ids do not fit eight bits."""
STEPS_OF_FP8 = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""How far an FP8 number may be from what was rounded, relative to it."""


@dataclass(frozen=True)
class FarNeedles:
    """Needles among the keys of one request with one KV head.

    Args:
        form: Name of the cache format.
        rows: "directions" if needles have any directions, "channels" if each has one channel only.
        places: "tiles", "splits" or "powers": the edges on whose sides needles are.
        new_tokens: Queries. They come after all needles.
        dtype: Of queries, and of keys and values before they are stored.
        seed: Of the numbers.
        block_size: Slots per block.
    """

    form: str
    rows: str
    places: str
    new_tokens: int = 1
    dtype: torch.dtype = torch.float16
    seed: int = 0
    block_size: int = 16


def places_of(kind: str, keys: int, block_size: int) -> list[int]:
    """Return the positions of the needles: at most HEADS, all before `keys`."""
    if kind == "tiles":
        places = [0, 1, block_size - 1, block_size, 63, 64, 127, 128]
    elif kind == "splits":
        # of 8, 4 and 3 equal splits
        places = [keys // 8 - 1, keys // 8, keys // 4 - 1, keys // 4]
        places += [keys // 3, keys - keys // 8, keys - 2, keys - 1]
    else:
        places = [255, 256, 1023, 1024, 4095, 4096, 65_535, 65_536]
    return sorted({place for place in places if 0 <= place < keys})


def directions_of(
    rows: str, form: CacheFormat, count: int, head_size: int, seed: int
) -> Tensor:
    """Return orthogonal directions of length 1: [needles, head_size]."""
    if rows == "channels":
        # a format that loses rows loses those of the first channel
        first = 1 if form.loses else 0
        step = max(1, (head_size - first) // count)
        return torch.eye(head_size)[first::step][:count]
    generator = torch.Generator().manual_seed(seed)
    drawn: Tensor = torch.randn(head_size, count, generator=generator)
    found: Tensor = torch.linalg.qr(drawn)[0].T
    return found


def make_cache(form: CacheFormat, plan: BatchPlan, device: torch.device) -> Call:
    """Return a call over a cache of the plan's request without contents."""
    (keys,), (new,) = plan.kv_lens, plan.query_lens
    blocks, size = -(-keys // plan.block_size), plan.head_size
    arguments: dict[str, Any] = {}
    num_blocks = FRONT + blocks
    sizes = CacheSizes(num_blocks, plan.block_size, 1, size, size, plan.dtype)
    if form.dtype is None:
        slots = (num_blocks, plan.block_size, 1, size, plan.dtype, device)
        arguments["key_cache"], arguments["value_cache"] = empty_cache(
            "separate", *slots
        )
    else:
        cache = make_coded(form, sizes, device, plan.seed, PACKED)
        arguments |= {"key_cache": cache.key, "value_cache": cache.value}
        arguments |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        arguments |= dict.fromkeys(cache.options, 1.0)
        if not form.is_measured:
            arguments |= {"k_scale": GIVEN_SCALE, "v_scale": GIVEN_SCALE}
    generator = torch.Generator().manual_seed(plan.seed)
    row = FRONT + torch.randperm(blocks, generator=generator)
    table = torch.cat([row, torch.tensor(GARBAGE)]).int()[None]
    arguments |= {
        "causal": True,
        "query": torch.zeros(new, plan.group, size, dtype=plan.dtype, device=device),
        "block_table": table.to(device),
        "query_start_loc": torch.tensor([0, new], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([keys], dtype=torch.int32, device=device),
        "max_query_len": new,
        "max_seq_len": keys,
    }
    return Call(
        "paged_attention", arguments, plan.dtype, plan.dtype, False, (new,), (keys,),
        [row.tolist()],
    )  # fmt: skip


def fill_cache(
    setting: Setting, form: CacheFormat, call: Call, new: list[Tensor]
) -> None:
    """Write keys and values by the candidate, or by hand if it does not write this format.

    Args:
        new: Keys and values, [tokens, 1, head_size].
    """
    arguments = call.arguments
    size = arguments["key_cache"].shape[1]
    position = torch.arange(len(new[0]))
    row = torch.tensor(call.rows[0])
    slots = row[position // size] * size + position % size
    names = ["key_cache", "value_cache", "k_scale", "v_scale"]
    names += ["k_global_scale", "v_global_scale"]
    cache = {name: arguments[name] for name in names if name in arguments}
    device = call.query.device
    try:
        if "reshape_and_cache" not in setting.candidate.operations:
            raise OutsideSupport("no write")
        setting.candidate.reshape_and_cache(
            *(side.to(device) for side in new), slot_mapping=slots.to(device), **cache,
            **name_of(form),
        )  # fmt: skip
    except OutsideSupport:
        for side, name in zip(new, ("key", "value"), strict=True):
            write_by_hand(form, side, name, cache, slots)


def write_by_hand(
    form: CacheFormat, new: Tensor, name: str, cache: dict[str, Any], slots: Tensor
) -> None:
    """Write the keys or the values to their slots."""
    stored, scale = cache[f"{name}_cache"], cache.get(f"{name[0]}_scale")
    at = tuple(
        index.to(stored.device)
        for index in (slots // stored.shape[1], slots % stored.shape[1])
    )
    measured = None
    if form in CODED:
        codes, measured = encode_by_hand(
            form, new, cache.get(f"{name[0]}_global_scale")
        )
    else:
        codes = stored_as(new, GIVEN_SCALE, stored.dtype)
    put(stored, at, codes)
    if isinstance(scale, Tensor) and measured is not None:
        put(scale, at, measured)


def off_by(form: CacheFormat, values: Tensor) -> Tensor:
    """Return how far stored values may be from what they were: [..., elements] in float64."""
    if form in CODED:
        return most_off(form, values)[0]
    sizes = values.double().abs()
    if form.dtype is None:
        return torch.zeros_like(sizes)
    return sizes * STEPS_OF_FP8[form.dtype] + GIVEN_SCALE * 2.0**-10


CASES = [
    FarNeedles(name, rows, places, seed=seed)
    for seed, name in enumerate(FORMATS)
    for rows, places in (("directions", "splits"), ("channels", "tiles"))
]
CASES += [
    FarNeedles("int8_per_token_head", "directions", "powers", 20, torch.bfloat16, 3),
    FarNeedles("int4_per_token_head", "channels", "powers", 5, torch.bfloat16, 4),
    FarNeedles("fp8_e4m3", "directions", "powers", 40, seed=5),
    FarNeedles("nvfp4", "directions", "powers", 3, seed=6, block_size=3),
]


@law("paged_attention", cases=CASES)
def a_needle_among_131072_keys_is_found_in_every_format(
    setting: Setting, case: FarNeedles
) -> None:
    """A candidate that writes the format stores the keys itself. Each query head has a needle."""
    form, device = FORMATS[case.form], setting.device
    keys = KEYS if device.type == "cuda" else KEYS_ON_A_CPU
    plan = setting.fit(
        BatchPlan(
            (case.new_tokens,), (keys,), kv_heads=1, group=HEADS, head_size=64,
            dtype=case.dtype, seed=case.seed, block_size=case.block_size,
        )
    )  # fmt: skip
    (keys,), (news,), size = plan.kv_lens, plan.query_lens, plan.head_size
    if not news or not fits(form, size):
        raise OutsideSupport(f"{form.name} with head size {size}")
    heads = min(plan.group, size)
    # step: draw keys and values, and put the needles among them
    places = places_of(case.places, keys - news + 1, plan.block_size)[:heads]
    generator = torch.Generator().manual_seed(case.seed)
    key, value = torch.randn(2, keys, 1, size, generator=generator)
    lean = directions_of(case.rows, form, len(places), size, case.seed)
    key[places, 0], value[places] = LEVEL * lean, value[places] + 3
    new = [side.to(plan.dtype) for side in (key, value)]
    # step: store them, and attend with queries along the needles
    call = make_cache(form, plan, device)
    fill_cache(setting, form, call, new)
    needle = torch.arange(plan.group) % len(places)
    query = (lean * size**0.5)[needle].to(plan.dtype)
    call = call.changed(query=query.expand(news, -1, -1).contiguous())
    out, _ = run_call(setting, call)
    # step: the result of each head is the value of its needle
    right = new[1][places, 0].double()
    largest = new[1].abs().max().double()
    eps = torch.finfo(plan.dtype).eps
    allowed = off_by(form, new[1][places])[:, 0] + (2 * LOST + 2 * eps) * largest
    share = ((out.cpu().double() - right[needle]).abs() / allowed[needle]).nan_to_num(
        torch.inf, posinf=torch.inf
    )
    if share.max() > 1:
        token, head, element = (
            int(index) for index in torch.unravel_index(share.argmax(), share.shape)
        )
        at = places[int(needle[head])]
        raise Disagreement(
            "output",
            f"at [{token}, {head}, {element}], where key {at} of {keys} has all of the weight,"
            f" {form.name}",
            float(out[token, head, element]),
            float(right[needle[head], element]),
        )
