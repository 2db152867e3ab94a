"""The small engine: on both twins and any size of cache, the tokens of a model without a cache."""

import pytest
import torch
from pagetwin.contract.scheduler_classes import Request
from pagetwin.examples.small_engine import (
    MAX_TOKENS,
    PROMPTS,
    SIZES,
    PagedEngine,
    ToyModel,
    run_example,
)
from support.twins import TWINS
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the example's model is on the CPU"
)


def tokens_without_a_cache(dtype=torch.float32):
    """Return the tokens of each prompt, each computed from all tokens before it."""
    model = ToyModel(dtype)

    def attend(_, query, key, value):
        group = query.shape[1] // key.shape[1]
        heads = [query, *(x.repeat_interleave(group, 1) for x in (key, value))]
        turned = [tensor.transpose(0, 1) for tensor in heads]
        return scaled_dot_product_attention(*turned, is_causal=True).transpose(0, 1)

    found = {}
    for name, prompt in PROMPTS.items():
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            positions = torch.arange(len(tokens))
            logits = model(torch.tensor(tokens), positions, attend)
            tokens.append(int(logits[-1].argmax()))
        found[name] = tokens[len(prompt) :]
    return found


@pytest.mark.parametrize("twin", TWINS)
def test_the_example_preempts_finds_a_prefix_and_has_the_tokens_of_the_model(twin):
    *steps, last = run_example(TWINS[twin].raw)
    tokens = [line.split("  ", 1) for line in (*steps, last) if line[1] == " "]
    assert dict(tokens) == {
        name: str(found) for name, found in tokens_without_a_cache().items()
    }
    text = "\n".join(steps)
    assert text.count("preempted") == 1 and "recompute" in text
    assert "b prefill 4 (4 found in the cache); c prefill 3" in text
    assert "c recompute 3, new 1 (4 found in the cache)" in text
    assert text.count("found in the cache") == 2


@pytest.mark.parametrize("twin", TWINS)
def test_the_cache_has_the_dtype_of_the_model(twin):
    """It was float32, so a model in bfloat16 raised an error at its first layer."""
    requests = [Request(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()]
    engine = PagedEngine(ToyModel(torch.bfloat16), TWINS[twin].raw, SIZES)
    for _ in engine.generate(requests):
        pass
    assert engine.caches.dtype == torch.bfloat16
    found = {request.request_id: request.output_token_ids for request in requests}
    assert found == tokens_without_a_cache(torch.bfloat16)


@pytest.mark.parametrize("num_blocks", [5, 6, 32])
@pytest.mark.parametrize("token_budget", [1, 5, 64])
def test_no_size_of_cache_or_step_changes_a_token(reference, num_blocks, token_budget):
    sizes = SIZES._replace(num_blocks=num_blocks, token_budget=token_budget)
    requests = [Request(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()]
    for _ in PagedEngine(ToyModel(), reference.raw, sizes).generate(requests):
        pass
    found = {request.request_id: request.output_token_ids for request in requests}
    assert found == tokens_without_a_cache()
