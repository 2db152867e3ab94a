"""Repeated calls on a GPU: bitwise equal to calls through Triton, in threads and in graphs."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pagetwin.optimized as twin
import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS, split_page
from pagetwin.optimized.dispatch import pipeline
from pagetwin.optimized.runtime import launcher
from torch import Tensor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(launcher.INTERPRETED, reason="needs a CUDA device"),
]
Call = Callable[[], list[Tensor]]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCK_SIZE, KV_HEADS = 16, 2


class Batch:
    """Random tensors of one batch, a set of its own for each seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cuda").manual_seed(seed)

    def numbers(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        found = torch.randn(*shape, generator=self._generator, device="cuda")
        return found.to(dtype)

    def starts(self, lens: list[int]) -> Tensor:
        return torch.tensor([0, *lens], device="cuda").cumsum(0).int()

    def table(self, reqs: int, blocks: int) -> Tensor:
        order = torch.randperm(reqs * blocks, generator=self._generator, device="cuda")
        return order.int().view(reqs, blocks)


def paged(
    seed: int,
    query_lens: list[int],
    key_len: int = 2000,
    *,
    heads: tuple[int, int] = (8, 128),
    dtype: torch.dtype = BF16,
    prefix: int = 0,
    sinks: bool = False,
    **options: Any,
) -> Call:
    """Return a call of paged attention; of cascade attention if there is a prefix."""
    batch, reqs = Batch(seed), len(query_lens)
    num_heads, head_size = heads
    kv_heads, value_size = (1, 512) if head_size == 576 else (KV_HEADS, head_size)
    blocks = -(-key_len // BLOCK_SIZE)
    sizes = (reqs * blocks, BLOCK_SIZE, kv_heads, head_size)
    key = batch.numbers(*sizes, dtype=dtype)
    value = key[..., :512] if head_size == 576 else batch.numbers(*sizes, dtype=dtype)
    query = batch.numbers(sum(query_lens), num_heads, head_size)
    table = batch.table(reqs, blocks)
    starts = batch.starts(query_lens)
    lens = torch.full((reqs,), key_len, dtype=torch.int32, device="cuda")
    lens[0] -= 5
    if sinks:
        options["sinks"] = batch.numbers(num_heads, dtype=torch.float32)
    if dtype == FP8:
        options |= {"k_scale": 0.5, "v_scale": 2.0}
    out = query.new_empty(len(query), num_heads, value_size)
    given = {"out": out, "options": AttentionOptions(**options)}
    bounds: tuple[int, ...] = (max(query_lens), key_len)
    operation: Any = twin.paged_attention
    if prefix:
        table[1:, : prefix // BLOCK_SIZE] = table[0, : prefix // BLOCK_SIZE].clone()
        operation, bounds = twin.cascade_attention, (*bounds, prefix)

    def call() -> list[Tensor]:
        out.fill_(torch.nan)
        return [operation(query, key, value, table, starts, lens, *bounds, **given)]

    return call


def encoder(seed: int) -> Call:
    batch, lens = Batch(seed), [300, 40, 1, 170]
    tensors = [batch.numbers(sum(lens), 8, 64) for _ in range(3)]
    starts = batch.starts(lens)
    return lambda: [twin.encoder_attention(*tensors, starts, starts, 300, 300)]


def write(seed: int, dtype: torch.dtype = BF16, scale: Any = None) -> Call:
    batch = Batch(seed)
    key, value = (batch.numbers(100, KV_HEADS, 128) for _ in range(2))
    caches = [batch.numbers(9, BLOCK_SIZE, KV_HEADS, 128, dtype=dtype) for _ in "kv"]
    slots = batch.table(1, 100)[0].long()
    scales = [torch.full((1,), 2.0, device="cuda") if scale == "tensor" else scale] * 2

    def call(tokens: int = 100) -> list[Tensor]:
        for cache in caches:
            cache.view(torch.uint8).fill_(255)
        new = key[:tokens], value[:tokens]
        twin.reshape_and_cache(*new, *caches, slots[:tokens], *scales)
        return [cache.view(torch.uint8) for cache in caches]

    return call


def write_pages(seed: int, name: str) -> Call:
    """A write of codes into pages that have scales between them, as vLLM's have."""
    form, batch = FORMATS[name], Batch(seed)
    key, value = (batch.numbers(100, KV_HEADS, 128) for _ in range(2))
    size = 2 * form.elements(128) + 8
    pages = torch.zeros(9, BLOCK_SIZE, KV_HEADS, size, dtype=torch.uint8, device="cuda")
    slots = batch.table(1, 100)[0].long()

    def call(tokens: int = 100) -> list[Tensor]:
        pages.fill_(0)
        *caches, k_scale, v_scale = split_page(pages, 128, 128, form)
        new = key[:tokens], value[:tokens]
        twin.reshape_and_cache(*new, *caches, slots[:tokens], k_scale, v_scale)
        return [pages]

    return call


def write_latents(
    seed: int, dtype: torch.dtype = BF16, scale: float | None = None
) -> Call:
    batch = Batch(seed)
    latents, rope = (batch.numbers(100, 1, size)[:, 0] for size in (512, 64))
    cache = batch.numbers(9, BLOCK_SIZE, 1, 576, dtype=dtype)[:, :, 0]
    slots = batch.table(1, 100)[0].long()
    return lambda tokens=100: _write_latents(latents, rope, cache, slots, scale, tokens)


def _write_latents(
    latents: Tensor,
    rope: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float | None,
    tokens: int,
) -> list[Tensor]:
    """Write the first of the latents to a cache full of 255."""
    cache.view(torch.uint8).fill_(255)
    # rows after the slots are padding of a captured graph
    rows = min(tokens + 3, len(latents))
    twin.concat_and_cache_mla(latents[:rows], rope[:rows], cache, slots[:tokens], scale)
    return [cache.view(torch.uint8)]


CASES: dict[str, Callable[[int], Call]] = {
    "decode": lambda seed: paged(seed, [1] * 40),
    "short decode": lambda seed: paged(seed, [1, 1], 700),
    "decode, FP8": lambda seed: paged(seed, [1] * 40, dtype=FP8),
    "decode, window": lambda seed: paged(seed, [1] * 9, sliding_window=100),
    "verification": lambda seed: paged(seed, [6] * 9),
    "append": lambda seed: paged(seed, [40] * 3, 6000),
    "prefill": lambda seed: paged(seed, [1500, 2000]),
    "prefill, FP8": lambda seed: paged(seed, [1500, 2000], dtype=FP8),
    "prefill alone": lambda seed: paged(seed, [2000] * 2),
    "prefill alone, FP8": lambda seed: paged(seed, [2000], dtype=FP8),
    "mixed, sinks": lambda seed: paged(
        seed, [1, 900, 1, 40], sinks=True, sliding_window=64
    ),
    "batch-invariant": lambda seed: paged(
        seed, [1, 300, 1], 9000, batch_invariant=True
    ),
    "latent": lambda seed: paged(seed, [1] * 9, heads=(16, 576)),
    "cascade": lambda seed: paged(seed, [1] * 9, prefix=1024),
    "encoder": encoder,
    "write": write,
    "write, FP8": lambda seed: write(seed, FP8, 2.0),
    "write, FP8, scales in memory": lambda seed: write(seed, FP8, "tensor"),
    **{
        f"write, {name} in pages": partial(write_pages, name=name)
        for name in ("int8_per_token_head", "int4_per_token_head")
    },
    "write latents": write_latents,
    "write latents, FP8": lambda seed: write_latents(seed, FP8, 2.0),
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each function that validates or plans a call."""
    found: list[str] = []

    def watch(module: Any, name: str) -> None:
        before = getattr(module, name)

        def noted(*args: Any, **named: Any) -> Any:
            found.append(name)
            return before(*args, **named)

        monkeypatch.setattr(module, name, noted)

    watch(pipeline, "_attend_anew")
    watch(sys.modules[twin.reshape_and_cache.__module__], "check_reshape_and_cache")
    watch(
        sys.modules[twin.concat_and_cache_mla.__module__], "check_concat_and_cache_mla"
    )
    return found


def through_triton(call: Call) -> list[Tensor]:
    """Return copies of a call's results, launched as if a profiler had hooks."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("launcher", "repeat.repeated_call", "repeat.writes"):
            module = import_module(f"pagetwin.optimized.runtime.{name}")
            patched.setattr(module, "is_profiled", lambda: True)
        return [tensor.clone() for tensor in call()]


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_is_bitwise_equal_to_one_through_triton(
    case: str, planned: list[str]
) -> None:
    for seed in (0, 1):
        call = CASES[case](seed)
        for _ in range(3):
            planned.clear()
            found = [tensor.clone() for tensor in call()]
        assert not planned, "the third call was planned"
        for one, other in zip(found, through_triton(call), strict=True):
            assert torch.equal(one, other) and not one.float().isnan().any()


@pytest.mark.parametrize("case", CASES)
def test_a_captured_repeated_call_is_bitwise_equal_in_each_replay(
    case: str, planned: list[str]
) -> None:
    call = CASES[case](2)
    expected = through_triton(call)
    for _ in range(3):
        call()
    planned.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    assert not planned
    for _ in range(3):
        for result in found:
            result.fill_(7)
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("write")])
def test_a_repeated_write_of_another_number_of_tokens_is_equal_to_one_through_triton(
    case: str, planned: list[str]
) -> None:
    call: Any = CASES[case](3)
    for _ in range(3):
        call()
    for tokens in (1, 99, 16, 100, 33):
        planned.clear()
        found = [tensor.clone() for tensor in call(tokens)]
        assert not planned
        expected = through_triton(partial(call, tokens))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_decode_after_a_decode_is_repeated_until_its_bound_is_another_one(
    planned: list[str],
) -> None:
    batch = Batch(4)
    cache = batch.numbers(24, BLOCK_SIZE, KV_HEADS, 128)
    query = batch.numbers(2, 4 * KV_HEADS, 128)
    table, starts = batch.table(2, 12), batch.starts([1, 1])
    planned_at = []
    for keys in range(60, 140):
        lens = torch.full((2,), keys, dtype=torch.int32, device="cuda")
        planned.clear()
        call = partial(
            twin.paged_attention, query, cache, cache, table, starts, lens, 1, keys
        )
        found = call()
        if planned:
            planned_at.append(keys)
        assert torch.equal(found, through_triton(lambda call=call: [call()])[0])
    # twice per bound: the second call is recorded
    assert len(planned_at) <= 6


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads_repeat_calls_on_streams_of_their_own_or_on_one(
    is_shared: bool,
) -> None:
    """A workspace, a recording or a tensor map of another thread would change the results."""
    shared = torch.cuda.Stream() if is_shared else None
    names = [name for name in CASES if not name.startswith("write")]
    calls = {name: [CASES[name](10 + seed) for seed in range(4)] for name in names}
    expected = {
        name: [through_triton(call)[0] for call in made] for name, made in calls.items()
    }
    torch.cuda.synchronize()
    wrong: list[str] = []

    def run(thread: int) -> None:
        try:
            with torch.cuda.stream(shared or torch.cuda.Stream()):
                for _ in range(6):
                    for name in names:
                        results = [
                            (calls[name][at]()[0].clone(), expected[name][at])
                            for at in (thread, thread + 2)
                        ]
                        wrong.extend(
                            name
                            for one, other in results
                            if not torch.equal(one, other)
                        )
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for started in threads:
        started.start()
    for started in threads:
        started.join()
    assert not wrong, sorted(set(wrong))
