"""A parallel implementation that is one function per rank, held to the laws of the step."""

from pathlib import Path

import pytest
import torch
from pagetwin.conformance import Status, check_implementation

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

FUNCTION = """
import torch
from pagetwin.conformance import step_of_ranks


def attend(ranks, step, query, key_cache, value_cache, scale):
    world, tokens = ranks.world_size, len(query)
    every = ranks.all_gather(query.contiguous())
    q = every.transpose(0, 1).flatten(1, 2).float()  # [tokens, ranks * heads, head_size]
    heads, size = q.shape[1], value_cache.shape[-1]
    rows, lses = torch.zeros(tokens, heads, size), torch.full((tokens, heads), -torch.inf)
    starts = step.query_start_loc.tolist()
    for req, seq_len in enumerate(step.seq_lens.tolist()):
        for token in range(starts[req], starts[req + 1]):
            last = seq_len - starts[req + 1] + token if step.causal else seq_len - 1
            own = [p for p in range(last + 1) if {owner} == ranks.rank]
            if not own:
                continue
            at = torch.arange(len(own))
            block = step.block_table[req, at // key_cache.shape[1]].long()
            key, value = (
                cache[block, at % cache.shape[1]].float().repeat_interleave(
                    heads // cache.shape[2], 1
                )
                for cache in (key_cache, value_cache)
            )
            scores = torch.einsum("hd,khd->hk", q[token], key) * scale
            lses[token] = scores.logsumexp(1)
            rows[token] = torch.einsum("hk,khd->hd", scores.softmax(1), value)
    packed = torch.cat([rows, lses[..., None]], -1).unflatten(1, (world, -1))
    got = ranks.all_to_all(packed.movedim(1, 0).contiguous())
    rows, lses = got[..., :-1], got[..., -1]
    joint = lses.logsumexp(0)
    weights = torch.exp(lses - torch.where(joint.isinf(), {empty}, joint))
    return (weights[..., None] * rows).sum(0), joint.T


DecodeContextParallel = step_of_ranks(attend)
"""
RIGHT = {"owner": "p // step.interleave_size % world", "empty": "0.0"}
WRONG = {
    "interleave size 1": RIGHT | {"owner": "p % world"},
    "tokens without keys": RIGHT | {"empty": "joint"},
}
WHOLE = "all ranks together compute attention over the whole sequences"
CROSS = "tokens of a batch that is not causal attend to all keys"
HELD = {
    WHOLE,
    CROSS,
    "each new token is written to one slot of one rank",
    "invalid parallel steps are rejected",
    "ranks that do not agree on the step are rejected",
}
OUTSIDE = {
    "fixed splits give the same bits on any number of ranks",
    "padding of a parallel step gets zeros and no sink",
}


def check(folder: Path, words: dict[str, str], only: str) -> dict[str, Status]:
    """Return how laws end on a function in a file."""
    text = FUNCTION
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    # a module of its own for each test
    file = folder / f"{folder.name.replace('-', '_')}.py"
    file.write_text(text, encoding="utf-8")
    report = check_implementation(
        str(file), only, examples=8, device="cpu", isolated=False
    )
    return {result.law: result.status for result in report.results}


def test_a_function_per_rank_is_held_to_the_laws_of_the_parallel_step(
    tmp_path: Path,
) -> None:
    found = check(tmp_path, RIGHT, "parallel_step")
    print(found)
    assert {law for law, status in found.items() if status is Status.HELD} >= HELD
    for law in OUTSIDE & found.keys():
        assert found[law] in (Status.OUTSIDE, Status.MISSING), (law, found[law])
    assert Status.BROKEN not in found.values(), found


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_function_per_rank_breaks_a_law(what: str, tmp_path: Path) -> None:
    assert check(tmp_path, WRONG[what], WHOLE)[WHOLE] is Status.BROKEN
