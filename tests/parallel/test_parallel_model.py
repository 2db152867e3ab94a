"""The model of the page on more GPUs, against the times of two that are not its inputs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))
model: Any = importlib.import_module("parallel_model")


@pytest.mark.parametrize("way", list(model.WAYS))
def test_the_model_is_within_15_percent_of_the_times_that_it_was_not_made_from(
    way: str,
) -> None:
    found = model.record()["found"]
    computed = model.Model(found, way)
    keys = model.DECODES["decode-8x32k"]
    for ranks, name in ((1, "decode-8x32k"), (2, f"decode-8x32k {way} all_to_all")):
        assert computed.decode(keys, ranks) == pytest.approx(
            found[name]["us"], rel=0.15
        )
    assert computed.prefill(model.PREFILL, 2) == pytest.approx(
        found["prefill-1x32k"]["all_us"], rel=0.15
    )
