"""The recorder in caches whose scales are measured: planted faults in each format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.layer_pages import head_slots, split_scaled_cache
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import (
    RecordedOperations,
    Recorder,
    RecorderSettings,
    record_backend,
)
from pagetwin.recorder.findings import Corruption
from pagetwin.recorder.laws.attention import RecordedCall, check_attention
from pagetwin.recorder.laws.cache import (
    RecordedWrite,
    WatchedBlock,
    check_watched,
    check_write,
)
from pagetwin.recorder.laws.row_case import RowCase
from pagetwin.recorder.reproduce import reproduce_case
from recorder_parts import reproduced, requests, step
from small_engine import EngineSettings, SmallEngine
from support.fake_vllm import VERSIONS, fake_vllm
from support.vllm_steps import EngineSteps
from torch import Tensor
from vllm_workers import READER, FullAttentionSpec

REFERENCE: Any = load_implementation("reference")
SCALED = [name for name, form in FORMATS.items() if form.is_measured]
STEP = step()
SLOTS = torch.from_numpy(STEP.slot_mapping)
TOKENS = (0, 1, 2, 3)
HEADS, KV_HEADS, SIZE = 4, 2, 16
SIDES = ("key", "value", "k_scale", "v_scale")


class Coded:
    """Right writes of the step into pages of ten blocks, and the keys and values of before.

    Args:
        name: the format.
    """

    def __init__(self, name: str) -> None:
        self.form = FORMATS[name]
        random = torch.Generator().manual_seed(3)
        slots, content = head_slots(self.form, KV_HEADS, SIZE, SIZE)
        page = torch.zeros(10, slots, 4, content, dtype=torch.uint8)
        self.parts = split_scaled_cache(page, SIZE, self.form)
        for scale in self.parts[2:]:
            scale.fill_(torch.nan)  # slots of no sequence
        # one element outweighs the others
        numbers = torch.randn(40, 2 * KV_HEADS, SIZE, generator=random)
        numbers[..., 3] *= 20
        self.key, self.value = numbers.split(KV_HEADS, 1)
        blocks = torch.from_numpy(STEP.block_table).flatten()
        slots = (blocks[:, None] * 4 + torch.arange(4)).flatten()
        self.write(slots)
        self.new = self.key[SLOTS], self.value[SLOTS]

    @property
    def scales(self) -> dict[str, Any]:
        scales: dict[str, Any] = {"k_scale": self.parts[2], "v_scale": self.parts[3]}
        if self.form.has_global_scale:
            scales |= {"k_global_scale": 0.05, "v_global_scale": 0.04}
        return scales

    def write(self, slots: Tensor, name: str | None = None) -> None:
        """Write keys and values to slots, by the rule of the format or of another one."""
        REFERENCE.reshape_and_cache(
            self.key[slots], self.value[slots], *self.parts[:2], slots, **self.scales,
            kv_cache_dtype=name or self.form.name,
        )  # fmt: skip

    def flip(self, side: str, at: tuple[int, ...] = (3, 1, 1)) -> None:
        """Change the lowest bit of a code or scale in a slot of the cache."""
        part = self.parts[SIDES.index(side)]
        at = (*at, 0 if "scale" in side else 2)[: part.dim()]
        wide = torch.int32 if part.dtype == torch.float32 else torch.uint8
        part[at] = (part[at].clone().view(wide) ^ 1).view(part.dtype)

    def written(self) -> Corruption | None:
        """Return what the law of writes finds."""
        write = RecordedWrite(
            "layer", *self.new, *self.parts[:2], self.scales, format_name=self.form.name
        )
        return check_write(write, STEP, TOKENS, REFERENCE.reshape_and_cache)

    def call(self, **scales: Any) -> RecordedCall:
        """Return right attention of the step, or attention that has read other scales."""
        query = torch.randn(4, HEADS, SIZE, generator=torch.Generator().manual_seed(4))
        tensors = (
            torch.from_numpy(array).int()
            for array in (STEP.block_table, STEP.query_start_loc, STEP.seq_lens)
        )
        output = REFERENCE.paged_attention(
            query, *self.parts[:2], *tensors, 3, 8,
            options=AttentionOptions(**self.scales | scales),
        )  # fmt: skip
        options = AttentionOptions(**self.scales)
        return RecordedCall(
            "layer", query, output, *self.parts[:2], None, options, "other"
        )


def attended(call: RecordedCall, tokens: tuple[int, ...] = TOKENS) -> Corruption | None:
    own = call.take(torch.tensor(tokens))
    return check_attention(own, STEP, tokens, REFERENCE.paged_attention)


# --- the laws


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SCALED)
def test_one_wrong_bit_of_a_code_or_scale_is_found(
    name: str, side: str, tmp_path: Path
) -> None:
    coded = Coded(name)
    assert coded.written() is None
    coded.flip(side)
    found = coded.written()
    assert found is not None and found.row == 0
    words = {"k_scale": "scale of the key", "v_scale": "scale of the value"}
    assert f"the {words.get(side, side)} at position 5 (slot 13), head 1" in found.found
    place = "element 2" if "8_" in name else "byte 2"
    assert (place in found.found) == ("scale" not in side)
    assert ("block 0" in found.found) == ("scale" in side and "nvfp4" in name)
    shown = found.found.partition(" is ")[2].split(" in the cache: expected ")
    assert len(set(shown)) == 2
    assert reproduced(tmp_path, "cache write", found.evidence)
    coded.flip(side)
    evidence = found.evidence | {
        "found": {
            other: part[SLOTS // 4, SLOTS % 4]
            for other, part in zip(SIDES, coded.parts, strict=True)
        }
    }
    assert not reproduced(tmp_path, "cache write", evidence)


@pytest.mark.parametrize("name", ["int4_per_token_head", "int4_per_token_head_vllm"])
def test_a_write_by_the_other_rule_of_int4_is_found(name: str) -> None:
    """Rows of one sign alone have other levels."""
    coded = Coded(name)
    coded.key.zero_()
    coded.key[..., 0] = 3.0
    (other,) = {"int4_per_token_head", "int4_per_token_head_vllm"} - {name}
    coded.new = coded.key[SLOTS], coded.value[SLOTS]
    coded.write(SLOTS)
    assert coded.written() is None
    coded.write(SLOTS, other)
    found = coded.written()
    assert found is not None and found.law == "cache write"


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_a_write_by_the_other_rule_of_nvfp4_is_found(name: str) -> None:
    """Blocks with numbers between 4 and 6 times a scale have other scales."""
    coded = Coded(name)
    coded.key.zero_()
    coded.key[..., :3] = torch.tensor([6.0, 4.8, 4.8])
    (other,) = {"nvfp4", "nvfp4_4over6"} - {name}
    coded.new = coded.key[SLOTS], coded.value[SLOTS]
    coded.write(SLOTS)
    assert coded.written() is None
    coded.write(SLOTS, other)
    found = coded.written()
    assert found is not None and found.law == "cache write"


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
def test_block_scales_are_equal_where_fp8_numbers_may_differ(side: str) -> None:
    """They have a dtype of FP8 caches, whose numbers may differ by a code in other engines."""
    coded = Coded("nvfp4")
    write = RecordedWrite(
        "layer", *coded.new, *coded.parts[:2], coded.scales, 1, format_name="nvfp4"
    )
    assert check_write(write, STEP, TOKENS, REFERENCE.reshape_and_cache) is None
    coded.flip(side)
    assert check_write(write, STEP, TOKENS, REFERENCE.reshape_and_cache) is not None


@pytest.mark.parametrize("side", ["k_global_scale", "v_global_scale"])
def test_a_wrong_global_scale_is_found(side: str, tmp_path: Path) -> None:
    """In the write, and in the rows that were read with it."""
    coded = Coded("nvfp4")
    given = coded.scales | {side: 0.06}
    write = RecordedWrite(
        "layer", *coded.new, *coded.parts[:2], given, format_name="nvfp4"
    )
    found = check_write(write, STEP, TOKENS, REFERENCE.reshape_and_cache)
    assert found is not None and found.law == "cache write"
    assert reproduced(tmp_path, "cache write", found.evidence)
    found = attended(coded.call(**{side: 0.06}), (1, 3))
    assert found is not None and found.law == "attention"
    assert reproduced(tmp_path, "attention", found.evidence)


@pytest.mark.parametrize("name", SCALED)
def test_nan_that_is_written_by_the_rule_is_right(name: str) -> None:
    coded = Coded(name)
    coded.key[SLOTS[2], 1, 5] = torch.nan
    coded.value[SLOTS[3], 0, 5] = torch.inf
    coded.new = coded.key[SLOTS], coded.value[SLOTS]
    coded.write(SLOTS)
    assert coded.written() is None


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SCALED)
def test_a_code_or_scale_that_changes_later_is_found(
    name: str, side: str, tmp_path: Path
) -> None:
    coded = Coded(name)
    watched = WatchedBlock.of("layer", replace(STEP, number=4), 7, 0, *coded.parts)
    writes = np.zeros(10, np.int64)
    assert check_watched(watched, STEP, writes) is None
    coded.flip(side, (7, 3, 1))
    found = check_watched(watched, STEP, writes)
    assert found is not None and found.law == "unchanged blocks"
    assert "at position 3 (block 7, offset 3), head 1" in found.found
    assert reproduced(tmp_path, "unchanged blocks", found.evidence)


def scale_of_the_token_after(scale: Tensor) -> Tensor:
    """Return the scales of the next slot for each slot."""
    slots = scale.flatten(0, 1)
    return torch.cat([slots[1:], slots[:1]]).view(scale.shape)


def no_zero_point(scale: Tensor) -> Tensor:
    """Return scales whose last four bits are 0."""
    return (scale.view(torch.int32) & ~15).view(torch.float32)


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("name", "plant"),
    [
        *((name, scale_of_the_token_after) for name in SCALED),
        ("int4_per_token_head", no_zero_point),
        ("int4_per_token_head_vllm", no_zero_point),
    ],
)
def test_rows_that_were_read_with_wrong_scales_are_found(
    name: str, plant: Callable[[Tensor], Tensor], side: str, tmp_path: Path
) -> None:
    coded = Coded(name)
    assert attended(coded.call()) is None
    wrong = {side: plant(coded.scales[side])}
    found = attended(coded.call(**wrong), (1, 3))
    assert found is not None and found.law == "attention"
    assert "has error" in found.found
    assert reproduced(tmp_path, "attention", found.evidence)
    row = RowCase.of_dict(found.evidence["rows"], "cpu")
    # the evidence has the codes and scales of its own blocks alone
    assert row.options.k_scale.shape[:3] == row.key_blocks.shape[:3]
    right = REFERENCE.paged_attention(**row.arguments())
    verdict, _ = replace(row, output=right).judge(REFERENCE.paged_attention)
    assert verdict.ok


@pytest.mark.parametrize("name", SCALED)
def test_a_row_with_a_scale_that_is_not_finite_names_it(name: str) -> None:
    coded = Coded(name)
    coded.parts[3][3, 0, 1] = torch.nan
    found = attended(coded.call(), (3, 2))
    assert (
        found is not None and "the value of position 4, which holds NaN" in found.found
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_the_optimized_twin_stays_within_the_budget(
    name: str, dtype: torch.dtype
) -> None:
    """Its kernels read codes and scales tile by tile, and rotate queries of a packed cache."""
    coded = Coded(name)
    call = coded.call()
    query = call.query.to(dtype)
    tensors = (
        torch.from_numpy(array).int()
        for array in (STEP.block_table, STEP.query_start_loc, STEP.seq_lens)
    )
    output = load_implementation("optimized").paged_attention(
        query, *coded.parts[:2], *tensors, 3, 8, options=call.options
    )
    assert attended(replace(call, query=query, output=output)) is None
    output[2, 1] *= 1.1
    assert attended(replace(call, query=query, output=output)) is not None


# --- engines


def recorder(folder: Path) -> Recorder:
    return Recorder(RecorderSettings(folder, sample_every=1))


def run_operations(run: Any, checks: Recorder, name: str) -> None:
    """Run two layers of two requests: prompts, then decodes."""
    form, operations = FORMATS[name], RecordedOperations(run, checks)
    random = torch.Generator().manual_seed(1)
    layers = [Coded(name) for _ in range(2)]
    computed = [0, 0]
    for new in ((6, 3), (1, 1), (1, 2), (1, 1)):
        common = operations.build_common_attn_metadata(
            list(new), computed, [[2, 3, 9], [7, 8, 1]], 4
        )
        for layer in layers:
            tokens = sum(new)
            rows = torch.randn(tokens, HEADS + 2 * KV_HEADS, SIZE, generator=random)
            query, key, value = rows.split([HEADS, KV_HEADS, KV_HEADS], 1)
            operations.reshape_and_cache(
                key, value, *layer.parts[:2], common.slot_mapping, **layer.scales,
                kv_cache_dtype=form.name,
            )  # fmt: skip
            operations.paged_attention(
                query, *layer.parts[:2], common.block_table_tensor, common.query_start_loc,
                common.seq_lens, common.max_query_len, common.max_seq_len,
                options=AttentionOptions(**layer.scales),
            )  # fmt: skip
        computed = [done + count for done, count in zip(computed, new, strict=True)]
    checks.finish()


def planted(run: Any, **operations: Any) -> Any:
    """Return an implementation with other operations."""
    others = {name: getattr(run, name) for name in run.operations}
    return SimpleNamespace(
        name=run.name, operations=run.operations, **others | operations
    )


@pytest.mark.parametrize("implementation", ["reference", "optimized"])
@pytest.mark.parametrize("name", SCALED)
def test_operations_on_codes_are_compared(
    name: str, implementation: str, tmp_path: Path
) -> None:
    """They ran without a comparison before."""
    checks = recorder(tmp_path)
    run_operations(load_implementation(implementation), checks, name)
    assert checks.is_on and checks.findings == []
    assert checks.checked["writes"] == checks.checked["rows"] == 4 + 4 + 2 + 3 + 2
    assert checks.checked["blocks"] > 0


@pytest.mark.parametrize("name", SCALED)
def test_a_write_that_rounds_its_keys_first_is_found(name: str, tmp_path: Path) -> None:
    """Keys in bfloat16 instead of float32 have other codes and scales."""

    def write(key: Tensor, *rest: Any, **named: Any) -> None:
        REFERENCE.reshape_and_cache(key.bfloat16().float(), *rest, **named)

    checks = recorder(tmp_path)
    run_operations(planted(REFERENCE, reshape_and_cache=write), checks, name)
    assert [finding.law for finding in checks.findings] == ["cache write"]
    (path,) = tmp_path.glob("*.pt")
    again = reproduce_case(path, "cpu")
    assert again.still is not None and again.still.law == "cache write"


@pytest.mark.parametrize("name", SCALED)
def test_attention_without_the_newest_key_is_found(name: str, tmp_path: Path) -> None:
    def attend(*given: Any, **named: Any) -> Tensor:
        lens = (given[5] - 1).clamp(min=1)
        out: Tensor = REFERENCE.paged_attention(*given[:5], lens, *given[6:], **named)
        return out

    checks = recorder(tmp_path)
    # a prompt without its last key is not causal in the same way, so decodes alone are wrong
    wrong = planted(
        REFERENCE,
        paged_attention=lambda *given, **named: (
            attend if given[6] == 1 else REFERENCE.paged_attention
        )(*given, **named),
    )
    run_operations(wrong, checks, name)
    assert [finding.law for finding in checks.findings] == ["attention"]


@pytest.mark.parametrize("fault", [None, "write", "read"])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_layers_of_the_vllm_plugin_are_compared(
    version: str, name: str, fault: str | None, tmp_path: Path
) -> None:
    """vLLM's pages hold codes and scales. A fault writes or reads with other scales."""
    with fake_vllm(version):
        from pagetwin.integrations.vllm.plugin import choose_backend

        checks = recorder(tmp_path)
        backend = record_backend(choose_backend(), checks, READER)
        steps = EngineSteps(version, kv_cache_dtype=name, backend=backend)
        steps.layer.layer_name = "layer"
        steps.builder = backend.get_builder_cls()(
            FullAttentionSpec(), ["layer"], steps.config, torch.device("cpu")
        )
        steps.impl.bounds = None
        if fault == "write":
            write = steps.impl._write
            steps.impl._write = lambda key, value, *rest, **named: write(
                key * 1.01, value, *rest, **named
            )
        elif fault == "read":
            attend = steps.impl._attend

            def wrong(*given: Any, options: AttentionOptions) -> Tensor:
                scale = scale_of_the_token_after(options.v_scale)
                out: Tensor = attend(*given, options=replace(options, v_scale=scale))
                return out

            steps.impl._attend = wrong
        for lens in ((20, 3, 1), (1, 1, 17), (1, 1, 1)):
            steps.step(lens)
        checks.finish()
        found = [finding.law for finding in checks.findings]
        laws = {None: [], "write": ["cache write"], "read": ["attention"]}
        assert checks.is_on and found == laws[fault]
        assert checks.checked["writes"] == checks.checked["rows"] == 4 + 4 + 3


@pytest.mark.parametrize(("bug", "law"), [(None, None), ("window", "attention")])
@pytest.mark.parametrize("name", SCALED)
def test_bugs_of_an_engine_are_found_in_each_format(
    name: str, bug: str | None, law: str | None, tmp_path: Path
) -> None:
    """Layers of this project, with preemptions and prefix hits."""
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1))
    window = 6 if bug == "window" else None
    engine = SmallEngine(
        EngineSettings(bug=bug, cache_dtype=name, window=window), checks
    )
    engine.add(requests(14))
    engine.run_to_the_end(60)
    found = [finding.law for finding in checks.findings]
    assert checks.is_on and found[:1] == ([] if law is None else [law])
    assert checks.checked["writes"] > 40 and checks.checked["rows"] > 40


@pytest.mark.parametrize("name", SCALED)
def test_codes_in_another_layout_than_their_scales_are_rejected_by_the_write(
    name: str, tmp_path: Path
) -> None:
    """Heads are taken for slots, so codes are where the page has scales."""
    checks = Recorder(RecorderSettings(tmp_path, sample_every=1))
    engine = SmallEngine(EngineSettings(bug="layout", cache_dtype=name), checks)
    engine.add(requests(14))
    with pytest.raises(ValueError, match="key_cache and k_scale share memory"):
        engine.run_to_the_end(60)
