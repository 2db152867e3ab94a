"""Settings of the recorder, from arguments or from the environment, and the check of its folder."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECORD_VARIABLE = "PAGETWIN_RECORD"
"""The environment variable that names the folder. If it is not set, nothing is recorded."""

ACTIONS = ("continue", "stop")
"""What happens after a violated law was reported."""

MEBI = 2**20


@dataclass(frozen=True)
class RecorderSettings:
    """What the recorder checks, how often, and what it may store.

    Args:
        folder: folder of the stored cases. It is created if it does not exist.
        sample_every: steps from one sampled step to the next. The first step is sampled. The
            bookkeeping is checked in every step.
        rows: rows of attention, and cache writes, that a sampled step compares.
        watched_blocks: full blocks whose content is compared from one sampled step to the next.
        ring: last steps whose metadata a stored case contains.
        action: "continue" or "stop" after a violated law. If "stop", `CorruptionFound` is raised.
        max_mib: MiB that the stored cases of the folder may have together.
        max_cases: cases that one recorder stores at most; one per law.
        seed: seed of the choice of rows and blocks.
        vllm_graphs: whether sampled steps that replay a CUDA graph of vLLM are compared. Other
            engines tell the recorder of their captures themselves.

    Raises:
        ValueError: a number is out of range, or the action is unknown.
    """

    folder: Path
    sample_every: int = 256
    rows: int = 4
    watched_blocks: int = 4
    ring: int = 16
    action: str = "continue"
    max_mib: int = 256
    max_cases: int = 8
    seed: int = 0
    vllm_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("sample_every", "rows", "ring", "max_mib", "max_cases"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.watched_blocks < 0:
            raise ValueError(
                f"watched_blocks = {self.watched_blocks}: expected at least 0"
            )
        if self.action not in ACTIONS:
            raise ValueError(
                f"action = {self.action!r}: expected {' or '.join(ACTIONS)}"
            )


VARIABLES = {
    "PAGETWIN_RECORD_EVERY": "sample_every",
    "PAGETWIN_RECORD_ROWS": "rows",
    "PAGETWIN_RECORD_ACTION": "action",
    "PAGETWIN_RECORD_MAX_MIB": "max_mib",
    "PAGETWIN_RECORD_GRAPHS": "vllm_graphs",
}
"""The environment variables besides PAGETWIN_RECORD, and the settings that they set."""


def settings_from_environment(
    environment: Mapping[str, str] | None = None,
) -> RecorderSettings | None:
    """Return the settings that the environment gives; None if nothing shall be recorded.

    Args:
        environment: Optional. The variables. If None, those of the process.

    Raises:
        ValueError: a variable is not a number in range, or the action is unknown.
    """
    variables = os.environ if environment is None else environment
    folder = variables.get(RECORD_VARIABLE, "")
    if not folder:
        return None
    given: dict[str, int | str] = {}
    for variable, name in VARIABLES.items():
        text = variables.get(variable)
        if text is None:
            continue
        if name == "action":
            given[name] = text
            continue
        if name == "vllm_graphs":
            if text not in ("0", "1"):
                raise ValueError(f"{variable} = {text!r}: expected 0 or 1")
            given[name] = text == "1"
            continue
        if not text.isdecimal():
            raise ValueError(f"{variable} = {text!r}: expected a whole number from 1")
        given[name] = int(text)
    return RecorderSettings(Path(folder), **given)  # type: ignore[arg-type]


def prepare_folder(settings: RecorderSettings) -> None:
    """Create the folder of the cases, and check that it can be written.

    Raises:
        OSError: the folder cannot be created or written, or its file system is full. The message
            is one sentence.
    """
    folder = settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"{RECORD_VARIABLE} = {folder}: no file can be created there"
            f" ({error.strerror or error}): expected a folder that you may write"
        ) from None
    free = shutil.disk_usage(folder).free
    if free < settings.max_mib * MEBI:
        raise OSError(
            f"{RECORD_VARIABLE} = {folder}: {free // MEBI} MiB are free there: expected"
            f" at least max_mib = {settings.max_mib}, or a smaller PAGETWIN_RECORD_MAX_MIB"
        )
