"""Calls that a probe tries: the first ones, and the values of their properties."""

from collections.abc import Iterator
from itertools import product

from ...validation.options import OPTIONS as OPTION_FILES
from ..cases.forms import FORMS, TABLE_FORMS
from ..cases.option_pairs import PLAIN, Choice, allowed
from ..cases.views import Views

LAW = "paged attention is right under any options"
LAW_OF_VIEWS = "attention is right for views under any options"
SEEDS = range(4)
SIZES: dict[str, tuple[int, ...]] = {
    "head_size": (128, 64, 256, 96, 80, 192, 512, 32, 16, 112, 160, 24, 8, 1),
    "block_size": (16, 64, 256, 1, 3, 8, 24, 32, 48, 128, 512),
    "group": (1, 2, 4, 8, 3, 5, 7, 16),
}
"""Values that are tried, the most usual ones first."""
FIELDS = {
    "head_size": "head_sizes",
    "block_size": "block_sizes",
    "group": "group_sizes",
}
DTYPES = ("bfloat16", "float16", "float32")
STORED = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
SCALES = {"numbers": "float", "one element": "one element", "each head": "per head"}
CAUSAL = {"no": "bool", "each request": "per request"}
OPTION_NAMES = [name for name in OPTION_FILES if name != "batch_invariant"]
OPTION_NAMES += ["scale", "value_head_size"]
STRIDES = {
    "query strides": FORMS[1:],
    "out strides": FORMS[1:],
    "block_table strides": TABLE_FORMS[1:],
}
"""Forms of tensors that are views, by property."""
Change = tuple[str, str]
"""A property of a call, and a value of it that the first call did not have."""


def bases() -> Iterator[tuple[int, Choice]]:
    """Yield seeds and calls without options, the most usual sizes first."""
    plain = PLAIN | {"query": "apart", "lse": "none", "out": "made"}
    sizes = [*product(SIZES["head_size"][:5], SIZES["block_size"][:4], DTYPES)]
    for batch, seed in product(("prefill", "decode"), SEEDS):
        # other seeds differ in the bounds of lengths
        for head, block, dtype in sizes if seed == 0 else sizes[: len(DTYPES)]:
            its = {"head_size": str(head), "block_size": str(block), "dtype": dtype}
            yield seed, plain | its | {"batch": batch}


def case_of(base: Choice, seed: int, changes: Choice) -> tuple[str, str]:
    """Return the law that tries the first call with some changes, and the case as Python."""
    choice = base | {key: its for key, its in changes.items() if key not in STRIDES}
    forms = {key.split()[0]: its for key, its in changes.items() if key in STRIDES}
    if not forms:
        return LAW, repr((choice, seed))
    if "out" in forms:
        choice["out"] = "given"
    return LAW_OF_VIEWS, repr((choice, seed, Views(**forms)))


def compatible(base: Choice, changes: list[Change]) -> list[Change]:
    """Return the first change, and those after it that can be combined with it in one call.

    Args:
        base: The call that is changed.
        changes: Any changes, at least one that `base` allows.
    """
    group: list[Change] = []
    for name, value in changes:
        beside = {key: its for key, its in base.items() if key != name}
        if value in allowed(beside | dict(group), name):
            group.append((name, value))
    return group


def words(changes: Choice) -> str:
    """Return changes in words, such as "head_size 64 and dtype float16"."""
    return " and ".join(f"{name} {value}" for name, value in changes.items())
