"""Calls over caches that are much larger than what a call may allocate.

Contents do not matter: codes are zeros, and scales ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.cache_formats import CacheFormat, ScaleAxes
from pagetwin.contract.latent_formats import LatentFormat
from pagetwin.contract.operations import load_implementation
from torch import Tensor

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cache and of the requests that fill it.

    Args:
        requests, keys: Requests, and the keys of each.
        kv_heads, group, head_size, block_size: As in a call of paged attention.
        heads: Query heads of latent attention.
        new_tokens: New tokens of a request that is computed as a prefill.
    """

    requests: int
    keys: int
    kv_heads: int
    group: int
    head_size: int
    block_size: int
    heads: int
    new_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests."""
        return self.requests * self.keys // self.block_size

    def table(self, requests: int, device: torch.device) -> Tensor:
        """Return [requests, blocks] the block table of the first requests."""
        ids = torch.arange(self.num_blocks, dtype=torch.int32, device=device)
        return ids.view(self.requests, -1)[:requests]

    def batch(
        self, requests: int, new_tokens: int, device: torch.device
    ) -> dict[str, Any]:
        """Return the arguments of a batch in which all requests have as many new tokens."""
        starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        return {
            "block_table": self.table(requests, device),
            "query_start_loc": starts * new_tokens,
            "seq_lens": starts.new_full((requests,), self.keys),
            "max_query_len": new_tokens,
            "max_seq_len": self.keys,
        }


ON_A_CPU = Sizes(4, 256, 2, 2, 64, 16, heads=2, new_tokens=24)
ON_A_GPU = Sizes(32, 16384, 8, 4, 128, 16, heads=16, new_tokens=512)
"""524,288 keys: 512 MiB of codes of four bits, and 304 MiB of the smallest latent records."""


@dataclass(frozen=True)
class LargeCall:
    """One call, and what it may allocate.

    Args:
        run: Makes the call, and returns its results.
        cache: The tensors of the cache, which exist before the call.
        result_bytes: What results take, in float32 if they are rounded at the end.
        converted_bytes: What a cache in 16 bits takes, if the call is one that may convert it.
    """

    run: Callable[[], object]
    cache: tuple[Tensor, ...]
    result_bytes: int
    converted_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        return sum(tensor.nbytes for tensor in self.cache)


def make_cache(form: CacheFormat, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return a cache of keys and values by the names of arguments, with its scales."""
    slots = (sizes.num_blocks, sizes.block_size, sizes.kv_heads)
    shape = (*slots, form.elements(sizes.head_size))
    made: dict[str, Any] = {}
    for name in ("key_cache", "value_cache"):
        stored = torch.zeros(
            shape, dtype=form.dtype or query_dtype(device), device=device
        )
        made[name] = stored
        scale: Tensor | None = None
        if ScaleAxes.TOKEN_HEAD in form.scales:
            scale = torch.ones(slots, device=device)
        elif ScaleAxes.BLOCK in form.scales:
            blocks = sizes.head_size // form.channels_per_scale
            ones = torch.ones(*slots, blocks, dtype=torch.float32, device=device)
            scale = ones.to(torch.float8_e4m3fn)
            made[f"{name[0]}_global_scale"] = 1.0
        elif form.is_quantised:
            scale = torch.ones(sizes.kv_heads, device=device)
        if scale is not None:
            made[f"{name[0]}_scale"] = scale
    return made


def query_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of queries: bfloat16, or float16 in the interpreter."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def tensors_of(cache: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors among arguments."""
    return tuple(value for value in cache.values() if isinstance(value, Tensor))


def attention_call(
    form: CacheFormat,
    sizes: Sizes,
    device: torch.device,
    requests: int,
    new_tokens: int,
    operation: str = "paged_attention",
    gathers: bool = False,
    **options: Any,
) -> LargeCall:
    """Return a call of attention in which the last tokens of all requests are new.

    Args:
        gathers: Whether the keys and values of all requests are copied first, in the dtype of
            the queries.
    """
    cache = make_cache(form, sizes, device)
    heads = sizes.kv_heads * sizes.group
    shape = (requests * new_tokens, heads, sizes.head_size)
    query = torch.zeros(shape, dtype=query_dtype(device), device=device)
    arguments = {"query": query} | cache | sizes.batch(requests, new_tokens, device)
    shared = options.get("common_prefix_len", 0) // sizes.block_size
    arguments["block_table"][:, :shared] = arguments["block_table"][0, :shared].clone()
    attend = getattr(load_implementation("optimized"), operation)
    is_converted = form.scales_whole_rows and new_tokens > 16
    converted = 0
    if is_converted:
        keys = requests * -(-sizes.keys // 128) * 128
        converted = 2 * keys * sizes.kv_heads * 2 * sizes.head_size

    def run() -> object:
        held = []
        if gathers:
            blocks = arguments["block_table"].long()
            held = [
                cache[name].view(torch.uint8)[blocks].to(query.dtype)
                for name in ("key_cache", "value_cache")
                for _ in range(form.codes_per_element)
            ]
        return held, attend(**pack_options(**arguments, **options))

    return LargeCall(
        run,
        tensors_of(cache),
        # in the dtype of the queries and in float32, and a log-sum-exp
        query.numel() * (query.element_size() + 4) + 4 * shape[0] * heads,
        converted if converted <= 512 * MIB else 0,
    )


def write_call(form: CacheFormat, sizes: Sizes, device: torch.device) -> LargeCall:
    """Return a write of new tokens that are scattered over the cache."""
    cache = make_cache(form, sizes, device)
    shape = (sizes.new_tokens, sizes.kv_heads, sizes.head_size)
    new = torch.ones(shape, dtype=query_dtype(device), device=device)
    slots = torch.arange(sizes.new_tokens, device=device) * 7
    named = {} if not form.is_quantised else {"kv_cache_dtype": form.name}
    arguments = {"key": new, "value": new, "slot_mapping": slots} | cache | named
    write = load_implementation("optimized").reshape_and_cache
    return LargeCall(lambda: write(**arguments), tensors_of(cache), 0)


def gather_call(
    form: CacheFormat, sizes: Sizes, requests: int, cache: dict[str, Any]
) -> LargeCall:
    """Return a gather of the first requests, as numbers."""
    device, tokens = cache["key_cache"].device, requests * sizes.keys
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    arguments = {
        "block_table": sizes.table(requests, device),
        "seq_start_loc": starts * sizes.keys,
        "num_tokens": tokens,
    } | cache
    if form.is_quantised:
        arguments["dtype"] = query_dtype(device)
    gather = load_implementation("optimized").gather_cache
    numbers = 2 * tokens * sizes.kv_heads * sizes.head_size
    size = query_dtype(device).itemsize
    return LargeCall(lambda: gather(**arguments), tensors_of(cache), size * numbers)


def copy_call(form: CacheFormat, sizes: Sizes, device: torch.device) -> LargeCall:
    """Return a copy of a quarter of the blocks to other blocks."""
    cache = make_cache(form, sizes, device)
    half = sizes.num_blocks // 2
    pairs = [[block, half + block] for block in range(0, half, 2)]
    shape = (2, *cache["key_cache"].shape)
    layer = torch.zeros(shape, dtype=cache["key_cache"].dtype, device=device)
    mapping = torch.tensor(pairs)
    copy = load_implementation("optimized").copy_blocks
    return LargeCall(lambda: copy([layer], mapping), (layer,), mapping.nbytes)


def make_latents(
    form: LatentFormat | torch.dtype | None, sizes: Sizes, device: torch.device
) -> tuple[Tensor, int, int]:
    """Return a cache of latents, the elements of a latent, and those of a rope key."""
    if form is None or isinstance(form, torch.dtype):
        shape = (sizes.num_blocks, sizes.block_size, 576)
        dtype = form or query_dtype(device)
        return torch.zeros(shape, dtype=dtype, device=device), 512, 64
    pages = torch.zeros(
        sizes.num_blocks, form.block_bytes(sizes.block_size), dtype=torch.uint8,
        device=device,
    )  # fmt: skip
    cache = form.view_cache(pages, sizes.block_size)
    return cache, form.kv_lora_rank, form.qk_rope_head_dim


def latent_call(
    form: LatentFormat | torch.dtype | None,
    sizes: Sizes,
    device: torch.device,
    operation: str,
    gathers: bool = False,
) -> LargeCall:
    """Return a call over latents: a decode of all requests, a prefill of one, or a write.

    Args:
        form: If None, elements have the dtype of the queries.
        gathers: Whether a prefill expands its whole context at once instead of in chunks.
    """
    cache, rank, rope = make_latents(form, sizes, device)
    dtype, heads, nope = query_dtype(device), sizes.heads, 128
    twin = load_implementation("optimized")
    scaled = isinstance(form, torch.dtype) and form.itemsize == 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if operation == "concat_and_cache_mla":
        slots = torch.arange(sizes.new_tokens, device=device) * 7
        new = zeros(sizes.new_tokens, rank), zeros(sizes.new_tokens, rope)
        scale = {"scale": 1.0} if scaled else {}
        return LargeCall(
            lambda: twin.concat_and_cache_mla(*new, cache, slots, **scale), (cache,), 0
        )
    is_decode = operation == "latent_decode_attention"
    requests, news = (sizes.requests, 1) if is_decode else (1, sizes.new_tokens)
    tokens = requests * news
    arguments: dict[str, Any] = {
        "q_nope": zeros(tokens, heads, nope),
        "q_pe": zeros(tokens, heads, rope),
        "kv_cache": cache,
        "w_uk": zeros(heads, nope, rank),
        "w_uv": zeros(heads, rank, nope),
    } | sizes.batch(requests, news, device)
    size = dtype.itemsize
    # queries in the space of the latents and their results, in the dtype and in float32
    results = tokens * heads * (2 * (rank + rope) + rank + nope) * (size + 4) // 2
    if not is_decode:
        arguments |= {
            "kv_c": zeros(tokens, rank),
            "k_pe": zeros(tokens, rope),
            "num_context_tokens": sizes.keys - news,
            "max_context_chunk": None if gathers else sizes.new_tokens,
        }
        # queries, and results: two of them in float32
        results = tokens * heads * ((2 * nope + rope) * size + 2 * nope * 4)
        # latents as codes, in float32 and in the dtype, and keys and values: of a chunk, and
        # of the one before it
        in_a_row = (rank + rope) * (1 + 4 + size) + heads * (2 * nope + rope) * size
        results += 2 * sizes.new_tokens * in_a_row
    options = {"k_scale": 1.0} if scaled else {}
    attend = getattr(twin, operation)
    return LargeCall(
        lambda: attend(**pack_options(**arguments, **options)), (cache,), results
    )
