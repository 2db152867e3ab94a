"""Choices of options: random ones, and a list that covers all pairs of values.

OPTIONS names all properties in which calls differ, and the values that the laws draw. Attention
options are declared in `validation/options`, with the pairs that they reject; all other properties
are declared here. A choice gives each of them one value. `design` returns choices that contain
every pair of values at least once, except the pairs in REJECTED, which raise.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from random import Random

from hypothesis import strategies as st

from ...contract.attention_options import OPTIONS_BY_POSITION
from ...validation.option import Option
from ...validation.options import OPTIONS as OPTION_FILES
from .batches import LAYOUTS
from .reuse import compiled, is_shared

Choice = dict[str, str]
"""One value for each option."""


@dataclass(frozen=True)
class Axis:
    """A property in which calls differ, besides the options.

    Args:
        values: Names of the values that the tests draw. The first one is the plain one.
        meaning: Its meaning in a few words.
        default: Its value in calls that do not set it, in a few words.
        heading: Heading of its column in the table of pairs. If empty, it has no column.
    """

    values: tuple[str, ...]
    meaning: str
    default: str
    heading: str = ""


_FIRST: dict[str, Axis | Option] = {
    "operation": Axis(
        ("paged_attention", "encoder_attention"),
        "keys in pages, or one after another",
        "-",
    ),
    "causal": OPTION_FILES["causal"],
    "batch": Axis(
        ("mixed", "prefill", "decode", "verification"),
        "whole prompts, single tokens, a few drafts, or all of it",
        "-",
    ),
}
_LAST: dict[str, Axis | Option] = {
    "cache": Axis(
        ("as the query", "e4m3", "e5m2"),
        "dtype of keys and values",
        "as the query",
        "FP8 cache",
    ),
    "scales": Axis(
        ("none", "numbers", "one element", "each head"),
        "`k_scale`, `v_scale`: what an FP8 cache's numbers stand for",
        "none",
    ),
    "dtype": Axis(("float32", "float16", "bfloat16"), "dtype of the queries", "-"),
    "out": Axis(
        ("given", "made", "e4m3", "e5m2"),
        "the output: given, made, or in FP8 with an `out_scale`",
        "made",
    ),
    "batch_invariant": OPTION_FILES["batch_invariant"],
    "lse": Axis(("given", "none"), "the log-sum-exp is wanted", "none", "lse"),
    "value_head_size": Axis(
        ("as the keys", "other"), "elements of a value", "as the keys", "value size"
    ),
    "layout": Axis(LAYOUTS, "strides of keys and values", "any"),
    "block_size": Axis(("16", "1", "3", "24"), "slots in a block", "any"),
    "group": Axis(("2", "1", "3", "8"), "query heads that share a kv head", "any"),
    "head_size": Axis(("16", "1", "24", "80"), "elements of a head", "any"),
    "query": Axis(("fused", "apart"), "a slice of a projection, or packed", "any"),
    "scale": Axis(("none", "0.3"), "what scores are multiplied with", "1/sqrt(size)"),
}
OPTIONS: dict[str, Axis | Option] = {
    **_FIRST,
    **{
        name: option
        for name, option in OPTION_FILES.items()
        if name not in _FIRST and name not in _LAST
    },
    **_LAST,
}
"""All axes and options, in the order of the tables in the documentation."""

PLAIN: Choice = {name: option.values[0] for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class RejectedPair:
    """Two options with values that cannot be combined.

    Args:
        one, other: Each an option and some of its values. No value of one can be combined with any
            value of the other.
        reason: The reason.
        words: A part of the error message.
    """

    one: tuple[str, tuple[str, ...]]
    other: tuple[str, tuple[str, ...]]
    reason: str
    words: str

    def pairs(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Yield the pairs, each value with its option."""
        for a in self.one[1]:
            for b in self.other[1]:
                yield (self.one[0], a), (self.other[0], b)


def _on(name: str) -> tuple[str, tuple[str, ...]]:
    return name, OPTIONS[name].values[1:]


_ENCODER = ("operation", ("encoder_attention",))
REJECTED = (
    *(
        RejectedPair(
            (rejection.other, rejection.values),
            _on(name),
            rejection.reason,
            rejection.words,
        )
        for name, option in OPTION_FILES.items()
        for rejection in option.rejected
    ),
    *(
        RejectedPair(
            ("causal", ("cross",)),
            _on(name),
            "if there are more queries than keys, a query has no position among the keys",
            f"{name} is given: expected at most as many",
        )
        for name in OPTIONS_BY_POSITION
    ),
    RejectedPair(
        _ENCODER,
        _on("cache"),
        "only cached keys are quantised",
        "expected torch.float16 or torch.bfloat16 or torch.float32",
    ),
    RejectedPair(
        _ENCODER,
        _on("scales"),
        "only cached keys are quantised",
        "k_scale is given: expected None, since the keys and values are not read",
    ),
    RejectedPair(
        _ENCODER,
        _on("block_size"),
        "only a cache has blocks",
        "unexpected keyword argument 'block_table'",
    ),
    RejectedPair(
        ("cache", ("as the query",)),
        _on("scales"),
        "only FP8 numbers have scales",
        "k_scale is given but the cache is",
    ),
    RejectedPair(
        ("scales", ("none",)),
        _on("cache"),
        "FP8 numbers need scales",
        "k_scale = None: expected a scale",
    ),
)
Value = tuple[str, str]
"""An option and one of its values."""
Pair = tuple[Value, Value]
_FORBIDDEN: dict[Value, set[Value]] = {}
"""For each value of an option, the values of others that it cannot be combined with."""
for _rejected in REJECTED:
    for _one, _other in _rejected.pairs():
        _FORBIDDEN.setdefault(_one, set()).add(_other)
        _FORBIDDEN.setdefault(_other, set()).add(_one)
_NONE: set[Value] = set()


def pairs_of(choice: Choice) -> set[Pair]:
    """Return all pairs of values of a choice."""
    return set(combinations(choice.items(), 2))


def all_pairs() -> set[Pair]:
    """Return all valid pairs of values."""
    return {
        ((name, value), (other, its))
        for name, other in combinations(OPTIONS, 2)
        for value in OPTIONS[name].values
        for its in OPTIONS[other].values
        if (other, its) not in _FORBIDDEN.get((name, value), _NONE)
    }


def allowed(choice: Choice, name: str) -> list[str]:
    """Return the values of an option that are valid together with those of a choice."""
    beside = choice.items()
    return [
        value
        for value in OPTIONS[name].values
        if _FORBIDDEN.get((name, value), _NONE).isdisjoint(beside)
    ]


def draw_choice(pick: Random, start: Iterable[tuple[str, str]] = ()) -> Choice:
    """Return a random choice in the order of OPTIONS that contains the given values."""
    while True:
        choice = dict(start)
        for name in pick.sample(list(OPTIONS), len(OPTIONS)):
            values = [choice[name]] if name in choice else allowed(choice, name)
            if not values:
                break
            choice[name] = pick.choice(values)
        else:
            return {name: choice[name] for name in OPTIONS}


def drawn_choice(seed: int, start: Choice) -> Choice:
    """Return a random choice of options with the given values.

    In a run that shares signatures it is one of a few choices. Those of all laws differ in the
    given values alone, and an option that cannot be combined with these is off.
    """
    pick = Random(seed)
    if not is_shared():
        return draw_choice(pick, start.items())
    operation = {"operation": start.get("operation", PLAIN["operation"])}
    choice = draw_choice(compiled(pick), operation.items()) | start
    for name in [option for option in choice if option not in start]:
        rest = {other: value for other, value in choice.items() if other != name}
        values = allowed(rest, name)
        if choice[name] not in values:
            choice[name] = PLAIN[name] if PLAIN[name] in values else values[0]
    return choice


def cover_pairs(candidates: int = 60) -> list[Choice]:
    """Return choices that contain every valid pair, each the best of some random candidates.

    Every choice starts from a pair that is still missing, so that the search ends.
    """
    pick = Random(0)
    missing = all_pairs()
    design: list[Choice] = []
    while missing:
        first = min(missing)
        drawn = [draw_choice(pick, first) for _ in range(candidates)]
        best = max(drawn, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        design.append(best)
    return design


@st.composite
def choices(draw: st.DrawFn) -> tuple[Choice, int]:
    """Draw any valid choice, and a seed for its batch."""
    seed = draw(st.integers(0, 2**20))
    return draw_choice(Random(seed)), seed


@cache
def design() -> list[Choice]:
    """Return choices that together cover every pair of options. It takes half a second, once."""
    return cover_pairs()
