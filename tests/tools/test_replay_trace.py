"""Traces of a replay: the shipped ones, malformed ones, scaled lengths."""

import importlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pagetwin.tools.replay.tokens import draw_tokens
from pagetwin.tools.replay.trace import (
    SHIPPED,
    TraceError,
    TraceLengths,
    read_trace,
    scale_trace,
)
from small_replays import small


@pytest.mark.parametrize(("name", "count"), [("azure", 1000), ("mooncake", 300)])
def test_a_shipped_trace_is_read_completely(name, count):
    trace = read_trace(name)
    assert len(trace) == count
    assert [request.number for request in trace] == list(range(count))
    assert all(a.arrival <= b.arrival for a, b in pairwise(trace))
    assert trace[0].arrival == 0
    assert min(request.prompt_len for request in trace) >= 1


def test_the_shipped_traces_are_in_the_package():
    package = Path(importlib.import_module("pagetwin.tools.replay").__file__).parent
    for name in SHIPPED.values():
        assert (package / "traces" / name).is_file()


def test_a_csv_keeps_all_seven_digits_of_a_second():
    assert read_trace("azure")[1].arrival == pytest.approx(4.3145790, abs=1e-6)


GOOD_LINE = '{"timestamp":0,"input_length":5,"output_length":2,"hash_ids":[3]}'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", "", ["t.jsonl", "holds no requests"]),
        ("t.csv", "", ["t.csv", "holds no requests"]),
        ("t.jsonl", f"{GOOD_LINE}\n{GOOD_LINE}\n{{oops\n", ["line 3", "not JSON"]),
        ("t.jsonl", f"{GOOD_LINE}\n[1]\n", ["line 2", "JSON object"]),
        (
            "t.jsonl",
            GOOD_LINE.replace("5", "-5"),
            ["line 1", "input_length = -5", "at least 1"],
        ),
        ("t.jsonl", GOOD_LINE.replace("5", '"x"'), ["line 1", "input_length = 'x'"]),
        ("t.jsonl", GOOD_LINE.replace("5", "true"), ["line 1", "input_length = True"]),
        ("t.jsonl", GOOD_LINE.replace("[3]", "7"), ["line 1", "hash_ids = 7"]),
        ("t.jsonl", GOOD_LINE.replace("[3]", "[-3]"), ["line 1", "hash_ids[0] = -3"]),
        (
            "t.jsonl",
            GOOD_LINE.replace("5", "600"),
            ["line 1", "1 entries", "input_length = 600", "2 entries"],
        ),
        (
            "t.jsonl",
            GOOD_LINE.replace('"output_length":2,', ""),
            ["line 1", "output_length", "missing"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n",
            ["line 1", "GeneratedTokens", "missing"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,3,2\n"
            "2023-11-16 18:15:47.1,-3,2\n",
            ["line 3", "ContextTokens = '-3'"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.1,3\n",
            ["line 2", "GeneratedTokens = None"],
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,2\n",
            ["line 2", "TIMESTAMP = 'yesterday'"],
        ),
        ("t.txt", GOOD_LINE, ["'.txt'", ".csv", ".jsonl"]),
    ],
)
def test_a_malformed_trace_raises_with_the_line_and_the_value(
    tmp_path, name, text, words
):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_trace(str(path))
    for word in words:
        assert word in str(raised.value)


def test_a_missing_trace_raises_with_the_names_of_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match="azure or mooncake"):
        read_trace("nowhere.csv")


def test_a_binary_trace_raises(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(str(path))


@pytest.mark.parametrize("scale", [1, 1 / 3, 1 / 64, 1 / 360, 1 / 5000])
@pytest.mark.parametrize("name", SHIPPED)
def test_scaled_lengths_are_at_least_one_and_prefixes_stay_shared(name, scale):
    trace = scale_trace(read_trace(name, 60), scale)
    tokens = draw_tokens(trace, seed=1)
    for request, sequence in zip(trace, tokens, strict=True):
        assert request.prompt_len >= 1
        assert request.output_len >= 1
        assert len(sequence) == request.prompt_len + request.output_len
    if name == "mooncake":
        block = trace[0].tokens_per_hash
        for a in range(20):
            common = 0
            for x, y in zip(trace[a].hash_ids, trace[a + 1].hash_ids, strict=False):
                if x != y:
                    break
                common += 1
            lengths = (trace[a].prompt_len, trace[a + 1].prompt_len)
            same = min(common * block, *lengths)
            assert same > 0
            assert np.array_equal(tokens[a][:same], tokens[a + 1][:same])


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_a_scale_out_of_range_raises(scale):
    with pytest.raises(ValueError, match=r"^scale = "):
        scale_trace(read_trace("azure", 1), scale)
    with pytest.raises(ValueError, match=r"^output_scale = "):
        scale_trace(read_trace("azure", 1), 1, scale)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_scaled_request_decodes_if_it_decodes_in_the_trace(name):
    """With one factor for all lengths, 18 of 40 requests of Azure's trace had no decode left."""
    settings = small(trace=name, requests=40)
    trace = read_trace(name, 40)
    scaled = scale_trace(trace, settings.scale, settings.output_scale)
    for before, after in zip(trace, scaled, strict=True):
        assert (before.output_len > 1) == (after.output_len > 1)
    assert (
        TraceLengths.of(scaled).decode_tokens
        > TraceLengths.of(trace).decode_tokens / 40
    )
    assert scale_trace(trace, 1) == trace
