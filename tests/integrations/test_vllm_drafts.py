"""Steps with drafts in the vLLM plugin: what the host knows of them are upper bounds."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_vllm import VERSIONS, fake_vllm, recorded
from support.vllm_steps import EngineSteps

BACKEND = "vllm.v1.attention.backend"


@pytest.fixture(params=[VERSIONS[0], VERSIONS[-1]])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The oldest and the newest interface."""
    with fake_vllm(request.param):
        yield request.param


@pytest.mark.parametrize("version", VERSIONS)
def test_the_methods_are_declared_and_have_vllms_names(version: str) -> None:
    """Releases before 0.28 have none of them."""
    classes = recorded(version)["modules"][BACKEND]["classes"]
    theirs = classes["AttentionMetadataBuilder"]
    for use_mla in (False, True):
        with fake_vllm(version, use_mla):
            from pagetwin.integrations.vllm.plugin import choose_backend

            backend = choose_backend()
            assert backend.supports_device_cpu_query_lens_mismatch()
            own = vars(backend.get_builder_cls().__mro__[1])
            name = "supports_draft_decode_metadata_update"
            if name in theirs["attributes"]:
                assert {name, "update_draft_decode_metadata"} <= set(own)


def test_drafts_that_the_device_divides_otherwise_than_the_host_are_right(
    version: str,
) -> None:
    """Adaptive verification trims drafts on the device; the host has them evenly divided."""
    steps = EngineSteps(version)
    assert steps.step((9, 18, 2)) <= 1
    lens = (5, 1, 0)
    plain = steps.common

    def common(*given: Any) -> Any:
        made = plain(*given)
        made.query_start_loc_cpu = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
        made.max_query_len = 6
        made.seq_lens_cpu_upper_bound = made.seq_lens[:3].cpu() + 5
        return made

    steps.common = common  # type: ignore[method-assign]
    assert steps.step(lens) <= 1


def test_metadata_of_a_step_of_drafts_hold_for_the_next_one(version: str) -> None:
    """vLLM advances its buffers, calls the builder, and runs the layers again."""
    steps = EngineSteps(version)
    assert steps.step((9, 18, 2)) <= 1
    common = steps.common((1, 1, 1), True, 0)
    metadata = steps.builder.build(0, common, True)
    assert steps.builder.supports_draft_decode_metadata_update
    for _ in range(2):
        new = steps._rows(2 * steps.kv_heads, 3)
        key, value = new.split(steps.kv_heads, 1)
        for req in range(3):
            steps.keys[req] = torch.cat([steps.keys[req], key[req : req + 1]])
            steps.values[req] = torch.cat([steps.values[req], value[req : req + 1]])
        # in place: the metadata of the first step are views
        common.seq_lens[:3] += 1
        slots = [
            steps.slots(req, len(steps.keys[req]) - 1, len(steps.keys[req]))
            for req in range(3)
        ]
        common.slot_mapping.copy_(torch.cat(slots))
        assert steps.builder.update_draft_decode_metadata(metadata) is None
        query = steps._rows(steps.heads, 3)
        out = torch.full_like(query, torch.nan)
        steps.impl.do_kv_cache_update(
            steps.layer, key, value, steps.cache, metadata.slot_mapping
        )
        steps.impl.forward(steps.layer, query, key, value, steps.cache, metadata, out)
        assert steps.judge(query, (1, 1, 1), True, out) <= 1


def test_ranges_of_prompts_are_computed_for_each_step_of_drafts(version: str) -> None:
    assert not EngineSteps(
        version, model={"rswa_window": 5}
    ).builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize(
    ("host", "longest", "drafts", "expected"),
    [
        # the host has the drafts evenly divided: a request may have all 4 of its own
        ((0, 2, 4), 4, 3, 4),
        ((0, 1, 2), 1, 3, 1),
        ((0, 1, 2), 1, 0, 1),
        # a chunk of a prompt with few tokens beside a long one: its length is exact
        ((0, 60, 61), 500, 3, 60),
        ((0, 0, 0), 4, 3, 4),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_bound_of_latent_decodes_holds_for_drafts_of_the_device(
    version: str,
    host: tuple[int, ...],
    longest: int,
    drafts: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was the longest of the host's lengths, which those of the device may exceed."""
    with fake_vllm(version, use_mla=True):
        from pagetwin.integrations.vllm.latent_builder import PagetwinLatentBuilder

        decode = SimpleNamespace()
        step = SimpleNamespace(num_decodes=len(host) - 1, decode=decode)
        base = PagetwinLatentBuilder.__mro__[2]
        monkeypatch.setattr(base, "build", lambda *given: step)
        builder = object.__new__(PagetwinLatentBuilder)
        builder.draft_len = 1 + drafts
        common = SimpleNamespace(
            query_start_loc_cpu=torch.tensor(host, device="cpu"), max_query_len=longest
        )
        assert builder.build(0, common).decode.max_query_len == expected
