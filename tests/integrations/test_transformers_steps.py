"""Steps of a PagedBatch that are used out of turn, and the dtypes of layers."""

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from library_models import PROMPTS, on_device, tiny
from pagetwin.integrations.transformers import (
    PagedBatch,
    PagedCache,
    generate,
    register,
    use_attention,
)

OURS = "pagetwin_reference"


@pytest.fixture
def model() -> Iterator[Any]:
    """Return a copy of a model that runs on the reference."""
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation(register("reference"))
    with torch.no_grad():
        yield model


@pytest.fixture
def batch(model: Any) -> PagedBatch:
    """Return a batch in whose cache the first request has three tokens."""
    batch = PagedBatch("reference", 8, block_size=4, device=model.device)
    batch.begin_step([3], [0], [[6, 2]])
    model(**batch.model_inputs([5, 6, 7]))
    return batch


def decode(model: Any, batch: PagedBatch) -> Tensor:
    """Return the logits of the next step."""
    batch.begin_step([1], [3], [[6, 2]])
    logits: Tensor = model(**batch.model_inputs([8])).logits
    return logits


@pytest.mark.extended
def test_a_second_model_on_one_batch_raises(model: Any, batch: PagedBatch) -> None:
    """Its keys overwrote those of the first one."""
    told, other = decode(model, copy.deepcopy(batch)), copy.deepcopy(model)
    batch.begin_step([1], [3], [[6, 2]])
    with pytest.raises(ValueError, match="expected one model per PagedBatch"):
        other(**batch.model_inputs([8]))
    torch.testing.assert_close(decode(model, batch), told)
    # also after the first model is gone, when its memory may be that of another one
    layers = [copy.deepcopy(model)]
    fresh = PagedBatch("reference", 8, block_size=4, device=model.device)
    fresh.begin_step([1], [0], [[1]])
    layers[0](**fresh.model_inputs([5]))
    layers.clear()
    gc.collect()
    fresh.begin_step([1], [1], [[1]])
    with pytest.raises(ValueError, match="expected one model per PagedBatch"):
        model(**fresh.model_inputs([5]))


def test_inputs_of_an_earlier_step_raise(model: Any, batch: PagedBatch) -> None:
    """The old position met the new slot; the logits were wrong by 9.5."""
    told = decode(model, copy.deepcopy(batch))
    batch.begin_step([1], [2], [[6]])
    inputs = batch.model_inputs([8])
    batch.begin_step([1], [3], [[6, 2]])
    with pytest.raises(ValueError, match="the inputs are of an earlier step"):
        model(**inputs)
    for name in ("pagetwin", "attention_mask"):
        mixed = {**batch.model_inputs([8]), name: inputs[name]}
        with pytest.raises(ValueError, match=r"earlier step|of different steps"):
            model(**mixed)
    torch.testing.assert_close(decode(model, batch), told)


def test_inputs_that_were_used_after_the_next_step_began_raise_in_models_that_drop_keywords() -> (
    None
):
    model = tiny("stablelm")
    batch = PagedBatch("reference", 8, block_size=4, device=model.device)
    batch.begin_step([2], [0], [[1]])
    inputs = batch.model_inputs([5, 6])
    batch.begin_step([2], [0], [[2]])
    with (
        torch.no_grad(),
        use_attention(model, "reference"),
        pytest.raises(ValueError, match="the inputs are of an earlier step"),
    ):
        model(**inputs)


def test_a_second_run_of_a_step_raises(model: Any, batch: PagedBatch) -> None:
    told = decode(model, copy.deepcopy(batch))
    batch.begin_step([1], [3], [[6, 2]])
    inputs = batch.model_inputs([8])
    model(**inputs)
    for again in (inputs, batch.model_inputs([9])):
        with pytest.raises(NotImplementedError, match="layer 0 has run in this step"):
            model(**again)
    torch.testing.assert_close(decode(model, batch), told)


def other_cache(model: Any, inputs: dict[str, Any]) -> None:
    cache = transformers.DynamicCache()
    model(**{**inputs, "past_key_values": cache, "use_cache": True})
    # the cache has a token now, and the layer gets two keys
    model(**{**inputs, "past_key_values": cache, "use_cache": True})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, i: m(**{**i, "pagetwin": 5}), TypeError, "pagetwin = int: expected"),
        (
            lambda m, i: m(**{**i, "pagetwin": i["pagetwin"].batch}),
            TypeError,
            "pagetwin = PagedBatch: expected what model_inputs",
        ),
        (
            lambda m, i: m(**{**i, "attention_mask": on_device([[1]])}),
            NotImplementedError,
            "attention_mask is not the one of this step",
        ),
        (
            lambda m, i: m(**{**i, "input_ids": on_device([[8, 8]])}),
            (ValueError, RuntimeError),
            "1 rows of 2 tokens and 2 keys: expected one row with the 1|size of tensor",
        ),
        (
            lambda m, i: m(
                input_ids=on_device([[8], [8]]), pagetwin=i["pagetwin"], use_cache=False
            ),
            (ValueError, NotImplementedError),
            "2 rows of 1 tokens|not the one of this step",
        ),
        (other_cache, (ValueError, NotImplementedError), "and 2 keys|has run in this"),
    ],
)
def test_inputs_that_were_changed_raise(
    model: Any,
    batch: PagedBatch,
    call: Callable[..., Any],
    error: Any,
    words: str,
) -> None:
    batch.begin_step([1], [3], [[6, 2]])
    with pytest.raises(error, match=words):
        call(model, batch.model_inputs([8]))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda b: b.begin_step([], [], []),
            ValueError,
            r"query_lens = \[\]: expected",
        ),
        (lambda b: b.begin_step([0], [3], [[6]]), ValueError, "at least one new token"),
        (
            lambda b: b.begin_step([1], [3], [[8]]),
            IndexError,
            "block id 8 .entry 0 of r",
        ),
        (lambda b: b.begin_step([1], [3], [[-1]]), IndexError, "block id -1"),
        (
            lambda b: b.begin_step([1.0], [3], [[6]]),
            TypeError,
            r"query_lens\[0\] = 1\.0",
        ),
        (lambda b: b.begin_step(1, [3], [[6]]), TypeError, "query_lens = 1 is int"),
        (lambda b: b.begin_step([1], ["3"], [[6]]), TypeError, r"tokens\[0\] = '3'"),
        (
            lambda b: b.begin_step([1], [3], [6]),
            TypeError,
            r"block_rows\[0\] = 6 is int",
        ),
        (lambda b: b.begin_step([1], [3], 6), TypeError, "block_rows = 6 is int"),
        (lambda b: b.begin_step([True], [3], [[6]]), TypeError, "True is bool"),
        (lambda b: b.model_inputs([8.0]), TypeError, r"tokens\[0\] = 8\.0 is float"),
        (lambda b: b.model_inputs("8"), TypeError, "tokens = '8' is str"),
        (lambda b: b.model_inputs([[8]]), TypeError, r"tokens\[0\] = \[8\] is list"),
        (
            lambda b: b.model_inputs([8, 8, 8, 8]),
            ValueError,
            "4 tokens: expected the 3",
        ),
        (lambda b: b.copy_blocks([(0, 1), (0, 8)]), IndexError, "block id 8"),
        (lambda b: b.poison([6, 9]), IndexError, "blocks: block id 9"),
        (lambda b: PagedBatch("reference", 0, 4, "cpu"), ValueError, "num_blocks = 0"),
        (
            lambda b: PagedBatch("reference", 4, 2.5, "cpu"),
            TypeError,
            "block_size = 2.5",
        ),
        (lambda b: PagedBatch(5, 4, 4, "cpu"), TypeError, "implementation = 5 is int"),
        (lambda b: PagedBatch("fast", 4, 4, "cpu"), ValueError, "cannot be loaded"),
    ],
)
def test_bad_calls_of_a_batch_raise_and_change_nothing(
    model: Any,
    batch: PagedBatch,
    call: Callable[[PagedBatch], Any],
    error: type[Exception],
    words: str,
) -> None:
    step = batch.step
    before = {layer: copy.deepcopy(pages) for layer, pages in batch.pages.items()}
    told = decode(model, copy.deepcopy(batch))
    with pytest.raises(error, match=words):
        call(batch)
    assert batch.step is step
    for layer, pages in batch.pages.items():
        for name in ("key_cache", "value_cache"):
            now, then = (
                getattr(its_pages, name) for its_pages in (pages, before[layer])
            )
            assert torch.equal(now.isnan(), then.isnan())
            assert torch.equal(now.nan_to_num(), then.nan_to_num())
    torch.testing.assert_close(decode(model, batch), told)


@pytest.mark.parametrize("kind", ["NumPy", "tensors", "tuples"])
def test_numbers_of_other_libraries_are_numbers(
    model: Any, batch: PagedBatch, kind: str
) -> None:
    told = decode(model, copy.deepcopy(batch))
    make: dict[str, Callable[[list[int]], Any]] = {
        "NumPy": np.array,
        "tensors": torch.tensor,
        "tuples": lambda values: tuple(map(np.int64, values)),
    }
    make_one = make[kind]
    batch.begin_step(make_one([1]), make_one([3]), [make_one([6, 2])])
    found = model(**batch.model_inputs(make_one([8]))).logits
    torch.testing.assert_close(found, told)


# --- dtypes, and an interpreter that is switched on too late


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_a_model_runs_under_autocast(name: str, dtype: torch.dtype) -> None:
    """Rotary positions leave keys in float32; it raised: value_cache is torch.bfloat16."""
    model, device = tiny(name), tiny(name).device.type
    with torch.autocast(device, dtype=dtype):
        found = generate(model, PROMPTS, "reference", max_new_tokens=2)
        ids = on_device([PROMPTS[3]])
        if name != "bloom":
            told = model.generate(
                ids, max_new_tokens=2, do_sample=False, pad_token_id=0
            )
            with use_attention(model, "reference"):
                cache = PagedCache(9, 4, "reference")
                again = model.generate(
                    ids,
                    max_new_tokens=2,
                    do_sample=False,
                    pad_token_id=0,
                    past_key_values=cache,
                )
            assert again.tolist() == told.tolist()
            assert found[3] == told[0, len(PROMPTS[3]) :].tolist()
            assert cache.layers[0].pages.key_cache.dtype == dtype
    assert [len(tokens) for tokens in found] == [2] * len(PROMPTS)


def test_layers_of_different_dtypes_raise(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.to(torch.float16)
        layer.self_attn.v_proj.register_forward_pre_hook(
            lambda module, given: (given[0].half(),)
        )
    ids = on_device([[5, 6]])
    words = r"torch\.float32.*torch\.float16: expected one dtype"
    with pytest.raises(TypeError, match=words):
        model(ids, use_cache=False)
    with pytest.raises(TypeError, match=words):
        model(ids, past_key_values=PagedCache(4, 4, "reference"))
    batch = PagedBatch("reference", 4, 4, model.device)
    batch.begin_step([2], [0], [[1]])
    with pytest.raises(TypeError, match=words):
        model(**batch.model_inputs([5, 6]))


@pytest.mark.extended
def test_an_interpreter_that_is_switched_on_too_late_raises_one_sentence() -> None:
    """It raised: Cannot call @triton.jit'd outside of the scope of a kernel."""
    program = (
        "import os, triton, torch\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from pagetwin import optimized\n"
        "one = torch.zeros(1, 1, 16)\n"
        "cache, slots = torch.zeros(1, 4, 1, 16), torch.tensor([0])\n"
        "starts = torch.tensor([0, 1], dtype=torch.int32)\n"
        "for call in (\n"
        "    lambda: optimized.reshape_and_cache(one, one, cache, cache.clone(), slots),\n"
        "    lambda: optimized.encoder_attention(one, one, one, starts, starts, 1, 1),\n"
        "):\n"
        "    try:\n        call()\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={
            name: value
            for name, value in os.environ.items()
            if name != "TRITON_INTERPRET"
        },
    )
    assert done.stdout.count("TRITON_INTERPRET = 1 was set after triton was") == 2
