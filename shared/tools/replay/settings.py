"""Settings of a replay, and their defaults for a CPU and for a GPU.

Without a GPU the kernels are interpreted, so everything is small. With a GPU the traffic runs at
its full length. A setting that is not given is taken from DEFAULTS for the device.

Settings are judged before torch is imported, which takes seconds.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...contract.extras import is_missing
from .trace import read_trace, scale_trace

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
NAMED_TWINS = ("reference", "optimized", "triton", "xformers")
"""Both twins, and the backends that run in a replay."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Everything a replay depends on.

    Args:
        trace: "mooncake", "azure" or a path.
        requests: requests of the trace that are replayed at most, from the first.
        scale: factor of the prompt lengths.
        output_scale: factor of the output lengths. An output of 2 or more tokens keeps 2.
        steps_per_second: steps in one second of the trace; arrivals are counted in steps.
        twins: the implementations to compare: "reference", "optimized", "triton", "xformers", or
            the dotted name of a package with the same files.
        device: "cpu" or "cuda".
        dtype: "float32", "float16" or "bfloat16".
        query_heads, kv_heads, head_size, layers: sizes of the model.
        block_size: slots per block.
        num_blocks: Optional. Blocks in the cache. If None, CACHE_SHARE of the blocks that the
            traffic would use at once in an unlimited cache, so that some requests have to wait.
        token_budget: new tokens per step at most.
        max_running: running requests at most.
        check_every: steps from one comparison of the whole caches to the next.
        attention_every: steps from one that computes attention to the next, from the first. The
            others build metadata and write caches alone.
        ranks: processes that share the keys of every sequence. Above 1, each implementation runs
            on one rank and on this number of ranks.
        splits: fixed splits of every sequence's keys, a multiple of `ranks`, so that the bits do
            not depend on the number of ranks. 0: none.
        seed: seed of tokens, tables and block order.
    """

    trace: str = "mooncake"
    requests: int
    scale: float
    output_scale: float
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
    attention_every: int = 1
    ranks: int = 1
    splits: int = 0
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
            "attention_every",
            "ranks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads = {self.query_heads} is not a multiple of kv_heads ="
                f" {self.kv_heads}"
            )
        self._check_ranks()
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype = {self.dtype!r}: expected one of {', '.join(DTYPES)}"
            )
        if not self.steps_per_second > 0:
            raise ValueError(
                f"steps_per_second = {self.steps_per_second}: expected a number above 0"
            )
        if not self.twins or not all(self.twins):
            raise ValueError(
                f"twins = {','.join(self.twins)!r}: expected names separated by"
                " commas, such as reference,optimized"
            )

    def _check_ranks(self) -> None:
        """Reject ranks among which heads or slots cannot be divided, and splits without ranks."""
        for name in ("query_heads", "block_size"):
            if getattr(self, name) % self.ranks:
                raise ValueError(
                    f"{name} = {getattr(self, name)} is not a multiple of ranks ="
                    f" {self.ranks}"
                )
        if self.splits < 0 or self.splits % self.ranks:
            raise ValueError(
                f"splits = {self.splits}: expected 0 or a multiple of ranks = {self.ranks}"
            )
        if self.splits and self.ranks == 1:
            raise ValueError(
                f"splits = {self.splits} with ranks = 1: expected at least 2 ranks, whose bits"
                " are compared with those of one rank"
            )

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs kernels of a twin."""
        return self.device == "cpu" and not {*self.twins}.isdisjoint(NAMED_TWINS[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The twins that run: those of `twins`, each also on several ranks if there are any."""
        if self.ranks == 1:
            return self.twins
        return tuple(
            name
            for twin in self.twins
            for name in (
                name_on_ranks(twin, 1, self.splits) if self.splits else twin,
                name_on_ranks(twin, self.ranks, self.splits),
            )
        )

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The element type of queries and caches."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found


def name_on_ranks(twin: str, ranks: int, splits: int) -> str:
    """Return the name of an implementation that runs its parallel step.

    Example:
        >>> name_on_ranks("optimized", ranks=2, splits=8)
        'optimized on 2 ranks with 8 splits'
    """
    name = f"{twin} on {ranks} rank{'s' if ranks > 1 else ''}"
    return f"{name} with {splits} splits" if splits else name


CACHE_SHARE = 0.6
"""Default size of the cache, as a share of the blocks that the traffic would use at once."""

INTERPRETED_ATTENTION_EVERY = 6
"""Default of `attention_every` where a kernel is interpreted: attention takes most of the time."""

DEFAULTS = {
    "cpu": ReplaySettings(
        requests=40,
        scale=1 / 64,
        output_scale=1 / 32,
        steps_per_second=3.0,
        device="cpu",
        dtype="float16",
        query_heads=4,
        kv_heads=2,
        head_size=16,
        block_size=8,
        token_budget=96,
        max_running=16,
        check_every=1,
    ),
    "cuda": ReplaySettings(
        requests=100,
        scale=1.0,
        output_scale=1.0,
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
"""Default settings, by device."""


def choose_settings(device: str | None = None, **given: Any) -> ReplaySettings:
    """Return the settings of a replay: those given, and the device's defaults for the rest.

    Args:
        device: Optional. "cpu" or "cuda". If None, "cuda" if there is a GPU.
        given: fields of ReplaySettings. None means that a field is not given.

    Raises:
        ValueError: the device is unknown, no GPU is available, or a field is out of range.
    """
    _check_device(device)
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device = 'cuda': torch sees no GPU here; expected cpu, where the twin's"
            " kernels are interpreted"
        )
    settings = _settings_of(device, given)
    gpus = torch.cuda.device_count() if device == "cuda" else settings.ranks
    if 1 < settings.ranks > gpus:
        raise ValueError(
            f"ranks = {settings.ranks} with device = 'cuda': torch finds {gpus} GPU(s), expected at"
            " least one per rank; replay on the CPU with --device cpu, or on fewer ranks"
        )
    return settings


def check_settings(device: str | None = None, **given: Any) -> None:
    """Raise what does not depend on this machine, without torch: see `choose_settings`.

    Raises:
        FileNotFoundError, ValueError: as in `choose_settings`, or the trace cannot be read, or a
            twin does not exist.
        ImportError: a twin needs triton, which is not installed.
    """
    _check_device(device)
    reasons = []
    for default in DEFAULTS if device is None else (device,):
        try:
            settings = _settings_of(default, given)
        except ValueError as reason:
            reasons.append(reason)
    if len(reasons) == (len(DEFAULTS) if device is None else 1):
        raise reasons[0]
    trace = read_trace(settings.trace, settings.requests)
    scale_trace(trace, settings.scale, settings.output_scale)
    for name in settings.twins:
        if name in NAMED_TWINS[1:] and is_missing("triton"):
            from ...engine.triton_versions import why_no_triton

            raise ImportError(why_no_triton())
        if name not in NAMED_TWINS and not _can_be_found(name):
            raise ValueError(
                f"twin = {name!r} cannot be loaded (No module named {name!r}): expected"
                f" {', '.join(NAMED_TWINS)}, or a package with the same operations"
            )


def _can_be_found(module: str) -> bool:
    top = module.partition(".")[0]
    return top.isidentifier() and importlib.util.find_spec(top) is not None


def _check_device(device: str | None) -> None:
    if device is not None and device not in DEFAULTS:
        raise ValueError(f"device = {device!r}: expected {' or '.join(DEFAULTS)}")


def _settings_of(device: str, given: dict[str, Any]) -> ReplaySettings:
    """Return those given, and the device's defaults for the rest."""
    chosen = {name: value for name, value in given.items() if value is not None}
    twins: Sequence[str] | None = chosen.get("twins")
    if twins is not None:
        chosen["twins"] = tuple(twins)
    settings = replace(DEFAULTS[device], **chosen)
    if "attention_every" in chosen or device == "cuda" or not settings.is_interpreted:
        return settings
    return replace(settings, attention_every=INTERPRETED_ATTENTION_EVERY)
