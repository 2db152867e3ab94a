"""Decoders of transformers on both twins: equal tokens, and logits within an error budget.

The models are small and have random weights. Their logits are compared with the library's own eager
attention in float64; the error budget is derived from the library's error in float32. Every run
counts the attention calls of each layer, so a layer that does not use the twin is detected.
"""

import copy
import functools
from importlib import import_module
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import (
    DEFAULT_OPTIONS,
    pack_options,
    unpack_options,
)
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from library_models import (
    NEW_TOKENS,
    PROMPTS,
    TWINS,
    assert_rows,
    calls_of,
    logits_of,
    on_device,
    tiny,
)
from pagetwin.integrations.transformers import (
    PagedBatch,
    Statistics,
    count_calls,
    decoder_only,
    generate,
    register,
    use_attention,
)
from support.tiny_models import DECODER_ONLY, VOCABULARY, WINDOW

pytestmark = pytest.mark.long

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
    batched = {
        tuple(answer.prompt_ids): answer.generated_tokens for answer in told.values()
    }
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
    # which would notice most of them
    monkeypatch.setattr(decoder_only, "check_steps", lambda *_: None)
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
    monkeypatch.setattr(decoder_only, "check_steps", lambda *_: None)
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
        logits_of(model_name, input_ids=on_device([PROMPTS[3]]))[1]
        for model_name in ("nemotron", name)
    ]
    apart = [logits_of(name, input_ids=on_device([prompt]))[1] for prompt in prompts]
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
