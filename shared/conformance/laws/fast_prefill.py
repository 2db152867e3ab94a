"""Laws of fast prefill: layers that run only on the tokens whose logits are needed.

The expected tokens are counted here one by one. The classes derived for such layers are compared
with their base classes.
"""

from collections import Counter
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ...contract.fast_prefill_metadata import KVSharingFastPrefillMetadata
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...engine.backend_interface import (
    AttentionBackend,
    AttentionMetadataBuilder,
    metadata_fields,
)
from ..candidates.setting import Setting
from ..cases.batches import heads_of
from ..cases.steps import (
    LONG,
    MANY,
    PROMPT,
    Requests,
    Runs,
    counts,
    logits_of,
    requests,
    several,
    whole_step,
)
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..checks.metadata import (
    expect_fields,
    expect_numbers,
    expect_unchanged,
    remember,
    seen_by,
    values_of,
)
from .law import law


def wanted_step(step: Requests, setting: Setting) -> CommonAttentionMetadata:
    """Return the step with all fields set and its logits indices on the device."""
    whole = whole_step(step, setting.device, ("tree_mask",))
    indices = whole.logits_indices_padded
    assert indices is not None
    return whole.replace(logits_indices_padded=indices.to(setting.device))


def logits_per_request(step: Requests) -> list[int]:
    """Return the number of tokens per request whose logits are needed."""
    owners = step.owners()
    wanted = [owners[token] for token in logits_of(step)]
    found = Counter(wanted)
    return [found[req] for req in range(len(step.new))]


@law(
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    cases=several(requests(most=5)),
    edges=[[MANY, LONG, Requests(Runs((3, 300)), Runs((2, 300)))], [PROMPT]],
)
def fast_prefill_keeps_only_the_selected_tokens_of_a_prompt(
    setting: Setting, cases: list[Requests]
) -> None:
    """A step of decodes keeps all its tokens: the same object is returned."""
    for step in cases:
        whole = wanted_step(step, setting)
        before = remember(whole)
        make = setting.candidate.make_kv_sharing_fast_prefill_common_attn_metadata
        found = make(whole)
        expect_unchanged("the step", whole, before)
        if max(step.new, default=0) <= 1:
            if found is not whole:
                raise Disagreement(
                    "a step of decodes", "as a whole", "another", "the same"
                )
            continue
        wanted, own = logits_of(step), logits_per_request(step)
        starts = counts([0, *accumulate(own)])
        assert whole.positions is not None
        right = values_of(whole) | {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "num_actual_tokens": len(wanted),
            "max_query_len": max(own),
            "logits_indices_padded": None,
            "num_logits_indices": None,
            "max_logits_per_req": None,
            "positions": whole.positions[wanted],
        }
        expect_fields("the step of wanted tokens", found, right, setting.device)
        bare = make(whole.replace(positions=None))
        right["positions"] = None
        expect_fields("the step without positions", bare, right, setting.device)


@law(
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    cases=several(requests(fewest=1).filter(lambda step: max(step.new) > 1)),
    edges=[[MANY, LONG]],
)
def a_selected_token_attends_to_the_same_keys_as_in_the_whole_step(
    setting: Setting, cases: list[Requests]
) -> None:
    for step in cases:
        whole = wanted_step(step, setting)
        make = setting.candidate.make_kv_sharing_fast_prefill_common_attn_metadata
        seen = step.seen()
        right = [seen[token] for token in logits_of(step)]
        for copy in seen_by(make(whole), step.block_size):
            expect_numbers("the visible slots of each selected token", copy, right)


@dataclass(frozen=True)
class BadFastPrefill:
    """An invalid selection of tokens, for two requests with four and three new tokens.

    Args:
        wanted: Optional. The selected tokens. If None, the step does not have this field.
        count: Optional. The number of valid entries in `wanted`. If None, the step does not have
            this field.
        what: The reason why the selection is invalid.
    """

    wanted: tuple[int, ...] | None
    count: int | None
    what: str


@law(
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    cases=[
        BadFastPrefill(None, 2, "no word on which tokens are wanted"),
        BadFastPrefill((3, 6), None, "no word on how many are wanted"),
        BadFastPrefill((3, 6), 3, "more tokens than are named"),
        BadFastPrefill((3, 6), -1, "a negative count"),
        BadFastPrefill((2, 6), 2, "a token before the last of its request"),
        BadFastPrefill((3, 4, 6), 3, "a gap among a request's tokens"),
        BadFastPrefill((6, 3), 2, "tokens of a later request first"),
        BadFastPrefill((3, 6, 5), 3, "tokens of a request out of order"),
        BadFastPrefill((3, 3, 6), 3, "a token twice"),
        BadFastPrefill((3, 7), 2, "a token after the last"),
        BadFastPrefill((-1, 6), 2, "a token before the first"),
        BadFastPrefill((3, 6), 2, "a tree of drafts"),
    ],
    claim="rejects shapes",
)
def tokens_that_cannot_be_selected_are_rejected(
    setting: Setting, invalid: BadFastPrefill
) -> None:
    step = Requests((4, 3), (0, 6))
    beside = () if invalid.what == "a tree of drafts" else ("tree_mask",)
    whole = whole_step(step, setting.device, beside).replace(
        logits_indices_padded=None
        if invalid.wanted is None
        else torch.tensor(invalid.wanted),
        num_logits_indices=invalid.count,
    )
    make = setting.candidate.make_kv_sharing_fast_prefill_common_attn_metadata
    expect_rejection(invalid.what, lambda: make(whole))


class PlainBuilder(AttentionMetadataBuilder):
    """Builder of the fields that all backends share; no request counts as a decode."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        common = common_attn_metadata
        boundary = (0, common.num_reqs, common_prefix_len, int(fast_build))
        return PagedAttentionMetadata(**metadata_fields(common, boundary, None))


class OtherBuilder(PlainBuilder):
    """Builder of a class other than `PlainBuilder`."""


class PlainBackend(AttentionBackend):
    """A backend with metadata and a builder for it."""

    name = "PLAIN"

    @staticmethod
    def get_metadata_cls() -> type[PagedAttentionMetadata]:
        return PagedAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return PlainBuilder


@law(
    "create_fast_prefill_custom_backend",
    cases=several(requests(most=5)),
    edges=[[MANY, LONG]],
)
def a_fast_prefill_layer_gets_the_selected_tokens_and_the_whole_step(
    setting: Setting, cases: list[Requests]
) -> None:
    """The base builder's metadata for the selected tokens, and two more fields."""
    for step in cases:
        make = setting.truth.make_kv_sharing_fast_prefill_common_attn_metadata
        whole = wanted_step(step, setting)
        before = remember(whole)
        fast = setting.candidate.create_fast_prefill_custom_backend(
            "Fast", PlainBackend
        )
        builder = fast.get_builder_cls()(None, ["layer"], setting.device)
        found = builder.build(2, whole, True)
        expect_unchanged("the step", whole, before)
        right = values_of(PlainBuilder(None, [], "cpu").build(2, make(whole), True))
        if not isinstance(found, fast.get_metadata_cls()):
            raise Disagreement(
                "metadata", "its class", type(found), fast.get_metadata_cls()
            )
        if not isinstance(found, KVSharingFastPrefillMetadata):
            raise Disagreement(
                "metadata", "its fields", "some", "those of the whole step"
            )
        for name, value in right.items():
            expect_same(f"metadata.{name}", getattr(found, name), value)
        for name in ("logits_indices_padded", "num_logits_indices"):
            expect_same(f"metadata.{name}", getattr(found, name), getattr(whole, name))
        expect_same("layers", builder.layer_names, ["layer"])
        expect_same("builder's device", str(builder.device), str(setting.device))


@dataclass(frozen=True)
class Prefix:
    """The prefix of a class name.

    Args:
        text: The prefix itself.
    """

    text: str


PREFIXES = [Prefix("Fast"), Prefix("KVSharing")]


@law("subclass_attention_backend", "create_fast_prefill_custom_backend", cases=PREFIXES)
def a_derived_backend_differs_only_in_its_builder(
    setting: Setting, prefix: Prefix
) -> None:
    derive = setting.candidate.subclass_attention_backend
    found = derive(prefix.text, PlainBackend, OtherBuilder)
    other = derive(prefix.text, PlainBackend, OtherBuilder)
    fast = setting.candidate.create_fast_prefill_custom_backend(
        prefix.text, PlainBackend
    )
    for backend in (found, fast):
        expect_same("its name", backend.__name__, f"{prefix.text}PlainBackend")
        expect_same("its backend's name", backend.get_name(), "PLAIN")
        expect_same("derived", issubclass(backend, PlainBackend), True)
    expect_same("its module", found.__module__, PlainBackend.__module__)
    answers = [
        ("a second class", found is not other),
        ("its builder", found.get_builder_cls() is OtherBuilder),
        ("an instance's builder", found.get_builder_cls is not None),
        ("its metadata", found.get_metadata_cls() is PagedAttentionMetadata),
        ("the other's builder", PlainBackend.get_builder_cls() is PlainBuilder),
        ("derived builder", issubclass(fast.get_builder_cls(), PlainBuilder)),
        ("derived metadata", fast.get_metadata_cls() is not PagedAttentionMetadata),
        (
            "the other's metadata",
            PlainBackend.get_metadata_cls() is PagedAttentionMetadata,
        ),
    ]
    for what, holds in answers:
        expect_same(what, holds, True)


@dataclass(frozen=True)
class Frozen:
    """Metadata that cannot be changed."""

    tokens: int
    reach: int = 3


@dataclass
class Open:
    """Metadata that can be changed."""

    tokens: int
    reach: int = 3


@law("subclass_attention_metadata", cases=PREFIXES)
def derived_metadata_has_the_additional_fields(
    setting: Setting, prefix: Prefix
) -> None:
    """A field that already exists keeps its position and gets the new default."""
    derive = setting.candidate.subclass_attention_metadata
    added = [("images", int, 5), ("reach", int, 8)]
    for base in (Frozen, Open):
        found = derive(prefix.text, base, added)
        expect_same("its name", found.__name__, prefix.text + base.__name__)
        expect_same("its module", found.__module__, base.__module__)
        expect_same("derived", issubclass(found, base), True)
        made = found(7)
        right = {"tokens": 7, "reach": 8, "images": 5}
        expect_same("its values", vars(made), right)
        expect_same("the order of its fields", list(values_of(made)), list(right))
        expect_same("the other's values", vars(base(7)), {"tokens": 7, "reach": 3})
        given = found(tokens=1, images=2, reach=4)
        expect_same("given values", [given.images, given.reach], [2, 4])
        expect_same("a second class", derive(prefix.text, base, added) is found, False)
        try:
            made.tokens = 9
            is_frozen = False
        except FrozenInstanceError:
            is_frozen = True
        expect_same("whether it is frozen", is_frozen, base is Frozen)
        expect_rejection("a default that changes", lambda: derive("", Frozen, LISTED))
        expect_rejection("a field by position", partial(found, 7, 8, 9))


LISTED: list[tuple[str, Any, Any]] = [("names", list, [])]


@dataclass(frozen=True)
class Drafts:
    """Queries of requests that all have the same number of new tokens.

    Args:
        reqs, query_len, heads, head_size: The shape of the queries.
        spare: The number of elements between two tokens. If not 0, queries are a slice of a larger
            tensor.
    """

    reqs: int
    query_len: int
    heads: int
    head_size: int
    spare: int


@st.composite
def drafts(draw: st.DrawFn) -> Drafts:
    """Return queries with few tokens per request, sometimes zero."""
    pick = Random(draw(st.integers(0, 2**20)))
    return Drafts(
        pick.choice([1, 2, 3, 5]),
        pick.choice([0, 1, 2, 4]),
        pick.choice([1, 2, 3]),
        pick.choice([1, 8]),
        pick.choice([0, 0, 7]),
    )


def numbered(drafts: Drafts, device: torch.device) -> torch.Tensor:
    """Return [tokens, heads, head_size] numbers; each is its own offset in memory."""
    tokens, width = drafts.reqs * drafts.query_len, drafts.heads * drafts.head_size
    fused = torch.arange(tokens * (width + drafts.spare), device=device).double()
    flat = fused.view(tokens, width + drafts.spare)[:, :width]
    return heads_of(flat, drafts.heads)


@law(
    "reshape_query_for_spec_decode",
    "reshape_attn_output_for_spec_decode",
    cases=several(drafts()),
)
def drafts_are_reshaped_to_their_own_axis_and_back_without_a_copy(
    setting: Setting, cases: list[Drafts]
) -> None:
    for case in cases:
        query = numbered(case, setting.device)
        found = setting.candidate.reshape_query_for_spec_decode(query, case.reqs)
        rows = [
            [query[req * case.query_len + token] for token in range(case.query_len)]
            for req in range(case.reqs)
        ]
        shape = (case.reqs, case.query_len, case.heads, case.head_size)
        expect_same("shape", tuple(found.shape), shape)
        for req, row in enumerate(rows):
            for token, right in enumerate(row):
                expect_same(f"draft {token} of request {req}", found[req, token], right)
        back = setting.candidate.reshape_attn_output_for_spec_decode(found)
        expect_same("drafts one after another", back, query)
        same = setting.candidate.reshape_attn_output_for_spec_decode(query)
        expect_same("identity of the output of three axes", same is query, True)
        for tensor in (found, back):
            expect_same("the same memory", tensor.data_ptr(), query.data_ptr())


@law(
    "reshape_query_for_spec_decode",
    "reshape_attn_output_for_spec_decode",
    cases=[Drafts(2, 3, 2, 4, 0)],
    claim="rejects shapes",
)
def drafts_that_do_not_divide_evenly_are_rejected(
    setting: Setting, case: Drafts
) -> None:
    query = numbered(case, setting.device)
    split = setting.candidate.reshape_query_for_spec_decode
    join = setting.candidate.reshape_attn_output_for_spec_decode
    apart = query.view(2, 3, 2, 4)[:, :2]
    for what, call in (
        ("six tokens of four requests", lambda: split(query, 4)),
        ("no request", lambda: split(query, 0)),
        ("a negative number of requests", lambda: split(query, -2)),
        ("queries of two axes", lambda: split(query[0], 2)),
        ("queries of four axes", lambda: split(query[None], 1)),
        ("an output of two axes", lambda: join(query[0])),
        ("an output of five axes", lambda: join(query[None, None])),
        ("requests with a gap between them", lambda: join(apart)),
    ):
        expect_rejection(what, call)
    plain = replace(case, query_len=1)
    expect_same("one draft", split(numbered(plain, setting.device), 2).shape[1], 1)
