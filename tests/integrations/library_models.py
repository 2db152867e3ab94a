"""Small models of transformers, their own logits in float64, and prompts."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from pagetwin.contract.budgets import judge_rows
from pagetwin.integrations.transformers import (
    count_calls,
    register,
)
from support.tiny_models import VOCABULARY, make_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
TWINS = ("reference", "optimized")
NEW_TOKENS = 4
DECODED = 3  # by a model that encodes first


class InFloat64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64; the library normalizes in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        upcast = [
            torch.float64 if argument is torch.float32 else argument
            for argument in args
        ]
        named = {
            name: torch.float64 if argument is torch.float32 else argument
            for name, argument in (kwargs or {}).items()
        }
        return func(*upcast, **named)


@functools.cache
def tiny(name: str) -> Any:
    """Return the model of that name, on the device of the kernels."""
    return make_model(name).to("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def exact(name: str) -> Any:
    """Return the same model in float64."""
    return copy.deepcopy(tiny(name)).double()


def logits_of(name: str, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the library's own logits: in float64 throughout, and in float32."""
    with torch.no_grad():
        same = tiny(name)(**inputs).logits
        inputs = {
            key: tensor.double() if tensor.is_floating_point() else tensor
            for key, tensor in inputs.items()
        }
        with InFloat64():
            truth = exact(name)(**inputs).logits
    return truth, same


def assert_rows(
    found: Tensor, truth: Tensor, same: Sequence[Tensor], about: object
) -> None:
    """Compare logits with float64, each row within its own error budget.

    A model amplifies rounding errors, and how much depends on the shapes of its matrix products.
    So a row's budget is derived from the worse of two runs of the library: all tokens at once,
    and one by one.
    """
    assert truth.dtype == torch.float64
    lost = torch.stack([(logits - truth).abs().amax(1) for logits in same])
    worse = torch.stack(list(same))[lost.argmax(0), torch.arange(len(truth))]
    verdict = judge_rows(found, truth, worse, torch.float32)
    assert verdict.ok, f"{about}: {verdict}"


def draw(*shape: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator).tolist()


def on_device(values: Any) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(values, device=device)


def calls_of(name: str, steps: int) -> dict[str, int]:
    """Return the expected calls of a decoder-only model's layers."""
    paths = {
        "bloom": "transformer.h.{}.self_attention",
        "falcon": "transformer.h.{}.self_attention",
        "falcon_7b": "transformer.h.{}.self_attention",
        "mpt": "transformer.blocks.{}.attn",
    }
    path = paths.get(name, "model.layers.{}.self_attn")
    return {path.format(layer): steps for layer in range(2)}


LONG = draw(23, seed=1)
# two prompts share five full blocks; one is a single token; the longest needs more than one step
PROMPTS = (draw(5, seed=2), LONG, [9], draw(12, seed=3), [*LONG[:20], 7, 8])
ENCODER_PROMPTS = (draw(5, seed=4), draw(13, seed=5), draw(1, seed=6), draw(9, seed=7))


def attention_names(name: str) -> tuple[list[str], list[str]]:
    """Return the names of a model's attention modules: the encoder's, the decoder's."""
    names = [
        module_name
        for module_name, module in tiny(name).named_modules()
        if type(module).__name__.endswith("Attention")
        and "layer" in module_name
        and not hasattr(module, "layer_norm")
    ]
    encoder = [name for name in names if "encoder" in name.split(".")[:2]]
    return encoder, [name for name in names if name not in encoder]


def is_dispatched(name: str) -> bool:
    """Tell whether this version looks the model's attention up by name; T5 does since 5.23."""
    if name != "t5" or VERSION >= (5, 23):
        return True
    return calls_attention_by_name(tiny(name))


def calls_attention_by_name(model: Any) -> bool:
    """Tell whether an encoder-decoder model runs the attention function that it is given."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(register("reference"))
    ids = on_device([[5]])
    with torch.no_grad(), count_calls(model) as calls:
        model(input_ids=ids, decoder_input_ids=ids)
    return bool(calls)


def skip_unless_dispatched(name: str) -> None:
    if not is_dispatched(name):
        pytest.skip(
            f"{name} of transformers {transformers.__version__} computes its own attention"
        )


# the limits of a call of `generate` in which requests wait, share steps and are preempted
NEW = 6
CROWDED = {
    "block_size": 4,
    "num_blocks": 12,
    "max_batch_tokens": 14,
    "arrival_steps": (0, 0, 1, 1, 5),
    "poison": True,
}


def library_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seed: int | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the tokens of the library's generate, prompt by prompt."""
    found = []
    for number, prompt in enumerate(prompts):
        if seed is not None:
            torch.manual_seed(seed + number)
        ids = on_device([prompt])
        run = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **options},
        )
        first = 1 if model.config.is_encoder_decoder else len(prompt)
        found.append(run[0, first:].tolist())
    return found


def with_ends(name: str, ends: Any) -> Any:
    """Return a model whose own generation_config names end tokens."""
    model = copy.copy(tiny(name))
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = ends
    return model


def usual_token(name: str, prompts: Sequence[Sequence[int]]) -> int:
    """Return a token that is not the first one of any output, and in the middle of some."""
    told = library_tokens(tiny(name), prompts)
    first = {answer[0] for answer in told}
    return next(
        token for answer in told for token in answer[1:-1] if token not in first
    )
