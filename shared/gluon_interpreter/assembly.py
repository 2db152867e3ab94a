"""Inline assembly, by what it computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .asynchronous import named_barrier
from .packed import run_packed
from .values import Value, of_tensor

FURTHER: dict[str, Callable[[list[Value]], Any]] = {}
"""What further assembly computes, by a pattern that is found in its text."""


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Value], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Compute what a piece of assembly computes.

    Raises:
        NotImplementedError: assembly that this interpreter does not know.
    """
    barrier = re.match(r"bar\.(sync|arrive) \$1, (\d+);", asm)
    if barrier:
        number = int(args[0].tensor[0])
        named_barrier(number, barrier[1] == "sync", int(barrier[2]))
        return args[0]
    if asm.startswith("griddepcontrol"):
        # launches run one after another here
        return args[0]
    if asm.startswith("cvt.rn."):
        return _round_pair(args[0].tensor, args[1].tensor, "bf16x2" in asm)
    if asm == "mov.b32 $0, $1;":
        return args[0]
    if asm == "mov.b32 {$0, $1}, $2;":
        words = args[0].tensor
        pair = words.contiguous().view(torch.int16).view(*words.shape, 2)
        return Value(pair[..., 0], gl.int16), Value(pair[..., 1], gl.int16)
    if asm.startswith("{ .reg") and "=h" in constraints and pack == 1:
        return run_packed(asm, constraints, args, dtype)
    if asm.startswith("tanh.approx"):
        return of_tensor(torch.tanh(args[0].tensor))
    if asm.startswith("rcp.approx"):
        return of_tensor(1.0 / args[0].tensor)
    if asm.startswith("max.NaN.ftz.f32 $0, $1, 0fC1000000"):
        return of_tensor(args[0].tensor.clamp(-8.0, 8.0))
    for pattern, compute in FURTHER.items():
        if re.search(pattern, asm):
            return compute(args)
    raise NotImplementedError(
        f"the Gluon interpreter does not know this assembly: {asm}"
    )


def _round_pair(left: torch.Tensor, right: torch.Tensor, is_bf16: bool) -> Value:
    kind = torch.bfloat16 if is_bf16 else torch.float16
    pair = torch.stack((left.to(kind), right.to(kind)), -1)
    return Value(pair.view(torch.int32).squeeze(-1), gl.int32)
