"""The laws that `make test-quick` tries: one per area and twin."""

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
