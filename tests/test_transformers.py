"""Models of transformers on both twins: equal tokens, and logits within an error budget.

The models are small and have random weights. Their logits are compared with the library's own eager
attention in float64; the error budget is derived from the library's error in float32. Every run
counts the attention calls of each layer, so a layer that does not use the twin is detected.
"""

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import (
    DEFAULT_OPTIONS,
    pack_options,
    unpack_options,
)
from pagetwin.contract.budgets import judge_rows
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

import transformers
from pagetwin.integrations.transformers import (
    PagedBatch,
    PagedCache,
    Statistics,
    count_calls,
    generate,
    register,
    register_all,
    use_attention,
)
from pagetwin.integrations.transformers.masks import (
    VisibleRange,
    read_bidirectional_window,
    read_padded_ranges,
    read_position_bias,
)
from tiny_models import DECODER_ONLY, ENCODER_DECODER, VOCABULARY, WINDOW, make_model
from transformers.modeling_outputs import BaseModelOutput

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
        upcast = [torch.float64 if each is torch.float32 else each for each in args]
        named = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (kwargs or {}).items()
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
            key: each.double() if each.is_floating_point() else each
            for key, each in inputs.items()
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
    lost = torch.stack([(each - truth).abs().amax(1) for each in same])
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


# --- models that only decode

LONG = draw(23, seed=1)
# two prompts share five full blocks; one is a single token; the longest needs more than one step
PROMPTS = (draw(5, seed=2), LONG, [9], draw(12, seed=3), [*LONG[:20], 7, 8])
CROWDED = {
    "max_new_tokens": NEW_TOKENS,
    "block_size": 4,
    "num_blocks": 11,
    "max_batch_tokens": 14,
    "arrival_steps": (0, 0, 1, 1, 5),
    "poison": True,
}


@functools.cache
def library_answers(name: str) -> list[tuple[list[int], Tensor]]:
    """Return the tokens and logits of the library's eager attention, prompt by prompt."""
    answers = []
    for prompt in PROMPTS:
        ids = on_device([prompt])
        told = tiny(name).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answer = told.sequences[0, len(prompt) :].tolist()
        answers.append((answer, torch.cat(told.logits)))
    return answers


# the kernels get no option from the other models that these do not give them
ON_KERNELS = ("llama", "gemma2", "gpt_oss", "llama4", "bloom")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, twin)
        for name in DECODER_ONLY
        for twin in TWINS
        if twin == "reference" or name in ON_KERNELS
    ],
)
def test_a_crowded_cache_gives_the_tokens_of_the_library_prompt_by_prompt(
    name: str, implementation: str
) -> None:
    """Chunked prefill, late arrivals, prefix hits and preemptions do not change the tokens."""
    statistics = Statistics(keep_logits=True)
    answers = generate(
        tiny(name), PROMPTS, implementation, **CROWDED, statistics=statistics
    )
    told = library_answers(name)
    assert answers == [answer for answer, _ in told]
    assert statistics.chunked_prompts == 1
    assert statistics.mixed_steps > 2
    assert statistics.preemptions > 0
    assert statistics.shared_blocks >= 5
    assert statistics.calls == calls_of(name, statistics.steps)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        ids = on_device([[*prompt, *answer[:-1]]])
        truth, same = logits_of(name, input_ids=ids)
        first = len(prompt) - 1
        runs = [same[0, first:], told[number][1]]
        assert_rows(statistics.logits[number], truth[0, first:], runs, (name, number))


# the library's own batching omits Gemma 2's soft cap, and does not support chunks (5.17 to 5.23)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt_oss"])
def test_the_library_s_own_continuous_batching_gives_the_same_tokens(name: str) -> None:
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=32, max_batch_tokens=64, use_cuda_graph=False
    )
    model = copy.deepcopy(tiny(name))
    model.set_attn_implementation("paged|eager")
    told = model.generate_batch(
        [list(prompt) for prompt in PROMPTS],
        generation_config=settings,
        continuous_batching_config=batching,
    )
    batched = {tuple(each.prompt_ids): each.generated_tokens for each in told.values()}
    answers = generate(tiny(name), PROMPTS, "reference", **CROWDED)
    assert answers == [batched[tuple(prompt)] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("llama", "scale", 0.3),
        ("mistral", "sliding_window", WINDOW - 1),
        ("qwen3", "sliding_window", WINDOW + 1),
        ("gemma2", "logits_soft_cap", None),
        ("gpt_oss", "sinks", None),
        ("llama4", "attention_chunk_size", WINDOW - 1),
        ("bloom", "alibi_slopes", None),
        ("mpt", "alibi_slopes", None),
        ("falcon", "scale", 0.5),
    ],
)
def test_an_attention_with_one_wrong_option_gives_other_tokens(
    name: str, option: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So equal tokens show that the options are passed on correctly."""
    module = import_module("pagetwin.reference.attention.paged")
    right = module.paged_attention

    def attend(*args: Any, **named: Any) -> Tensor:
        options = unpack_options(named.pop("options", DEFAULT_OPTIONS))
        if option in named | options:
            options[option] = wrong
        return right(*args, **pack_options(**named | options))

    monkeypatch.setattr(module, "paged_attention", attend)
    statistics = Statistics(keep_logits=True)
    answers = generate(
        tiny(name), PROMPTS, "reference", **CROWDED, statistics=statistics
    )
    told = library_answers(name)
    assert answers != [answer for answer, _ in told]
    first = statistics.logits[1][0] - told[1][1][0]
    assert first.abs().max() > 1e-2


def test_a_read_past_the_end_of_a_sequence_gives_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("pagetwin.reference.attention.paged")
    right = module.paged_attention

    def attend(query: Tensor, *args: Any, **options: Any) -> Tensor:
        keys, values, table, starts, seq_lens, most_queries, most_keys = args
        longer = seq_lens + (seq_lens % keys.shape[1] != 0).int()
        most_keys = max(most_keys, int(longer.max()))
        return right(
            query, keys, values, table, starts, longer, most_queries, most_keys
        )

    monkeypatch.setattr(module, "paged_attention", attend)
    statistics = Statistics(keep_logits=True)
    generate(tiny("llama"), PROMPTS, "reference", **CROWDED, statistics=statistics)
    assert any(logits.isnan().any() for logits in statistics.logits)


def test_an_output_ends_with_the_first_stop_token() -> None:
    told = [answer for answer, _ in library_answers("llama")]
    end = told[0][2]
    until = [
        answer[: answer.index(end) + 1] if end in answer else answer for answer in told
    ]
    assert until != told
    for ends in (end, [end, VOCABULARY - 1]):
        answers = generate(
            tiny("llama"), PROMPTS, "reference", **CROWDED, eos_token_id=ends
        )
        if ends == end:
            assert answers == until


def test_a_paged_batch_runs_without_the_scheduler() -> None:
    """The calls that `generate` makes in a step: two requests, one of them a prefill."""
    model, prompts = tiny("gemma2"), [PROMPTS[0], PROMPTS[3]]
    model.set_attn_implementation(register("reference"))
    try:
        batch = PagedBatch("reference", 8, block_size=4, device=model.device)
        with torch.no_grad(), count_calls(model) as calls:
            batch.begin_step([4], [0], [[6, 2]])
            model(**batch.model_inputs(prompts[0][:4]))
            batch.begin_step([1, 12], [4, 0], [[6, 2], [0, 7, 3]])
            logits = model(**batch.model_inputs([prompts[0][4], *prompts[1]])).logits[0]
    finally:
        model.set_attn_implementation("eager")
    assert calls == calls_of("gemma2", 2)
    for place, number in ((0, 0), (-1, 3)):
        answer, told = library_answers("gemma2")[number]
        assert int(logits[place].argmax()) == answer[0]
        torch.testing.assert_close(logits[place], told[0], atol=1e-4, rtol=1e-4)


class _CallsOthers:
    """A hook on a layer's MLP that runs further models inside of a step, once."""

    def __init__(self, *models: Any) -> None:
        self.models, self.logits = models, []

    def __call__(self, *_: Any) -> None:
        models, self.models = self.models, ()
        ids = on_device([PROMPTS[3]])
        self.logits += [
            model(input_ids=ids, use_cache=False).logits for model in models
        ]


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_a_batch_is_not_used_by_models_that_are_not_in_the_step(name: str) -> None:
    """Another model and the same one run inside of a step, with as many tokens as the step has.

    With the batch of the step, their 12 tokens would be two requests instead of one.
    """
    model, other = tiny(name), tiny("nemotron")
    prompts = [PROMPTS[3][:5], PROMPTS[3][5:]]
    told = [
        logits_of(each, input_ids=on_device([PROMPTS[3]]))[1]
        for each in ("nemotron", name)
    ]
    apart = [logits_of(name, input_ids=on_device([each]))[1] for each in prompts]
    hook = _CallsOthers(other, model)
    with (
        torch.no_grad(),
        use_attention(model, "reference"),
        use_attention(other, "reference"),
    ):
        handle = model.model.layers[0].mlp.register_forward_hook(hook)
        try:
            batch = PagedBatch("reference", 8, block_size=4, device=model.device)
            batch.begin_step([5, 7], [0, 0], [[6, 2], [5, 0]])
            logits = model(**batch.model_inputs(PROMPTS[3])).logits
        finally:
            handle.remove()
    assert len(hook.logits) == 2
    for found, expected in zip(hook.logits, told, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, torch.cat(apart, 1), atol=1e-4, rtol=1e-4)


def test_a_layer_that_passes_on_neither_keyword_nor_mask_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its attention mixed the requests of a step, and was counted as a call of the twin."""
    layer = tiny("stablelm").model.layers[1].self_attn
    forward = layer.forward

    def without_mask(*args: Any, **named: Any) -> Any:
        return forward(*args, **{**named, "attention_mask": None})

    monkeypatch.setattr(layer, "forward", without_mask)
    with pytest.raises(
        NotImplementedError, match="1 of 2 attention layers got the pages"
    ):
        generate(tiny("stablelm"), PROMPTS, "reference")


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt"])
def test_a_model_with_its_own_attention_runs_in_steps_only(name: str) -> None:
    model, ids = tiny(name), on_device([[5, 6, 7]])
    told = logits_of(name, input_ids=ids)[1]
    batch = PagedBatch("reference", 2, block_size=4, device=model.device)
    batch.begin_step([3], [0], [[1]])
    with torch.no_grad(), use_attention(model, "reference"):
        found = model(**batch.model_inputs([5, 6, 7])).logits
        with pytest.raises(
            NotImplementedError, match=r"expected generate\(\.\.\.\) or"
        ):
            model(input_ids=ids)
        model.train()
        try:
            with pytest.raises(NotImplementedError, match=r"dropout = 0\.5"):
                for module in model.modules():
                    if type(module).__name__.endswith("Attention"):
                        module.attention_dropout = torch.nn.Dropout(0.5)
                        module.attn_dropout_p = 0.5
                model(**batch.model_inputs([5, 6, 7]))
        finally:
            model.eval()
    torch.testing.assert_close(found, told, atol=1e-4, rtol=1e-4)
    # restored
    again = logits_of(name, input_ids=ids)[1]
    assert torch.equal(again, told)


# --- models that encode first

ENCODER_PROMPTS = (draw(5, seed=4), draw(13, seed=5), draw(1, seed=6), draw(9, seed=7))
WAVES = {"max_new_tokens": DECODED, "block_size": 4}


def encoder_prompts(name: str) -> Sequence[Any]:
    """Return the encoder's inputs: tokens of four lengths, or two audio inputs of one length."""
    if name != "whisper":
        return ENCODER_PROMPTS
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(8, 40, generator=generator) for _ in range(2)]


def encoder_inputs(name: str, prompt: Any) -> dict[str, Tensor]:
    """Return one prompt as keyword arguments of the library."""
    if name == "whisper":
        return {"input_features": prompt[None].to(tiny(name).device)}
    return {"input_ids": on_device([prompt])}


def start_of(name: str) -> int:
    """Return the first token of a decoder; the library falls back to bos_token_id."""
    config = tiny(name).config
    start = getattr(config, "decoder_start_token_id", None)
    return config.bos_token_id if start is None else start


@functools.cache
def library_decodes(name: str) -> list[tuple[list[int], Tensor]]:
    """Return the tokens and logits of the library's eager attention, prompt by prompt."""
    model, answers = tiny(name), []
    for prompt in encoder_prompts(name):
        ids = on_device([[start_of(name)]])
        logits: list[Tensor] = []
        told: dict[str, Any] = encoder_inputs(name, prompt)
        for _ in range(DECODED):
            with torch.no_grad():
                out = model(**told, decoder_input_ids=ids, use_cache=True)
            logits.append(out.logits[:, -1])
            ids = logits[-1].argmax(1, keepdim=True)
            told = {
                "encoder_outputs": BaseModelOutput(out.encoder_last_hidden_state),
                "past_key_values": out.past_key_values,
            }
        tokens = torch.cat(logits).argmax(1).tolist()
        answers.append((tokens, torch.cat(logits)))
    return answers


def attention_names(name: str) -> tuple[list[str], list[str]]:
    """Return the names of a model's attention modules: the encoder's, the decoder's."""
    names = [
        module_name
        for module_name, module in tiny(name).named_modules()
        if type(module).__name__.endswith("Attention")
        and "layer" in module_name
        and not hasattr(module, "layer_norm")
    ]
    encoder = [each for each in names if "encoder" in each.split(".")[:2]]
    return encoder, [each for each in names if each not in encoder]


def is_dispatched(name: str) -> bool:
    """Tell whether this version looks the model's attention up by name; T5 does since 5.23."""
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if name != "t5" or version >= (5, 23):
        return True
    model = copy.deepcopy(tiny(name))
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


def test_a_model_that_a_version_does_not_dispatch_raises() -> None:
    """T5 accepted the name and silently used its own attention."""
    if is_dispatched("t5"):
        assert generate(tiny("t5"), [[5]], "reference", max_new_tokens=1)
        return
    with pytest.raises(NotImplementedError, match="0 of 2 attention layers ran"):
        generate(tiny("t5"), [[5]], "reference")


@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_cross_attention_reads_the_encoder_s_keys_from_pages_in_every_step(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of all lengths in one padded batch; the padding does not change the result."""
    skip_unless_dispatched(name)
    module = import_module(f"pagetwin.{implementation}.cache.cache_ops")
    write, written = module.reshape_and_cache, []

    def counting(key: Tensor, *args: Any) -> None:
        written.append(len(key))
        write(key, *args)

    monkeypatch.setattr(module, "reshape_and_cache", counting)
    prompts, statistics = encoder_prompts(name), Statistics(keep_logits=True)
    num_blocks = 5 if name == "whisper" else 8
    answers = generate(
        tiny(name),
        prompts,
        implementation,
        **WAVES,
        num_blocks=num_blocks,
        statistics=statistics,
    )
    told = library_decodes(name)
    assert answers == [answer for answer, _ in told]
    # every layer ran on the twin, once per step
    waves = 2
    encoder, decoder = attention_names(name)
    assert statistics.encoder_runs == waves
    assert statistics.steps == waves * DECODED
    assert len(encoder) == 2
    assert len(decoder) == 4
    assert statistics.calls == {
        **dict.fromkeys(encoder, waves),
        **dict.fromkeys(decoder, waves * DECODED),
    }
    # each layer wrote each token of the encoder once, and no padding
    lengths = [20 if name == "whisper" else len(prompt) for prompt in prompts]
    assert sum(written) == 2 * (sum(lengths) + len(prompts) * DECODED)
    # the logits are within the error budget
    start = [start_of(name)]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = on_device([[*start, *answer[:-1]]])
        truth, same = logits_of(
            name, **encoder_inputs(name, prompt), decoder_input_ids=ids
        )
        runs = [same[0], told[number][1]]
        assert_rows(statistics.logits[number], truth[0], runs, (name, number))


def test_a_finished_request_leaves_its_wave() -> None:
    told = [answer for answer, _ in library_decodes("bart")]
    end = told[1][1]
    until = [
        answer[: answer.index(end) + 1] if end in answer else answer for answer in told
    ]
    assert until != told
    statistics = Statistics()
    answers = generate(
        tiny("bart"),
        ENCODER_PROMPTS,
        "reference",
        max_new_tokens=DECODED,
        block_size=4,
        eos_token_id=end,
        statistics=statistics,
    )
    assert answers == until
    assert statistics.encoder_runs == 1


@pytest.mark.parametrize(
    ("limit", "waves"), [({"max_running": 1}, 4), ({"max_batch_tokens": 26}, 2)]
)
def test_waves_are_as_large_as_the_limits_allow(
    limit: dict[str, int], waves: int
) -> None:
    statistics = Statistics()
    answers = generate(
        tiny("bart"),
        ENCODER_PROMPTS,
        "reference",
        **WAVES,
        **limit,
        statistics=statistics,
    )
    assert answers == [answer for answer, _ in library_decodes("bart")]
    assert statistics.encoder_runs == waves


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "gpt_oss"])
def test_the_library_s_own_generate_takes_a_paged_cache(name: str, beams: int) -> None:
    if name == "t5":
        skip_unless_dispatched(name)
    model, prompt = (
        tiny(name),
        on_device([ENCODER_PROMPTS[1], ENCODER_PROMPTS[1][::-1]]),
    )
    options = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": NEW_TOKENS,
        "num_beams": beams,
        "do_sample": False,
    }
    told = model.generate(prompt, **options)
    caches = [PagedCache(24 * beams, 4, "reference") for _ in range(2)]
    cache = caches[0]
    if model.config.is_encoder_decoder:
        cache = transformers.EncoderDecoderCache(*caches)
    model.set_attn_implementation(register("reference"))
    try:
        with count_calls(model) as calls:
            answers = model.generate(prompt, past_key_values=cache, **options)
    finally:
        model.set_attn_implementation("eager")
    assert answers.tolist() == told.tolist()
    assert sum(calls.values()) >= 2 * NEW_TOKENS


# --- plain runs, padded batches


@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_padding_on_either_side_changes_nothing(
    name: str, side: str, implementation: str
) -> None:
    prompts = [PROMPTS[3], PROMPTS[0]]
    longest = max(map(len, prompts))
    padded, shown, places = [], [], []
    for prompt in prompts:
        rest = longest - len(prompt)
        before, after = (rest, 0) if side == "left" else (0, rest)
        padded.append([*[0] * before, *prompt, *[0] * after])
        shown.append([*[0] * before, *[1] * len(prompt), *[0] * after])
        places.append([*[0] * before, *range(len(prompt)), *[0] * after])
    model = tiny(name)
    inputs = {
        "input_ids": on_device(padded),
        "attention_mask": on_device(shown),
        "position_ids": on_device(places),
    }
    truth, same = logits_of(name, **inputs)
    model.set_attn_implementation(register(implementation))
    try:
        with torch.no_grad(), count_calls(model) as calls:
            found = model(**inputs).logits
    finally:
        model.set_attn_implementation("eager")
    assert calls == calls_of(name, 1)
    is_token = inputs["attention_mask"].bool()
    alone = torch.cat(
        [logits_of(name, input_ids=on_device([prompt]))[1][0] for prompt in prompts]
    )
    runs = [same[is_token], alone]
    assert_rows(found[is_token], truth[is_token], runs, (name, side))


@pytest.mark.parametrize("implementation", TWINS)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_whole_encoder_decoder_runs_without_any_cache(
    name: str, implementation: str
) -> None:
    skip_unless_dispatched(name)
    model = tiny(name)
    inputs = {
        "input_ids": on_device([ENCODER_PROMPTS[3], [*ENCODER_PROMPTS[0], 0, 0, 0, 0]]),
        "attention_mask": on_device([[1] * 9, [1] * 5 + [0] * 4]),
        "decoder_input_ids": on_device([draw(6, seed=9), draw(6, seed=10)]),
    }
    truth, same = logits_of(name, **inputs)
    model.set_attn_implementation(register(implementation))
    try:
        with torch.no_grad(), count_calls(model) as calls:
            found = model(**inputs, use_cache=False).logits
    finally:
        model.set_attn_implementation("eager")
    encoder, decoder = attention_names(name)
    assert calls == dict.fromkeys([*encoder, *decoder], 1)
    assert_rows(found.flatten(0, 1), truth.flatten(0, 1), [same.flatten(0, 1)], name)


# --- masks and biases


def mask_of(*rows: str) -> Tensor:
    """Return a mask of one request; a query attends to the keys with a 1."""
    return torch.tensor([[[[each == "1" for each in row] for row in rows]]])


@pytest.mark.parametrize(
    ("mask", "visible", "queries", "keys"),
    [
        (None, VisibleRange(True), (0, 3), (0, 3)),
        (mask_of("100", "110", "111"), VisibleRange(True), (0, 3), (0, 3)),
        (mask_of("000", "010", "011"), VisibleRange(True), (1, 3), (1, 3)),
        (mask_of("100", "110", "110"), VisibleRange(True), (0, 2), (0, 2)),
        (mask_of("100", "110", "011"), VisibleRange(True, 2), (0, 3), (0, 3)),
        (mask_of("110", "110", "110"), VisibleRange(False), (0, 3), (0, 2)),
        (
            mask_of("110", "110", "110"),
            VisibleRange(False, has_bias=True),
            (0, 2),
            (0, 2),
        ),
        (mask_of("110", "111", "011"), VisibleRange(False, 2), (0, 3), (0, 3)),
        (mask_of("100", "110", "001"), VisibleRange(True, None, 2), (0, 3), (0, 3)),
        (mask_of("000", "000", "000"), VisibleRange(True), (0, 0), (0, 0)),
    ],
)
def test_a_mask_is_converted_to_ranges(
    mask: Tensor | None,
    visible: VisibleRange,
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> None:
    ranges = read_padded_ranges(mask, 1, 3, 3, visible)
    assert (ranges.queries, ranges.keys) == ([queries], [keys])


@pytest.mark.parametrize(
    ("mask", "visible", "words"),
    [
        (mask_of("100", "110", "101"), VisibleRange(True), r"\[0, 0, 2, 1\] = False"),
        (mask_of("110", "110", "111"), VisibleRange(True), r"\[0, 0, 0, 1\] = True"),
        (mask_of("100", "110", "111"), VisibleRange(True, 2), r"\[0, 0, 2, 0\] = True"),
        (mask_of("100", "010", "011"), VisibleRange(True), r"\[0, 0, 1, 0\] = False"),
        (mask_of("101", "101", "101"), VisibleRange(False), r"\[0, 0, 0, 1\] = False"),
    ],
)
def test_a_mask_that_contains_more_raises(
    mask: Tensor, visible: VisibleRange, words: str
) -> None:
    with pytest.raises(NotImplementedError, match=words):
        read_padded_ranges(mask, 1, 3, 3, visible)


def test_the_mask_shows_whether_a_bidirectional_window_includes_its_end() -> None:
    mask = mask_of("1100", "1110", "0111", "0011")
    assert read_bidirectional_window(mask, 2) == 2
    assert read_bidirectional_window(mask, 1) == 2
    assert read_bidirectional_window(mask, 9) == 9


def test_a_bias_by_distance_becomes_a_table() -> None:
    """Of five keys and two queries, the last ones."""
    table = torch.randn(3, 9)
    distance = torch.arange(5)[None, :] - torch.arange(3, 5)[:, None]
    bias = table[:, distance + 4][None]
    found = read_position_bias(bias)
    assert found is not None
    assert torch.equal(found[:, distance + 4], bias[0])
    assert read_position_bias(torch.zeros(1, 3, 2, 5)) is None
    bias = bias.clone()
    bias[0, 1, 0, 2] += 1
    with pytest.raises(NotImplementedError, match="by key - query alone"):
        read_position_bias(bias)


# --- validation


def test_a_layer_that_computes_its_own_attention_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two layers does not use the twin; the model would run without any other sign."""
    layer = tiny("llama").model.layers[1].self_attn
    monkeypatch.setattr(
        layer, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(NotImplementedError, match="1 of 2 attention layers ran"):
        generate(tiny("llama"), PROMPTS, "reference")


def test_a_model_with_its_own_attention_raises() -> None:
    gpt_j = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, rotary_dim=8
        )
    )
    with pytest.raises(NotImplementedError, match="does not let its attention be repl"):
        generate(gpt_j.eval(), [[5, 6]], "reference")
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2
        )
    )
    with pytest.raises(NotImplementedError, match="keeps a state of the past"):
        generate(mamba.eval(), [[5, 6]], "reference")


def test_falcon_with_alibi_raises() -> None:
    """The library rounds its bias to bfloat16, so no slopes give the same logits."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=VOCABULARY, alibi=True, **sizes)
    )
    with pytest.raises(NotImplementedError, match="rounds the bias of each key to bf"):
        generate(falcon.eval(), [[5, 6]], "reference")


def test_merged_attention_of_decoder_and_encoder_raises() -> None:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.T5Gemma2Config(
        encoder={
            "text_config": text,
            "vision_config": vision,
            "mm_tokens_per_image": 1,
        },
        decoder=text,
        vocab_size=VOCABULARY,
    )
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    with pytest.raises(NotImplementedError, match="one softmax over the keys"):
        generate(model, [[5, 6]], "reference")


def test_the_model_s_attention_is_restored_after_an_error() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        generate(model, [[]], "reference")
    assert model.config._attn_implementation == "eager"
    generate(model, [[5]], "reference", max_new_tokens=1)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        ([[5], []], {}, ValueError, r"prompts\[1\] is empty: expected at least one"),
        ([["five"]], {}, TypeError, r"prompts\[0\]\[0\] = 'five' is str.*tokenizer"),
        ([], {}, ValueError, r"prompts = \[\] is empty: expected a list of .*\[\[5, 6"),
        (None, {}, TypeError, r"prompts = None is NoneType: expected .*\[\[5, 6, 7\]"),
        (
            [5, 6],
            {},
            TypeError,
            r"prompts\[0\] = 5 is int: .*\[\[5, 6, 7\], \[8, 9\]\]",
        ),
        (
            "five",
            {},
            TypeError,
            r"prompts = 'five' is str: .*\[\[5, 6.*run the tokenizer",
        ),
        (["five"], {}, TypeError, r"prompts\[0\] = 'five' is str: .*run the tokenizer"),
        ({"input_ids": [[5]]}, {}, TypeError, r"is dict: .* give its input_ids"),
        ({5, 6}, {}, TypeError, r"prompts = \{5, 6\} is set: expected a list of"),
        (
            torch.zeros(2, 3),
            {},
            TypeError,
            r"prompts is Tensor of torch\.float32, shape \[2, 3\]: .* are integers",
        ),
        (
            [torch.zeros(3)],
            {},
            TypeError,
            r"prompts\[0\] is Tensor of torch\.float32, shape \[3\]: .* are integers",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            {},
            TypeError,
            r"prompts is Tensor of torch\.int64, .*\[\[5, 6.*\.tolist\(\)",
        ),
        ([[5.0]], {}, TypeError, r"prompts\[0\]\[0\] = 5\.0 is float: expected an int"),
        ([[5, 96]], {}, ValueError, r"prompts\[0\]\[1\] = 96 .* 0 <= token < 96"),
        (
            [[5] * 9],
            {"num_blocks": 2, "block_size": 4, "max_new_tokens": 1},
            ValueError,
            r"prompts\[0\] has 9 tokens .* \(8\)",
        ),
        ([[5]], {"implementation": "fast"}, ValueError, "implementation = 'fast'"),
        ([[5]], {"max_new_tokens": 0}, ValueError, "max_new_tokens = 0"),
        ([[5]], {"block_size": 0}, ValueError, "block_size = 0"),
        ([[5]], {"arrival_steps": [0, 1]}, ValueError, "has 2 entries: expected 1"),
        ([[5]], {"arrival_steps": [-1]}, ValueError, r"arrival_steps\[0\] = -1"),
        ([[5]], {"decoder_prompt": [1]}, ValueError, "the model is decoder-only"),
    ],
)
def test_bad_input_raises(
    prompts: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        generate(tiny("llama"), prompts, **{"implementation": "reference", **options})


@pytest.mark.parametrize(
    ("name", "prompts", "options", "words"),
    [
        ("bart", [[5]], {"arrival_steps": [0]}, "the model is an encoder-decoder"),
        ("bart", [[5] * 9], {"num_blocks": 2, "block_size": 4}, "3 blocks for its enc"),
        ("bart", [[5]], {"decoder_prompt": [96]}, r"decoder_prompt\[0\] = 96"),
        ("bart", [[5]], {"decoder_prompt": []}, "at least one token"),
        ("whisper", [], {}, r"is empty: expected a list of tensors \[bands, frames\]"),
        ("whisper", [torch.zeros(8)], {}, r"prompts\[0\] has shape \[8\]"),
        (
            "whisper",
            [torch.zeros(8, 40), [5]],
            {},
            r"prompts\[1\] = \[5\] is list: .*ten",
        ),
        ("whisper", torch.zeros(1, 8), {}, r"prompts\[0\] has shape \[8\]"),
    ],
)
def test_bad_input_of_an_encoder_raises(
    name: str, prompts: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        generate(tiny(name), prompts, "reference", **options)


@pytest.fixture
def model() -> Any:
    """Return a copy of a model that runs on the reference."""
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation(register("reference"))
    return model


def test_unsupported_calls_raise(model: Any) -> None:
    ids = on_device([[5, 6, 7]])
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        model(ids)
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"expected torch\.bool"):
            model(ids, attention_mask=torch.zeros(1, 1, 3, 3, device=ids.device))
        with pytest.raises(ValueError, match=r"expected \[1, 1, 3, 3\]"):
            wide = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=ids.device)
            model(ids, attention_mask=wide)
        # two sequences packed into one row; the library detects them by their positions
        with pytest.raises(NotImplementedError, match="other masks are not supported"):
            model(ids, position_ids=on_device([[0, 1, 0]]), use_cache=False)
        model.config.attention_dropout = 0.5
        for layer in model.train().model.layers:
            layer.self_attn.attention_dropout = 0.5
        with pytest.raises(NotImplementedError, match=r"dropout = 0\.5"):
            model(ids)


def test_pages_and_model_must_use_the_same_implementation(model: Any) -> None:
    batch = PagedBatch("pagetwin.reference", 4, block_size=4, device=model.device)
    with pytest.raises(ValueError, match="expected begin_step"):
        batch.model_inputs([5])
    batch.begin_step([2], [0], [[1]])
    with pytest.raises(ValueError, match="expected the 2 of the step"):
        batch.model_inputs([5])
    with torch.no_grad(), pytest.raises(ValueError, match="the same implementation"):
        model(**batch.model_inputs([5, 6]))


def test_keys_in_pages_are_read_only_by_a_twin(model: Any) -> None:
    ids = on_device([[5, 6, 7]])
    with torch.no_grad(), pytest.raises(TypeError, match="are stored in pages"):
        tiny("llama")(ids, past_key_values=PagedCache(4, 4, "reference"))
    with torch.no_grad(), pytest.raises(ValueError, match="the same implementation"):
        model(ids, past_key_values=PagedCache(4, 4, "pagetwin.reference"))
    padded = torch.tensor([[0, 1, 1]], device=ids.device)
    cache = PagedCache(4, 4, "reference")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="padding before"):
        model(ids, attention_mask=padded, past_key_values=cache)
    cache = PagedCache(1, 2, "reference")
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs 2 new blocks"):
        model(ids, past_key_values=cache)
    cache = PagedCache(9, 4, "reference")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="2 requests: expected 1"):
            model(ids.expand(2, 3), past_key_values=cache)
        with pytest.raises(NotImplementedError, match="only grows"):
            cache.crop(-1)
        cache.reset()
        model(ids.expand(2, 3), past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys.shape == (2, 2, 3, 16)
    assert repr(keys) == "KeysInPages()"


def test_both_twins_are_registered_under_their_names() -> None:
    names = register_all()
    assert names == ("pagetwin_reference", "pagetwin_optimized")
    assert set(names) <= set(transformers.AttentionInterface().valid_keys())


def test_without_the_library_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import pagetwin.integrations\n"
        "try:\n    import pagetwin.integrations.transformers\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'pagetwin[transformers]'" in done.stdout


def test_the_old_import_path_names_the_new_one() -> None:
    with pytest.raises(ImportError, match=r"pagetwin\.integrations\.transformers"):
        import_module("pagetwin.shared.integrations.transformers")
