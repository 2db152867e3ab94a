"""Tensor parallelism of transformers over gloo: each rank attends with its own heads."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pagetwin.engine.rank_group import RankGroup
from support.rank_processes import RankProcesses

transformers = pytest.importorskip("transformers")
distributed = pytest.importorskip("transformers.distributed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"),
        reason="this version of transformers distributes a model only while it is loaded",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks run on the CPU"),
]

PROMPTS = [[5, 6, 7], [8] * 20, [8] * 20 + [9], [3]]
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Return two processes for all tests of this file."""
    found = RankProcesses(tmp_path_factory.mktemp("ranks"), 2)
    yield found
    found.close()


def make_model() -> Any:
    """Return a small Llama, the same in each process; its weights tell tokens apart."""
    from support.tiny_models import SIZES

    torch.manual_seed(0)
    sizes = {**SIZES, "eos_token_id": None, "initializer_range": 0.5}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def generate_on_a_rank(
    ranks: RankGroup, twin: str
) -> tuple[list[list[int]], dict[str, tuple[int, ...]]]:
    """Return the tokens of a rank, and the shapes of its part of some weights."""
    from pagetwin.integrations.transformers import generate

    # transformers reads these, also of a group that is there already
    rank = str(ranks.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    model = make_model()
    config = distributed.DistributedConfig(tp_size=2, tp_plan="auto")
    config, _, mesh = model.prepare_distribute_model(config)
    model = model.maybe_distribute_model(model, config, mesh)
    layer = model.model.layers[0].self_attn
    shapes = {
        name: tuple(getattr(layer, name).weight.to_local().shape)
        for name in ("q_proj", "k_proj")
    }
    return generate(model, PROMPTS, twin, max_new_tokens=NEW_TOKENS), shapes


@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_two_ranks_of_transformers_generate_the_tokens_of_one_process(
    two: RankProcesses, twin: str
) -> None:
    from pagetwin.integrations.transformers import generate

    right = generate(make_model(), PROMPTS, "reference", max_new_tokens=NEW_TOKENS)
    found = two.run(2, generate_on_a_rank, twin)
    for answer in found:
        assert not isinstance(answer, Exception), answer
        tokens, shapes = answer
        # two of the four query heads and one of the two KV heads
        assert shapes == {"q_proj": (32, 32), "k_proj": (16, 32)}
        assert tokens == right
