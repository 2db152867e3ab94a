"""Table of requests with few new tokens in latent attention: decodes against prefills.

`tests/gpu/latent_paths.py` measures them.
"""

from page_data import read_rows


def latent_paths_table() -> str:
    """Return one row per batch, and per number of new tokens the time of a decode in prefills."""
    ratios: dict[tuple[int, int, int], dict[int, float]] = {}
    for timed in read_rows("latent_paths"):
        batch = timed["requests"], timed["keys"], timed["heads"]
        ratio = timed["decode_us"] / timed["prefill_us"]
        ratios.setdefault(batch, {})[timed["new"]] = ratio
    new = sorted({new_tokens for row in ratios.values() for new_tokens in row})
    lines = [
        f"| requests x keys, heads | {' | '.join(f'{new_tokens} new' for new_tokens in new)} |",
        f"|---|{'---:|' * len(new)}",
    ]
    for (reqs, keys, heads), row in ratios.items():
        cells = [
            f"{row[new_tokens]:.2f}" if new_tokens in row else "" for new_tokens in new
        ]
        lines.append(f"| {reqs} x {keys:,}, {heads} heads | {' | '.join(cells)} |")
    return "\n".join(lines)
