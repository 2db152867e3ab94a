"""Small batches of every attention kernel, to be run under compute-sanitizer, one group at a time.

    python tests/gpu/sanitized.py append
    compute-sanitizer --tool memcheck python tests/gpu/sanitized.py append
    compute-sanitizer --tool racecheck python tests/gpu/sanitized.py invariant

The first run, without the tool, compiles the kernels into Triton's cache. GROUPS names the groups.
A group ends with the word `done` and the names of the kernels that ran; the tool prints what it
found. It is an error if a kernel of the group did not run, or if an output is not finite.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

# each tensor is an allocation of its own, so that memcheck finds an access past its end
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.optimized import kernels
from pagetwin.optimized.attention import cascade as cascade_attention
from pagetwin.optimized.attention import paged as paged_attention
from pagetwin.optimized.cache.cache_ops import reshape_and_cache
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.cascade import family as prefix
from pagetwin.optimized.kernels.sm90.code_decode import family as code_decode
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.kernels.sm90.latent import family as latent
from pagetwin.optimized.kernels.sm90.prefill import family as sm90
from pagetwin.optimized.runtime.launcher import Launcher
from torch import Tensor

FAR = 2**30
"""Block-table entries past the end of a sequence: no kernel may read that block."""


class Batch(NamedTuple):
    """One batch of a paged cache.

    Args:
        query_lens, seq_lens: new tokens and keys of each request.
        options: by name.
        head_size, value_size: of queries and keys, and of values.
        dtype: of the queries and the output.
        heads, kv_heads: query heads and kv heads.
        stored: dtype of the cache. If None, that of the queries.
        shared_prefix: keys of a prefix that all requests share. If it is not 0, the operation is
            cascade attention.
        is_latent: whether the values are the first columns of the keys.
        form: the cache format, with scales that its write measures. None: `stored` has numbers.
        block_size: slots of a block.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    options: dict[str, Any] = {}  # noqa: RUF012 - a constant, which nothing changes
    head_size: int = 128
    value_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    heads: int = 8
    kv_heads: int = 2
    stored: torch.dtype | None = None
    shared_prefix: int = 0
    is_latent: bool = False
    form: str | None = None
    block_size: int = 16


class Group(NamedTuple):
    """The batches that one process runs.

    Args:
        batches: the batches.
        kernels: kernels that must run, with their modules under `pagetwin.optimized.kernels`.
        is_hopper: whether the kernels for Hopper may run.
    """

    batches: tuple[Batch, ...]
    kernels: tuple[str, ...]
    is_hopper: bool = True


RAGGED = ((1,) * 9, (300, 17, 700, 1, 0, 128, 64, 2000, 5))
LONG = ((200, 70), (333, 70))
FP8: dict[str, Any] = {
    "stored": torch.float8_e4m3fn,
    "options": {"k_scale": 0.5, "v_scale": 0.25},
}
CASCADES = (
    Batch([1] * 5, [300, 177, 700, 129, 145], shared_prefix=128),
    Batch([7, 30, 1], [300, 94, 65], shared_prefix=64, dtype=torch.float16),
)
LATENTS = tuple(
    Batch(*lens, head_size=576, heads=heads, kv_heads=1, is_latent=True)
    for heads, lens in (
        (16, ([1] * 5, [300, 17, 1, 64, 2000])),
        (128, ([2, 1], [700, 65])),
        # row tiles of requests of several lengths
        (16, ([1, 30, 1, 9], [300, 90, 1700, 700])),
    )
)
GROUPS = {
    "portable": Group(
        tuple(
            batch._replace(head_size=head_size, dtype=dtype)
            for head_size, dtype in ((128, torch.bfloat16), (64, torch.float16))
            for batch in (
                # too many kv heads for a number of programs per request
                Batch(*RAGGED, heads=32, kv_heads=8),
                Batch([4] * 3, [300, 17, 700], {"sliding_window": 50}),
                Batch([1] * 3, [5000, 3, 900]),
                Batch([1, 200, 7], [90, 333, 70]),
                Batch([1, 70], [700, 333], {"batch_invariant": True}),
            )
        ),
        (
            "portable.decode.decode_kernel",
            "portable.prefill.prefill_kernel",
            "portable.split_kv.split_rows_kernel",
        ),
        is_hopper=False,
    ),
    "short": Group(
        (
            Batch([1] * 3, [300, 17, 0]),
            Batch(*RAGGED),
            Batch([1], [20000]),
            Batch([4, 1], [129, 500]),
            Batch([1, 3], [64, 200], {"sliding_window": 50}, dtype=torch.float16),
        ),
        ("portable.short_decode.short_decode_kernel",),
    ),
    "append": Group(
        (
            Batch([5, 1, 8], [700, 1, 3000]),
            Batch([40, 0, 17], [900, 600, 2000]),
            Batch([9, 2], [650, 900], {"sliding_window": 50}, dtype=torch.float16),
        ),
        ("portable.append.append_kernel",),
        is_hopper=False,
    ),
    "segments": Group(
        (
            # query tiles of one warpgroup and of two
            Batch([5, 1, 8], [700, 1, 3000]),
            Batch([8, 5], [3000, 700], heads=6),
            Batch([40, 0, 17], [900, 600, 2000]),
            Batch([30, 2], [900, 4000], head_size=64, dtype=torch.float16),
            Batch([6], [2000], head_size=256),
        ),
        ("sm90.append.kernel.append_kernel",),
    ),
    "cascade": Group(
        CASCADES,
        (
            "portable.cascade.cascade_prefix_kernel",
            "portable.cascade.cascade_rest_kernel",
        ),
        is_hopper=False,
    ),
    "prefix": Group(
        CASCADES,
        (
            "sm90.cascade.kernel.cascade_prefix_sm90_kernel",
            "portable.cascade.cascade_rest_kernel",
        ),
    ),
    "hopper": Group(
        (
            Batch(*LONG),
            Batch(*LONG, {"sliding_window": 50}, dtype=torch.float16),
            Batch(*LONG, {"attention_chunk_size": 70}, head_size=64),
            Batch(*LONG, {"logits_soft_cap": 20.0}, head_size=256),
            # without a decode launch: the kernel clears the padding
            Batch([130], [260]),
            Batch([130], [260], head_size=96),
            Batch(*LONG, {"causal": False, "sliding_window": 50}),
            Batch(*LONG, block_size=8),
        ),
        ("sm90.prefill.kernel.prefill_kernel",),
    ),
    "unaligned": Group(
        tuple(
            Batch(*LONG, options, head_size=head_size)
            for head_size, options in (
                (96, {"sliding_window": 50}),
                (80, {"logits_soft_cap": 20.0}),
                (112, {}),
                (24, {}),
                (160, {}),
                (200, {"sliding_window": 50}),
            )
        ),
        ("sm90.prefill.kernel.prefill_kernel",),
    ),
    "packed": Group(
        (
            # all query heads of a kv head share a tile if their number divides 64
            Batch([200, 70, 3], [333, 70, 260], heads=6, kv_heads=2),
            Batch([130, 33, 1], [260, 90, 40], heads=8, kv_heads=1),
            Batch([130, 33], [260, 90], heads=16, kv_heads=1, head_size=64),
            Batch(*LONG, heads=4, kv_heads=4),
            # tiles that begin within a token
            Batch([40, 9], [60, 140], heads=71, kv_heads=1, head_size=64),
        ),
        ("sm90.prefill.kernel.prefill_kernel",),
    ),
    "copied": Group(
        (Batch(*LONG, block_size=1), Batch(*LONG, block_size=12, head_size=80)),
        (
            "sm90.code_prefill.kernel.upcast_kernel",
            "sm90.prefill.kernel.prefill_kernel",
        ),
    ),
    "token-tiles": Group(
        (
            # groups that do not divide 64: a tile has all query heads of whole tokens
            Batch([40, 9, 100], [60, 140, 120], heads=10),
            Batch([36, 5], [150, 5], heads=7, kv_heads=1, dtype=torch.float16),
            Batch([40, 70], [90, 130], heads=14, head_size=64),
            Batch([37], [150], heads=6, head_size=96),
            Batch([30, 20], [30, 200], {"sliding_window": 50}, 256, heads=12),
        ),
        ("sm90.prefill.kernel.prefill_kernel",),
    ),
    "wide": Group(
        tuple(
            Batch(*lens, options, head_size=192, value_size=128, heads=4, kv_heads=4)
            for lens, options in (
                (LONG, {}),
                (LONG, {"sliding_window": 50}),
                (((130, 3), (260, 90)), {"logits_soft_cap": 20.0}),
            )
        ),
        ("sm90.prefill.kernel.prefill_kernel",),
    ),
    "invariant": Group(
        tuple(
            batch._replace(options=batch.options | {"batch_invariant": True})
            for batch in (
                Batch(*RAGGED),
                Batch([1, 200, 7], [5000, 333, 70]),
                Batch([200, 70], [333, 70], {"sliding_window": 50}, head_size=64),
                Batch([1, 130], [5000, 260], dtype=torch.float16, heads=6),
            )
        ),
        ("sm90.invariant.kernel.invariant_kernel", "sm90.invariant.kernel.fold_kernel"),
    ),
    "fp8": Group(
        (
            Batch(*RAGGED, **FP8),
            Batch([1, 4, 1], [5000, 700, 2], **FP8, head_size=64, dtype=torch.float16),
            Batch(*LONG, **FP8),
            Batch([130], [260], **FP8),
            Batch([130, 1], [260, 90], **FP8, head_size=64, dtype=torch.float16),
        ),
        (
            "sm90.code_decode.kernel.code_decode_kernel",
            "sm90.code_prefill.kernel.upcast_kernel",
            "sm90.prefill.kernel.prefill_kernel",
        ),
    ),
    "codes": Group(
        tuple(
            Batch(*lens, form=form, head_size=head_size, dtype=dtype)
            for form in (
                "int8_per_token_head",
                "fp8_per_token_head",
                "int4_per_token_head",
            )
            for lens, head_size, dtype in (
                (RAGGED, 128, torch.bfloat16),
                (([1, 4, 1], [5000, 700, 2]), 64, torch.float16),
                (LONG, 128, torch.bfloat16),
                (([130, 1], [260, 90]), 64, torch.float16),
            )
        ),
        (
            "sm90.code_decode.kernel.code_decode_kernel",
            "sm90.code_prefill.kernel.upcast_kernel",
            "sm90.prefill.kernel.prefill_kernel",
        ),
    ),
    "latent": Group(
        (
            *LATENTS,
            *(LATENTS[1]._replace(block_size=size) for size in (1, 12)),
        ),
        (
            "sm90.latent.kernel.latent_decode_kernel",
            "sm90.latent.kernel.copied_latent_decode_kernel",
            "sm90.latent.combine.latent_combine_kernel",
        ),
    ),
    "portable-latent": Group(
        (*LATENTS, LATENTS[0]._replace(**FP8)),
        (
            "portable.latent.latent_kernel",
            "portable.latent.latent_combine_kernel",
        ),
        is_hopper=False,
    ),
}
"""The groups by name."""
FAMILIES = (sm90, append, prefix, code_decode, code_prefill, invariant, latent)
"""The kernels for Hopper, by what selects them."""


def run_batch(batch: Batch, device: str) -> Tensor:
    """Return the output of a batch, with two padding tokens, after two equal calls."""
    torch.manual_seed(0)
    tokens, stored = sum(batch.query_lens) + 2, batch.stored or batch.dtype
    block_size = batch.block_size
    num_blocks = [-(-seq_len // block_size) for seq_len in batch.seq_lens]
    block_table = torch.full(
        (len(num_blocks), max(num_blocks) + 1), FAR, dtype=torch.int32
    )
    ids = torch.randperm(sum(num_blocks)).int().split(num_blocks)
    for row, own in zip(block_table, ids, strict=True):
        row[: len(own)] = own
    shared_blocks = batch.shared_prefix // block_size
    block_table[:, :shared_blocks] = block_table[0, :shared_blocks].clone()
    shape = (sum(num_blocks), block_size, batch.kv_heads)
    sizes = (batch.head_size, batch.value_size or batch.head_size)
    key, value = (torch.randn(*shape, size).to(device, stored) for size in sizes)
    if batch.is_latent:
        value = key[..., :512]
    query = torch.randn(tokens, batch.heads, batch.head_size).to(device, batch.dtype)
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).int()
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32)
    options = dict(batch.options)
    if batch.form is not None:
        key, value, options["k_scale"], options["v_scale"] = write_codes(
            batch.form, key, value
        )
    arguments: list[Any] = [query, key, value]
    arguments += [tensor.to(device) for tensor in (block_table, starts, lengths)]
    arguments += [max(batch.query_lens), max(batch.seq_lens)]
    attend: Any = paged_attention.paged_attention
    if batch.shared_prefix:
        attend = cascade_attention.cascade_attention
        arguments.append(batch.shared_prefix)
    lse = torch.empty(batch.heads, tokens, device=device)
    for _ in range(2):
        out: Tensor = attend(*arguments, lse=lse, **pack_options(**options))
    return out


def write_codes(name: str, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return a key cache, a value cache and their scales, with all slots written."""
    form = FORMATS[name]
    shape = (*key.shape[:3], key.shape[3] // form.codes_per_element)
    written = [torch.zeros(shape, dtype=form.dtype, device=key.device) for _ in "kv"]
    written += [torch.ones(key.shape[:3], device=key.device) for _ in "kv"]
    slots = torch.arange(key.shape[0] * key.shape[1], device=key.device)
    reshape_and_cache(
        key.flatten(0, 1), value.flatten(0, 1), *written[:2], slots, *written[2:]
    )
    return tuple(written)


def run_group(name: str, device: str = "cuda") -> list[str]:
    """Run the batches of a group, and return the kernels that were launched."""
    group, ran = GROUPS[name], set()
    start = Launcher.__call__

    def noted(self: Launcher, *args: Any, **given: Any) -> None:
        module = self._kernel.__module__.removeprefix(f"{kernels.__name__}.")
        ran.add(f"{module}.{self.name}")
        start(self, *args, **given)

    Launcher.__call__ = noted  # type: ignore[method-assign]
    for family in FAMILIES:
        if not group.is_hopper:
            family.is_hopper = lambda device: False
    for batch in group.batches:
        assert run_batch(batch, device).isfinite().all(), batch
    missing = {*group.kernels} - ran
    assert not missing, f"{name}: {missing} did not run, but {ran}"
    return sorted(ran)


def main() -> None:
    """Run the group that the first word of the command line names."""
    name = sys.argv[1]
    if name not in GROUPS:
        raise SystemExit(f"{name}: expected one of {', '.join(GROUPS)}")
    ran = run_group(name)
    torch.cuda.synchronize()
    print("done", name, *ran)


if __name__ == "__main__":
    main()
