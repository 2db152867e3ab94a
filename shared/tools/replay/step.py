"""One step on all twins, compared with the expected result.

Every twin gets the same batch and has a cache of its own. The expected result consists of the
reference's metadata, a cache that is written by plain indexing, and attention in float64. Integers
and copied bytes must be equal bit for bit; attention must stay within its error budget. The step
ends at the first law that is violated.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from ...contract.budgets import Verdict
from .batch import ReplayBatch
from .mismatch import Violation, describe_row
from .model import LayerInputs
from .oracle import (
    MAX_SCORES_PER_CHUNK,
    compute_expected_attention,
    describe_difference,
    first_difference,
)
from .twins import ReplayTwin, StepMetadata


class Stage(Enum):
    """A stage of a step that is timed."""

    METADATA = "metadata"
    WRITE = "cache write"
    ATTENTION = "attention"


class ReplayLaw(Enum):
    """A property that every twin must have in every step."""

    RUNS = "'a step runs without an error'"
    METADATA = "'the metadata are equal'"
    WRITTEN = "'each new key and value is in its slot'"
    REST = "'all other slots are unchanged'"
    ATTENTION = "'attention stays within its error budget'"
    BITS = "'with fixed splits, any number of ranks gives the same bits'"


@dataclass
class StepResult:
    """Times and comparisons of one step.

    Args:
        seconds: for each twin its seconds in each stage.
        verdicts: for each twin its worst row, over all layers compared so far.
        oracle_seconds: seconds spent on the float64 oracle and the comparisons.
        violation: the first law that is violated. None if all hold.
        layer: the layer of the violation.
    """

    seconds: list[dict[Stage, float]]
    verdicts: list[Verdict]
    oracle_seconds: float = 0.0
    violation: Violation | None = None
    layer: int = 0


class _LawViolated(Exception):
    """Ends a step at the first law that is violated."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.found)
        self.violation = violation


def run_step(
    reference: ReplayTwin,
    twins: Sequence[ReplayTwin],
    batch: ReplayBatch,
    inputs: Sequence[LayerInputs],
    expected_caches: Sequence[Tensor],
    caches: Sequence[Sequence[Tensor]],
    check_whole_cache: bool,
    has_attention: bool = True,
    max_scores: int = MAX_SCORES_PER_CHUNK,
) -> StepResult:
    """Run a step on every twin and compare the results.

    Args:
        reference: the twin that defines the result.
        twins: the twins to compare with it.
        batch: the step's requests.
        inputs: for each layer its queries, keys and values.
        expected_caches: for each layer [2, num_blocks, block_size, kv_heads, head_size]; modified
            in place.
        caches: for each twin the same; modified in place.
        check_whole_cache: whether the slots that the step does not write are compared too.
        has_attention: whether attention is computed and compared.
        max_scores: score elements that the oracle holds in memory at once.
    """
    nothing = Verdict(0.0, 0, 0.0, 0.0, True)
    result = StepResult(
        seconds=[dict.fromkeys(Stage, 0.0) for _ in twins],
        verdicts=[nothing for _ in twins],
    )
    began = time.perf_counter()
    try:
        expected = reference.metadata(batch)
        built = []
        for index, twin in enumerate(twins):
            with _timed(result, index, twin, Stage.METADATA):
                built.append(twin.metadata(batch))
            _compare_metadata(index, built[-1], expected)
        slots = expected.common.slot_mapping
        for layer, layer_inputs in enumerate(inputs):
            result.layer = layer
            expected_cache = expected_caches[layer]
            _write_by_indexing(layer_inputs, expected_cache, slots)
            outputs: list[Tensor] = []
            for index, twin in enumerate(twins):
                cache = caches[index][layer]
                with _timed(result, index, twin, Stage.WRITE):
                    twin.write(layer_inputs, cache, built[index])
                if not has_attention:
                    continue
                with _timed(result, index, twin, Stage.ATTENTION):
                    outputs.append(twin.attend(layer_inputs, cache, built[index]))
            for index in range(len(twins)):
                cache = caches[index][layer]
                output = outputs[index] if has_attention else None
                _compare_written(index, cache, expected_cache, slots, output)
                if check_whole_cache:
                    _compare_rest(index, cache, expected_cache, output)
            if not has_attention:
                continue
            attention = compute_expected_attention(
                reference.implementation,
                batch,
                layer_inputs.query,
                expected_cache,
                max_scores,
            )
            for index, output in enumerate(outputs):
                verdict = attention.compare(output)
                worst = result.verdicts[index]
                if verdict.worst >= worst.worst or not verdict.finite:
                    result.verdicts[index] = verdict
                if not verdict.ok:
                    found = describe_row(batch, verdict, output, attention.exact)
                    raise _LawViolated(
                        Violation(
                            index,
                            ReplayLaw.ATTENTION.value,
                            found,
                            output,
                            attention.exact,
                        )
                    )
            _compare_bits(twins, outputs)
    except _LawViolated as violated:
        result.violation = violated.violation
    _wait(reference.device)
    spent = sum(sum(seconds.values()) for seconds in result.seconds)
    result.oracle_seconds = time.perf_counter() - began - spent
    return result


def compare_whole_caches(
    expected_caches: Sequence[Tensor], caches: Sequence[Sequence[Tensor]]
) -> tuple[int, Violation] | None:
    """Return layer and violation of the first cache that differs from the expected one."""
    for layer, expected_cache in enumerate(expected_caches):
        for index, of_twin in enumerate(caches):
            try:
                _compare_rest(index, of_twin[layer], expected_cache, None)
            except _LawViolated as violated:
                return layer, violated.violation
    return None


def written_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return [2, tokens, kv_heads, head_size]: the content of those slots."""
    return cache.flatten(1, 2)[:, slots]


def _write_by_indexing(inputs: LayerInputs, cache: Tensor, slots: Tensor) -> None:
    flat = cache.view(2, -1, *cache.shape[3:])
    flat[0, slots] = inputs.key
    flat[1, slots] = inputs.value


def _compare_metadata(twin: int, found: StepMetadata, expected: StepMetadata) -> None:
    named = _named(expected)
    # the slots computed on the device must equal those computed on the host
    named["slots_on_device"] = expected.common.slot_mapping
    difference = describe_difference(_named(found), named)
    if difference:
        raise _LawViolated(Violation(twin, ReplayLaw.METADATA.value, difference))


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
    twin: int,
    cache: Tensor,
    expected_cache: Tensor,
    slots: Tensor,
    output: Tensor | None,
) -> None:
    found, expected = written_slots(cache, slots), written_slots(expected_cache, slots)
    where = first_difference(found, expected)
    if where is None:
        return
    side, token, head, element = where
    name = ("key", "value")[side]
    raise _LawViolated(
        Violation(
            twin,
            ReplayLaw.WRITTEN.value,
            f"the {name} of token {token} (slot {int(slots[token])}), head {head}, element"
            f" {element} is {found[where].item():.6g}: expected"
            f" {expected[where].item():.6g}",
            output,
        )
    )


def _compare_bits(twins: Sequence[ReplayTwin], outputs: Sequence[Tensor]) -> None:
    """Compare the twins that return the same bits with the first of them."""
    first: dict[object, int] = {}
    for index, (twin, output) in enumerate(zip(twins, outputs, strict=True)):
        if twin.bits_of is None:
            continue
        other = first.setdefault(twin.bits_of, index)
        where = first_difference(output, outputs[other])
        if where is not None:
            token, head, element = where
            raise _LawViolated(
                Violation(
                    index,
                    ReplayLaw.BITS.value,
                    f"token {token}, head {head}, element {element} is"
                    f" {output[where].item():.9g}: expected"
                    f" {outputs[other][where].item():.9g}, as {twins[other].name}",
                    output,
                )
            )


def _compare_rest(
    twin: int, cache: Tensor, expected_cache: Tensor, output: Tensor | None
) -> None:
    where = first_difference(cache, expected_cache)
    if where is None:
        return
    side, block_id, offset, head, element = where
    name = ("key", "value")[side]
    raise _LawViolated(
        Violation(
            twin,
            ReplayLaw.REST.value,
            f"the {name} at offset {offset} of block {block_id}, head {head}, element"
            f" {element} is {cache[where].item():.6g}: expected"
            f" {expected_cache[where].item():.6g}",
            output,
        )
    )


@contextmanager
def _timed(
    result: StepResult, index: int, twin: ReplayTwin, stage: Stage
) -> Iterator[None]:
    """Add the time spent inside to a twin's stage; an error of the twin violates a law."""
    _wait(twin.device)
    began = time.perf_counter()
    try:
        yield
        _wait(twin.device)
    except (NotImplementedError, torch.OutOfMemoryError):
        # no result is not a wrong result
        raise
    except Exception as error:
        raise _LawViolated(
            Violation(
                index,
                ReplayLaw.RUNS.value,
                f"{stage.value} raised {type(error).__name__}: {error}",
            )
        ) from error
    finally:
        result.seconds[index][stage] += time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
