"""Laws of a cache of latents (MLA).

Written entries are exact, byte by byte, and all other memory is unchanged. The widths come from the
configuration. Invalid calls raise before anything is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import pack_options
from ...contract.kinds import PAD_SLOT_ID
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, NAN, put_on
from ..cases.caches import FP8
from ..cases.latent_batches import (
    LAYOUTS,
    LatentPlan,
    build_latents,
    empty_latent_cache,
)
from ..cases.reuse import compiled
from ..checks.canaries import copy_of, expect_memory, kept, packed
from ..checks.expect import expect_rejection, expect_same
from ..oracles.brute_force import quantise_by_hand
from .invariance import FAR
from .latents import WAYS, arguments_of, expect_latents, run_latents
from .law import law


@dataclass(frozen=True)
class LatentWrite:
    """New tokens and their slots, in small sizes.

    Args:
        slots: The slot of each token in the slot mapping. A token with a negative slot is not
            stored.
        padding: The number of tokens after the end of the slot mapping.
        blocks, block_size: The size of the cache.
        rank, rope: The widths of the latents and of the rope keys.
        scale: The scale of an FP8 cache. It is passed as a tensor if `is_tensor` is True.
        wide: Whether latents and rope keys are slices of one projection.
    """

    slots: tuple[int, ...]
    padding: int
    blocks: int
    block_size: int
    rank: int
    rope: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None
    scale: float
    is_tensor: bool
    layout: str
    wide: bool
    seed: int


@st.composite
def writes(draw: st.DrawFn) -> LatentWrite:
    """Return a write, often to the last slot of the cache; one seed determines all of it."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    blocks, size = pick.choice([1, 3, 7]), kernel.choice([1, 3, 16, 24])
    count = min(pick.choice([0, 1, 2, blocks * size // 2]), blocks * size)
    slots = pick.sample(range(blocks * size), count)
    if count and pick.random() < 0.5:
        slots[0] = blocks * size - 1 if blocks * size - 1 not in slots else slots[0]
    skipped = pick.choice([PAD_SLOT_ID, PAD_SLOT_ID, -7, -(2**40)])
    kept_slots = [skipped if pick.random() < 0.2 else slot for slot in slots]
    return LatentWrite(
        tuple(kept_slots),
        pick.choice([0, 0, 2]),
        blocks,
        size,
        kernel.choice([1, 5, 16, 40]),
        kernel.choice([1, 24, 40]),
        kernel.choice(DTYPES),
        kernel.choice([None, None, *FP8]),
        pick.choice([0.5, 0.03, 1.7, 50.0]),
        kernel.random() < 0.5,
        kernel.choice(LAYOUTS),
        pick.random() < 0.5,
        pick.randrange(2**16),
    )


@law("concat_and_cache_mla", cases=writes())
def a_latent_and_its_rope_key_are_written_to_their_slot(
    setting: Setting, write: LatentWrite
) -> None:
    """The rope key follows the latent; nothing else is written. FP8 values saturate."""
    plan = LatentPlan(
        (),
        (),
        block_size=write.block_size,
        rank=write.rank,
        rope=write.rope,
        dtype=write.dtype,
        cache_dtype=write.cache_dtype,
        layout=write.layout,
    )
    generator = torch.Generator().manual_seed(write.seed)
    tokens, width = len(write.slots) + write.padding, write.rank + write.rope
    numbers = 9 * torch.randn(tokens, width, generator=generator)
    numbers[:, 0] *= 1e3
    # a rope key may be much larger than its latent
    numbers[:, -1] *= 1e3
    new = numbers.to(write.dtype)
    fused = torch.full((tokens, width + 3), NAN, dtype=write.dtype)
    fused[:, :width] = new
    source = (fused if write.wide else new).to(setting.device)
    parts = source[:, : write.rank], source[:, write.rank : width]
    if not write.wide:
        parts = parts[0].contiguous(), parts[1].contiguous()
    cache = put_on(empty_latent_cache(plan, write.blocks), setting.device)
    right = copy_of(cache)
    for token, slot in enumerate(write.slots):
        if slot < 0:
            continue
        row = new[token]
        if write.cache_dtype is not None:
            # the scale and the dividend are float32
            scale = torch.tensor(write.scale)
            divided = row.float() / scale
            row = quantise_by_hand(divided[None, None], 1.0, write.cache_dtype)[0, 0]
        right[slot // write.block_size, slot % write.block_size] = row
    scale = torch.tensor(write.scale, device=setting.device)
    given = (scale if write.is_tensor else write.scale,)
    mapping = torch.tensor(write.slots, dtype=torch.int64, device=setting.device)
    with kept(kv_c=parts[0], k_pe=parts[1], slot_mapping=mapping):
        found = setting.candidate.concat_and_cache_mla(
            *parts, cache, mapping, *(given if write.cache_dtype else ())
        )
    expect_same("what it returns", found, None)
    expect_memory("kv_cache", cache, right)


@law("concat_and_cache_mla", "latent_decode_attention", cases=[2, 1])
def latents_past_two_billion_elements_are_found(setting: Setting, block: int) -> None:
    """The third block is past 2**31 elements; a 32-bit offset would become negative."""
    plan = LatentPlan((1,), (33,), heads=1, dtype=torch.float16, needle="last")
    batch = build_latents(plan, setting.device)
    # on a host, only the touched part takes memory
    memory = torch.empty(2 * FAR + 2**12, dtype=torch.float16, device=setting.device)
    far = memory.as_strided((3, 16, 24), (FAR, 24, 1)).fill_(NAN)
    order = [2, 1, 0] if block == 2 else [0, 2, 1]
    own = batch.kv_cache[batch.rows[0]].flatten(0, 1)[:33]
    slots = [order[position // 16] * 16 + position % 16 for position in range(33)]
    setting.candidate.concat_and_cache_mla(
        own[:, :16],
        own[:, 16:],
        far,
        torch.tensor(slots, dtype=torch.int64, device=setting.device),
    )
    for position, slot in enumerate(slots):
        expect_same(f"slot {slot}", far[slot // 16, slot % 16], own[position])
    table = torch.tensor([order], dtype=torch.int32, device=setting.device)
    changes = {"kv_cache": far, "block_table": table}
    found = run_latents(setting, batch, WAYS[0], **changes)
    expect_latents(setting, batch, WAYS[0], found)


@law("concat_and_cache_mla", cases=["token", "element"])
def offsets_of_new_latents_have_64_bits(setting: Setting, axis: str) -> None:
    """The latents and rope keys are views of large tensors, of which nothing else is touched."""
    far = {"token": (FAR, 1), "element": (3, FAR)}[axis]
    memory = torch.empty(2 * FAR + 2**12, dtype=torch.float16, device=setting.device)
    new = memory.as_strided((3, 3), far)
    new.copy_(torch.arange(9.0).view(3, 3))
    slots, device = [2, 0, 3], setting.device
    for rank in (3, 1):
        given = (new[:, :rank], new[:, 3 - rank :])
        cache = torch.zeros(1, 4, 2 * rank, dtype=torch.float16, device=device)
        mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        setting.candidate.concat_and_cache_mla(*given, cache, mapping)
        expect_same("cache", packed(cache[0, slots]), packed(torch.cat(given, 1)))


@law("latent_prefill_attention", cases=[2, 1])
def latents_past_two_billion_elements_are_gathered(
    setting: Setting, block: int
) -> None:
    """The third block of the cache is the first or the last block of the context."""
    plan = LatentPlan((3,), (36,), heads=1, dtype=torch.float16, needle="first")
    batch = build_latents(plan, setting.device)
    memory = torch.empty(2 * FAR + 2**12, dtype=torch.float16, device=setting.device)
    far = memory.as_strided((3, 16, 24), (FAR, 24, 1)).fill_(NAN)
    order = [2, 1, 0] if block == 2 else [0, 1, 2]
    far[order] = batch.kv_cache[batch.rows[0]]
    table = torch.tensor([order], dtype=torch.int32, device=setting.device)
    changes = {"kv_cache": far, "block_table": table}
    found = run_latents(setting, batch, WAYS[1], **changes)
    expect_latents(setting, batch, WAYS[1], found)


WIDTHS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 96,
}


@law("get_mla_dims", cases=["missing", None, 7, 1536])
def latent_widths_are_those_of_the_configuration(
    setting: Setting, query: int | str | None
) -> None:
    """If queries are not compressed, q_lora_rank is None or missing."""
    named = {} if query == "missing" else {"q_lora_rank": query}
    dims = setting.candidate.get_mla_dims(SimpleNamespace(**WIDTHS, **named))
    for name, width in WIDTHS.items():
        expect_same(name, getattr(dims, name), width)
    expect_same("q_lora_rank", dims.q_lora_rank, named.get("q_lora_rank"))


@law(
    "get_mla_dims",
    cases=[(name, width) for name in WIDTHS for width in ("missing", None, 0, -1)],
)
def a_model_without_latents_has_no_widths(
    setting: Setting, case: tuple[str, int | str | None]
) -> None:
    name, width = case
    widths: dict[str, Any] = WIDTHS | {name: width}
    if width == "missing":
        del widths[name]
    config = SimpleNamespace(**widths)
    expect_rejection(
        f"{name} of {width}", lambda: setting.candidate.get_mla_dims(config)
    )


Change = Callable[[dict[str, Any]], dict[str, Any]]


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def lse_in_latents(given: dict[str, Any]) -> dict[str, Any]:
    """Return new latents whose first numbers are the log-sum-exps too."""
    latents = given["kv_c"].contiguous()
    return {"kv_c": latents, "lse": latents.view(-1)[:12].view(3, 4)}


UNFIT: dict[str, Change] = {
    "a cache of four axes": lambda given: {"kv_cache": given["kv_cache"][None]},
    "a cache of another width": lambda given: {"kv_cache": given["kv_cache"][..., :23]},
    "a cache of another dtype": lambda given: {"kv_cache": given["kv_cache"].half()},
    "an FP8 cache without a scale": lambda given: {
        "kv_cache": given["kv_cache"].to(FP8[0])
    },
    "a scale of a cache that has none": lambda given: {"k_scale": 0.5},
    "rope queries of other heads": lambda given: {"q_pe": given["q_pe"][:, :2]},
    "rope queries of other tokens": lambda given: {"q_pe": given["q_pe"][:3]},
    "rope queries of another dtype": lambda given: {"q_pe": given["q_pe"].half()},
    "keys' projection of other heads": lambda given: {"w_uk": given["w_uk"][:2]},
    "keys' projection turned round": lambda given: {
        "w_uk": given["w_uk"][:, :5].transpose(1, 2)
    },
    "values' projection of other latents": lambda given: {
        "w_uv": given["w_uv"][:, :15]
    },
    "values' projection of another dtype": lambda given: {
        "w_uv": given["w_uv"].double()
    },
    "a table of 64 bits": lambda given: {"block_table": given["block_table"].long()},
    "lengths of other requests": lambda given: {"seq_lens": ints(20)},
    "lengths of 64 bits": lambda given: {"seq_lens": given["seq_lens"].long()},
    "too few starts": lambda given: {"query_start_loc": ints(0, 3)},
    "a negative bound": lambda given: {"max_query_len": -1},
    "a bound that no row holds": lambda given: {"max_seq_len": 10**6},
    "an output of another width": lambda given: {"out": torch.zeros(4, 3, 15)},
    "an FP8 output": lambda given: {"out": torch.zeros(4, 3, 16).to(FP8[0])},
    "a log-sum-exp of tokens by heads": lambda given: {"lse": torch.zeros(4, 3)},
    "a log-sum-exp of 16 bits": lambda given: {"lse": torch.zeros(3, 4).half()},
    "an expanded output": lambda given: {"out": torch.zeros(1, 1, 16).expand(4, 3, 16)},
    "an output in the cache": lambda given: {
        "out": given["kv_cache"].view(-1)[: 4 * 3 * 16].view(4, 3, 16)
    },
    "a cap": lambda given: {"logits_soft_cap": 30.0},
    "a scale of values": lambda given: {"v_scale": 0.5},
    "no causal mask": lambda given: {"causal": False},
}
DECODE: dict[str, Change] = {"a window of nothing": lambda given: {"sliding_window": 0}}
PREFILL: dict[str, Change] = {
    "a window": lambda given: {"sliding_window": 7},
    "latents of other tokens": lambda given: {"kv_c": given["kv_c"][:3]},
    "a log-sum-exp in the latents": lse_in_latents,
    "latents of another width": lambda given: {"kv_c": given["kv_c"][:, :15]},
    "rope keys of another dtype": lambda given: {"k_pe": given["k_pe"].half()},
    "a negative context": lambda given: {"num_context_tokens": -1},
    "chunks of nothing": lambda given: {"max_context_chunk": 0},
}
CONTENTS: dict[str, Change] = {
    "starts that fall": lambda given: {"query_start_loc": ints(0, 3, 2)},
    "starts past the tokens": lambda given: {"query_start_loc": ints(0, 3, 5)},
    "more new tokens than keys": lambda given: {"seq_lens": ints(2, 9)},
    "a bound below the queries": lambda given: {"max_query_len": 2},
    "a bound below the keys": lambda given: {"max_seq_len": 19},
}
PREFILL_CONTENTS: dict[str, Change] = {
    "a context longer than it says": lambda given: {"num_context_tokens": 24}
}


def expect_rejected(setting: Setting, way: str, what: str, change: Change) -> None:
    batch = build_latents(LatentPlan((3, 1), (20, 9)), setting.device)
    given = arguments_of(batch, way)
    with setting.device:
        given |= {"out": torch.full((4, 3, 16), 7.0), "lse": torch.full((3, 4), 7.0)}
        given |= change(given)
    operation = getattr(setting.candidate, way)
    with kept(out=given["out"], lse=given["lse"]):
        expect_rejection(what, lambda: operation(**pack_options(**given)))


@law(
    *WAYS,
    cases=[
        *((way, what) for way in WAYS for what in UNFIT),
        *((WAYS[0], what) for what in DECODE),
        *((WAYS[1], what) for what in PREFILL),
    ],
    claim="rejects shapes",
)
def latent_attention_rejects_invalid_arguments(
    setting: Setting, case: tuple[str, str]
) -> None:
    way, what = case
    expect_rejected(setting, way, what, (UNFIT | DECODE | PREFILL)[what])


@law(
    *WAYS,
    cases=[
        *((way, what) for way in WAYS for what in CONTENTS),
        *((WAYS[1], what) for what in PREFILL_CONTENTS),
    ],
    claim="rejects contents",
)
def invalid_batches_of_latents_are_rejected_if_contents_are_checked(
    setting: Setting, case: tuple[str, str]
) -> None:
    way, what = case
    expect_rejected(setting, way, what, (CONTENTS | PREFILL_CONTENTS)[what])


UNWRITABLE: dict[str, dict[str, Any]] = {
    "latents of two widths": {"kv_c": torch.zeros(3, 5)},
    "rope keys of other tokens": {"k_pe": torch.zeros(2, 2)},
    "rope keys of another dtype": {"k_pe": torch.zeros(3, 2).half()},
    "latents of another dtype": {
        "kv_c": torch.zeros(3, 4).half(),
        "k_pe": torch.zeros(3, 2).half(),
    },
    "slots of 32 bits": {"slot_mapping": ints(0, 1, 2)},
    "more slots than tokens": {"slot_mapping": torch.arange(4)},
    "slots of two axes": {"slot_mapping": torch.arange(3)[None]},
    "a scale of a cache that has none": {"scale": 0.5},
    "an FP8 cache without a scale": {"kv_cache": torch.zeros(2, 4, 6).to(FP8[0])},
    "a scale of nothing": {
        "kv_cache": torch.zeros(2, 4, 6).to(FP8[0]),
        "scale": 0.0,
    },
    "a cache of four axes": {"kv_cache": torch.zeros(2, 4, 1, 6)},
}
UNWRITABLE_CONTENTS: dict[str, dict[str, Any]] = {
    "a slot past the cache": {"slot_mapping": torch.tensor([0, 8, 1])},
    "two tokens for one slot": {"slot_mapping": torch.tensor([0, 5, 5])},
}


def expect_unwritten(setting: Setting, what: str, changes: dict[str, Any]) -> None:
    wide = torch.full((4, 4, 6), 7.0)
    given: dict[str, Any] = {
        "kv_c": torch.zeros(3, 4),
        "k_pe": torch.zeros(3, 2),
        "kv_cache": wide[1:3],
        "slot_mapping": torch.arange(3),
    }
    moved = {
        name: value.to(setting.device) if isinstance(value, Tensor) else value
        for name, value in (given | changes).items()
    }
    with kept(kv_cache=moved["kv_cache"]):
        expect_rejection(what, lambda: setting.candidate.concat_and_cache_mla(**moved))


@law("concat_and_cache_mla", cases=[*UNWRITABLE], claim="rejects shapes")
def latents_that_do_not_fit_the_cache_are_rejected(setting: Setting, what: str) -> None:
    expect_unwritten(setting, what, UNWRITABLE[what])


@law("concat_and_cache_mla", cases=[*UNWRITABLE_CONTENTS], claim="rejects contents")
def invalid_slots_of_latents_are_rejected_if_contents_are_checked(
    setting: Setting, what: str
) -> None:
    expect_unwritten(setting, what, UNWRITABLE_CONTENTS[what])
