"""Signatures of attention calls, and batches that share one.

A kernel is compiled for what is constant in it: dtypes, head sizes, block size, options, and powers
of two of some bounds. A signature holds these. All its batches are served by the same compiled
kernels, and differ in everything else: lengths, block tables, needles, poison, numbers. So a round
of fuzzing draws a few signatures and hundreds of batches for each, and compilation is paid once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from ...validation.options import OPTIONS as OPTION_FILES
from .batches import TABLES
from .option_pairs import PLAIN, Choice, allowed, draw_choice
from .ranks import RankLayout
from .views import Views, draw_views

POISONS = ("nan", "inf", "large")
"""Contents of slots that are not allocated: NaN, infinity, the largest number of the dtype."""
ENTRIES = ("far outside", "first block", "of another request")
"""Contents of block-table entries past the end of a sequence."""
VERSION = 3
"""Version of the drawing. A seed gives other numbers in another version, so a case of another
version is rejected: it would not reproduce what was found."""


@dataclass(frozen=True)
class Limits:
    """Sizes that signatures are drawn from.

    Args:
        head_sizes, groups, block_sizes: As in `option_pairs.OPTIONS`.
        kv_heads: Numbers of kv heads.
        reqs: Maximum number of requests per batch.
        max_query_len: Maximum number of new tokens of a request.
        max_key_len: Maximum number of keys of a request.
        plain: Probability that an option is off.
    """

    head_sizes: tuple[str, ...]
    groups: tuple[str, ...]
    block_sizes: tuple[str, ...]
    kv_heads: tuple[int, ...]
    reqs: int
    max_query_len: int
    max_key_len: int
    plain: float


SMALL = Limits(
    head_sizes=("16", "16", "8", "24", "1", "80"),
    groups=("1", "2", "2", "3", "4", "8"),
    block_sizes=("16", "16", "8", "1", "3", "24"),
    kv_heads=(1, 1, 1, 2),
    reqs=3,
    max_query_len=20,
    max_key_len=80,
    plain=0.75,
)
"""For a CPU: the kernels' tiles are small there, so short sequences cross their edges."""
LARGE = Limits(
    head_sizes=("128", "128", "64", "64", "96", "256", "80", "24"),
    groups=("1", "2", "4", "4", "5", "8"),
    block_sizes=("16", "16", "32", "64", "128", "1", "24"),
    kv_heads=(1, 2, 2, 4),
    reqs=8,
    max_query_len=150,
    max_key_len=1100,
    plain=0.75,
)
"""For a GPU: sequences of many tiles, long enough to be split."""


@dataclass(frozen=True)
class Signature:
    """What all batches of a signature have in common.

    Args:
        choice: One value for each option, as in `option_pairs.OPTIONS`.
        kv_heads: Number of kv heads.
        reqs: Maximum number of requests per batch.
        max_query_len, max_key_len: Bounds of the lengths. The calls pass them as they are.
        seed: Selects what else is the same in all batches, such as the kind of an FP8 scale.
        ranks: Optional. The ranks that compute a batch together. If None, there is one, without
            an operation of several ranks.
        views: Which tensors are views of larger ones. A kernel may be compiled for its strides.
    """

    choice: Choice
    kv_heads: int = 1
    reqs: int = 3
    max_query_len: int = 20
    max_key_len: int = 80
    seed: int = 0
    ranks: RankLayout | None = None
    views: Views = field(default_factory=Views)

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return int(self.choice["block_size"])

    @property
    def query_heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * int(self.choice["group"])

    @property
    def has_prompts(self) -> bool:
        """Whether all keys of a batch are new, because ranks compute whole prompts."""
        return self.ranks is not None and not self.ranks.is_step

    @property
    def is_valid(self) -> bool:
        """Whether its heads and blocks can be distributed over its ranks."""
        sizes = (self.block_size, self.query_heads, self.kv_heads)
        return self.ranks is None or self.ranks.takes(*sizes)

    @property
    def is_paged(self) -> bool:
        """Whether the keys are in a paged cache."""
        return self.choice["operation"] == "paged_attention"


@dataclass(frozen=True)
class SignedBatch:
    """One batch of a signature in small numbers.

    Args:
        signature: What it shares with the other batches.
        query_lens, key_lens: New tokens and keys of each request.
        needles: For each request, the position of the key that outweighs all others; -1 for none.
        table: One of TABLES: which blocks the requests share.
        poison: One of POISONS: the content of slots that are not allocated.
        entries: One of ENTRIES: the content of table entries past the end of a sequence.
        padding: Query rows after the last request.
        seed: Seed of the numbers, the blocks and the tensors of options.
        version: VERSION of the drawing. A case that was printed before versions has none.

    Raises:
        ValueError: The batch is of another version.
    """

    signature: Signature
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    needles: tuple[int, ...]
    table: str = "scattered"
    poison: str = "nan"
    entries: str = "far outside"
    padding: int = 0
    seed: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        """Reject a batch of another version."""
        if self.version != VERSION:
            raise ValueError(
                f"version = {self.version}: this batch was drawn by another version of pagetwin,"
                f" and its numbers cannot be drawn again (expected {VERSION}); run pagetwin fuzz"
                " again, or reproduce it with the version that found it"
            )

    def simpler(self) -> Iterator["SignedBatch"]:
        """Yield batches that are simpler by one change, the largest simplification first."""
        return (batch for batch in self._simpler() if batch.signature.is_valid)

    def _simpler(self) -> Iterator["SignedBatch"]:
        reqs = list(zip(self.query_lens, self.key_lens, self.needles, strict=True))
        for req in range(len(reqs)):
            if len(reqs) > 1:
                yield self._with(reqs[:req] + reqs[req + 1 :])
        signature = self.signature
        for ranks in () if signature.ranks is None else signature.ranks.simpler():
            yield replace(self, signature=replace(signature, ranks=ranks))
        for views in signature.views.simpler():
            yield replace(self, signature=replace(signature, views=views))
        for name, plain in PLAIN.items():
            if name == "operation" or signature.choice[name] == plain:
                continue
            rest = {other: v for other, v in signature.choice.items() if other != name}
            if plain in allowed(rest, name):
                choice = signature.choice | {name: plain}
                yield replace(self, signature=replace(signature, choice=choice))
        simpler_signatures: tuple[dict[str, Any], ...] = (
            {"kv_heads": 1},
            {"seed": 0},
            {"max_query_len": max(1, *self.query_lens)},
            {"max_key_len": max(1, *self.key_lens)},
        )
        for changes in simpler_signatures:
            yield replace(self, signature=replace(signature, **changes))
        simpler_contents: tuple[dict[str, Any], ...] = (
            {"table": "scattered"},
            {"poison": "nan"},
            {"entries": "far outside"},
            {"padding": 0},
            {"seed": 0},
            {"seed": 1},
        )
        for changes in simpler_contents:
            yield replace(self, **changes)
        is_free = signature.choice["causal"] == "cross" or signature.has_prompts
        for req, (new, keys, needle) in enumerate(reqs):
            for shorter in (
                (new, keys, -1),
                (min(new, 1), keys, needle),
                (new, keys // 2, needle),
                (new, keys - signature.block_size, needle),
                (new, keys - 1, needle),
                (new - 1, keys, needle),
            ):
                if shorter[0] < 0 or shorter[1] < (0 if is_free else shorter[0]):
                    continue
                yield self._with([*reqs[:req], shorter, *reqs[req + 1 :]])

    def _with(self, reqs: list[tuple[int, int, int]]) -> "SignedBatch":
        if self.signature.has_prompts:
            reqs = [(keys, keys, needle) for _, keys, needle in reqs]
        return replace(
            self,
            query_lens=tuple(new for new, _, _ in reqs),
            key_lens=tuple(keys for _, keys, _ in reqs),
            needles=tuple(min(needle, keys - 1) for _, keys, needle in reqs),
        )


def draw_signature(
    seed: int, limits: Limits, operation: str = "paged_attention"
) -> Signature:
    """Return a random signature. Equal arguments give equal signatures."""
    pick = Random(f"signature {seed} {operation}")
    start = {"operation": operation}
    for name, plain in PLAIN.items():
        # sizes, layouts and dtypes are always drawn
        if name in OPTIONAL and pick.random() < limits.plain:
            start[name] = plain
    if operation == "encoder_attention":
        start["causal"] = pick.choice(["no", "no", "yes"])
    choice = draw_choice(pick, start.items())
    choice["head_size"] = pick.choice(limits.head_sizes)
    choice["group"] = pick.choice(limits.groups)
    if operation == "paged_attention":
        choice["block_size"] = pick.choice(limits.block_sizes)
    longest = {"decode": 1, "verification": 5, "prefill": limits.max_query_len}
    max_query_len = longest.get(choice["batch"], limits.max_query_len)
    return Signature(
        choice=choice,
        kv_heads=pick.choice(limits.kv_heads),
        reqs=limits.reqs,
        max_query_len=min(max_query_len, limits.max_query_len),
        max_key_len=limits.max_key_len,
        seed=pick.randrange(2**16),
        views=draw_views(pick, operation, limits.plain).with_fixed_strides(),
    )


OPTIONAL = (
    *OPTION_FILES,
    "cache",
    "scales",
    "value_head_size",
    "scale",
)
"""Options that are off in most signatures."""


def draw_batch(signature: Signature, index: int) -> SignedBatch:
    """Return one of a signature's batches. Equal arguments give equal batches."""
    pick = Random(f"batch {signature.seed} {index}")
    reqs = pick.randint(1, signature.reqs)
    lens = [_draw_lengths(pick, signature) for _ in range(reqs)]
    return SignedBatch(
        signature=signature,
        query_lens=tuple(new for new, _ in lens),
        key_lens=tuple(keys for _, keys in lens),
        needles=tuple(
            _draw_needle(pick, signature, *lens_of_request) for lens_of_request in lens
        ),
        table=pick.choice(TABLES),
        poison=pick.choice(["nan", *POISONS]),
        entries=pick.choice(["far outside", *ENTRIES]),
        padding=pick.choice([0, 0, 1, 3]),
        seed=pick.randrange(2**31),
        version=VERSION,
    )


def _edges(signature: Signature) -> list[int]:
    """Return lengths at block, tile, window and chunk edges."""
    size = signature.block_size
    sizes = [size, 2 * size, 3 * size, 16, 32, 64, 128, 256, 512, 1024]
    for name in ("sliding_window", "attention_chunk_size"):
        if signature.choice[name] != "none":
            sizes += [int(signature.choice[name]), 2 * int(signature.choice[name])]
    return sizes


def _draw_lengths(pick: Random, signature: Signature) -> tuple[int, int]:
    """Return new tokens and keys of a request, on both sides of block and tile edges."""
    most, longest = signature.max_query_len, signature.max_key_len
    edges = [edge for edge in _edges(signature) if edge <= longest]
    keys = pick.choice(
        [
            pick.choice(edges) + pick.choice([-1, 0, 1]),
            pick.randint(1, longest),
            pick.randint(1, min(longest, 3 * signature.block_size)),
        ]
    )
    keys = min(max(keys, 0), longest)
    kind = signature.choice["batch"]
    if kind == "mixed":
        kind = pick.choice(["decode", "prefill", "chunk", "verification"])
    new = {
        "decode": 1,
        "prefill": min(keys, most),
        "chunk": pick.randint(1, most),
        "verification": pick.randint(1, min(5, most)),
    }[kind]
    if kind == "prefill":
        keys = new if pick.random() < 0.7 else keys
    if pick.random() < 0.06:
        new = 0
    if signature.choice["causal"] == "cross":
        return new, keys
    return min(new, keys), keys


def _draw_needle(pick: Random, signature: Signature, new: int, keys: int) -> int:
    """Return the position of a needle next to an edge, or -1."""
    if not keys or pick.random() < 0.4:
        return -1
    size, last = signature.block_size, keys - 1
    edges = [0, last, keys - new, last // size * size, last // 32 * 32, last // 64 * 64]
    edges += [last - edge for edge in _edges(signature)[-3:]]
    edges.append(pick.randrange(keys))
    return min(max(0, pick.choice(edges) - pick.choice([0, 0, 1])), last)


@st.composite
def signed_batches(draw: st.DrawFn, operation: str = "paged_attention") -> SignedBatch:
    """Return a batch of one of four signatures, so that few kernels are compiled."""
    seed = draw(st.integers(0, 2**20))
    return draw_batch(draw_signature(seed % 4, SMALL, operation), seed)
