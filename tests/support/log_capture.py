"""The log messages of a test, without pytest's plugin, which costs a tenth of the suite's time.

Where torch is imported, it takes 5 ms per test to visit all loggers, and few tests ask for any.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class LogCapture(logging.Handler):
    """Messages that reach the root logger, under the names of pytest's `caplog`."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.levels: dict[logging.Logger, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        """The messages with their arguments."""
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        """A line per record: its level, its logger and its message."""
        lines = (
            f"{record.levelname} {record.name}: {self.format(record)}\n"
            for record in self.records
        )
        return "".join(lines)

    def clear(self) -> None:
        """Forget the records."""
        self.records.clear()

    def set_level(self, level: int | str, logger: str | None = None) -> None:
        """Set the level of a logger until the test ends."""
        found = logging.getLogger(logger)
        self.levels.setdefault(found, found.level)
        found.setLevel(level)

    @contextmanager
    def at_level(self, level: int | str, logger: str | None = None) -> Iterator[None]:
        """Set the level of a logger inside of a block."""
        found = logging.getLogger(logger)
        before = found.level
        found.setLevel(level)
        try:
            yield
        finally:
            found.setLevel(before)

    @contextmanager
    def attached(self) -> Iterator["LogCapture"]:
        """Capture inside of a block, and set the levels back after it."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield self
        finally:
            root.removeHandler(self)
            for logger, level in self.levels.items():
                logger.setLevel(level)
