"""Are the widths of latent attention what the model's configuration says?"""

from types import SimpleNamespace

import pytest
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st

WIDTHS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 96,
}


@given(
    widths=st.fixed_dictionaries(dict.fromkeys(WIDTHS, st.integers(1, 2048))),
    query=st.none() | st.fixed_dictionaries({"q_lora_rank": st.none() | st.just(7)}),
)
def test_the_widths_are_those_of_the_configuration(
    widths: dict[str, int], query: dict[str, int | None] | None, twin: Twin
) -> None:
    """A model that does not compress its queries says None, or nothing."""
    dims = twin.get_mla_dims(SimpleNamespace(**widths, **(query or {})))
    expected = {"q_lora_rank": (query or {}).get("q_lora_rank"), **widths}
    assert vars(dims) == expected
    assert dims.qk_head_dim == widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]
    assert dims.cached_width == widths["kv_lora_rank"] + widths["qk_rope_head_dim"]


@pytest.mark.parametrize("name", WIDTHS)
def test_a_width_that_is_missing_is_named(name: str, twin: Twin) -> None:
    without = {other: width for other, width in WIDTHS.items() if other != name}
    with pytest.raises(ValueError, match=f"has no {name}"):
        twin.get_mla_dims(SimpleNamespace(**without))
    with pytest.raises(ValueError, match=f"{name} = 0"):
        twin.get_mla_dims(SimpleNamespace(**WIDTHS | {name: 0}))
