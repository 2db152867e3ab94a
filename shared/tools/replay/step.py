"""Do the twins agree on one step?

Every twin gets the same batch and has a cache of its own. Beside them stands the truth: the
reference's metadata, a cache into which plain indexing writes, and attention in float64. Integers
and moved bytes must be equal to the last bit; attention must stay within its budget. The first law
that breaks ends the step.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from ...contract.budgets import Verdict
from .batch import Batch
from .disagreement import Difference
from .judge import SCORES_A_PIECE, find_truth, first_difference, name_differences
from .model import LayerInputs
from .twins import StepMetadata, Twin


class Stage(Enum):
    """What time is spent on."""

    METADATA = "metadata"
    WRITE = "cache write"
    ATTENTION = "attention"


class Law(Enum):
    """What must hold in every step."""

    RUNS = "'a step runs without an error'"
    METADATA = "'the metadata are equal'"
    WRITTEN = "'each new key and value lies in its slot'"
    REST = "'all other slots stay as they are'"
    ATTENTION = "'attention stays within its budget'"


@dataclass
class StepResult:
    """How a step went.

    Args:
        seconds: for each twin its seconds in each stage.
        verdicts: for each twin its worst row, over all layers judged so far.
        judging: seconds that went into the truth and the comparisons.
        difference: the first law that broke; None: all held.
        layer: where it broke.
    """

    seconds: list[dict[Stage, float]]
    verdicts: list[Verdict]
    judging: float = 0.0
    difference: Difference | None = None
    layer: int = 0


class _Broken(Exception):
    """Ends a step at the first law that breaks."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.found)
        self.difference = difference


def run_step(
    reference: Twin,
    twins: Sequence[Twin],
    batch: Batch,
    inputs: Sequence[LayerInputs],
    truth_caches: Sequence[Tensor],
    caches: Sequence[Sequence[Tensor]],
    check_whole_cache: bool,
    scores_a_piece: int = SCORES_A_PIECE,
) -> StepResult:
    """Run a step on every twin and compare what comes out.

    Args:
        reference: the twin that is right by definition.
        twins: the ones to compare with it.
        batch: the step's requests.
        inputs: for each layer its queries, keys and values.
        truth_caches: for each layer [2, num_blocks, block_size, kv_heads, head_size], changed.
        caches: for each twin the same, changed.
        check_whole_cache: also compare the slots that nobody wrote.
        scores_a_piece: score elements that the judge holds in memory at once.
    """
    nothing = Verdict(0.0, 0, 0.0, 0.0, True)
    result = StepResult(
        seconds=[dict.fromkeys(Stage, 0.0) for _ in twins],
        verdicts=[nothing for _ in twins],
    )
    began = time.perf_counter()
    try:
        right = reference.metadata(batch)
        made = []
        for place, twin in enumerate(twins):
            with _timed(result, place, twin, Stage.METADATA):
                made.append(twin.metadata(batch))
            _compare_metadata(place, made[-1], right)
        slots = right.common.slot_mapping
        for layer, layer_inputs in enumerate(inputs):
            result.layer = layer
            truth_cache = truth_caches[layer]
            _write_plainly(layer_inputs, truth_cache, slots)
            answers = []
            for place, twin in enumerate(twins):
                cache = caches[place][layer]
                with _timed(result, place, twin, Stage.WRITE):
                    twin.write(layer_inputs, cache, made[place])
                with _timed(result, place, twin, Stage.ATTENTION):
                    answers.append(twin.attend(layer_inputs, cache, made[place]))
            for place in range(len(twins)):
                cache = caches[place][layer]
                _compare_written(place, cache, truth_cache, slots, answers[place])
                if check_whole_cache:
                    _compare_rest(place, cache, truth_cache, answers[place])
            truth = find_truth(
                reference.implementation,
                batch,
                layer_inputs.query,
                truth_cache,
                scores_a_piece,
            )
            for place, answer in enumerate(answers):
                verdict = truth.judge(answer)
                worst = result.verdicts[place]
                if verdict.worst >= worst.worst or not verdict.finite:
                    result.verdicts[place] = verdict
                if not verdict.ok:
                    found = _describe_row(batch, verdict, answer, truth.exact)
                    raise _Broken(
                        Difference(
                            place, Law.ATTENTION.value, found, answer, truth.exact
                        )
                    )
    except _Broken as broken:
        result.difference = broken.difference
    _wait(reference.device)
    spent = sum(sum(seconds.values()) for seconds in result.seconds)
    result.judging = time.perf_counter() - began - spent
    return result


def compare_whole_caches(
    truth_caches: Sequence[Tensor], caches: Sequence[Sequence[Tensor]]
) -> tuple[int, Difference] | None:
    """Return the layer and what differs in the first cache that is not the truth's."""
    for layer, truth_cache in enumerate(truth_caches):
        for place, of_twin in enumerate(caches):
            try:
                _compare_rest(place, of_twin[layer], truth_cache, None)
            except _Broken as broken:
                return layer, broken.difference
    return None


def written_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return [2, tokens, kv_heads, head_size]: what lies in those slots."""
    return cache.flatten(1, 2)[:, slots]


def _write_plainly(inputs: LayerInputs, cache: Tensor, slots: Tensor) -> None:
    flat = cache.view(2, -1, *cache.shape[3:])
    flat[0, slots] = inputs.key
    flat[1, slots] = inputs.value


def _compare_metadata(place: int, made: StepMetadata, right: StepMetadata) -> None:
    found, expected = _named(made), _named(right)
    # the device's slots have to be the host's slots
    expected["slots_on_device"] = right.common.slot_mapping
    difference = name_differences(found, expected)
    if difference:
        raise _Broken(Difference(place, Law.METADATA.value, difference))


def _named(step: StepMetadata) -> dict[str, object]:
    named: dict[str, object] = {
        "order": step.order,
        "boundary": step.boundary,
        "slots_on_device": step.slots_on_device,
    }
    for field in fields(step.common):
        named[field.name] = getattr(step.common, field.name)
    return named


def _compare_written(
    place: int, cache: Tensor, truth_cache: Tensor, slots: Tensor, answer: Tensor
) -> None:
    found, expected = written_slots(cache, slots), written_slots(truth_cache, slots)
    where = first_difference(found, expected)
    if where is None:
        return
    which, token, head, element = where
    name = ("key", "value")[which]
    raise _Broken(
        Difference(
            place,
            Law.WRITTEN.value,
            f"the {name} of token {token} (slot {int(slots[token])}), head {head}, element"
            f" {element} is {found[where].item():.6g}: expected"
            f" {expected[where].item():.6g}",
            answer,
        )
    )


def _compare_rest(
    place: int, cache: Tensor, truth_cache: Tensor, answer: Tensor | None
) -> None:
    where = first_difference(cache, truth_cache)
    if where is None:
        return
    which, block_id, offset, head, element = where
    name = ("key", "value")[which]
    raise _Broken(
        Difference(
            place,
            Law.REST.value,
            f"the {name} at offset {offset} of block {block_id}, head {head}, element"
            f" {element} is {cache[where].item():.6g}: expected"
            f" {truth_cache[where].item():.6g}",
            answer,
        )
    )


def _describe_row(batch: Batch, verdict: Verdict, answer: Tensor, exact: Tensor) -> str:
    token = verdict.row
    request, position = batch.request_of(token)
    errors = (answer[token].double() - exact[token]).abs().nan_to_num(torch.inf)
    head, element = divmod(int(errors.argmax()), answer.shape[2])
    return (
        f"{verdict}; token {token} of the step is position {position} of request"
        f" {request} in the batch ({batch.query_lens[request]} new tokens behind"
        f" {batch.num_computed_tokens[request]}); head {head}, element {element} is"
        f" {answer[token, head, element].item():.6g}: expected"
        f" {exact[token, head, element].item():.6g}"
    )


@contextmanager
def _timed(result: StepResult, place: int, twin: Twin, stage: Stage) -> Iterator[None]:
    """Add the time spent inside to a twin's stage; what the twin raises breaks a law."""
    _wait(twin.device)
    began = time.perf_counter()
    try:
        yield
        _wait(twin.device)
    except (NotImplementedError, torch.OutOfMemoryError):
        # no answer is not a wrong one
        raise
    except Exception as error:
        raise _Broken(
            Difference(
                place,
                Law.RUNS.value,
                f"{stage.value} raised {type(error).__name__}: {error}",
            )
        ) from error
    finally:
        result.seconds[place][stage] += time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
