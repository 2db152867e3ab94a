"""Compilation of the Hopper latent decode kernel on any machine, with the assembler's report.

    PYTHONPATH=tests python tests/kernels/compile_latent_sm90.py [NUMBER ...]

As compile_prefill_sm90.py: launches are recorded instead of made. The output is one JSON object
per line: the case, registers, bytes spilled, the assembler's warnings and shared memory.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.latent import family as latent_family
from pagetwin.optimized.kernels.sm90.latent.combine import latent_combine_kernel
from pagetwin.optimized.kernels.sm90.latent.kernel import (
    copied_latent_decode_kernel,
    latent_decode_kernel,
)
from pagetwin.optimized.runtime.attention_call import AttentionCall
from support.compile_prefill_sm90 import BF16, FP16, NAMES, compile_case
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

# dtype, query heads, block size, query tokens per request, log-sum-exp, causal
CASES = [
    (BF16, 128, 64, 1, True, True),
    (BF16, 16, 16, 1, False, True),
    (FP16, 40, 32, 1, True, True),
    (FP16, 128, 256, 4, False, False),
    (BF16, 128, 1, 1, False, False),
    (FP16, 16, 12, 2, True, True),
]
Case = tuple[torch.dtype, int, int, int, bool, bool]


def make_call(case: Case, width: int = 576) -> AttentionCall:
    """Return a call of two requests on the CPU."""
    dtype, heads, block_size, query_len, has_lse, is_causal = case
    query = torch.zeros(2 * query_len, heads, 576, dtype=dtype)
    cache = torch.zeros(4, block_size, 1, width, dtype=dtype)[..., :576]
    out = torch.zeros(2 * query_len, heads, 512, dtype=dtype)
    lse = torch.zeros(heads, 2 * query_len) if has_lse else None
    return AttentionCall(
        query,
        cache,
        cache[..., :512],
        torch.zeros(2, 2, dtype=torch.int32),
        torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32),
        torch.tensor([block_size, 2 * block_size], dtype=torch.int32),
        query_len,
        2 * block_size,
        0.1,
        out,
        lse,
        AttentionOptions(causal=is_causal),
    )


def record(case: Case) -> list[tuple[Any, dict[str, Any]]]:
    """Return the kernels that one call launches, and their arguments."""
    launches: list[tuple[Any, dict[str, Any]]] = []

    def keep(self: Any, *args: Any, **options: Any) -> None:
        launches.append((self, dict(zip(self.arg_names, args, strict=True))))

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda device=None: properties
    GluonJITFunction.run = keep
    JITFunction.run = keep
    call = make_call(case)
    latent_family.plan(call).launch(call)
    return launches


def main(numbers: list[int]) -> None:
    """Compile the cases of these numbers."""
    for case in [CASES[number] for number in numbers]:
        dtype, heads, block_size, query_len, has_lse, is_causal = case
        (decode, values), (combine, others) = record(case)
        is_copied = block_size % 16 > 0
        expected = copied_latent_decode_kernel if is_copied else latent_decode_kernel
        assert decode is expected
        assert combine is latent_combine_kernel
        # both launches have the same outputs and strides
        for name in set(values) & set(others):
            same = values[name] is others[name] or values[name] == others[name]
            if isinstance(values[name], torch.Tensor):
                same = values[name].data_ptr() == others[name].data_ptr()
                same &= values[name].dtype == others[name].dtype
            assert same, name
        compiled, report = compile_case(values, decode)
        line = {
            "case": f"{NAMES[dtype]}, {heads} heads, blocks of {block_size},"
            f" {query_len} queries"
            + (", log-sum-exp" if has_lse else "")
            + ("" if is_causal else ", not causal"),
            "numbers": {n: v for n, v in values.items() if isinstance(v, int | float)},
            **report,
            "shared": compiled.metadata.shared,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or list(range(len(CASES))))
