"""What tests of several rooms use: fakes, builders of batches, checkers, small models."""

from pathlib import Path

import pytest

# assertions of these modules show values, as those of test files do
pytest.register_assert_rewrite(
    *(f"support.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py"))
)
