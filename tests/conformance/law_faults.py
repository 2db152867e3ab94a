"""Faults for law tests: wrappers that spoil any operation, and a few for single operations."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from inspect import isclass, isfunction, signature
from typing import Any

import torch
from pagetwin.conformance.candidates.candidate import Candidate, Support
from pagetwin.conformance.checks.expect import INPUT_ERRORS
from pagetwin.contract.layouts import KVCacheLayout
from torch import Tensor

Function = Callable[..., Any]
Fault = Callable[[Function], Function]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value) and not isclass(value):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])


def add_one(tensors: Iterable[Tensor]) -> None:
    """Change the last element of each tensor in place."""
    for tensor in tensors:
        if tensor.numel():
            last = tensor[tuple(size - 1 for size in tensor.shape)]
            changed = (
                ~last if last.dtype == torch.bool else last.float().nan_to_num() + 1
            )
            with suppress(RuntimeError):  # a broadcast view or a leaf cannot be written
                last.copy_(changed)


def spoiled(value: Any) -> Any:
    """Return a result with its last number changed; tensors are changed in place."""
    if isinstance(value, Tensor):
        add_one([value])
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, list) and value:
        return [*value[:-1], spoiled(value[-1])]
    if isinstance(value, tuple) and value:
        rest = [*value[:-1], spoiled(value[-1])]
        return type(value)(*rest) if hasattr(value, "_fields") else tuple(rest)
    if isinstance(value, dict) and value:
        last = list(value)[-1]
        return value | {last: spoiled(value[last])}
    if is_dataclass(value) and not isclass(value):
        names = [field.name for field in fields(value) if field.init]
        with suppress(Exception):
            return replace(value, **{names[-1]: spoiled(getattr(value, names[-1]))})
    return value


def wrong_result(function: Function) -> Function:
    """Return the operation with another last number in its result."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        add_one(
            tensor
            for name in ("out", "lse", "output")
            for tensor in tensors_in(named.get(name))
        )
        return spoiled(found)

    return call


def wrong_at_times(function: Function) -> Function:
    """Return the operation with a result that depends on the number of calls before."""
    calls = [0]

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        calls[0] += 1
        for tensor in (
            *tensors_in(found),
            *tensors_in([named.get("out"), named.get("lse")]),
        ):
            if tensor.is_floating_point():
                scaled = tensor.float() * (1 + calls[0] / 50) + calls[0] / 50
                tensor.copy_(scaled)
            elif tensor.numel():
                tensor.add_(calls[0] % 2)
        return found

    return call


def writes_its_inputs(function: Function) -> Function:
    """Return the operation that changes every tensor and list that it is given."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        add_one(tensors_in([given, named]))
        for argument in (*given, *named.values()):
            if (
                isinstance(argument, list)
                and argument
                and isinstance(argument[-1], int)
            ):
                argument[-1] += 1
        return found

    return call


def validates_nothing(function: Function) -> Function:
    """Return the operation that gives None where it would raise."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        with suppress(*INPUT_ERRORS, RuntimeError):
            return function(*given, **named)

    return call


ANY: dict[str, Fault] = {
    "validates nothing": validates_nothing,
    "wrong result": wrong_result,
    "writes its inputs": writes_its_inputs,
    "wrong at times": wrong_at_times,
}
"""Faults of any operation."""


def with_fault(fault: Fault, operation: Any) -> Any:
    """Return an operation with a fault; of a class, each public method has it."""
    if not isclass(operation):
        return fault(operation)
    return with_methods(
        operation,
        fault,
        lambda name: name[0] != "_" or (name, fault) == ("__init__", validates_nothing),
    )


def with_methods(kind: Any, fault: Fault, is_meant: Callable[[str], bool]) -> Any:
    """Return a class some of whose methods have a fault."""
    methods = {
        name: fault(method)
        for base in reversed(kind.__mro__[:-1])
        for name, method in vars(base).items()
        if isfunction(method) and is_meant(name)
    }
    return type(kind.__name__, (kind,), methods)


def with_class(backend: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Return a backend one of whose classes is changed.

    Args:
        backend: the backend.
        method: "get_impl_cls" for its layers, "get_builder_cls" for its metadata builder.
        change: returns the changed class.
    """
    found = change(getattr(backend, method)())
    return type(backend.__name__, (backend,), {method: staticmethod(lambda: found)})


def with_forward(fault: Fault, impl: Any) -> Any:
    """Return a class of layers whose `forward` has a fault."""
    return with_methods(impl, fault, lambda name: name == "forward")


def broken(right: Candidate, names: Iterable[str], fault: Fault) -> Candidate:
    """Return an implementation some of whose operations have a fault.

    Args:
        right: the implementation without faults.
        names: its operations that get the fault; of BACKENDS, each layer's `forward` gets it.
        fault: what is wrong with them.
    """
    operations = dict(right.operations)
    for name in names:
        found = operations[name]
        if name == "BACKENDS":
            change = partial(with_forward, fault)
            operations[name] = tuple(
                with_class(backend, "get_impl_cls", change) for backend in found
            )
        else:
            operations[name] = with_fault(fault, found)
    return Candidate("broken", operations, Support())


# ---- faults of single operations, for laws that no fault of any operation breaks


def other_default(function: Function) -> Function:
    """Return the operation with another default of its last optional argument."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    own = signature(function)
    last = [
        parameter.name
        for parameter in own.parameters.values()
        if parameter.default is not parameter.empty
    ][-1]
    call.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter.replace(default="another")
            if parameter.name == last
            else parameter
            for parameter in own.parameters.values()
        ]
    )
    return call


def one_for_none(function: Function) -> Function:
    """Return a cut of a step that gives the whole step where no cut is asked for."""
    return lambda slices, step: function(slices, step) or [step]


def reversed_tokens(function: Function) -> Function:
    """Return a write that takes the new keys and values in reverse order."""
    return lambda key, value, *rest, **named: function(
        key.flip(0), value.flip(0), *rest, **named
    )


def reversed_slots(function: Function) -> Function:
    """Return a builder of a step whose new tokens get each other's slots."""

    def build(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        return found.replace(slot_mapping=found.slot_mapping.flip(0))

    return build


def one_layout(function: Function) -> Function:
    """Return a view of caches that ignores the layout that is asked for."""
    return lambda config, raw, backends, layout=None: function(
        config, raw, backends, KVCacheLayout.NHD
    )


def sorted_by_name(function: Function) -> Function:
    """Return a binding of caches in alphabetical order of the layers."""

    def bind(*given: Any) -> Any:
        found = function(*given)
        return {name: found[name] for name in sorted(found)}

    return bind


def copied(function: Function) -> Function:
    """Return an operation that copies where a view is asked for."""
    return lambda *given: function(*given).clone()


def same_backend(function: Function) -> Function:
    """Return a derivation that gives the backend itself."""
    return lambda prefix, backend, *rest: backend


def one_token_more(function: Any) -> Any:
    """Return a builder that counts a token too many in each group."""

    def add_seq_group(self: Any, group: Any) -> None:
        function.add_seq_group(self, group)
        self.num_prefill_tokens += 1

    return type(function.__name__, (function,), {"add_seq_group": add_seq_group})


def new_tensors(function: Any) -> Any:
    """Return step buffers each of whose steps has tensors of its own."""

    def build(self: Any, *given: Any, **named: Any) -> Any:
        found = function.build(self, *given, **named)
        return found.replace(seq_lens=found.seq_lens.clone())

    return type(function.__name__, (function,), {"build": build})


def no_slots(function: Any) -> Any:
    """Return a parallel step in which no rank stores a new token."""

    def prepare(self: Any, *given: Any, **named: Any) -> Any:
        found = function.prepare(self, *given, **named)
        return replace(found, slot_mapping=found.slot_mapping * 0 - 1)

    return type(function.__name__, (function,), {"prepare": prepare})


def same_tokens(function: Any) -> Any:
    """Return a prefill whose later ranks have later tokens only."""

    def prepare(self: Any, *given: Any, **named: Any) -> Any:
        found = function.prepare(self, *given, **named)
        return replace(found, tokens=found.tokens * 0 + self.ranks.rank)

    return type(function.__name__, (function,), {"prepare": prepare})


def wrong_rows(function: Any) -> Any:
    """Return a parallel step with wrong rows."""
    return with_methods(function, wrong_result, lambda name: name == "attend")


def rows_at_times(function: Any) -> Any:
    """Return a prefill whose rows depend on the number of calls before."""
    return with_methods(function, wrong_at_times, lambda name: name == "attend")


def agrees_with_all(function: Any) -> Any:
    """Return a prefill that does not compare the ranks."""

    def init(self: Any, ranks: Any, *given: Any, **named: Any) -> None:
        ranks.agree = lambda **values: None
        function.__init__(self, ranks, *given, **named)

    return type(function.__name__, (function,), {"__init__": init})


def step_without(name: str, other: Any = None) -> Callable[[Any], Any]:
    """Return a change of layers: they ignore one field of their step."""

    def change(impl: Any) -> Any:
        def forward(self: Any, *given: Any) -> Any:
            step = None if given[5] is None else replace(given[5], **{name: other})
            return impl.forward(self, *given[:5], step, *given[6:])

        return type(impl.__name__, (impl,), {"forward": forward})

    return change


def swapped_scales(impl: Any) -> Any:
    """Return layers that take the scale of the keys for that of the values."""

    def scales(self: Any, *given: Any) -> Any:
        found = impl._scales(self, *given)
        return {"k_scale": found["v_scale"], "v_scale": found["k_scale"]}

    return type(impl.__name__, (impl,), {"_scales": scales})


def of_layers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a fault of the layers of all backends."""
    return lambda backends: tuple(
        with_class(backend, "get_impl_cls", change) for backend in backends
    )


def metadata_without_trees(backends: Any) -> Any:
    """Return backends whose metadata lacks the step's trees."""

    def change(builder: Any) -> Any:
        def build(self: Any, *given: Any, **named: Any) -> Any:
            return replace(builder.build(self, *given, **named), tree_mask=None)

        return type(builder.__name__, (builder,), {"build": build})

    return tuple(with_class(backend, "get_builder_cls", change) for backend in backends)


def threshold_of_the_class(backends: Any) -> Any:
    """Return backends whose metadata builders keep the threshold of their class."""

    def change(builder: Any) -> Any:
        init = {"init_reorder_batch_threshold": lambda self, *given, **named: None}
        return type(builder.__name__, (builder,), init)

    return tuple(with_class(backend, "get_builder_cls", change) for backend in backends)


def with_method(name: str, fault: Fault) -> Callable[[Any], Any]:
    """Return a fault of a class: one of its methods has a fault."""
    return lambda kind: with_methods(kind, fault, lambda own: own == name)


def with_limits(change: Callable[[int, int], tuple[int, int]]) -> Callable[[Any], Any]:
    """Return a fault of schedulers: they keep to other limits than the given ones."""

    def fault(make: Function) -> Function:
        def init(
            self: Any, manager: Any, token_budget: int, max_running: int, *policy: str
        ) -> None:
            make(self, manager, *change(token_budget, max_running), *policy)

        return init

    return with_method("__init__", fault)


def with_output(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return a fault of schedulers: each step is changed after it was scheduled."""

    def fault(schedule: Function) -> Function:
        def call(self: Any) -> Any:
            found = schedule(self)
            change(found)
            return found

        return call

    return with_method("schedule", fault)


def with_requests(**change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a fault of schedulers: fields of each scheduled request have other values."""

    def other(found: Any) -> None:
        found.scheduled_requests = [
            replace(scheduled, **{name: new(scheduled) for name, new in change.items()})
            for scheduled in found.scheduled_requests
        ]

    return with_output(other)


def without_seed(make: Function) -> Function:
    """Return the creation of a block manager that ignores the seed."""

    def init(
        self: Any,
        num_blocks: int,
        block_size: int,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        make(self, num_blocks, block_size, **options)

    return init


def always_caching(make: Function) -> Function:
    """Return the creation of a block manager whose prefix caching cannot be switched off."""

    def init(
        self: Any,
        num_blocks: int,
        block_size: int,
        seed: int | None = None,
        enable_caching: bool = True,
        **options: Any,
    ) -> None:
        make(self, num_blocks, block_size, seed, **options)

    return init


def another_token(update: Function) -> Function:
    """Return an update that appends another token than the sampled one."""
    return lambda self, output, sampled: update(
        self, output, {request: token + 1 for request, token in sampled.items()}
    )


def without_prefix_hits(make: Function) -> Function:
    """Return the creation of a scheduler that finds no tokens in the cache."""

    def init(self: Any, manager: Any, *limits: Any) -> None:
        make(self, manager, *limits)
        manager.get_computed_blocks = lambda *prompt: []

    return init


def first_preempted_first(schedule: Function) -> Function:
    """Return a schedule that preempts the request that was admitted first."""

    def call(self: Any) -> Any:
        self.running.reverse()
        return schedule(self)

    return call


def needless_preemption(schedule: Function) -> Function:
    """Return a schedule that preempts one of two requests, whether or not blocks are left."""

    def call(self: Any) -> Any:
        if len(self.running) < 2:
            return schedule(self)
        victim = self.running.pop()
        self.block_manager.free(victim.request_id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
        limit, self.max_running = self.max_running, len(self.running)
        found = schedule(self)
        self.max_running = limit
        found.preempted_req_ids.insert(0, victim.request_id)
        return found

    return call


SINGLE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "each new token is written to one slot of one rank": (
        "DecodeContextParallel",
        no_slots,
    ),
    "ranks have equal work": ("PrefillContextParallel", same_tokens),
    "rounds of a ring are attention over the whole prompts": (
        "RingContextParallel",
        wrong_rows,
    ),
    "weights of a ring sum to one at every score": (
        "RingContextParallel",
        wrong_rows,
    ),
    "a ring prefill is right for every batch of a signature": (
        "RingContextParallel",
        rows_at_times,
    ),
    "a late rank of a ring changes no bit": ("RingContextParallel", rows_at_times),
    "ranks of a ring that differ are rejected": (
        "RingContextParallel",
        agrees_with_all,
    ),
    "heads and keys on several ranks together are attention on one": (
        "DecodeContextParallel",
        wrong_rows,
    ),
    "a token that selects all keys has the bits of dense attention": (
        "sparse_attention",
        wrong_result,
    ),
    "no slices give no micro batches": ("split_attn_metadata", one_for_none),
    "offsets of new tokens have 64 bits": ("reshape_and_cache", reversed_tokens),
    "a fast prefill layer gets the selected tokens and the whole step": (
        "create_fast_prefill_custom_backend",
        same_backend,
    ),
    "a derived backend differs only in its builder": (
        "create_fast_prefill_custom_backend",
        same_backend,
    ),
    "drafts are reshaped to their own axis and back without a copy": (
        "reshape_query_for_spec_decode",
        copied,
    ),
    "each layer gets its bytes in the layout of its backend": (
        "reshape_kv_caches",
        one_layout,
    ),
    "each layer is bound to its own cache or the one it shares": (
        "bind_kv_cache",
        sorted_by_name,
    ),
    "a token is written where it is read": (
        "build_common_attn_metadata",
        reversed_slots,
    ),
    "an omitted argument has the default of the reference": (
        "reorder_batch_to_split_decodes_and_prefills",
        other_default,
    ),
    "what a step has collected can be read": (
        "CommonMetadataBuilder",
        one_token_more,
    ),
    "the tensors of a step keep their addresses": ("StepBuffers", new_tensors),
    "every field of a step follows from its requests": (
        "build_common_attn_metadata",
        reversed_slots,
    ),
    "every field of a layers metadata follows from the step": (
        "BACKENDS",
        metadata_without_trees,
    ),
    "a step is split at the threshold of its builder": (
        "BACKENDS",
        threshold_of_the_class,
    ),
    "a layer applies the trees of its step": (
        "BACKENDS",
        of_layers(step_without("tree_mask")),
    ),
    "a layer applies the images of its step": (
        "BACKENDS",
        of_layers(step_without("query_ranges")),
    ),
    "a layer applies its options and those of its step": (
        "BACKENDS",
        of_layers(step_without("causal", True)),
    ),
    "a layer keeps its cache in fp8 under its scales": (
        "BACKENDS",
        of_layers(swapped_scales),
    ),
    "without prefix caching no content is known": (
        "BlockManager",
        with_method("__init__", always_caching),
    ),
    "free blocks are allocated in order of their ids unless a seed shuffles them": (
        "BlockManager",
        with_method("__init__", without_seed),
    ),
    "a step stays within the token budget and the number of running requests": (
        "Scheduler",
        with_limits(lambda budget, running: (budget + 1, running)),
    ),
    "every request finishes with the tokens that were sampled for it": (
        "Scheduler",
        with_method("update_from_output", another_token),
    ),
    "a scheduled request computes its next known tokens": (
        "Scheduler",
        with_requests(samples_token=lambda each: not each.samples_token),
    ),
    "a chunk ends with the known tokens or with the budget": (
        "Scheduler",
        with_limits(lambda budget, running: (max(1, budget - 1), running)),
    ),
    "the rows of a step hold its tokens and no block more": (
        "Scheduler",
        with_requests(block_ids=lambda each: [*each.block_ids, 0]),
    ),
    "a request is scheduled after the tokens that earlier steps stored": (
        "Scheduler",
        with_requests(block_ids=lambda each: each.block_ids[::-1]),
    ),
    "a step lists every block that it writes for the first time": (
        "Scheduler",
        with_output(lambda found: found.new_block_ids.clear()),
    ),
    "a running request goes before every waiting one": (
        "Scheduler",
        with_output(lambda found: found.scheduled_requests.reverse()),
    ),
    "a request waits only for token budget blocks or the limit of running requests": (
        "Scheduler",
        with_limits(lambda budget, running: (budget, 1)),
    ),
    "the request admitted last is preempted first": (
        "Scheduler",
        with_method("schedule", first_preempted_first),
    ),
    "no request is preempted while enough blocks are left": (
        "Scheduler",
        with_method("schedule", needless_preemption),
    ),
    "nothing is preempted if all requests fit": (
        "Scheduler",
        with_method("schedule", needless_preemption),
    ),
    "a token is computed once unless it is a prefix hit or is preempted": (
        "Scheduler",
        with_output(lambda found: vars(found).update(num_prefix_hit_tokens=99)),
    ),
    "a prompt that is in the cache is computed from its first unknown block on": (
        "Scheduler",
        with_method("__init__", without_prefix_hits),
    ),
    "a step requests a copy of a shared block before it is written": (
        "Scheduler",
        with_output(lambda found: found.blocks_to_copy.clear()),
    ),
}
"""By law: the operation that is wrong, and its fault."""
