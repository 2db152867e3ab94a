"""Rejected calls: a method that raises has changed neither its object nor its arguments.

The classes with state are found in the source. Each of their methods is called with one argument
after the other replaced by wrong values, in the states of a short history. A wrong value may be
accepted, for example a negative priority; what raises must say what was expected.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from inspect import signature
from itertools import count
from typing import Any

import pytest
from pagetwin import optimized, reference
from pagetwin.conformance.checks.state import state_of
from pagetwin.contract.extra_keys import ExtraKeys
from pagetwin.contract.scheduler_classes import Request, RequestStatus
from pagetwin.contract.v0.sequence_classes import SequenceGroup, SequenceInput
from pagetwin.reference import BlockManager, Scheduler
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
    "CommonAttentionState": "shared/conformance/laws/v0/graph_rejections.py",
    "GraphSamples": OF_RECORDER,
    "GroupRows": OF_RECORDER,
    "Launcher": INTERNAL,
    "Launches": INTERNAL,
    "Ledger": OF_RECORDER,
    "PagedBatch": "tests/integrations/test_transformers_validation.py",
    "PagedLayer": "tests/integrations/test_transformers_validation.py",
    "Pages": "part of the paged cache",
    "PlanCache": INTERNAL,
    "PortableDecodePlan": INTERNAL,
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
    "Streams": "part of generate, which validates its arguments",
    "WorkerSteps": OF_RECORDER,
    "default_modes": "takes no arguments",
}
"""Classes with state whose invalid calls are tried elsewhere, or that have none."""


def stateful_classes() -> Iterator[tuple[str, set[str]]]:
    """Yield the public classes one of whose methods changes `self`, with their public methods."""
    for folder in (*FOLDERS, *(f"shared/{each}" for each in SHARED)):
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
                        public = {m.name for m in methods if m.name[0] != "_"}
                        yield node.name, public


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


@dataclass
class Subject:
    """An object in a state, and valid calls of all its methods that take arguments."""

    value: Any
    calls: dict[str, tuple[Any, ...]]


def requests_of(*specs: tuple[str, list[int]]) -> list[Request]:
    return [Request(name, tokens, max_tokens=3) for name, tokens in specs]


def block_manager(window: int | None) -> Subject:
    manager = BlockManager(9, 2, sliding_window=window)
    manager.allocate_slots("a", 0, 5)
    manager.cache_full_blocks("a", [7, 8, 7, 9, 7], 5)
    manager.fork("a", "b")
    manager.allocate_slots("b", 5, 2)
    calls = {
        "get_computed_blocks": ([7, 8, 7], ExtraKeys(cache_salt="a")),
        "allocate_slots": ("c", 0, 3, []),
        "cache_full_blocks": ("b", [7, 8, 7, 9, 7, 5, 5], 7, ExtraKeys()),
        "fork": ("a", "c"),
        "free": ("a",),
        "get_block_ids": ("a",),
        "num_blocks_of": ("a",),
        "ref_cnt": (1,),
    }
    return Subject(manager, calls)


def scheduler(policy: str) -> Subject:
    subject = Scheduler(BlockManager(5, 2), 8, 4, policy)
    a, b, c = requests_of(("a", [5, 6, 7]), ("b", [5, 6, 8, 9]), ("c", [1]))
    for request in (a, b, c):
        subject.add_request(request)
    first = subject.schedule()
    sampled = {
        scheduled_request.request.request_id: 4
        for scheduled_request in first.scheduled_requests
    }
    subject.update_from_output(first, sampled)
    step = subject.schedule()
    sampled = {
        scheduled_request.request.request_id: 4
        for scheduled_request in step.scheduled_requests
        if scheduled_request.samples_token
    }
    calls = {
        "add_request": (Request("d", [5], 1),),
        "update_from_output": (step, sampled),
        "finish_requests": (["a"], RequestStatus.FINISHED_ABORTED),
        "reset_prefix_cache": (True,),
    }
    return Subject(subject, calls)


def request() -> Subject:
    value = Request("a", [5, 6], max_tokens=2)
    value.append_output_token(9)
    return Subject(value, {"append_output_token": (5,)})


def step_buffers(twin: Any) -> Subject:
    buffers = twin.StepBuffers(3, 16, 4, 4)
    buffers.append_blocks([0, 1], [[7, 2], [5]])
    buffers.build([3, 1], [0, 0])
    buffers.append_blocks([0], [[3]])
    calls = {
        "append_blocks": ([0, 1], [[9], [8, 6]]),
        "clear_rows": ([0, 1],),
        "build": ([1, 2], [3, 1], [1, 0], 3, 8),
    }
    return Subject(buffers, calls)


def block_table(twin: Any) -> Subject:
    table = twin.BlockTable(8, 3, 4, kernel_block_size=4)
    table.add_row([7, 2], 0)
    table.append_row([5], 1)
    calls = {
        "append_row": ([1, 9], 1),
        "add_row": ([3, 4], 0),
        "move_row": (0, 1),
        "swap_row": (0, 1),
        "compute_slot_mapping": ([0, 1], [5, 3]),
        "get_device_tensor": (2,),
    }
    return Subject(table, calls)


def builder(twin: Any) -> Subject:
    value = twin.CommonMetadataBuilder(block_size=4)
    value.prepare()
    first, second = (
        SequenceGroup(
            is_prompt=False,
            sequences=(SequenceInput(seq_id=seq_id, query_len=1, context_len=4),),
            block_tables={seq_id: [7, 2]},
        )
        for seq_id in (1, 2)
    )
    value.add_seq_group(first)
    calls = {"add_seq_group": (second,), "build": ([5, 1], [1], 1, 2, 4)}
    return Subject(value, calls)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "BlockManager": lambda: block_manager(None),
    "BlockManager, window": lambda: block_manager(3),
    "Scheduler": lambda: scheduler("fcfs"),
    "Scheduler, priority": lambda: scheduler("priority"),
    "Request": request,
    "StepBuffers": lambda: step_buffers(reference),
    "StepBuffers, optimized": lambda: step_buffers(optimized),
    "BlockTable": lambda: block_table(reference),
    "BlockTable, optimized": lambda: block_table(optimized),
    "CommonMetadataBuilder": lambda: builder(reference),
    "CommonMetadataBuilder, optimized": lambda: builder(optimized),
}


STRICT = ("BlockManager", "Request", "Scheduler")
"""Classes that say what they expected of a wrong type too; of others, Python says it."""


def wrong_values(value: Any) -> Iterator[Any]:
    """Yield values that are probably wrong in the place of a valid one."""
    yield from (None, object(), 1.5, "nothing")
    if isinstance(value, int):
        yield from (-1, 2**70, [value])
    elif isinstance(value, str):
        yield from ("", ["a"], {})
    elif isinstance(value, dict):
        yield from ({}, {**value, "else": 1}, [*value])
        for key, inner in value.items():
            yield {name: each for name, each in value.items() if name != key}
            yield from ({**value, key: wrong} for wrong in wrong_values(inner))
    elif isinstance(value, list | tuple):
        yield from (5, [], value[:-1], [*value, *value])
        inner = value[-1] if value else 1
        for wrong in (2**31, *wrong_values(inner)):
            yield [*value[:-1], wrong]
            yield [*value, wrong]
    elif isinstance(value, SequenceGroup | SequenceInput):
        for field in fields(value):
            for wrong in wrong_values(getattr(value, field.name)):
                # a field of another type is rejected already where the object is made
                with suppress(TypeError, ValueError):
                    yield replace(value, **{field.name: wrong})


METHODS = [(name, method) for name, make in SUBJECTS.items() for method in make().calls]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_a_call_that_raises_has_changed_nothing(name: str, method: str) -> None:
    arguments = SUBJECTS[name]().calls[method]
    for index in range(len(arguments)):
        num_raised = 0
        for number in count():
            subject = SUBJECTS[name]()
            given = [*subject.calls[method]]
            wrong = [*wrong_values(given[index])]
            if number == len(wrong):
                break
            given[index] = wrong[number]
            state = subject.value, given
            before = state_of(state)
            try:
                getattr(subject.value, method)(*given)
            except Exception as error:
                num_raised += 1
                call = f"{name}.{method}, argument {index} = {wrong[number]!r:.60}"
                if name.startswith(STRICT) or not isinstance(error, TypeError):
                    assert "expected" in str(error), f"{call}: {error!r}"
                assert state_of(state) == before, f"{call}: {error!r}"
        assert num_raised, f"{name}.{method} takes anything as argument {index}"


def test_every_class_with_state_is_tried() -> None:
    found = dict(stateful_classes())
    tried = {name.partition(",")[0] for name in SUBJECTS}
    assert {*found} == tried | {*ELSEWHERE}
    assert not tried & {*ELSEWHERE}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_method_with_arguments_is_tried(name: str) -> None:
    subject = SUBJECTS[name]()
    for method, call in vars(type(subject.value)).items():
        if not method.startswith("_") and callable(call):
            parameters = list(signature(call).parameters)[1:]
            assert len(subject.calls.get(method, ())) == len(parameters), method
