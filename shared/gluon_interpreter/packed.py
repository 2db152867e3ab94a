"""Assembly on words of packed numbers, run instruction by instruction: moves, bits, float16, FP8.

A register is an int64 tensor of the unsigned numbers that its bits are, one per element of a tile.
Source: PTX ISA, the instructions mov (pack and unpack), prmt, and, or, xor, shl, shr, lop3, sub and
fma on float16 in pairs, and cvt.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from .values import TORCH_DTYPES, InterpreterError, Value

FP8_KINDS = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _select_bits(
    one: torch.Tensor, two: torch.Tensor, three: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Return the bits of a table of eight, of which three words choose one in each place."""
    result = torch.zeros_like(one)
    for number in range(8):
        if int(table) >> number & 1:
            chosen = torch.full_like(one, 0xFFFFFFFF)
            for word, bit in ((one, 4), (two, 2), (three, 1)):
                chosen = chosen & (word if number & bit else ~word)
            result = result | chosen
    return result


def _halves(word: torch.Tensor) -> list[torch.Tensor]:
    """Return the two float16 numbers of words in float64."""
    parts = [(word >> shift & 0xFFFF).to(torch.int16) for shift in (0, 16)]
    return [part.view(torch.float16).double() for part in parts]


def _pack_halves(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the words of two numbers, each rounded to float16 once."""
    bits: list[torch.Tensor] = [
        half.to(torch.float16).view(torch.int16).to(torch.int64) & 0xFFFF
        for half in torch.broadcast_tensors(low, high)
    ]
    return bits[0] | bits[1] << 16


def _subtract(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    pairs = zip(_halves(one), _halves(two), strict=True)
    return _pack_halves(*(left - right for left, right in pairs))


def _multiply_add(
    one: torch.Tensor, two: torch.Tensor, three: torch.Tensor
) -> torch.Tensor:
    parts = zip(_halves(one), _halves(two), _halves(three), strict=True)
    return _pack_halves(*(left * right + rest for left, right, rest in parts))


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda word: word,
    "and.b32": operator.and_,
    "or.b32": operator.or_,
    "xor.b32": operator.xor,
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
    "lop3.b32": _select_bits,
    "sub.f16x2": _subtract,
    "fma.rn.f16x2": _multiply_add,
}
"""Instructions of one result, by what they compute."""


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
    if re.fullmatch(r"0x[0-9A-F]+|\d+", name):
        return torch.tensor(int(name, 0))
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
    simple = re.fullmatch(r"(\w+(?:\.\w+)*) (\S+?), (.*)", text)
    if simple and simple[1] in OPERATIONS:
        given = [_read(registers, name) for name in simple[3].split(", ")]
        registers[simple[2]] = OPERATIONS[simple[1]](*given) & 0xFFFFFFFF
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
