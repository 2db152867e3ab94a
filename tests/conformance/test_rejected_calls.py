"""Classes with state: where it is tried that a method that raises has changed nothing.

The classes are found in the source. Those that are operations are tried by the law "a call that
raises has changed nothing".
"""

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from pagetwin.conformance.checks.state import state_of
from pagetwin.contract.operations import CONCEPTS
from pagetwin.contract.scheduler_classes import Request
from support.source_tree import ROOT

FOLDERS = (
    "reference",
    *(f"optimized/{name}" for name in ("batch", "cache", "dispatch", "parallel")),
    *(f"optimized/{name}" for name in ("kernels/portable/host", "runtime", "v0")),
)
SHARED = ("contract", "engine", "integrations/transformers", "recorder")
CHANGES = {
    *(
        "append",
        "appendleft",
        "extend",
        "insert",
        "pop",
        "popleft",
        "popitem",
        "remove",
    ),
    *(
        "add",
        "discard",
        "clear",
        "update",
        "setdefault",
        "move_to_end",
        "copy_",
        "fill_",
    ),
    *("zero_", "scatter_", "sort", "fill"),
}
"""Methods that change the object that they are called on."""

OPERATIONS = {name for concept in CONCEPTS for name in concept.operations}
INTERNAL = "called by operations, which validate before"
OF_RECORDER = "part of the recorder, which reports what is wrong and raises nothing"
ELSEWHERE = {
    "Anew": INTERNAL,
    "Arena": INTERNAL,
    "ArgumentTypes": INTERNAL,
    "AttentionPlan": INTERNAL,
    "Attention": "tests/engine/test_layer.py",
    "AttentionImpl": "tests/engine/test_layer.py",
    "AttentionMetadataBuilder": "what it changes depends on no argument of a step",
    "BlockRows": "part of the paged cache",
    "CapturedSteps": "the base of the twins' CommonAttentionState",
    "CheckedSteps": OF_RECORDER,
    "GraphSamples": OF_RECORDER,
    "GroupRows": OF_RECORDER,
    "Launcher": INTERNAL,
    "Launches": INTERNAL,
    "Ledger": OF_RECORDER,
    "PagedBatch": "tests/integrations/test_transformers_validation.py",
    "PagedLayer": "tests/integrations/test_transformers_validation.py",
    "Pipeline": INTERNAL,
    "PlanCache": INTERNAL,
    "PortableDecodePlan": INTERNAL,
    "PortableLatentPlan": INTERNAL,
    "PrefixCache": "part of BlockManager, which validates its arguments",
    "RankBuffers": INTERNAL,
    "RankGroup": "tests/parallel/test_rank_processes.py",
    "RankSplits": INTERNAL,
    "RecordedOperations": OF_RECORDER,
    "Recorder": "tests/recorder/test_recorder.py",
    "Reports": OF_RECORDER,
    "RowTable": OF_RECORDER,
    "Samples": OF_RECORDER,
    "Sampler": "part of generate, which validates its arguments",
    "SignatureCache": INTERNAL,
    "StepGroups": OF_RECORDER,
    "SymmetricRanks": "tests/parallel/test_exchange.py",
    "Streams": "part of generate, which validates its arguments",
    "WorkerSteps": OF_RECORDER,
    "default_modes": "takes no arguments",
}
"""Other classes with state, and where their invalid calls are tried, if they have any."""


def stateful_classes() -> Iterator[str]:
    """Yield the names of the public classes one of whose methods changes `self`."""
    for folder in (*FOLDERS, *(f"shared/{name}" for name in SHARED)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    methods = [
                        statement
                        for statement in node.body
                        if isinstance(statement, ast.FunctionDef)
                        and statement.name not in ("__init__", "__post_init__")
                    ]
                    if any(changes_self(method) for method in methods):
                        yield node.name


def changes_self(method: ast.FunctionDef) -> bool:
    for node in ast.walk(method):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGES else []
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                is_part = False
                while isinstance(part, ast.Attribute | ast.Subscript):
                    part, is_part = part.value, True
                if is_part and isinstance(part, ast.Name) and part.id == "self":
                    return True
    return False


@pytest.mark.extended
def test_every_class_with_state_is_tried() -> None:
    found = {*stateful_classes()}
    tried = {*found & {*OPERATIONS}, "Request"}
    assert found == tried | {*ELSEWHERE}
    assert not tried & {*ELSEWHERE}


@pytest.mark.parametrize("token", [None, object(), 1.5, "nothing", -1, 2**70, [5]])
def test_a_request_does_not_change_with_an_invalid_token(token: Any) -> None:
    request = Request("a", [5, 6], max_tokens=2)
    request.append_output_token(9)
    before = state_of(request)
    with pytest.raises((TypeError, ValueError), match="expected"):
        request.append_output_token(token)
    assert state_of(request) == before
