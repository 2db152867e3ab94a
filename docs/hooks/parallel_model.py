"""Tables of parallel attention: what two and four GPUs took, and what a model computes for more.

The model has four numbers of a record. A GPU reads keys and values at a rate, and needs a time that
does not depend on their number. A step on several GPUs needs a time for its exchange and combine. A
prefill has arithmetic, and gathers keys and values at a rate.
"""

import json
from typing import Any

from page_data import DATA

KV_BYTES = 8 * (128 + 128) * 2
"""Bytes of a token's keys and values in one layer: 8 KV heads of 128 elements in 16 bits."""
LAYERS = 32
DECODES = {"decode-1x128k": 131072, "decode-8x32k": 8 * 32768}
AIMS = {"decode-1x128k": 1.8, "decode-8x32k": 1.85}
"""How many times as fast as one GPU two of them should be."""
PREFILL = 32768
PREFILLS = {
    "": "gather, NCCL",
    " batch-invariant": "gather, NCCL, `batch_invariant`",
    " ring": "ring, NCCL",
}
"""How the keys and values of a prefill reach the ranks, by the end of the name in a record."""
RANKS = (1, 2, 4, 8, 72)
LENGTHS = {"128k": 131072, "1M": 2**20, "10M": 10 * 2**20}
WAYS = {"nccl": "NCCL", "symmetric": "symmetric memory"}


def record(ranks: int = 2) -> dict[str, Any]:
    """Return the newest record of parallel steps on a number of GPUs."""
    path = DATA / f"parallel_x{ranks}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


class Model:
    """Times in microseconds, from the record of two GPUs.

    Args:
        found: Figures of a record, by name.
        way: How the ranks exchange tensors.
    """

    def __init__(self, found: dict[str, Any], way: str = "symmetric") -> None:
        self.found = found
        name, keys = "decode-1x128k", DECODES["decode-1x128k"]
        whole, half = found[name]["us"], found[f"{name} share"]["us"]
        # step: keys and values read per microsecond, and the rest of a decode
        self.rate = keys / 2 * KV_BYTES / (whole - half)
        self.start_us = whole - keys * KV_BYTES / self.rate
        # step: exchange and combine
        self.exchange_us = found[f"{name} {way} all_to_all"]["us"] - half
        # step: arithmetic of a pair of query and key, and the gather
        self.pair_us = found["prefill-1x32k"]["one_us"] / PREFILL**2
        gather = found["prefill-1x32k collectives"]["all_gather"]
        self.gather_rate = PREFILL / 2 * KV_BYTES / gather

    def decode(self, keys: int, ranks: int) -> float:
        """Return the time of a decode: start, then keys * bytes / (ranks * rate), then exchange."""
        exchange = self.exchange_us if ranks > 1 else 0.0
        return self.start_us + keys * KV_BYTES / ranks / self.rate + exchange

    def prefill(self, tokens: int, ranks: int) -> float:
        """Return the time of a prefill: pairs / ranks, then the rows of the other ranks."""
        rows = tokens * (ranks - 1) / ranks
        return self.pair_us * tokens**2 / ranks + rows * KV_BYTES / self.gather_rate


def parallel_times() -> str:
    """Return what was measured on two GPUs."""
    return times_of(record())


def parallel_times_4() -> str:
    """Return what was measured on four GPUs."""
    return times_of(record(4))


def times_of(whole: dict[str, Any]) -> str:
    """Return the times of a record, each beside that of one GPU in the same run."""
    found, ranks = whole["found"], len(whole["devices"])
    lines = [
        f"Measured on {ranks} x {whole['devices'][0]} ({whole['date']}, torch {whole['torch']},"
        f" NCCL {whole['nccl']}, triton {whole['triton']}, commit {whole['commit']}), microseconds"
        " of one layer in a CUDA graph. 32 query heads, 8 KV heads, head size 128, bf16.",
        "",
        f"| workload | exchange | 1 GPU | {ranks} GPUs | factor |",
        "|---|---|---:|---:|---:|",
    ]
    for name in DECODES:
        for way, words in WAYS.items():
            for exchange in ("all_to_all", "reduce_scatter"):
                measured = found[f"{name} {way} {exchange}"]
                lines.append(
                    f"| {name} | `{exchange}`, {words} | {found[name]['us']:.0f}"
                    f" | {measured['us']:.0f} | {measured['times']:.2f} |"
                )
            measured = found[f"{name} {way} splits 8 x 16"]
            lines.append(
                f"| {name} | `KeySplits(8, 16)`, {words} | {measured['one_rank_us']:.0f}"
                f" | {measured['us']:.0f} | {measured['times_of_one_rank']:.2f} |"
            )
    for suffix, words in PREFILLS.items():
        measured = found[f"prefill-1x32k{suffix}"]
        lines.append(
            f"| prefill-1x32k | {words} | {measured['one_us']:.0f} | {measured['all_us']:.0f}"
            f" | {measured['times']:.2f} |"
        )
    return "\n".join(lines)


def parallel_decodes() -> str:
    """Return what the parts of a decode step took, and the most that its share allows."""
    found = record()["found"]
    lines = [
        "| workload | through | 1 GPU | attention of a share | alone it would allow | gather of"
        " queries | all-to-all | left for combine and launches | step | factor | aim |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, aim in AIMS.items():
        one, share = found[name]["us"], found[f"{name} share"]["us"]
        for way, words in WAYS.items():
            sent = found[f"{name} {way} collectives"]
            step = found[f"{name} {way} all_to_all"]
            left = step["us"] - share - sent["queries"] - sent["packed_1"]
            lines.append(
                f"| {name} | {words} | {one:.1f} | {share:.1f} | {one / share:.2f}"
                f" | {sent['queries']:.1f} | {sent['packed_1']:.1f} | {left:.1f}"
                f" | {step['us']:.1f} | {step['times']:.2f} | {aim} |"
            )
    return "\n".join(lines)


def parallel_collectives() -> str:
    """Return the measured time of each collective of a step."""
    found = record()["found"]
    lines = [
        "| workload | through | gather of queries | all-to-all of partial results"
        " | gather of log-sum-exps | reduce-scatter |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in DECODES:
        for way, words in WAYS.items():
            measured = found[f"{name} {way} collectives"]
            lines.append(
                f"| {name} | {words} | {measured['queries']:.1f} | {measured['packed_1']:.1f}"
                f" | {measured['lse']:.1f} | {measured['rows_added']:.1f} |"
            )
    return "\n".join(lines)


def parallel_model() -> str:
    """Return what the model computes for more GPUs."""
    model = Model(record()["found"])
    heads = " | ".join(f"{ranks} GPUs" if ranks > 1 else "1 GPU" for ranks in RANKS)
    lines = [f"| one layer | {heads} |", f"|---|{'---:|' * len(RANKS)}"]
    for label, keys in LENGTHS.items():
        times = [model.decode(keys, ranks) for ranks in RANKS]
        cells = [f"{time:,.0f} us ({times[0] / time:.1f})" for time in times]
        lines.append(f"| decode over {label} keys | {' | '.join(cells)} |")
    for label, keys in LENGTHS.items():
        times = [model.prefill(keys, ranks) / 1e3 for ranks in RANKS]
        cells = [f"{time:,.0f} ms ({times[0] / time:.1f})" for time in times]
        lines.append(f"| prefill of {label} tokens | {' | '.join(cells)} |")
    for label, keys in LENGTHS.items():
        sizes = [f"{keys * KV_BYTES * LAYERS / ranks / 1e9:,.0f} GB" for ranks in RANKS]
        lines.append(
            f"| cache of {label} keys, {LAYERS} layers | {' | '.join(sizes)} |"
        )
    return "\n".join(lines)


def parallel_limits() -> str:
    """Return where the exchange takes as long as the attention, and how the model was checked."""
    found = record()["found"]
    lines = []
    for way, words in WAYS.items():
        model = Model(found, way)
        keys = model.exchange_us * model.rate / KV_BYTES
        other = "decode-8x32k"
        computed = model.decode(DECODES[other], 2)
        measured = found[f"{other} {way} all_to_all"]["us"]
        lines.append(
            f"- Through {words}, exchange and combine take {model.exchange_us:.0f} us. A GPU reads"
            f" the keys and values of {keys:,.0f} tokens in that time, at"
            f" {model.rate / 1e6:.2f} TB/s. With fewer keys per GPU, communication takes longer"
            f" than attention. Check: for {other} the model computes {computed:.0f} us, and"
            f" {measured:.0f} us were measured."
        )
    tokens = KV_BYTES / model.gather_rate / model.pair_us
    computed = model.prefill(PREFILL, 2)
    measured = found["prefill-1x32k"]["all_us"]
    lines.append(
        f"- A prefill gathers at {model.gather_rate / 1e3:.0f} GB/s. Gather and arithmetic take"
        f" the same time for {tokens:,.0f} * (ranks - 1) tokens. Check: for prefill-1x32k the"
        f" model computes {computed:,.0f} us, and {measured:,.0f} us were measured."
    )
    return "\n".join(lines)
