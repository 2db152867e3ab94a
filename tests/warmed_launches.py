"""Print which calls within a spec launch a kernel that `warm_up` has not compiled.

    python tests/warmed_launches.py 90

Launches are recorded instead of made, on host tensors, as in compile_kernels.py. A kernel is
compiled once per set of types, constants and alignments. One JSON object: `warmed`, the number of
kernels that `warm_up` compiled; `calls`, how many calls followed; `missing`, the calls that needed
another one.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import random
import sys
from importlib import import_module
from typing import Any

import torch
from compile_kernels import pretend, specialize_launch
from pagetwin.contract.attention_options import AttentionOptions

MAX_NUM_REQS, MAX_QUERY_LEN, MAX_SEQ_LEN, BLOCK_SIZE = 200, 600, 9000, 16
OPTIONS = (
    AttentionOptions(),
    AttentionOptions(sliding_window=256, sinks=torch.ones(32)),
    AttentionOptions(batch_invariant=True),
)


def keys_of(launches: list[Any]) -> set[str]:
    """Return what the recorded launches are compiled for."""
    found = set()
    for kernel, values, given in launches:
        # triton keeps the type of these numbers only; 7 is neither 1 nor a multiple of 16
        plain = {
            each.name: 7
            for each in kernel.params
            if each.do_not_specialize and isinstance(values.get(each.name), int)
        }
        types = specialize_launch(kernel, values | plain)
        found.add(str((kernel.__name__, *types, sorted(given.items()))))
    return found


def draw_lens(pick: random.Random) -> list[tuple[int, int]]:
    """Return new tokens and keys of the requests of a batch within the spec."""
    kind = pick.choice(["decode", "verify", "prefill", "mixed", "one"])
    num_reqs = (
        1 if kind == "one" else pick.choice([1, 2, 16, 17, 33, 129, MAX_NUM_REQS])
    )
    most = pick.choice([1, 2, 4, 5, 9, 16, 33, 64, 200, MAX_QUERY_LEN])
    lens = []
    for _ in range(num_reqs):
        new = 1 if kind == "decode" else pick.randint(1, most)
        if kind == "mixed" and lens:
            new = 1
        keys = max(new, pick.choice([1, 100, 2048, 2049, 5000, MAX_SEQ_LEN]))
        lens.append((new, keys))
    return lens


def call(
    lens: list[tuple[int, int]],
    caches: Any,
    options: AttentionOptions,
    lse: bool,
    prefix: int,
) -> None:
    """Make one call of paged attention, or of a cascade if there is a prefix."""
    twin = import_module("pagetwin.optimized")
    tokens, longest = sum(new for new, _ in lens), max(keys for _, keys in lens)
    starts = torch.tensor([0, *(new for new, _ in lens)]).cumsum(0).int()
    arguments = (
        torch.empty(tokens, 32, 128, dtype=torch.bfloat16),
        *caches,
        torch.zeros(len(lens), -(-longest // BLOCK_SIZE), dtype=torch.int32),
        starts,
        torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        max(new for new, _ in lens),
        longest,
    )
    given: dict[str, Any] = {"options": options}
    if lse:
        given["lse"] = torch.empty(32, tokens)
    if prefix:
        twin.cascade_attention(*arguments, prefix, **given)
    else:
        twin.paged_attention(*arguments, **given)


def main(chip: int) -> None:
    """Warm up, then make calls."""
    launches: list[Any] = []
    pretend(chip, launches)
    twin = import_module("pagetwin.optimized")
    caches = torch.zeros(2, 20, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16)
    for options in OPTIONS:
        spec = twin.WarmUpSpec(
            key_cache=caches[0],
            value_cache=caches[1],
            num_query_heads=32,
            max_num_reqs=MAX_NUM_REQS,
            max_query_len=MAX_QUERY_LEN,
            max_seq_len=MAX_SEQ_LEN,
            options=(options,),
            lse=(False, True),
            cascades=options == AttentionOptions(),
        )
        told = twin.warm_up(spec)
        assert told
    warmed = keys_of(launches)
    missing, pick, calls = [], random.Random(0), 0
    for options in OPTIONS:
        for lse in (False, True):
            for prefix in (0, 32) if options == AttentionOptions() else (0,):
                for _ in range(25):
                    launches.clear()
                    lens = draw_lens(pick)
                    if prefix:
                        lens = [(new, max(keys, new + prefix)) for new, keys in lens]
                    call(lens, caches, options, lse, prefix)
                    calls += 1
                    assert launches
                    if keys_of(launches) - warmed:
                        name = launches[-1][0].__name__
                        missing.append(
                            [name, str(options.given), lse, prefix, lens[:3]]
                        )
    print(json.dumps({"warmed": len(warmed), "calls": calls, "missing": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
