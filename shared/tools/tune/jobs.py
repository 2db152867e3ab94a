"""Jobs of a tuning run: for each choice the batches on which it is timed, within a memory limit."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...contract.cache_formats import FORMATS
from ...contract.tuning_classes import TuningCase, TuningInputs, TuningJob
from ..bench.accuracy import expect_all, find_expected
from ..bench.inputs import draw_inputs
from ..bench.workloads import Workload, ragged_lens
from .layers import LayerSizes

Lens = tuple[tuple[int, int, int], ...]
"""Requests, and new tokens and keys of each."""
BLOCK_SIZE = 16
LEAST_KEYS = 256
APPEND_ROWS = (32, 64, 128)
SHORT_DECODES: tuple[Lens, ...] = (
    ((2, 1, 16384),), ((8, 1, 6144),), ((1, 1, 65536),), ((16, 1, 5120),),
)  # fmt: skip
PREFIX_LEN = 2048
CASCADES: tuple[Lens, ...] = (
    ((128, 1, PREFIX_LEN + 256),), ((64, 1, PREFIX_LEN + 512),),
    ((32, 1, PREFIX_LEN + 256),), ((64, 1, PREFIX_LEN + 2048),),
)  # fmt: skip
"""Decodes whose sequences begin with the same keys."""
CHUNKS: tuple[Lens, ...] = (
    ((8, 16, 8192),), ((2, 64, 16384),), ((1, 512, 32768),), ((16, 128, 4096),),
    ((4, 1024, 4096),), ((64, 8, 1024),),
)  # fmt: skip
"""Batches between an append and a prefill."""
PROOF_KEYS = (15, 16, 17, 127, 128, 129, 300, 513)
"""Keys of the batches on which what was chosen is checked: on both sides of edges."""
TINY_QUERY, TINY_KEYS, SHOWN = 20, 48, 4
"""New tokens and keys of a tiny request, at most; lengths that a name lists, at most."""


@dataclass(frozen=True)
class TunedLayer:
    """What the batches of a layer have in common.

    Args:
        layer: The layer.
        dtype: Name of the dtype of queries.
        cache_format: Name of the cache's format.
        most_bytes: Bytes of the caches of a batch, at most.
        multiprocessors: Of the chip.
        is_tiny: Whether the batches are tiny, to be run in the interpreter.
    """

    layer: LayerSizes
    dtype: str
    cache_format: str
    most_bytes: int
    multiprocessors: int
    is_tiny: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.layer.query_heads // self.layer.kv_heads

    @property
    def most_decoded(self) -> int:
        """New tokens of a request that decodes compute, at most."""
        return max(1, 16 // self.group_size)

    def batch(self, lens: Lens, prefix_len: int = 0) -> Workload:
        """Return a batch, with fewer keys if the caches would be too large.

        Args:
            lens: its requests.
            prefix_len: keys that all of them begin with, at most.

        Raises:
            ValueError: They would be too large with LEAST_KEYS keys too.
        """
        layer, form = self.layer, FORMATS[self.cache_format]
        dtype: torch.dtype = getattr(torch, self.dtype)
        while True:
            name = f"{len(lens)} ragged"
            if len(lens) <= SHOWN:
                name = " + ".join(
                    f"{reqs} x {new} of {keys}" if new > 1 else f"{reqs} x {keys}"
                    for reqs, new, keys in lens
                )
            shared = min(prefix_len, min(keys for _, _, keys in lens) // 2)
            shared = shared // BLOCK_SIZE * BLOCK_SIZE
            name += f" after a prefix of {shared}" if shared else ""
            found = Workload(
                name=f"{name}, {layer.name}",
                kind="cascade" if shared else "decode",
                shared_prefix=shared,
                about="tuning",
                query_lens=tuple(new for reqs, new, _ in lens for _ in range(reqs)),
                kv_lens=tuple(keys for reqs, _, keys in lens for _ in range(reqs)),
                query_heads=layer.query_heads,
                kv_heads=layer.kv_heads,
                head_size=layer.head_size,
                block_size=BLOCK_SIZE,
                dtype=dtype,
                kv_dtype=form.dtype if form.dtype and not form.is_measured else dtype,
                sliding_window=layer.window,
                cache_format=form.name if form.is_measured else None,
            )
            if self.is_tiny:
                return make_tiny(found)
            # a cache of codes is drawn in the dtype of the queries first
            rows = 2 * layer.kv_heads * layer.head_size
            drawn = dtype.itemsize if form.is_measured else found.kv_dtype.itemsize
            taken = sum(found.kv_lens) * rows * (drawn + form.is_measured)
            if taken <= self.most_bytes:
                return found
            smaller = tuple(
                (reqs, new, max(new, LEAST_KEYS, keys // 2)) for reqs, new, keys in lens
            )
            if smaller == lens:
                raise ValueError(
                    f"memory_gb: a batch of {layer.name} takes {taken / 2**30:.2f} GiB, and"
                    f" {self.most_bytes / 2**30:.2f} may be taken; expected a larger limit"
                )
            lens = smaller

    def cases(
        self, batches: Sequence[Lens], prefix_len: int = 0
    ) -> tuple[TuningCase, ...]:
        """Return batches that are timed; those that became equal are left out.

        Args:
            prefix_len: keys that the requests of a batch begin with, at most.
        """
        drawn = (self.batch(lens, prefix_len) for lens in batches)
        workloads = {found.name: found for found in drawn}
        return tuple(
            make_case(workload, is_whole=False) for workload in workloads.values()
        )

    def proofs(self, queries: Sequence[int]) -> tuple[TuningCase, ...]:
        """Return a batch of which every row is checked."""
        pairs = [(new, max(new, keys)) for new in queries for keys in PROOF_KEYS]
        lens = tuple((1, new, keys) for new, keys in pairs)
        found = replace(self.batch(lens), name=f"lengths at edges, {self.layer.name}")
        return (make_case(found, is_whole=True),)


def make_tiny(workload: Workload) -> Workload:
    """Return few requests of a batch, with few heads and tokens.

    Three fill the interpreter's four multiprocessors, if the batch has as many.
    """
    pairs = list(zip(workload.query_lens, workload.kv_lens, strict=True))
    shown = sorted({0, len(pairs) // 2, len(pairs) - 1})
    tiny = [(min(pairs[req][0], TINY_QUERY), pairs[req][1]) for req in shown]
    return replace(
        workload.tiny(),
        name=f"tiny {workload.name}",
        query_lens=tuple(new for new, _ in tiny),
        kv_lens=tuple(max(new, min(keys, TINY_KEYS)) for new, keys in tiny),
    )


def make_case(workload: Workload, is_whole: bool) -> TuningCase:
    """Return a case of a batch.

    Args:
        is_whole: Whether every row is checked, and not about twelve.
    """

    def make() -> TuningInputs:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        inputs = draw_inputs(workload, zlib.crc32(workload.name.encode()), device)
        expected = (expect_all if is_whole else find_expected)(inputs)
        k_scale, v_scale = inputs.scales
        arguments = {
            "query": inputs.query,
            "key_cache": inputs.key_cache,
            "value_cache": inputs.value_cache,
            "block_table": inputs.block_table,
            "query_start_loc": inputs.query_start_loc,
            "seq_lens": inputs.seq_lens,
            "max_query_len": inputs.max_query_len,
            "max_seq_len": inputs.max_seq_len,
            "out": inputs.fresh(),
            "options": replace(inputs.options(), k_scale=k_scale, v_scale=v_scale),
        }
        if workload.shared_prefix:
            arguments["common_prefix_len"] = workload.shared_prefix
        return TuningInputs(
            arguments, lambda out: expected.check(out, workload.dtype).message
        )

    return TuningCase(workload.name, make)


def choose_jobs(kinds: Sequence[TunedLayer]) -> list[TuningJob]:
    """Return the jobs of some layers: the choices that most time depends on come first.

    Args:
        kinds: The layers. Thresholds and rates are measured on the first one.
    """
    first, *_ = kinds
    jobs = [job for kind in kinds for job in _tile_jobs(kind)]
    jobs += [job for kind in kinds if kind.layer.is_main for job in _append_jobs(kind)]
    few = first.cases(SHORT_DECODES)
    many = first.cases([((64, 1, 4096),), _ragged(96)])
    jobs.append(TuningJob("short_tiles", few))
    jobs.append(TuningJob("min_segment", (*few, *many)))
    jobs.append(TuningJob("rates", first.cases(CHUNKS)))
    if first.layer.window is None:
        cascades = first.cases(CASCADES, PREFIX_LEN)
        jobs.append(TuningJob("short_rest_keys", cascades))
        jobs.append(TuningJob("short_rest_programs", cascades))
    return jobs


def _tile_jobs(kind: TunedLayer) -> list[TuningJob]:
    """Return the jobs of decodes, of few decodes, and of prefills."""
    full = kind.multiprocessors // kind.layer.kv_heads + 1
    many = max(64, 2 * full)
    return [
        TuningJob(
            "decode",
            kind.cases([((many, 1, 4096),), _ragged(2 * many), ((2 * full, 1, 512),)]),
            kind.proofs(sorted({1, kind.most_decoded})),
        ),
        TuningJob(
            "prefill",
            kind.cases([((1, 8192, 8192),), ((4, 1024, 2048),), ((16, 256, 256),)]),
            # more rows than any decode tile has
            kind.proofs((65, 130)),
        ),
        TuningJob(
            "small batch",
            kind.cases(
                [
                    ((1, 1, 32768),),
                    ((4, 1, 4096),),
                    ((max(1, full - 1), 1, 8192),),
                    ((1, 1, 512),),
                ]
            ),
            kind.proofs((1,)),
        ),
    ]


def _append_jobs(kind: TunedLayer) -> list[TuningJob]:
    """Return a job per query tile of appends."""
    jobs = []
    for rows in APPEND_ROWS:
        tokens = rows // kind.group_size
        if tokens > 1:
            jobs.append(
                TuningJob(
                    "append",
                    kind.cases(
                        [
                            ((8, tokens, 8192),),
                            ((32, tokens, 2048),),
                            ((1, tokens, 32768),),
                        ]
                    ),
                    kind.proofs((1, 2, 7, 33)),
                    rows,
                )
            )
    return jobs


def _ragged(reqs: int) -> Lens:
    """Return decodes whose lengths' logarithms are normal, with a median of 1,024 keys."""
    lens = ragged_lens(reqs, seed=7, median=1024, sigma=0.8, least=64, most=8192)
    return tuple((1, 1, keys) for keys in lens)
