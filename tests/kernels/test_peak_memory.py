"""Peak memory of calls over large caches: nothing is gathered or dequantised as a whole.

A call may allocate its results and what docs/design.md (Memory) says. The cache is several times
larger. On a CPU kernels are interpreted, and what torch allocates for them is counted.
"""

from collections.abc import Callable

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.latent_formats import LATENT_FORMATS, LatentFormat
from support.large_caches import (
    MIB,
    ON_A_CPU,
    ON_A_GPU,
    LargeCall,
    Sizes,
    attention_call,
    copy_call,
    gather_call,
    latent_call,
    make_cache,
    write_call,
)
from support.peak_memory import measure_peak

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, and not interpreted"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
WRITTEN = tuple(FORMATS.values())
READ = tuple(
    form for form in WRITTEN if form.name not in ("int4_per_token_head_vllm", "nvfp4_4over6")
)  # fmt: skip
"""Formats whose caches are not read as those of another one."""
LATENTS: dict[str, LatentFormat | torch.dtype | None] = {
    "16 bits": None,
    "fp8_e4m3": torch.float8_e4m3fn,
} | LATENT_FORMATS

Make = Callable[[Sizes, torch.device], LargeCall]
ATTENTION: dict[str, Callable[..., LargeCall]] = {
    "decode": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 1, **more
    ),
    "one decode": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, 1, 1, **more
    ),
    "draft tokens": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 4, **more
    ),
    "chunks": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, 2, sizes.new_tokens, **more
    ),
    "more chunks than are converted": lambda form, sizes, device, **more: (
        attention_call(form, sizes, device, sizes.requests, 24, **more)
    ),
    "batch-invariant decode": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 1, batch_invariant=True, **more
    ),
    "window": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 1, sliding_window=100, **more
    ),
    "cascade": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 1, "cascade_attention",
        common_prefix_len=sizes.keys // 2, **more,
    ),
    "context-parallel decode": lambda form, sizes, device, **more: attention_call(
        form, sizes, device, sizes.requests, 1, "dcp_attention", dcp_world_size=2,
        dcp_rank=0, **more,
    ),
}  # fmt: skip


def make_calls() -> dict[str, Make]:
    """Return what makes each call, by its name."""
    made: dict[str, Make] = {}
    for form in READ:
        for name, attention in ATTENTION.items():
            made[f"{form.name}, {name}"] = lambda sizes, device, a=attention, f=form: a(
                f, sizes, device
            )
        made[f"{form.name}, gather"] = lambda sizes, device, f=form: gather_call(
            f, sizes, 1, make_cache(f, sizes, device)
        )
        made[f"{form.name}, copy"] = lambda sizes, device, f=form: copy_call(
            f, sizes, device
        )
    for form in WRITTEN:
        made[f"{form.name}, write"] = lambda sizes, device, f=form: write_call(
            f, sizes, device
        )
    for kind, latents in LATENTS.items():
        for operation in (
            "latent_decode_attention",
            "latent_prefill_attention",
            "concat_and_cache_mla",
        ):
            made[f"latents of {kind}, {operation}"] = (
                lambda sizes, device, f=latents, o=operation: latent_call(
                    f, sizes, device, o
                )
            )
    return made


CALLS = make_calls()
WORKSPACE = (36 + 4 + 1) * MIB + (1 << 14)
"""Bytes of partial results, of the workspace before it grew, and of counters."""
ROUNDING = 8 * MIB
"""Bytes by which torch's allocator rounds up, at most, and of small tensors of a plan."""
INTERPRETED_WORKSPACE = 48 << 10
"""Bytes that the interpreter's 4 multiprocessors may take for partial results."""


def allowed(call: LargeCall, device: torch.device) -> int:
    """Return how many bytes a call may allocate."""
    if device.type != "cuda":
        # no kernel converts a cache here
        return call.result_bytes + INTERPRETED_WORKSPACE
    converted = 0
    if call.converted_bytes:
        # with factors of keys, and in steps of 16 MiB
        converted = call.converted_bytes * 33 // 32 + 16 * MIB
    return call.result_bytes + WORKSPACE + ROUNDING + converted


def expect_bounded(call: LargeCall, device: torch.device) -> None:
    """Raise if a call allocates more than it may, or if its cache is too small to show it."""
    most = allowed(call, device)
    extra = most - call.result_bytes - call.converted_bytes
    assert call.cache_bytes > 2.5 * extra
    peak = measure_peak(call.run, device)
    assert peak <= most, f"{peak} bytes of {most}; the cache has {call.cache_bytes}"


@on_a_cpu
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CALLS)
def test_no_call_materialises_a_cache(name: str) -> None:
    expect_bounded(CALLS[name](ON_A_CPU, CPU), CPU)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU's memory")
@pytest.mark.parametrize("name", CALLS)
def test_no_call_materialises_a_cache_on_a_gpu(name: str) -> None:
    expect_bounded(CALLS[name](ON_A_GPU, GPU), GPU)


@on_a_cpu
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_planted_gather_exceeds_the_bound(name: str) -> None:
    """The cache of four bits is gathered, of the requests of the call alone."""
    form = FORMATS["int4_per_token_head"]
    expect_exceeded(ATTENTION[name](form, ON_A_CPU, CPU, gathers=True), CPU)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU's memory")
@pytest.mark.parametrize("form", READ, ids=lambda form: form.name)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_planted_gather_exceeds_the_bound_on_a_gpu(name: str, form: object) -> None:
    expect_exceeded(ATTENTION[name](form, ON_A_GPU, GPU, gathers=True), GPU)


@on_a_cpu
@pytest.mark.extended
@pytest.mark.parametrize("kind", LATENTS)
def test_a_context_that_is_expanded_as_a_whole_exceeds_the_bound(kind: str) -> None:
    operation = "latent_prefill_attention"
    expect_exceeded(latent_call(LATENTS[kind], ON_A_CPU, CPU, operation, True), CPU)


def expect_exceeded(call: LargeCall, device: torch.device) -> None:
    """Raise if a call with a planted gather stays within its bound."""
    most = allowed(call, device)
    peak = measure_peak(call.run, device)
    assert peak > most, f"{peak} bytes of {most}: the gather is not noticed"
