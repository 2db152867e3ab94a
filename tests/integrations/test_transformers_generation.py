"""End tokens of the transformers integration's `generate`, and numbers of other libraries."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from library_models import (
    ENCODER_PROMPTS,
    NEW,
    PROMPTS,
    library_tokens,
    tiny,
    usual_token,
    with_ends,
)
from pagetwin.integrations.transformers import generate
from support.tiny_models import VOCABULARY

pytestmark = pytest.mark.extended

# --- end tokens


@pytest.mark.parametrize("kind", [int, lambda end: [end, VOCABULARY - 1]])
@pytest.mark.parametrize(
    ("name", "prompts"), [("llama", PROMPTS), ("bart", ENCODER_PROMPTS)]
)
def test_an_output_ends_with_the_model_s_own_end_token(
    name: str, prompts: Sequence[Sequence[int]], kind: Callable[[int], Any]
) -> None:
    """It ran on past it, so a chat model began the user's next message."""
    end = usual_token(name, prompts)
    model = with_ends(name, kind(end))
    told = library_tokens(model, prompts)
    assert any(answer[-1] == end and len(answer) < NEW for answer in told)
    found = generate(model, prompts, "reference", max_new_tokens=NEW)
    assert found == told
    # an empty list means that no token ends an output
    whole = generate(model, prompts, "reference", max_new_tokens=NEW, eos_token_id=[])
    assert whole == library_tokens(tiny(name), prompts)
    # a token that the caller names takes the place of the model's own
    unused = min(
        set(range(VOCABULARY)) - {token for answer in whole for token in answer}
    )
    other = generate(
        model, prompts, "reference", max_new_tokens=NEW, eos_token_id=unused
    )
    assert other == whole


@pytest.mark.parametrize(
    "kind",
    [
        int,
        np.int64,
        np.uint8,
        np.array,
        torch.tensor,
        lambda end: [end],
        lambda end: (end, end),
        lambda end: {end},
        lambda end: (token for token in [end]),
        lambda end: np.array([end]),
        lambda end: torch.tensor([end]),
        lambda end: torch.tensor([end, 1], dtype=torch.int32),
        lambda end: [torch.tensor(end)],
        lambda end: [np.int64(end)],
    ],
)
@pytest.mark.parametrize("number", ["zero", "other"])
def test_an_end_token_may_be_a_number_of_numpy_or_torch(
    kind: Callable[[int], Any], number: str
) -> None:
    """A tensor never matched, and 0 of NumPy was taken for None."""
    model = tiny("llama")
    end = 0 if number == "zero" else usual_token("llama", PROMPTS)
    if number == "zero":
        # the head gives token 0 what it gave the usual one
        model = copy.deepcopy(model)
        usual = usual_token("llama", PROMPTS)
        with torch.no_grad():
            model.lm_head.weight[[0, usual]] = model.lm_head.weight[[usual, 0]]
    told = library_tokens(model, PROMPTS, eos_token_id=end)
    assert any(answer[-1] == end and len(answer) < NEW for answer in told)
    found = generate(
        model, PROMPTS, "reference", max_new_tokens=NEW, eos_token_id=kind(end)
    )
    assert found == told


@pytest.mark.parametrize(
    "value",
    [
        "83",
        b"83",
        83.0,
        True,
        [True],
        [None],
        ["83"],
        [[83]],
        {83: "end"},
        torch.tensor(83.0),
        torch.tensor([83.0]),
        torch.tensor([True]),
        torch.tensor([[83]]),
        np.array([83.0]),
        np.array("83"),
        np.array([[83]]),
        np.bool_(True),
        np.float32(83),
        object(),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "eos_token_id",
        "seed",
        "decoder_prompt",
        "arrival_steps",
        "max_new_tokens",
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "max_running",
    ],
)
def test_anything_but_integers_raises_a_type_error_that_names_the_argument(
    name: str, value: Any
) -> None:
    model = tiny("bart" if name == "decoder_prompt" else "llama")
    with pytest.raises(TypeError, match=rf"^{name}.* expected .*integer"):
        generate(model, [[5]], "reference", **{name: value})


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_every_number_may_be_one_of_numpy_or_torch(kind: Callable[[Any], Any]) -> None:
    numbers = {"max_new_tokens": 3, "block_size": 4, "num_blocks": 12, "seed": 5}
    numbers |= {"max_batch_tokens": 14, "max_running": 3}
    told = generate(tiny("llama"), PROMPTS, "reference", max_new_tokens=3)
    found = generate(
        tiny("llama"),
        [[kind(token) for token in prompt] for prompt in PROMPTS],
        "reference",
        **{name: kind(number) for name, number in numbers.items()},
        arrival_steps=kind([0, 0, 1, 1, 5]),
    )
    assert found == told


def test_the_first_tokens_of_a_decoder_may_be_a_tensor() -> None:
    """Token 0 in a tensor was taken for no token."""
    told = generate(tiny("bart"), [[5, 6]], "reference", 3, decoder_prompt=[0])
    for given in (torch.tensor([0]), np.array([0]), (0,), [torch.tensor(0)]):
        found = generate(tiny("bart"), [[5, 6]], "reference", 3, decoder_prompt=given)
        assert found == told
