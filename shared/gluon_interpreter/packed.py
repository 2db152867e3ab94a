"""Assembly on words of packed numbers, run instruction by instruction: moves, permutations, FP8.

A register is an int64 tensor of the unsigned numbers that its bits are, one per element of a tile.
Source: PTX ISA, the instructions mov (pack and unpack), prmt and cvt.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .values import TORCH_DTYPES, InterpreterError, Value

FP8_KINDS = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def run_packed(asm: str, constraints: str, args: list[Value], dtype: Any) -> Any:
    """Return the results of a block of assembly.

    Args:
        asm: `{ .reg ...; instruction; ... }`.
        constraints: of the operands, results first: `=h` or `=r`, then `r`.
        args: int32 tiles.
        dtype: of the results, each of 16 bits.

    Raises:
        NotImplementedError: an instruction that this interpreter does not know.
        InterpreterError: a register is used before it has a value, or a result has none.
    """
    kinds = constraints.split(",")
    num_results = sum(kind.startswith("=") for kind in kinds)
    assert kinds == ["=h"] * num_results + ["r"] * len(args), constraints
    registers = {
        f"${num_results + i}": tile.tensor.to(torch.int64) & 0xFFFFFFFF
        for i, tile in enumerate(args)
    }
    for line in asm.strip("{} \n").split(";"):
        text = line.strip()
        if text and not text.startswith(".reg"):
            _run_instruction(text, registers)
    return tuple(
        Value(_read(registers, f"${i}").to(torch.int16).view(TORCH_DTYPES[kind]), kind)
        for i, kind in enumerate(dtype)
    )


def _read(registers: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in registers:
        raise InterpreterError(f"assembly reads {name}, which has no value")
    return registers[name]


def _run_instruction(text: str, registers: dict[str, torch.Tensor]) -> None:
    """Run one instruction: change the register that it writes."""
    unpack = re.fullmatch(r"mov\.b32 \{(\S+), (\S+)\}, (\S+)", text)
    if unpack:
        word = _read(registers, unpack[3])
        registers[unpack[1]], registers[unpack[2]] = word & 0xFFFF, word >> 16
        return
    permute = re.fullmatch(r"prmt\.b32 (\S+), (\S+), (\S+), 0x([0-7]{4})", text)
    if permute:
        left, right = (_read(registers, permute[i]) for i in (2, 3))
        registers[permute[1]] = _permute_bytes(left, right, int(permute[4], 16))
        return
    convert = re.fullmatch(r"cvt\.rn\.f16x2\.(e4m3x2|e5m2x2) (\S+), (\S+)", text)
    if convert:
        source = _read(registers, convert[3])
        registers[convert[2]] = _to_float16(source, FP8_KINDS[convert[1]])
        return
    raise NotImplementedError(
        f"the Gluon interpreter does not know this instruction: {text}"
    )


def _permute_bytes(
    left: torch.Tensor, right: torch.Tensor, selector: int
) -> torch.Tensor:
    """Return words of bytes of two words: byte i is the one that digit i selects of eight."""
    eight = left | right << 32
    word = torch.zeros_like(left)
    for i in range(4):
        chosen = selector >> 4 * i & 7
        word |= (eight >> 8 * chosen & 0xFF) << 8 * i
    return word


def _to_float16(pair: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the bits of two float16 numbers, which have the values of two FP8 numbers."""
    halves = [
        (pair >> shift & 0xFF).to(torch.uint8).view(kind).to(torch.float16)
        for shift in (0, 8)
    ]
    low, high = (half.view(torch.int16).to(torch.int64) & 0xFFFF for half in halves)
    return low | high << 16
