"""All figures of a replay as one dictionary of plain numbers.

The tables print it, `--json` stores it, and the report shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import median
from typing import Any, NamedTuple

import torch

from .run import Replay, StepRecord
from .step import Stage
from .twins import ReplayTwin


def label_twins(names: Sequence[str]) -> list[str]:
    """Return a label for each twin; repeated names are numbered.

    Example:
        >>> label_twins(["reference", "reference"])
        ['reference', 'reference (2)']
    """
    labels: list[str] = []
    for index, name in enumerate(names):
        before = names[:index].count(name)
        labels.append(f"{name} ({before + 1})" if before else name)
    return labels


def summarize(
    replay: Replay, records: Sequence[StepRecord], wall_seconds: float
) -> dict[str, Any]:
    """Return all figures of a replay.

    Args:
        replay: a replay that has ended.
        records: its steps.
        wall_seconds: duration of the whole replay.
    """
    settings = replay.settings
    labels = label_twins(settings.names)
    return {
        "settings": {
            **{name: getattr(settings, name) for name in settings.__dataclass_fields__},
            "twins": labels,
            "machine": _machine(settings.device),
            "is_interpreted": settings.is_interpreted,
        },
        "compared": len(set(settings.twins)) > 1,
        "steps": len(records),
        "steps_with_attention": sum(record.has_attention for record in records),
        "requests": len(replay.requests),
        "requests_finished": replay.requests_finished,
        "lengths": asdict(replay.lengths),
        "lengths_in_trace": asdict(replay.trace_lengths),
        "tokens": {
            "prefill": sum(record.prefill_tokens for record in records),
            "decode": sum(record.decode_tokens for record in records),
            "recomputed": sum(record.recomputed_tokens for record in records),
            "found_in_prefix_cache": sum(
                record.prefix_hit_tokens for record in records
            ),
            "regained_after_preemption": sum(
                record.regained_tokens for record in records
            ),
        },
        "blocks": {
            "total": replay.num_blocks,
            "used_at_most": max((record.used for record in records), default=0),
        },
        "preemptions": sum(len(record.preempted) for record in records),
        "running_at_most": max((record.running for record in records), default=0),
        "waiting_at_most": max((record.waiting for record in records), default=0),
        "agreement": {
            label: _agreement(records, index) for index, label in enumerate(labels)
        },
        "seconds": {
            "wall": wall_seconds,
            "oracle": sum(record.oracle_seconds for record in records),
            "twins": {
                label: _seconds(records, index, replay.twins[index])
                for index, label in enumerate(labels)
            },
        },
    }


class ScaledLengths(NamedTuple):
    """Lengths of all prompts or of all outputs, as replayed and as in the trace."""

    name: str
    tokens: int
    in_trace: int
    scale: str

    @property
    def words(self) -> str:
        """How the replayed number of tokens was obtained."""
        if self.scale == "1":
            return "as in the trace"
        return f"of {self.in_trace:,} in the trace, scaled by {self.scale}"


def scaled_lengths(figures: Mapping[str, Any]) -> tuple[ScaledLengths, ScaledLengths]:
    """Return by how much prompts and outputs were scaled.

    Example:
        4,181 prompt tokens "of 267,501 in the trace, scaled by 1/64".
    """
    here, there = figures["lengths"], figures["lengths_in_trace"]

    def lengths(name: str, scale: float) -> ScaledLengths:
        ratio = Fraction(scale).limit_denominator(10_000)
        words = str(ratio) if ratio.numerator == 1 else f"{scale:g}"
        tokens = f"{name}_tokens"
        return ScaledLengths(f"{name} tokens", here[tokens], there[tokens], words)

    settings = figures["settings"]
    return (
        lengths("prompt", settings["scale"]),
        lengths("output", settings["output_scale"]),
    )


def describe_result(figures: Mapping[str, Any]) -> str:
    """Return what the replay has shown: that twins agree only if two twins were compared."""
    steps, settings = figures["steps"], figures["settings"]
    sentences = [f"The twins agree in all {steps:,} steps."]
    if not figures["compared"]:
        sentences = [
            f"{settings['twins'][0]} agrees with the reference in float64 in all {steps:,}"
            " steps. No twins were compared, because only one implementation ran: --twins"
            " takes several."
        ]
    if figures["steps_with_attention"] < steps:
        sentences.append(
            f"Attention was computed in one step of {settings['attention_every']}: --all computes"
            " it in each."
        )
    if settings["ranks"] > 1:
        what = (
            "the same bits" if settings["splits"] else "results within the error budget"
        )
        sentences.append(
            f"One rank and {settings['ranks']} ranks gave {what} in every step."
        )
    return " ".join(sentences)


def describe_machine(figures: Mapping[str, Any]) -> str:
    """Return the device, and what its times are not."""
    machine: str = figures["settings"]["machine"]
    if not figures["settings"]["is_interpreted"]:
        return machine
    return f"{machine}, kernels interpreted: their times need a GPU"


def _agreement(records: Sequence[StepRecord], index: int) -> dict[str, Any]:
    worst = max(records, key=lambda record: record.verdicts[index].worst, default=None)
    if worst is None:
        return {"worst_share_of_budget": 0.0, "error": 0.0, "budget": 0.0, "step": None}
    verdict = worst.verdicts[index]
    return {
        "worst_share_of_budget": verdict.worst,
        "error": verdict.error,
        "budget": verdict.budget,
        "step": worst.step,
    }


def _seconds(
    records: Sequence[StepRecord], index: int, twin: ReplayTwin
) -> dict[str, dict[str, float | None]]:
    """Return total and median of each stage; None if a backend does not have the stage."""
    times: dict[str, dict[str, float | None]] = {}
    for stage in Stage:
        spent = [
            record.seconds[index][stage]
            for record in records
            if record.has_attention or stage is not Stage.ATTENTION
        ]
        if not spent or (stage is Stage.WRITE and twin.writes_in_attend):
            times[stage.value] = {"total": None, "median": None}
        else:
            times[stage.value] = {"total": sum(spent), "median": median(spent)}
    return times


def _machine(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return "CPU"
