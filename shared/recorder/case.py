"""Stored cases: one file per violated law, complete or absent, within a limit of disk space.

A case contains the metadata of the step and of the steps before it, the evidence of the law, and
versions. It contains no token ids and no text. It holds plain tensors, numbers and strings, so
loading it runs no code.
"""

import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .findings import Corruption
from .settings import MEBI
from .step import HostStep

FORMAT = "pagetwin recorder 1"
PREFIX = "pagetwin-record"
PACKAGES = ("pagetwin", "torch", "triton", "vllm", "transformers", "xformers")


@dataclass(frozen=True)
class StoredCase:
    """A violated law with all that is needed to check it again.

    Args:
        finding: the law, the sentence and the evidence.
        sentence: the whole sentence that was logged.
        number: number of the step.
        step: Optional. Metadata of the step. None if the law concerns the schedule alone.
        ring: metadata of the steps before it, the oldest first.
        versions: versions of packages, Python and the device.
    """

    finding: Corruption
    sentence: str
    number: int
    step: HostStep | None
    ring: tuple[HostStep, ...]
    versions: dict[str, str]


def describe_versions() -> dict[str, str]:
    """Return the versions of what takes part, by name."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def save_case(folder: Path, case: StoredCase, max_mib: int) -> Path:
    """Write a case; the file appears complete or not at all.

    Steps of the ring are left out, the oldest first, if the file would exceed the limit.

    Args:
        folder: the recorder's folder.
        case: the case.
        max_mib: MiB that all cases in the folder may have together.

    Raises:
        OSError: the file cannot be written, or the case does not fit the limit.
    """
    finding = case.finding
    content: dict[str, Any] = {
        "format": FORMAT,
        "law": finding.law,
        "found": finding.found,
        "row": finding.row,
        "request_id": None if finding.request_id is None else str(finding.request_id),
        "evidence": finding.evidence,
        "sentence": case.sentence,
        "number": case.number,
        "versions": case.versions,
        "step": None if case.step is None else case.step.as_dict(),
    }
    used = sum(path.stat().st_size for path in folder.glob(f"{PREFIX}-*.pt"))
    left = max_mib * MEBI - used - _size(content)
    if left < 0:
        raise OSError(
            f"the case needs {_size(content) // MEBI + 1} MiB, and the cases in {folder}"
            f" already have {used // MEBI} of max_mib = {max_mib}"
        )
    ring: list[dict[str, Any]] = []
    for earlier in reversed(case.ring):
        stored = earlier.as_dict()
        left -= _size(stored)
        if left < 0:
            break
        ring.insert(0, stored)
    content["ring"] = ring
    law = finding.law.replace(" ", "-")
    path = folder / f"{PREFIX}-{os.getpid()}-step-{case.number}-{law}.pt"
    if path.exists():  # of another recorder of this process
        path = path.with_stem(f"{path.stem}-{time.time_ns()}")
    unfinished = folder / f".{path.name}.unfinished"
    try:
        torch.save(content, unfinished)
        unfinished.replace(path)
    except RuntimeError as error:  # torch's writer on a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_case(path: Path) -> StoredCase:
    """Return a stored case.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a case of the recorder, or it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file that the recorder wrote")
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
        assert content["format"] == FORMAT
        step = content["step"]
        return StoredCase(
            finding=Corruption(
                content["law"],
                content["found"],
                content["row"],
                content["request_id"],
                content["evidence"],
            ),
            sentence=content["sentence"],
            number=content["number"],
            step=None if step is None else HostStep.of_dict(step),
            ring=tuple(HostStep.of_dict(step) for step in content["ring"]),
            versions=dict(content["versions"]),
        )
    except OSError:
        raise
    except Exception as error:  # of any type: the bytes may be anything
        raise ValueError(
            f"{path} is not a case of the recorder, or it is damaged: expected a file"
            f" named {PREFIX}-*.pt as the recorder wrote it"
        ) from error


def describe_history(case: StoredCase) -> Sequence[str]:
    """Return one line per stored step about the request concerned, the oldest first."""
    if case.step is None or case.finding.row is None:
        return []
    row = case.finding.row
    own = set(case.step.blocks_of(row).tolist())
    lines = []
    for step in (*case.ring, case.step):
        if step.group != case.step.group:
            continue
        for other in range(len(step.seq_lens)):
            blocks = step.blocks_of(other).tolist()
            shared = sorted(own & set(blocks))
            if not shared or not step.query_lens[other]:
                continue
            lines.append(
                f"step {step.number}, row {other}: {int(step.query_lens[other])} new of"
                f" {int(step.seq_lens[other])} tokens, blocks {_shorten(blocks)}"
            )
    return lines


def _shorten(blocks: Sequence[int]) -> str:
    words = [str(block) for block in blocks]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return " ".join(words)


def _size(value: Any) -> int:
    """Return about how many bytes a value takes in a file."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() + 512
    if isinstance(value, dict):
        return sum(_size(part) for part in value.values()) + 64
    if isinstance(value, list | tuple):
        return sum(_size(part) for part in value) + 64
    return len(str(value)) + 16
