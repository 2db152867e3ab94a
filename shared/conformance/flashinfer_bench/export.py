"""Export of definitions, workloads and the reference, in the folders of flashinfer-trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, device

from .definitions import REFERENCES, Definition, find_definition
from .families import EXPORTED
from .workloads import TraceWorkload, workloads_of, write_safetensors

AUTHOR = "pagetwin"


def export_definitions(
    folder: Path, names: Sequence[str] | None = None
) -> dict[str, int]:
    """Write definitions with their reference, workloads and a solution that is the reference.

    Args:
        folder: The root of the dataset. It may contain another one; files of the same names are
            replaced.
        names: Optional. Names of definitions. If None, those of `EXPORTED`.

    Returns:
        The number of workloads of each definition.

    Raises:
        ValueError: A definition is not known.
    """
    found = [find_definition(name) for name in names or EXPORTED]
    counts = {}
    for definition in found:
        where = definition.family.op_type
        _write(
            folder / "definitions" / where / f"{definition.name}.json",
            definition.to_json(),
        )
        of_author = folder / "solutions" / AUTHOR / where / definition.name
        for solution in solutions_of(definition):
            _write(of_author / f"{solution['name']}.json", solution)
        workloads = workloads_of(definition)
        lines = [json.dumps(trace_of(workload)) for workload in workloads]
        file = folder / "workloads" / where / f"{definition.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        for workload in workloads:
            _write_tensors(folder, workload)
        counts[definition.name] = len(workloads)
    return counts


def trace_of(
    workload: TraceWorkload,
    solution: str | None = None,
    evaluation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a trace: a workload, and what a solution did on it if there is one."""
    return {
        "definition": workload.definition.name,
        "workload": workload.to_json(),
        "solution": solution,
        "evaluation": evaluation,
    }


def solutions_of(definition: Definition) -> list[dict[str, Any]]:
    """Return the solutions of a definition: its reference, and our operation if there is a call."""
    own = REFERENCES / f"{definition.family.name}_optimized.txt"
    found = [reference_solution(definition)]
    if own.is_file():
        text = own.read_text(encoding="utf-8")
        topk = str(definition.constants.get("topk", ""))
        found.append(operation_solution(definition, text.replace("{topk}", topk)))
    return found


def operation_solution(definition: Definition, source: str) -> dict[str, Any]:
    """Return the operation of `pagetwin.optimized` as a solution.

    Args:
        definition: The definition.
        source: A module with a function `run` that takes the inputs of the definition.
    """
    return {
        "name": f"{AUTHOR}_{definition.name}",
        "definition": definition.name,
        "author": AUTHOR,
        "description": "The operation of pagetwin.optimized.",
        "spec": {
            "language": "triton",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["torch", "triton", "pagetwin"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }


def reference_solution(definition: Definition) -> dict[str, Any]:
    """Return the reference as a solution, which holds every law."""
    return {
        "name": f"{AUTHOR}_reference_{definition.name}",
        "definition": definition.name,
        "author": AUTHOR,
        "description": "The reference of the definition, in float64.",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu", "cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["torch"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": definition.reference}],
    }


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, workload: TraceWorkload) -> None:
    inputs = workload.inputs(device("cpu"))
    path = folder / workload.blob
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value for name, value in inputs.items() if isinstance(value, Tensor)
    }
    write_safetensors(path, tensors)
