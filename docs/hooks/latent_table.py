"""Table of requests with few new tokens in latent attention: decodes against prefills.

`tests/gpu/latent_paths.py` measures them.
"""

from page_data import read_rows


def latent_paths_table() -> str:
    """Return one row per batch, and per number of new tokens the time of a decode in prefills."""
    ratios: dict[tuple[int, int, int], dict[int, float]] = {}
    for each in read_rows("latent_paths"):
        batch = each["requests"], each["keys"], each["heads"]
        ratio = each["decode_us"] / each["prefill_us"]
        ratios.setdefault(batch, {})[each["new"]] = ratio
    new = sorted({each for row in ratios.values() for each in row})
    lines = [
        f"| requests x keys, heads | {' | '.join(f'{each} new' for each in new)} |",
        f"|---|{'---:|' * len(new)}",
    ]
    for (reqs, keys, heads), row in ratios.items():
        cells = [f"{row[each]:.2f}" if each in row else "" for each in new]
        lines.append(f"| {reqs} x {keys:,}, {heads} heads | {' | '.join(cells)} |")
    return "\n".join(lines)
