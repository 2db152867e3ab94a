"""How large is the replay, and where does it run?

Without a GPU the twin's kernels are interpreted, so everything is small; with one, the traffic runs
at its full length. What a user leaves open is taken from the row of DEFAULTS for the device, and
from nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a replay depends on.

    Args:
        trace: "mooncake", "azure" or a path.
        requests: how many of the trace at most, from the front.
        scale: what lengths are multiplied with.
        steps_per_second: steps of the batch in one second of the trace; arrivals are counted in
            them.
        twins: the implementations to compare: "reference", "optimized", "triton", "xformers", or
            the dotted name of a package with the same files.
        device: "cpu" or "cuda".
        dtype: "float32", "float16" or "bfloat16".
        query_heads, kv_heads, head_size, layers: the model.
        block_size: slots in a block.
        num_blocks: blocks in the cache; None: CACHE_SHARE of what the traffic would use at once if
            there were no end of them, so that some of it has to wait.
        token_budget: new tokens of a step at most.
        max_running: requests that run at once at most.
        check_every: steps between two comparisons of the whole cache.
        seed: what tokens, tables and block order are drawn from.
    """

    trace: str = "mooncake"
    requests: int
    scale: float
    steps_per_second: float
    twins: tuple[str, ...] = ("reference", "optimized")
    device: str
    dtype: str
    query_heads: int
    kv_heads: int
    head_size: int
    layers: int = 1
    block_size: int
    num_blocks: int | None = None
    token_budget: int
    max_running: int
    check_every: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "query_heads",
            "kv_heads",
            "head_size",
            "layers",
            "block_size",
            "token_budget",
            "max_running",
            "check_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads = {self.query_heads} is not a multiple of kv_heads ="
                f" {self.kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype = {self.dtype!r}: expected one of {', '.join(DTYPES)}"
            )
        if self.steps_per_second <= 0:
            raise ValueError(
                f"steps_per_second = {self.steps_per_second}: expected a number above 0"
            )
        if not self.twins or not all(self.twins):
            raise ValueError(
                f"twins = {','.join(self.twins)!r}: expected names with commas between"
                " them, such as reference,optimized"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


CACHE_SHARE = 0.6
"""Part of the blocks that endless traffic would use which a replay gets by default."""

DEFAULTS = {
    "cpu": Settings(
        requests=40,
        scale=1 / 64,
        steps_per_second=3.0,
        device="cpu",
        dtype="float16",
        query_heads=4,
        kv_heads=2,
        head_size=16,
        block_size=8,
        token_budget=96,
        max_running=8,
        check_every=1,
    ),
    "cuda": Settings(
        requests=100,
        scale=1.0,
        steps_per_second=30.0,
        device="cuda",
        dtype="bfloat16",
        query_heads=32,
        kv_heads=8,
        head_size=128,
        block_size=16,
        token_budget=2048,
        max_running=64,
        check_every=16,
    ),
}
"""What a user who says nothing gets, by device."""


def choose_settings(device: str | None = None, **given: Any) -> Settings:
    """Return the settings of a replay: what was given, and the device's defaults for the rest.

    Args:
        device: "cpu" or "cuda"; None: cuda if there is a GPU.
        given: fields of Settings; None: not given.

    Raises:
        ValueError: an unknown device, a GPU that is not there, or a field out of range.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in DEFAULTS:
        raise ValueError(f"device = {device!r}: expected {' or '.join(DEFAULTS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device = 'cuda': torch sees no GPU here; expected cpu, where the twin's"
            " kernels are interpreted"
        )
    twins: Sequence[str] | None = given.get("twins")
    if twins is not None:
        given["twins"] = tuple(twins)
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(DEFAULTS[device], **chosen)
