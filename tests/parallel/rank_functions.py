"""Programs of ranks: right and wrong ones."""

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
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top.isinf(), {empty}, top))
    total = weights.sum(0)
    out = (weights[..., None] * rows).sum(0) / total.clamp(min=1.0)[..., None]
    return out, (top + total.log()).T


DecodeContextParallel = step_of_ranks(attend)
"""


RIGHT = {"owner": "p // step.interleave_size % world", "empty": "0.0"}


WRONG = {
    "interleave size 1": RIGHT | {"owner": "p % world"},
    "tokens without keys": RIGHT | {"empty": "top"},
}
