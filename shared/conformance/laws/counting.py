"""Laws of what is computed once per step: convolution chunks, DCP ranks, layer parameters.

The expected values are computed here position by position, token by token and layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from ...contract.kinds import PAD_SLOT_ID
from ...contract.layer_parameters import PerLayerParameters
from ..candidates.setting import Setting
from ..cases.steps import Requests, Runs, counts, padded, several
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..checks.metadata import packed
from .law import law


@dataclass(frozen=True)
class ChunkedPrompts:
    """Prompts for the causal convolution.

    Args:
        lens: new tokens of each prompt.
    """

    lens: tuple[int, ...]


@st.composite
def prompts(draw: st.DrawFn) -> ChunkedPrompts:
    """Return prompts of whole chunks of 8 tokens, one token more and one less; some long."""
    pick = Random(draw(st.integers(0, 2**20)))
    lens = [0, 1, 7, 8, 9, 16, 17, pick.randint(1, 60)]
    if pick.random() < 0.15:  # more chunks than buffers of the minimum size hold
        lens.append(pick.choice([8 * 1024, 8 * 1024 + 1, 9000]))
    return ChunkedPrompts(
        tuple(pick.choice(lens) for _ in range(pick.choice([0, 1, 3, 6])))
    )


LARGE_PROMPTS = [
    ChunkedPrompts(Runs((8, 298), (17, 2))),
    ChunkedPrompts((7, 8 * 65_600, 300)),
    ChunkedPrompts(Runs((0, 3), (1, 65_600), (9, 1))),
]
"""Prompts, tokens and chunks that do not fit 8 and 16 bits."""


@law(
    "compute_causal_conv1d_metadata",
    cases=several(prompts()),
    edges=[[prompts] for prompts in LARGE_PROMPTS],
)
def every_chunk_of_every_prompt_has_its_program(
    setting: Setting, cases: list[ChunkedPrompts]
) -> None:
    for prompts in cases:
        starts = counts(Requests(prompts.lens, (0,) * len(prompts.lens)).starts)
        before = starts.clone()
        found, batch, offset = setting.candidate.compute_causal_conv1d_metadata(
            starts, setting.device
        )
        expect_same("the starts afterwards", starts, before)
        expect_same("sizes of chunks", list(found), [8])
        nums = [len(range(0, length, 8)) for length in prompts.lens]
        owners = [req for req, num in enumerate(nums) for _ in range(num)]
        numbers = [number for num in nums for number in range(num)]
        room = 2 * max(1024, len(owners))
        right = {
            "nums": counts(nums),
            "tot": len(owners),
            "mlist": torch.tensor(owners, dtype=torch.int64),
            "mlist_len": len(owners),
            "offsetlist": counts(numbers),
            "batch_ptr": counts(padded(owners, room, PAD_SLOT_ID)),
            "token_chunk_offset_ptr": counts(padded(numbers, room, PAD_SLOT_ID)),
        }
        chunks = found[8]
        expect_same("names", sorted(chunks), sorted(right))
        for name, value in right.items():
            expect_same(name, chunks[name], value)
            if isinstance(value, torch.Tensor):
                on_device = name.endswith("_ptr")
                expected = setting.device.type if on_device else "cpu"
                expect_same(f"device of {name}", chunks[name].device.type, expected)
        expect_same("the programs' requests", batch, right["batch_ptr"])
        expect_same("the programs' chunks", offset, right["token_chunk_offset_ptr"])
        kinds = [type(chunks[name]) for name in ("tot", "mlist_len")]
        expect_same("kinds of the numbers", kinds, [int, int])


@law(
    "compute_causal_conv1d_metadata",
    cases=[ChunkedPrompts((8, -3)), ChunkedPrompts((-1,))],
    claim="rejects shapes",
)
def prompts_with_decreasing_starts_are_rejected(
    setting: Setting, prompts: ChunkedPrompts
) -> None:
    starts = counts(Requests(prompts.lens, (0,) * len(prompts.lens)).starts)
    compute = setting.candidate.compute_causal_conv1d_metadata
    expect_rejection("starts that fall", lambda: compute(starts, setting.device))
    expect_rejection(
        "starts that begin after 0",
        lambda: compute(starts.clamp(min=0) + 1, setting.device),
    )


@dataclass(frozen=True)
class Deal:
    """Sequences whose positions are distributed over ranks.

    Args:
        seq_lens: tokens of each sequence.
        ranks: number of ranks.
        in_a_row: consecutive positions that go to the same rank.
    """

    seq_lens: tuple[int, ...]
    ranks: int
    in_a_row: int

    def ranks_of(self, length: int) -> list[int]:
        """Return the rank of each position, assigned round-robin."""
        found: list[int] = []
        rank = 0
        while len(found) < length:
            found += [rank] * self.in_a_row
            rank = rank + 1 if rank + 1 < self.ranks else 0
        return found[:length]


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    """Return sequences that end before, at and after the end of a round."""
    pick = Random(draw(st.integers(0, 2**20)))
    ranks, in_a_row = pick.choice([1, 2, 3, 4, 8]), pick.choice([1, 1, 2, 3, 16])
    whole = ranks * in_a_row
    edges = [0, 1, in_a_row - 1, in_a_row, in_a_row + 1, whole - 1, whole, whole + 1]
    edges += [2 * whole + in_a_row, 3 * whole - 1, pick.randint(0, 100)]
    reqs = pick.choice([0, 1, 2, 5])
    return Deal(tuple(pick.choice(edges) for _ in range(reqs)), ranks, in_a_row)


LARGE_DEALS = [
    Deal((70_000, 300, 1), 300, 1),
    Deal((70_000, 300, 1), 2, 257),
    Deal((140_000, 131_200, 65_600), 2, 65_600),
    Deal(Runs((5, 300)), 8, 2),
]
"""Lengths, ranks, runs and numbers of requests that do not fit 8 and 16 bits."""


@law(
    "get_dcp_ranks",
    cases=several(deals()),
    edges=[[deal] for deal in LARGE_DEALS],
)
def positions_are_interleaved_over_the_ranks(
    setting: Setting, cases: list[Deal]
) -> None:
    for deal in cases:
        length = max(deal.seq_lens, default=0)
        pick = Random(length)
        order = list(range(length))
        pick.shuffle(order)  # the rank depends on the position, not on its index
        positions = torch.tensor(order, dtype=torch.int64, device=setting.device)
        before = positions.clone()
        found = setting.candidate.get_dcp_ranks(positions, deal.ranks, deal.in_a_row)
        dealt = deal.ranks_of(length)
        right = torch.tensor([dealt[position] for position in order], dtype=torch.int64)
        expect_same("ranks", found, right)
        expect_same("where they lie", found.device.type, setting.device.type)
        expect_same("positions afterwards", positions, before)
        if deal.in_a_row == 1:
            plain = setting.candidate.get_dcp_ranks(positions, deal.ranks)
            expect_same("ranks, one position in a row", plain, right)
        far = torch.tensor([2**40 + 7], device=setting.device)
        rank = (2**40 + 7) // deal.in_a_row % deal.ranks
        found = setting.candidate.get_dcp_ranks(far, deal.ranks, deal.in_a_row)
        expect_same("the rank of a far position", found.tolist(), [rank])


@law(
    "get_dcp_local_seq_lens",
    cases=several(deals()),
    edges=[[deal] for deal in LARGE_DEALS],
)
def every_token_is_counted_on_one_rank(setting: Setting, cases: list[Deal]) -> None:
    """The result for one rank is its column of the result for all, also for a single rank."""
    for deal in cases:
        lens = counts(deal.seq_lens, setting.device)
        before = lens.clone()
        of_ranks = (deal.ranks, None, deal.in_a_row)
        found = setting.candidate.get_dcp_local_seq_lens(lens, *of_ranks)
        dealt = [deal.ranks_of(length) for length in deal.seq_lens]
        ranks = range(deal.ranks)
        right = counts([own.count(rank) for own in dealt for rank in ranks])
        right = right.view(len(dealt), deal.ranks)
        expect_same("tokens of each rank", found, right)
        expect_same("where they lie", found.device.type, setting.device.type)
        for rank in ranks:
            column = setting.candidate.get_dcp_local_seq_lens(
                lens, deal.ranks, rank, deal.in_a_row
            )
            expect_same(
                f"tokens of rank {rank}", packed(column), packed(right[:, rank])
            )
        expect_same("the lengths afterwards", lens, before)
        found = setting.candidate.get_dcp_local_seq_lens(lens.long(), *of_ranks)
        expect_same("tokens of each rank, from lengths of 64 bits", found, right)
        alone = setting.candidate.get_dcp_local_seq_lens(lens)
        expect_same("tokens without ranks", alone, before.view(-1, 1))


@dataclass(frozen=True)
class Ranks:
    """Ranks that do not exist.

    Args:
        ranks, rank, in_a_row: the arguments of the call.
    """

    ranks: int
    rank: int | None
    in_a_row: int


@law(
    "get_dcp_local_seq_lens",
    "get_dcp_ranks",
    cases=[
        Ranks(0, None, 1),
        Ranks(2, None, 0),
        Ranks(2, 2, 1),
        Ranks(2, -1, 1),
        Ranks(1, None, -1),
    ],
    claim="rejects shapes",
)
def ranks_that_do_not_exist_are_rejected(setting: Setting, ranks: Ranks) -> None:
    lens = counts([5], setting.device)
    local = setting.candidate.get_dcp_local_seq_lens
    expect_rejection(
        repr(ranks), lambda: local(lens, ranks.ranks, ranks.rank, ranks.in_a_row)
    )
    if ranks.rank is None:
        dealt = setting.candidate.get_dcp_ranks
        positions = torch.arange(5, device=setting.device)
        expect_rejection(
            repr(ranks), lambda: dealt(positions, ranks.ranks, ranks.in_a_row)
        )


@dataclass(frozen=True)
class PlannedLayer:
    """The parameters of a layer's implementation. A parameter that is None does not exist.

    Args:
        scale: scale of its scores. Optional. If None, the layer is not an attention layer.
        window: number of visible keys to the left and to the right. Optional.
        cap: soft cap of its scores. Optional.
        sinks: whether each head has a sink.
    """

    scale: float | None
    window: tuple[int, int] | None = None
    cap: float | None = None
    sinks: bool = False

    def as_layer(self) -> Any:
        """Return a layer of a model."""
        if self.scale is None:
            return SimpleNamespace()
        impl = SimpleNamespace(scale=self.scale)
        if self.window is not None:
            impl.sliding_window = self.window
        if self.cap is not None:
            impl.logits_soft_cap = self.cap
        impl.sinks = torch.zeros(2) if self.sinks else None
        return SimpleNamespace(impl=impl)

    def numbers(self) -> PerLayerParameters:
        """Return the parameters that a plan needs."""
        assert self.scale is not None
        left = -1 if self.window is None else self.window[0]
        return PerLayerParameters(left, self.cap, self.scale, self.sinks)


@dataclass(frozen=True)
class PlannedModel:
    """The layers of a model.

    Args:
        layers: the layers, of which at least one is an attention layer.
    """

    layers: tuple[PlannedLayer, ...]


@st.composite
def models(draw: st.DrawFn) -> PlannedModel:
    """Return models whose layers are equal, or differ in one number."""
    pick = Random(draw(st.integers(0, 2**20)))
    first = PlannedLayer(
        pick.choice([0.125, 1.0]),
        pick.choice([None, (-1, -1), (127, 0), (0, 0)]),
        pick.choice([None, 30.0, 0]),
        pick.random() < 0.3,
    )
    layers = [first]
    for _ in range(pick.choice([0, 1, 2, 4])):
        kind = pick.choice(["same", "same", "norm", "window", "cap", "scale", "sinks"])
        kinds: dict[str, dict[str, Any]] = {
            "same": {},
            "norm": {"scale": None},
            "window": {"window": (31, 0)},
            "cap": {"cap": 50.0},
            "scale": {"scale": 0.5},
            "sinks": {"sinks": not first.sinks},
        }
        layers.append(replace(first, **kinds[kind]))
    return PlannedModel(tuple(layers))


def alike(numbers: Sequence[PerLayerParameters]) -> bool:
    """Return whether all layers have the same numbers as the first, without the flags."""
    return all(
        (layer.window_left, layer.logits_soft_cap, layer.sm_scale, layer.has_sinks)
        == (
            numbers[0].window_left,
            numbers[0].logits_soft_cap,
            numbers[0].sm_scale,
            numbers[0].has_sinks,
        )
        for layer in numbers
    )


@law(
    "get_per_layer_parameters", "infer_global_hyperparameters", cases=several(models())
)
def the_parameters_in_which_the_layers_of_a_plan_differ_are_reported(
    setting: Setting, cases: list[PlannedModel]
) -> None:
    """Layers without attention are ignored. The entries of the layers are not modified."""
    for model in cases:
        layers = {
            f"layer {n}": layer.as_layer() for n, layer in enumerate(model.layers)
        }
        names = list(layers)[::-1]
        found = setting.candidate.get_per_layer_parameters(
            layers | {"not requested": object()}, names, SimpleNamespace
        )
        right = {
            f"layer {n}": layer.numbers()
            for n, layer in reversed(list(enumerate(model.layers)))
            if layer.scale is not None
        }
        expect_same("layers, in the order of the names", list(found), list(right))
        for name, numbers in right.items():
            expect_same(name, vars(found[name]), vars(numbers))
        # flags that were set for another model must be ignored
        marked = {
            name: replace(
                parameters, has_same_window_lefts=n % 2 == 0, has_same_all_params=True
            )
            for n, (name, parameters) in enumerate(right.items())
        }
        before = {name: dict(vars(parameters)) for name, parameters in marked.items()}
        shared = setting.candidate.infer_global_hyperparameters(marked)
        after = {name: dict(vars(parameters)) for name, parameters in marked.items()}
        expect_same("entries afterwards", after, before)
        plans = list(right.values())
        lefts = {plan.window_left for plan in plans}
        expect_same(
            "numbers of the plan",
            vars(shared),
            vars(plans[0])
            | {
                "has_same_window_lefts": len(lefts) == 1,
                "has_same_all_params": alike(plans),
            },
        )
        if any(shared is parameters for parameters in marked.values()):
            raise Disagreement(
                "the plan", "as a whole", "a layer's own entry", "a copy"
            )


@law(
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
    cases=[PlannedModel((PlannedLayer(1.0),))],
    claim="rejects shapes",
)
def layers_without_a_plan_are_rejected(setting: Setting, model: PlannedModel) -> None:
    read = setting.candidate.get_per_layer_parameters
    (layer,) = model.layers
    layers = {
        "a": layer.as_layer(),
        "no scale": SimpleNamespace(impl=SimpleNamespace()),
        "a number": SimpleNamespace(impl=SimpleNamespace(scale=1.0, sliding_window=7)),
        "three": SimpleNamespace(
            impl=SimpleNamespace(scale=1.0, sliding_window=(1,) * 3)
        ),
    }
    for names, impl_cls in (
        (["a", "b"], SimpleNamespace),
        (["a"], PlannedModel),
        (["no scale"], SimpleNamespace),
        (["a number"], SimpleNamespace),
        (["three"], SimpleNamespace),
    ):
        expect_rejection(
            f"layers {names} of {impl_cls.__name__}",
            partial(read, layers, names, impl_cls),
        )
    infer = setting.candidate.infer_global_hyperparameters
    expect_rejection("no layer", lambda: infer({}))
