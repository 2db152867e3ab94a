"""How many dropped keys does a tolerance notice?

One query attends to some keys. For each key in turn, the exact answer without it stands for a
kernel that dropped it, otherwise perfect and rounded to the dtype. A common test compares with a
fixed tolerance (atol = 1e-2, or what assert_close takes); here every row has its budget. With a
needle, the key that is dropped outweighs all others, as it does in the suite's data.

    python tests/benchmarks/dropped_keys.py
"""

import torch
from pagetwin.contract.budgets import judge_rows

KV_LENS = (128, 1328, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ASSERT_CLOSE = {
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
}
"""What torch.testing.assert_close takes when nothing is said."""
HEADS, HEAD_SIZE, DROPPED = 8, 64, 64
"""Each of so many keys, evenly spread, is dropped once in each head."""


def answer(query, key, value, dtype=torch.float64):
    """Return [heads, head_size] attention of one query, computed in a dtype."""
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scores = torch.einsum("hd,khd->hk", query, key) * HEAD_SIZE**-0.5
    return torch.einsum("hk,khd->hd", scores.softmax(1), value)


def noticed(kv_len: int, dtype: torch.dtype, needle: bool) -> dict[str, float]:
    """Return which share of the dropped keys each judge notices."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    query, key, value = (
        random(*shape).to(dtype)
        for shape in (
            (HEADS, HEAD_SIZE),
            (kv_len, HEADS, HEAD_SIZE),
            (kv_len, HEADS, HEAD_SIZE),
        )
    )
    counts = {"atol 1e-2": 0, "assert_close": 0, "budget": 0}
    places = torch.linspace(0, kv_len - 1, DROPPED).long().tolist()
    for place in places:
        keys, values = key.clone(), value.clone()
        if needle:
            # a score of 24 and more, where the others lie around 1
            lean = torch.nn.functional.normalize(query.float(), dim=1)
            norm = query.float().norm(dim=1, keepdim=True)
            keys[place] = (24 * HEAD_SIZE**0.5 / norm * lean).to(dtype)
            values[place] += 3
        rest = [number for number in range(kv_len) if number != place]
        exact = answer(query, keys, values)
        found = answer(query, keys[rest], values[rest]).to(dtype)
        same = answer(query, keys, values, dtype)
        sizes = answer(query, keys, values.abs())
        for head in range(HEADS):
            pair = found[head].double(), exact[head]
            counts["atol 1e-2"] += not torch.allclose(*pair, rtol=0, atol=1e-2)
            counts["assert_close"] += not torch.allclose(*pair, **ASSERT_CLOSE[dtype])
            row = slice(head, head + 1)
            verdict = judge_rows(found[row], exact[row], same[row], dtype, sizes[row])
            counts["budget"] += not verdict.ok
    return {name: count / (len(places) * HEADS) for name, count in counts.items()}


def honest(kv_len: int, dtype: torch.dtype) -> dict[str, float]:
    """Return which share of right answers each judge rejects.

    The answers are those of a kernel on tensor cores: float32 inside, but the weights, at most 1,
    are rounded to the dtype before they meet the values, and the result is rounded once.
    """
    generator = torch.Generator().manual_seed(1)
    counts = {"atol 1e-2": 0, "assert_close": 0, "budget": 0}
    rounds = 16
    for _ in range(rounds):
        query, key, value = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in (
                (HEADS, HEAD_SIZE),
                (kv_len, HEADS, HEAD_SIZE),
                (kv_len, HEADS, HEAD_SIZE),
            )
        )
        exact, sizes = answer(query, key, value), answer(query, key, value.abs())
        same = answer(query, key, value, dtype)
        scores = (
            torch.einsum("hd,khd->hk", query.float(), key.float()) * HEAD_SIZE**-0.5
        )
        weights = torch.exp(scores - scores.amax(1, keepdim=True))
        total = torch.einsum("hk,khd->hd", weights.to(dtype).float(), value.float())
        found = (total / weights.sum(1, keepdim=True)).to(dtype)
        for head in range(HEADS):
            pair = found[head].double(), exact[head]
            counts["atol 1e-2"] += not torch.allclose(*pair, rtol=0, atol=1e-2)
            counts["assert_close"] += not torch.allclose(*pair, **ASSERT_CLOSE[dtype])
            row = slice(head, head + 1)
            counts["budget"] += not judge_rows(
                found[row], exact[row], same[row], dtype, sizes[row]
            ).ok
    return {name: count / (rounds * HEADS) for name, count in counts.items()}


def table() -> str:
    """Return the shares as a Markdown table."""
    lines = [
        "| keys | dtype | data | `atol=1e-2` | `assert_close` | budget |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for kv_len in KV_LENS:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            runs = {
                "random": noticed(kv_len, dtype, False),
                "needle": noticed(kv_len, dtype, True),
                "nothing dropped": honest(kv_len, dtype),
            }
            for data, shares in runs.items():
                cells = " | ".join(f"{100 * share:.1f} %" for share in shares.values())
                lines.append(f"| {kv_len:,} | {name} | {data} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
