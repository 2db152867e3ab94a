"""The laws that `make test-quick` tries, one per area and twin, and modules that tests write."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the first law of each area for `make test-quick`."""
    areas: set[tuple[str, str]] = set()
    for item in items:
        name = item.name.partition("[")[0]
        if item.path.name == "test_laws.py" and name.endswith("_obeys"):
            law = item.callspec.params["law"].law  # type: ignore[attr-defined]
            if (name, law.area) not in areas:
                areas.add((name, law.area))
                item.add_marker("quick")


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], str]]:
    """Return a function that writes a module into the current folder, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    written: list[str] = []

    def write(text: str) -> str:
        name = f"written_{tmp_path.name}_{len(written)}".replace("-", "_")
        Path(f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
