"""Run every pair of options on both twins, and write docs/data/option_runs.json.

    python tests/conformance/record_options.py

The documentation's tables of options are made from the record. Runs on another device are kept, as
long as the choices are the same.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.option_pairs import OPTIONS, REJECTED, design
from pagetwin.contract.operations import load_implementation

sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))

from page_data import DATA, entry_lines

RECORD = DATA / "option_runs.json"


def drawn() -> dict[str, Any]:
    """Return the options, the pairs that are rejected and the choices, as the record holds them."""
    found = {
        "options": {
            name: {
                "values": option.values,
                "meaning": option.meaning,
                "default": option.default,
                "heading": option.heading,
            }
            for name, option in OPTIONS.items()
        },
        "rejected": [
            {"one": pair.one, "other": pair.other, "reason": pair.reason}
            for pair in REJECTED
        ],
        "choices": [list(choice.values()) for choice in design()],
    }
    as_stored: dict[str, Any] = json.loads(json.dumps(found))
    return as_stored


def run_all(name: str, device: torch.device) -> dict[str, list[int]]:
    """Return the numbers of the choices that keep their error budget, and of those that do not."""
    twin, reference = (
        load_implementation(twin_name) for twin_name in (name, "reference")
    )
    found: dict[str, list[int]] = {"passed": [], "failed": []}
    for number, choice in enumerate(design()):
        call = build_call(choice, number, device)
        try:
            call.assert_right(*call.run(twin), reference)
            found["passed"].append(number)
        except Exception as error:
            print(f"{name}, choice {number}: {type(error).__name__}: {error}")
            found["failed"].append(number)
    return found


def place_of(name: str, device: torch.device) -> str:
    """Return which twin runs where, as the record says it."""
    if device.type == "cuda":
        return f"{name} on CUDA"
    interpreted = " in Triton's interpreter" if name == "optimized" else ""
    return f"{name} on CPU{interpreted}"


def main() -> None:
    """Run both twins on this machine and write the record."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    today = drawn()
    kept = held["runs"] if held.get("choices") == today["choices"] else {}
    runs = {
        place_of(name, device): run_all(name, device)
        for name in ("reference", "optimized")
    }
    record = today | {"runs": dict(sorted((kept | runs).items()))}
    RECORD.write_text(entry_lines(record), encoding="utf-8")


if __name__ == "__main__":
    main()
