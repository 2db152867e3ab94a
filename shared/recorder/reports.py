"""Reports: the first violation of each law is logged and stored."""

import logging
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import replace

from .case import StoredCase, describe_versions, save_case
from .findings import Corruption, CorruptionFound
from .settings import RecorderSettings
from .step import HostStep

LOGGER = logging.getLogger("pagetwin.recorder")


class Reports:
    """The violations found so far, and the last steps.

    Args:
        settings: where and how much is stored, and whether the engine stops.
    """

    def __init__(self, settings: RecorderSettings) -> None:
        self.settings = settings
        self.findings: list[Corruption] = []
        """The first violation of each law."""
        self.ring: deque[HostStep] = deque(maxlen=settings.ring)
        """The metadata of the last steps."""
        self.names: dict[int, Hashable] = {}
        """The request of each row of the current batch, if the engine tells its schedule."""

    def log_start(self) -> None:
        """Log that the recorder is on."""
        LOGGER.info(
            "flight recorder: on, cases are stored in %s; every step is checked, and one of %d is"
            " sampled",
            self.settings.folder,
            self.settings.sample_every,
        )

    def log_progress(self, checked: Mapping[str, int]) -> None:
        """Log what was checked after 1, 2, 4, 8 and so on sampled steps.

        Args:
            checked: as in `Recorder`.
        """
        sampled = checked["sampled_steps"]
        if not sampled or sampled & (sampled - 1):
            return
        LOGGER.info(
            "flight recorder: steps checked: %d, sampled: %d; compared: cache writes %d, rows of"
            " attention %d, blocks %d; violations: %d",
            *(checked["steps"], sampled, checked["writes"], checked["rows"]),
            *(checked["blocks"], len(self.findings)),
        )

    def report(
        self, finding: Corruption | None, step: HostStep | None, number: int
    ) -> None:
        """Log and store the first violation of a law; raise if the engine shall stop.

        Args:
            finding: Optional. The violation. If None, nothing is reported.
            step: Optional. The step. If None, the law concerns the schedule or a graph alone.
            number: number of the step.

        Raises:
            CorruptionFound: the action is "stop".
        """
        if finding is not None and finding.request_id is None and step is not None:
            row = -1 if finding.row is None else finding.row
            finding = replace(finding, request_id=self.names.get(row))
        if finding is None or finding.law in [finding.law for finding in self.findings]:
            return
        self.findings.append(finding)
        whose = f", {finding.request}" if finding.request else ""
        sentence = f"step {number}{whose}: {finding.law}: {finding.found}"
        path = None
        if len(self.findings) <= self.settings.max_cases:
            case = StoredCase(
                finding,
                sentence,
                number,
                step,
                tuple(earlier for earlier in self.ring if earlier is not step),
                describe_versions(),
            )
            try:
                path = save_case(self.settings.folder, case, self.settings.max_mib)
                sentence += f". To check it again: pagetwin reproduce {path}"
            except OSError as error:
                sentence += f". The case is not stored: {error}"
        LOGGER.error("flight recorder: %s", sentence)
        if self.settings.action == "stop":
            raise CorruptionFound(sentence, finding, path)
