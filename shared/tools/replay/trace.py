"""Traces: arrival times, prompt lengths and output lengths of the requests of a real server.

Two traces are part of the package. The Mooncake trace also names the blocks of 512 tokens that a
prompt is made of, so it says which prompts share a prefix. A trace can be scaled down, so that the
same traffic runs on a laptop. Blocks are scaled with the lengths, so shared prefixes stay shared.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

TOKENS_PER_HASH = 512
"""Prompt tokens per entry of Mooncake's `hash_ids`."""

SHIPPED = {
    "azure": "azure-llm-conv-2023-head1000.csv",
    "mooncake": "mooncake-conversation-head300-upto16k.jsonl",
}

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Args:
        number: index in the trace, by arrival.
        arrival: seconds since the first request.
        prompt_len: tokens of the prompt, from 1.
        output_len: tokens of the output, from 1.
        hash_ids: names of the prompt's blocks. Empty if the trace names none.
        tokens_per_hash: prompt tokens per name.
    """

    number: int
    arrival: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    tokens_per_hash: int = TOKENS_PER_HASH


@dataclass(frozen=True)
class TraceLengths:
    """Sums over the requests of a trace.

    Args:
        prompt_tokens: tokens of all prompts.
        output_tokens: tokens of all outputs.
        decode_tokens: output tokens after the first one of each request. The prefill gives the
            first one, so each of these needs a decode.
    """

    prompt_tokens: int
    output_tokens: int
    decode_tokens: int

    @classmethod
    def of(cls, trace: list[TraceRequest]) -> "TraceLengths":
        """Return the sums of a trace."""
        outputs = sum(request.output_len for request in trace)
        decodes = sum(max(0, request.output_len - 1) for request in trace)
        return cls(sum(request.prompt_len for request in trace), outputs, decodes)


class TraceError(ValueError):
    """The trace cannot be read; the message names file, line and value."""


def read_trace(name: str, requests: int | None = None) -> list[TraceRequest]:
    """Return the requests of a trace, by arrival.

    Args:
        name: "mooncake", "azure", or the path of a .csv (Azure's columns) or .jsonl
            (Mooncake's keys) file.
        requests: Optional. Number of requests at most, from the first. If None, all.

    Raises:
        FileNotFoundError: the file does not exist.
        TraceError: the file is empty or malformed.
        ValueError: `requests` is less than 1.
    """
    if requests is not None and requests < 1:
        raise ValueError(f"requests = {requests}: expected at least 1")
    path = Path(__file__).parent / "traces" / SHIPPED[name] if name in SHIPPED else None
    path = Path(name) if path is None else path
    if not path.is_file():
        raise FileNotFoundError(
            f"trace = {name!r}: expected {' or '.join(SHIPPED)}, or the path of a .csv or"
            " .jsonl file that exists"
        )
    if path.suffix not in (".csv", ".jsonl"):
        raise TraceError(
            f"trace = {name!r} ends in {path.suffix!r}: expected .csv (columns"
            f" {', '.join(AZURE_COLUMNS)}) or .jsonl (keys {', '.join(MOONCAKE_KEYS)})"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path.name}: byte {error.start} is not UTF-8: expected a text file"
        ) from None
    read = _read_csv if path.suffix == ".csv" else _read_jsonl
    try:
        found = sorted(read(path.name, text), key=lambda request: request.arrival)
    except csv.Error as error:
        raise TraceError(
            f"{path.name}: {error}: expected comma-separated values"
        ) from None
    if not found:
        raise TraceError(f"{path.name} holds no requests: expected at least one")
    first = found[0].arrival
    return [
        replace(request, number=number, arrival=request.arrival - first)
        for number, request in enumerate(found[:requests])
    ]


def scale_trace(
    trace: list[TraceRequest], scale: float, output_scale: float | None = None
) -> list[TraceRequest]:
    """Return the same traffic with shorter prompts and outputs.

    Prompts made of named blocks are scaled block by block, so that shared prefixes stay shared.

    Args:
        trace: the requests.
        scale: factor of the prompt lengths, above 0 and at most 1. No length becomes less than 1.
        output_scale: Optional. Factor of the output lengths, in the same range. If None, `scale`.
            An output of 2 or more tokens keeps at least 2, so each request that decodes in the
            trace decodes here too.

    Raises:
        ValueError: a scale is out of range.

    Example:
        scale 1/64: a prompt of 1,100 tokens in blocks of 512 (2 full blocks and 76 tokens)
        becomes 2 blocks of 8 and 1 token, 17 tokens.
    """
    output_scale = scale if output_scale is None else output_scale
    for name, factor in (("scale", scale), ("output_scale", output_scale)):
        if not 0 < factor <= 1:
            raise ValueError(
                f"{name} = {factor}: expected a number above 0 and at most 1"
            )
    return [_scale_request(request, scale, output_scale) for request in trace]


def _scale_request(
    request: TraceRequest, scale: float, output_scale: float
) -> TraceRequest:
    least = max(1, min(request.output_len, 2))
    output_len = max(least, round(request.output_len * output_scale))
    if not request.hash_ids:
        prompt_len = max(1, round(request.prompt_len * scale))
        return replace(request, prompt_len=prompt_len, output_len=output_len)
    tokens_per_hash = max(1, round(request.tokens_per_hash * scale))
    full, rest = divmod(request.prompt_len, request.tokens_per_hash)
    rest = min(tokens_per_hash, max(1, round(rest * scale))) if rest else 0
    return replace(
        request,
        prompt_len=full * tokens_per_hash + rest,
        output_len=output_len,
        tokens_per_hash=tokens_per_hash,
    )


def _read_csv(name: str, text: str) -> Iterator[TraceRequest]:
    reader = csv.DictReader(text.splitlines())
    columns = reader.fieldnames or []
    if not columns:
        return
    for column in AZURE_COLUMNS:
        if column not in columns:
            raise TraceError(
                f"{name}, line 1: the column {column} is missing from"
                f" {', '.join(columns)}: expected {', '.join(AZURE_COLUMNS)}"
            )
    for row in reader:
        where = f"{name}, line {reader.line_num}"
        yield TraceRequest(
            number=0,
            arrival=_seconds(where, row["TIMESTAMP"]),
            prompt_len=_length(where, "ContextTokens", row["ContextTokens"], 1),
            output_len=_length(where, "GeneratedTokens", row["GeneratedTokens"], 0),
        )


def _read_jsonl(name: str, text: str) -> Iterator[TraceRequest]:
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {line_number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(
                f"{where}: {_short(line)} is not JSON ({error.msg} at column"
                f" {error.colno}): expected one object per line"
            ) from None
        if not isinstance(entry, dict):
            raise TraceError(f"{where}: {_short(line)}: expected a JSON object")
        for key in MOONCAKE_KEYS:
            if key not in entry:
                raise TraceError(
                    f"{where}: the key {key} is missing: expected"
                    f" {', '.join(MOONCAKE_KEYS)}"
                )
        prompt_len = _length(where, "input_length", entry["input_length"], 1)
        hash_ids = entry["hash_ids"]
        if not isinstance(hash_ids, list):
            raise TraceError(
                f"{where}: hash_ids = {_short(hash_ids)}: expected a list of integers"
            )
        named = len(hash_ids) * TOKENS_PER_HASH
        if hash_ids and named < prompt_len:
            raise TraceError(
                f"{where}: hash_ids has {len(hash_ids)} entries, enough for {named} tokens,"
                f" but input_length = {prompt_len}: expected"
                f" {-(-prompt_len // TOKENS_PER_HASH)} entries"
            )
        yield TraceRequest(
            number=0,
            arrival=_length(where, "timestamp", entry["timestamp"], 0) / 1000,
            prompt_len=prompt_len,
            output_len=_length(where, "output_length", entry["output_length"], 0),
            hash_ids=tuple(
                _length(where, f"hash_ids[{index}]", hash_id, 0)
                for index, hash_id in enumerate(hash_ids)
            ),
        )


def _length(where: str, name: str, value: Any, least: int) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        number = int(value)
    if number is None or number < least:
        raise TraceError(
            f"{where}: {name} = {_short(value)}: expected an integer of at least {least}"
        )
    return number


def _seconds(where: str, value: str | None) -> float:
    # datetime takes six digits of a second, the trace has seven
    whole, _, fraction = (value or "").strip().partition(".")
    try:
        moment = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc)
        return moment.timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise TraceError(
            f"{where}: TIMESTAMP = {_short(value)}: expected a time such as"
            " 2023-11-16 18:15:46.6805900"
        ) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
