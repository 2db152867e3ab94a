"""Models of transformers that are compared with the library before `generate` uses them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers
from library_models import (
    PROMPTS,
    VERSION,
    calls_attention_by_name,
    library_tokens,
    tiny,
)
from pagetwin.integrations.transformers import (
    PagedBatch,
    generate,
    use_attention,
)
from pagetwin.integrations.transformers.steps.step import StepMask
from support.tiny_models import VOCABULARY

# --- the comparison at the start


class Shift(nn.Module):
    """An MLP that adds the row before: the last token of another request, in a step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden + hidden.roll(1, 1))
        return found


class RowNorm(Shift):
    """An MLP that normalizes over the tokens of the row."""

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden / hidden.std(1, keepdim=True))
        return found


class LaterPositions(nn.Module):
    """An embedding of rotary positions that begins at 3."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Any:
        row = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.inner(hidden, row)


def changed_llama(kind: type[nn.Module]) -> Any:
    model = copy.deepcopy(tiny("llama"))
    if kind is LaterPositions:
        model.model.rotary_emb = kind(model.model.rotary_emb)
    else:
        model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    return model


@pytest.mark.parametrize("kind", [Shift, RowNorm, LaterPositions])
def test_a_model_that_depends_on_the_other_rows_of_a_step_raises_at_the_start(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rule names these: two requests in steps are compared with the library's own run."""
    model = changed_llama(kind)
    with pytest.raises(
        NotImplementedError, match="gives other logits for two requests"
    ):
        generate(model, PROMPTS, "reference")
    assert model.config._attn_implementation == "eager"


class PaddedNorm(nn.Module):
    """A layer of an encoder that depends on the number of columns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        found = self.inner(*args, **named)
        states = found[0] if isinstance(found, tuple) else found
        states = states * states.shape[1]
        return (states, *found[1:]) if isinstance(found, tuple) else states


def test_an_encoder_that_depends_on_its_padding_raises_at_the_start() -> None:
    model = copy.deepcopy(tiny("bart"))
    layers = model.model.encoder.layers
    layers[0] = PaddedNorm(layers[0])
    with pytest.raises(
        NotImplementedError, match="gives other logits for two requests"
    ):
        generate(model, [[5, 6, 7], [8]], "reference")


def test_experts_of_limited_capacity_raise() -> None:
    model = copy.deepcopy(tiny("bart"))
    model.model.encoder.layers[0].fc1.moe_eval_capacity_token_fraction = 0.5
    with pytest.raises(
        NotImplementedError, match=r"token_fraction = 0\.5: expected at"
    ):
        generate(model, [[5]], "reference")


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_comparison_takes_the_rounding_of_low_precision(
    name: str, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(tiny(name)).to(dtype)
    assert len(generate(model, PROMPTS, "reference", max_new_tokens=1)) == len(PROMPTS)


# --- models that compute with their mask


def test_a_model_that_computes_with_its_mask_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Doge and GIT raised inside: size of tensor a must match the size of tensor b."""
    model = copy.deepcopy(tiny("llama"))
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def masked(*args: Any, **named: Any) -> Any:
        # in a run of the library it has numbers
        if isinstance(named["attention_mask"], StepMask):
            named["attention_mask"] = named["attention_mask"] & True
        return forward(*args, **named)

    monkeypatch.setattr(layer, "forward", masked)
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        generate(model, PROMPTS, "reference")


def test_a_layer_may_move_or_slice_the_mask_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copy.deepcopy(tiny("stablelm"))
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def moved(*args: Any, **named: Any) -> Any:
        mask = named["attention_mask"]
        if isinstance(mask, StepMask):
            assert mask.dtype == torch.bool and mask.ndim == 4
            mask = mask.to("cpu")[:, :, :, :4].contiguous()
        named["attention_mask"] = mask
        return forward(*args, **named)

    told = generate(model, PROMPTS, "reference", max_new_tokens=3)
    monkeypatch.setattr(layer, "forward", moved)
    assert generate(model, PROMPTS, "reference", max_new_tokens=3) == told


def test_a_position_bias_in_a_step_raises() -> None:
    """Its columns are those of the row, and not the keys of the requests."""
    model = tiny("llama")
    batch = PagedBatch("reference", 4, 4, model.device)
    batch.begin_step([2], [0], [[1]])
    bias = torch.ones(1, 4, 2, 2, device=model.device)
    with (
        torch.no_grad(),
        use_attention(model, "reference"),
        pytest.raises(NotImplementedError, match="position_bias in a step"),
    ):
        model(**batch.model_inputs([5, 6]), position_bias=bias)


def test_switch_transformers_gives_the_tokens_of_the_library() -> None:
    """Its encoder has a mask of floats, 0 and the lowest number; it raised."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        dropout_rate=0.0,
    )
    torch.manual_seed(4)
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model = model.to(tiny("llama").device)
    if VERSION < (5, 24) and not calls_attention_by_name(model):
        with pytest.raises(NotImplementedError, match="0 of 6 attention layers ran"):
            generate(model, PROMPTS, "reference", max_new_tokens=3)
        return
    told = library_tokens(model, PROMPTS, max_new_tokens=3)
    assert generate(model, PROMPTS, "reference", max_new_tokens=3) == told
