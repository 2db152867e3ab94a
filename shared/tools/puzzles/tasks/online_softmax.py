"""Puzzle 6: softmax and weighted average, one tile of keys at a time."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle, counted, small_numbers

INF = float("inf")
TEMPLATE = '''\
"""Puzzle 6: online softmax.

A kernel reads the keys in tiles and reads each tile once. It keeps a running maximum m, a
running sum l of exp(score - m), and an accumulator of the weighted values. When a tile
raises the maximum, the sum and the accumulator are rescaled.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def online_softmax(
    tiles: Iterator[tuple[Tensor, Tensor]], rows: int, head_size: int
) -> tuple[Tensor, Tensor]:
    """Return the values averaged by the softmax of their scores, and the log-sum-exp.

    The tensors may have any strides: they need not be contiguous.

    Args:
        tiles: yields (scores [rows, keys], values [keys, head_size]) once per tile, float32.
            A score of -inf means that the row does not attend to the key. Scores can be
            large: exp(score) can overflow.
        rows: number of queries.
        head_size: elements per value.

    Returns:
        output [rows, head_size] and lse [rows], the natural logarithm of the sum of
        exp(score) over all keys. A row that attends to no key has output 0 and lse -inf.

    Example:
        Tile 0 has the score 0 and the value 8: m = 0, l = 1, acc = 8. Tile 1 has the score
        ln 3 = 1.0986 and the value 4. The maximum rises by 1.0986, so the old sums are
        rescaled by exp(-1.0986) = 1/3: l = 1/3 + 1 = 4/3, acc = 8/3 + 4 = 20/3. The output
        is acc / l = 5, and lse = 1.0986 + ln(4/3) = ln 4 = 1.3863.

        >>> tiles = [
        ...     (torch.tensor([[0.0]]), torch.tensor([[8.0]])),
        ...     (torch.tensor([[3.0]]).log(), torch.tensor([[4.0]])),
        ... ]
        >>> online_softmax(iter(tiles), rows=1, head_size=1)
        (tensor([[5.]]), tensor([1.3863]))
    """
    raise NotImplementedError
'''


def cases() -> Iterator[Case]:
    """Yield up to three tiles of one key with all scores, then tiles with more keys and rows."""
    for count in (1, 2, 3):
        numbers = [0.0, 1.0, -INF, 2.0] if count < 3 else [0.0, 1.0, -INF]
        for scores in product(numbers, repeat=count):
            tiles = [
                (torch.tensor([[score]]), torch.tensor([[value]]))
                for score, value in zip(scores, (1.0, 3.0, 8.0), strict=False)
            ]
            yield {"tiles": tiles, "rows": 1, "head_size": 1}
    for seed in range(8):
        tiles = []
        for tile in range(2):
            drawn = small_numbers(2, 2, seed=2 * seed + tile)
            masked = drawn.masked_fill(drawn == -1, -INF)
            tiles.append((masked, counted(2, 2, start=1 + 4 * tile)))
        yield {"tiles": tiles, "rows": 2, "head_size": 2}
    for scores in ((200.0,), (200.0, 201.0), (201.0, 200.0), (-200.0, -201.0)):
        tiles = [
            (torch.tensor([[score]]), torch.tensor([[value]]))
            for score, value in zip(scores, (1.0, 3.0), strict=False)
        ]
        yield {"tiles": tiles, "rows": 1, "head_size": 1}


def call(function: Function, case: Case) -> Any:
    """Pass the tiles as an iterator."""
    return function(iter(case["tiles"]), case["rows"], case["head_size"])


def joined(tiles: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all scores, all values, and the running maximum after the tile of each key.

    Returns:
        [rows, keys], [keys, head_size] and [rows, keys], in float64.
    """
    read = list(tiles)
    scores = torch.cat([tile for tile, _ in read], 1).double()
    values = torch.cat([tile for _, tile in read], 0).double()
    highest = torch.cat(
        [tile.amax(1, keepdim=True).expand_as(tile) for tile, _ in read], 1
    )
    return scores, values, highest.double().cummax(1).values


def exp_over(scores: Tensor, maxima: Tensor) -> Tensor:
    """Return exp(scores - maxima), 0 where the score is -inf."""
    return torch.where(scores == -INF, 0.0, torch.exp(scores - maxima))


def weigh(scores: Tensor) -> Tensor:
    """Return softmax over all keys at once, 0 in rows that attend to no key."""
    p = exp_over(scores, scores.amax(1, keepdim=True))
    return p / p.sum(1, keepdim=True).clamp(min=1.0)


def right(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return softmax over all keys at once, in float64."""
    scores, values, _ = joined(tiles)
    return (weigh(scores) @ values).float(), scores.logsumexp(1).float()


def rescaled(is_acc: bool, is_sum: bool) -> Function:
    """Return a wrong answer in which a sum keeps its old scale when the maximum rises."""

    def wrong(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
        scores, values, running = joined(tiles)
        last = running[:, -1:].expand_as(running)
        acc = exp_over(scores, last if is_acc else running) @ values
        total = exp_over(scores, last if is_sum else running).sum(1)
        is_empty = total == 0
        out = torch.where(is_empty[:, None], 0.0, acc / total[:, None])
        return out.float(), (last[:, 0] + total.log()).float()

    return wrong


def not_divided(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return the accumulator."""
    scores, values, running = joined(tiles)
    acc = exp_over(scores, running[:, -1:]) @ values
    return acc.float(), scores.logsumexp(1).float()


def minus_inf(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return NaN where the first tile is masked: -inf - -inf."""
    read = list(tiles)
    out, lse = right(iter(read), rows, head_size)
    is_nan = (read[0][0] == -INF).all(1)
    return out.masked_fill(is_nan[:, None], torch.nan), lse.masked_fill(
        is_nan, torch.nan
    )


def zero_over_zero(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return NaN in rows that attend to no key."""
    out, lse = right(tiles, rows, head_size)
    return out.masked_fill((lse == -INF)[:, None], torch.nan), lse


def empty_lse(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return lse NaN in rows that attend to no key."""
    out, lse = right(tiles, rows, head_size)
    return out, lse.masked_fill(lse == -INF, torch.nan)


def base_2(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Take the last logarithm to base 2."""
    scores, values, running = joined(tiles)
    total = exp_over(scores, running[:, -1:]).sum(1)
    out = weigh(scores) @ values
    return out.float(), (running[:, -1] + total.log2()).float()


def exp2(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Use powers of 2 for weights."""
    unit = float(torch.tensor(2.0).log())
    scaled = [(scores * unit, values) for scores, values in tiles]
    out, lse = right(iter(scaled), rows, head_size)
    return out, (lse.double() / unit).float()


def without_maximum(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the rescaled sum."""
    scores, values, running = joined(tiles)
    total = exp_over(scores, running[:, -1:]).sum(1)
    out = weigh(scores) @ values
    return out.float(), total.log().float()


def overflow(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Compute exp(score) itself in float32."""
    read = list(tiles)
    scores = torch.cat([tile for tile, _ in read], 1)
    values = torch.cat([tile for _, tile in read], 0)
    total = scores.exp().sum(1)
    out = scores.exp() @ values / total[:, None]
    return torch.where((scores == -INF).all(1)[:, None], 0.0, out), total.log()


def last_tile(tiles: Any, rows: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return the result of the last tile."""
    return right(iter([list(tiles)[-1]]), rows, head_size)


PUZZLE = Puzzle(
    number=6,
    name="online_softmax",
    title="softmax, one tile of keys at a time",
    page="ideas/online_softmax",
    template=TEMPLATE,
    results={"output": ("row", "element"), "lse": ("row",)},
    cases=cases,
    right=right,
    call=call,
    hints=(
        Hint(
            "rescale_acc",
            "The sum is right and the accumulator is not. It holds weights relative to the old"
            " maximum. When the maximum rises, rescale it by alpha too.",
            rescaled(False, True),
        ),
        Hint(
            "rescale_sum",
            "The accumulator is right and the running sum is not. When the maximum rises,"
            " rescale the sum by alpha too.",
            rescaled(True, False),
        ),
        Hint(
            "rescale",
            "Sum and accumulator keep the scale of an old maximum. When a tile raises the"
            " maximum, rescale both by alpha = exp(old maximum - new maximum).",
            rescaled(False, False),
        ),
        Hint(
            "divide",
            "This is the accumulator. Divide it by the running sum at the end, so that the"
            " weights of a row add up to 1.",
            not_divided,
        ),
        Hint(
            "minus_inf",
            "A row whose tile is masked has the maximum -inf, and -inf - (-inf) is NaN. Use"
            " another number in place of the maximum as long as it is -inf.",
            minus_inf,
        ),
        Hint(
            "empty_row",
            "This row attends to no key, so accumulator and sum are both 0, and 0 / 0 is NaN."
            " Such a row has output 0.",
            zero_over_zero,
        ),
        Hint(
            "empty_lse",
            "This row attends to no key. Its output is right. Its log-sum-exp is -inf, the"
            " logarithm of 0.",
            empty_lse,
        ),
        Hint(
            "lse_base",
            "The output is right. The log-sum-exp is natural: do not add a logarithm to base 2"
            " to a maximum in natural units.",
            base_2,
        ),
        Hint(
            "base_2",
            "The weights are powers of 2. Scores are natural: use exp, or multiply the scores"
            " by log2(e) first and convert the log-sum-exp back.",
            exp2,
        ),
        Hint(
            "lse_maximum",
            "The output is right. The running sum is relative to the maximum, so the maximum"
            " is part of the log-sum-exp.",
            without_maximum,
        ),
        Hint(
            "overflow",
            "exp of a large score is infinite in float32, and exp of a very small one is 0."
            " Subtract the running maximum first.",
            overflow,
        ),
        Hint(
            "last_tile",
            "Only the last tile is in the result. The running values of the tiles before it"
            " must be kept.",
            last_tile,
        ),
    ),
    idea="Follow m, l and acc through the tiles above, as in the example. After each tile, acc /"
    " l is the right output for the keys up to there.",
)
