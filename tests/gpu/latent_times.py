"""Times of portable latent attention with candidates of its tuning constants.

    python tests/gpu/latent_times.py RESULTS
    python tests/gpu/latent_times.py RESULTS --only tiles --cases 1x64x8192 256x8x1024
    python tests/gpu/latent_times.py RESULTS --fp8

The Hopper kernel is not used, so a Hopper chip runs what other chips run. Each batch is timed with
the chosen constants, with every candidate of CANDIDATES in their place, with the portable kernels
that read latents as keys and again as values (`paged`), and with vLLM's Triton decode of latents if
it can be imported (`stage_kernels.py`), with several numbers of splits. vLLM's backend takes 4.

RESULTS has one JSON object per line: query heads, requests, keys, new tokens, the way, and the
median of replays of a CUDA graph in microseconds. Replays of one batch alternate, each with a cold
L2 cache. Results are compared with those of `paged` before they are timed. A candidate that does
not compile or does not fit the chip has an `error` in place of the time.
"""

import argparse
import inspect
import json
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.optimized import paged_attention
from pagetwin.optimized.dispatch import families
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.portable.host import latent
from pagetwin.optimized.kernels.portable.host.latent_tiles import LatentTiles
from pagetwin.optimized.kernels.portable.host.tuning import Tiles
from pagetwin.optimized.kernels.portable.latent import Combination
from pagetwin.tools.bench.timing import Stopwatch, captured, time_interleaved
from torch import Tensor

RANK, ROPE, BLOCK_SIZE = 512, 64, 64
CASES = (
    # requests, query heads, keys, new tokens
    (1, 64, 8192, 1), (1, 64, 65536, 1), (1, 128, 8192, 1), (1, 16, 8192, 1),
    (1, 16, 65536, 1), (8, 16, 8192, 1), (8, 128, 8192, 1), (32, 128, 8192, 1),
    (64, 16, 4096, 1), (256, 16, 1024, 1), (256, 8, 1024, 1), (64, 128, 4096, 2),
    (16, 32, 8192, 4),
)  # fmt: skip
TILES = (
    # rows, keys, warps, stages, programs per SM
    (16, 32, 4, 3, 2), (16, 32, 4, 5, 2), (16, 64, 4, 3, 2), (16, 64, 8, 3, 2),
    (16, 32, 8, 3, 2), (32, 32, 8, 3, 1), (32, 64, 8, 3, 1), (64, 32, 8, 3, 1),
    (64, 32, 8, 5, 1), (64, 64, 8, 3, 1),
)  # fmt: skip
COMBINATIONS = (
    # rows, channels, splits at once
    (1, 128, 16), (1, 128, 32), (1, 64, 32), (1, 512, 8), (2, 128, 8), (4, 128, 4),
    (8, 128, 2), (8, 128, 4),
)  # fmt: skip
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "tiles": [{"tiles": LatentTiles(Tiles(*tile), count)} for *tile, count in TILES],
    "keys": [{"MIN_KEYS": keys} for keys in (64, 256, 512, 1024)],
    "columns": [{"MAX_COLUMNS": columns} for columns in (1, 2, 4, 16)],
    "combination": [{"combination": Combination(*sizes)} for sizes in COMBINATIONS],
}
"""Values in place of the chosen ones, of one constant at a time."""
SPLITS = (1, 4, 16, 64)
MAX_ERROR = 0.02
REPEATS = 11


class Batch:
    """Decodes of equal lengths over random latents.

    Args:
        reqs, heads, keys, new: requests, query heads, keys of a request, its new tokens.
        is_fp8: whether the latents are float8_e4m3fn numbers. vLLM's kernels are not timed then.
    """

    def __init__(
        self, reqs: int, heads: int, keys: int, new: int, is_fp8: bool
    ) -> None:
        bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        self.bounds, self.is_fp8 = (new, keys), is_fp8
        blocks = reqs * (keys // BLOCK_SIZE)
        self.cache = torch.randn(blocks, BLOCK_SIZE, 1, RANK + ROPE, **bf16)
        scale = torch.ones(1, device="cuda")
        self.options = pack_options()
        if is_fp8:
            self.cache = self.cache.to(torch.float8_e4m3fn)
            self.options = pack_options(k_scale=scale, v_scale=scale)
        self.table = torch.randperm(blocks, device="cuda").int().view(reqs, -1)
        self.query = torch.randn(reqs * new, heads, RANK + ROPE, **bf16)
        self.starts = torch.arange(reqs + 1, device="cuda").int() * new
        self.lens = torch.full((reqs,), keys, device="cuda").int()
        self.scale = (RANK + ROPE) ** -0.5
        self.out = torch.empty(reqs * new, heads, RANK, **bf16)

    def attend(self) -> Tensor:
        """Attend with whatever kernels are chosen."""
        return paged_attention(
            self.query, self.cache, self.cache[..., :RANK], self.table, self.starts,
            self.lens, *self.bounds, scale=self.scale, out=self.out, **self.options,
        )  # fmt: skip

    def attend_with_vllm(
        self, fwd: Callable[..., Any], splits: int
    ) -> Callable[[], Any]:
        """Return the call of vLLM's kernels, which take one new token per request."""
        tokens, heads, _ = self.query.shape
        logits = self.query.new_empty(
            tokens, heads, splits, RANK + 1, dtype=torch.float32
        )
        lse = self.query.new_empty(tokens, heads)
        known = inspect.signature(fwd).parameters
        given: dict[str, Any] = {"is_mla": True} if "is_mla" in known else {}
        for name in ("k_scale", "v_scale"):
            if name in known and known[name].default is inspect.Parameter.empty:
                given[name] = torch.ones(1, device="cuda")
        return lambda: fwd(
            self.query, self.cache, self.cache[..., :RANK], self.out, lse, self.table,
            self.lens, logits, splits, self.scale, BLOCK_SIZE, **given,
        )  # fmt: skip


@contextmanager
def chosen(**given: Any) -> Iterator[None]:
    """Replace constants, and forget plans and recorded launches, which would keep the others."""
    functions = {"tiles": "choose_latent_tiles", "combination": "choose_combination"}
    with ExitStack() as stack:
        for name, value in given.items():
            replacement = value
            if name in functions:
                replacement = lambda *_, value=value: value  # noqa: E731
            target = functions.get(name, name)
            stack.enter_context(mock.patch.object(latent, target, replacement))
        forget()
        yield
    forget()


def forget() -> None:
    """Drop plans and recorded launches."""
    PIPELINE.plans.clear()
    PIPELINE.plans.repeats.clear()


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave kernel families out of the choice."""
    rest = tuple(f for f in families.FAMILIES if f.name not in names)
    with mock.patch.object(families, "FAMILIES", rest):
        forget()
        yield
    forget()


def ways(
    batch: Batch, kinds: list[str]
) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yield what is timed: its name, a context, and the call."""
    yield "chosen", chosen(), batch.attend
    for kind in kinds:
        for given in CANDIDATES[kind]:
            (value,) = given.values()
            yield f"{kind} {value}", chosen(**given), batch.attend
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    except ImportError:
        return
    if batch.bounds[0] == 1 and not batch.is_fp8:
        for splits in SPLITS:
            call = batch.attend_with_vllm(decode_attention_fwd, splits)
            yield f"vllm {splits}", chosen(), call


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--only", nargs="*", choices=CANDIDATES, default=list(CANDIDATES)
    )
    parser.add_argument("--cases", nargs="*", help="REQUESTSxHEADSxKEYS")
    parser.add_argument("--fp8", action="store_true", help="FP8 latents")
    asked = parser.parse_args()
    with asked.results.open("a") as file, without("sm90 latent"):
        for case in CASES:
            if asked.cases and "x".join(map(str, case[:3])) not in asked.cases:
                continue
            batch = Batch(*case, asked.fp8)
            line: dict[str, Any] = dict(
                zip(("requests", "heads", "keys", "new"), case, strict=True)
            )
            line["fp8"] = asked.fp8
            line["device"] = torch.cuda.get_device_name()
            found = time_ways(batch, asked.only)
            for way, result in found.items():
                print(json.dumps(line | {"way": way} | result), file=file, flush=True)
            print(line, {way: result.get("us") for way, result in found.items()})


def time_ways(batch: Batch, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Return the microseconds, or the error, of everything that is timed over one batch."""
    found: dict[str, dict[str, Any]] = {}
    with without("sm90 latent", "portable latent"):
        expected = batch.attend().clone()
        replays = {"paged": capture(batch.attend)}
    for way, context, call in ways(batch, kinds):
        with context:
            try:
                batch.out.fill_(float("nan"))
                call()
                error = (batch.out - expected).abs().max().item()
                assert error < MAX_ERROR, f"differs by {error}"
                replays[way] = capture(call)
            except Exception as error:
                found[way] = {"error": str(error)[:200]}
    times = time_interleaved(replays, REPEATS, random.Random(0), Stopwatch("cuda"))
    return found | {
        way: {"us": round(statistics.median(runs), 2)} for way, runs in times.items()
    }


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a call that has run before."""
    graph = captured(call)
    assert graph is not None, "the call cannot be captured"
    return graph.replay


if __name__ == "__main__":
    main()
