"""Wrong twins in a replay: what is caught, what is stored, and what reproduces it."""

import re
from pathlib import Path

import pytest
import torch
from pagetwin.tools.replay.mismatch import TwinMismatch, load_step, save_step
from pagetwin.tools.replay.reproduce import reproduce
from pagetwin.tools.replay.run import Replay
from pagetwin.tools.replay.step import ReplayLaw
from small_replays import REFERENCE, drop_the_first_key, small, wrong_twin


def shift_a_slot(key, value, key_cache, value_cache, slot_mapping):
    """Write the last token one slot too far."""
    slot_mapping = slot_mapping.clone()
    slot_mapping[-1] = (slot_mapping[-1] + 1) % key_cache[..., 0, 0].numel()
    if slot_mapping[-1] in slot_mapping[:-1]:
        slot_mapping[-1] = -1
    REFERENCE.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


WRONG = {
    "attention drops the first key": (
        {"paged_attention": drop_the_first_key},
        ReplayLaw.ATTENTION,
    ),
    "attention leaves its output as it was": (
        {"paged_attention": lambda *tensors, **options: options["out"]},
        ReplayLaw.ATTENTION,
    ),
    "the write shifts a slot": ({"reshape_and_cache": shift_a_slot}, ReplayLaw.WRITTEN),
    "the device's slots start at zero": (
        {
            "compute_slot_mapping_device": lambda starts, computed, *rest: (
                REFERENCE.compute_slot_mapping_device(starts, 0 * computed, *rest)
            )
        },
        ReplayLaw.METADATA,
    ),
    "the batch is not reordered": (
        {
            "reorder_batch_to_split_decodes_and_prefills": lambda counts: list(
                range(len(counts))
            )
        },
        ReplayLaw.METADATA,
    ),
    "the boundary counts a decode as prefill": (
        {"split_decodes_and_prefills": lambda common: (0, 1, 0, 1)},
        ReplayLaw.METADATA,
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_twin_is_caught_stored_and_caught_again(name, tmp_path):
    operations, law = WRONG[name]
    implementations = wrong_twin(**operations)
    replay = Replay(
        small(twins=("reference", "wrong")), implementations, folder=tmp_path
    )
    with pytest.raises(TwinMismatch) as caught:
        list(replay.steps())
    assert caught.value.violation.law == law.value
    assert caught.value.violation.twin == 1
    assert "wrong" in str(caught.value)
    assert "expected" in str(caught.value)
    (path,) = tmp_path.iterdir()
    assert path == caught.value.path
    torch.load(path, weights_only=True)
    stored, before = load_step(path)
    assert stored.twins == ("reference", "wrong")
    assert before.found == caught.value.violation.found
    still = reproduce(path, implementations)
    assert still is not None
    assert still.violation.found == caught.value.violation.found
    # the same step on a correct twin
    assert reproduce(path, wrong_twin()) is None


def test_a_write_to_a_slot_of_another_block_is_caught(tmp_path):
    def write_twice(key, value, key_cache, value_cache, slot_mapping):
        REFERENCE.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        free = set(range(key_cache.shape[0])) - set((slot_mapping // 8).tolist())
        key_cache[max(free), 0] = 1.0

    implementations = wrong_twin(reshape_and_cache=write_twice)
    for check_every, place in ((1, "first"), (10**6, "last")):
        settings = small(twins=("wrong",), check_every=check_every)
        with pytest.raises(TwinMismatch) as caught:
            list(Replay(settings, implementations, folder=tmp_path).steps())
        assert caught.value.violation.law in (
            ReplayLaw.REST.value,
            ReplayLaw.ATTENTION.value,
        )
        assert (caught.value.stored.step == 1) == (place == "first")
        hint = "check_every = 1 finds the step" in str(caught.value)
        assert hint == (
            place == "last" and caught.value.violation.law == ReplayLaw.REST.value
        )


def test_a_twin_that_raises_violates_a_law(tmp_path):
    def fail(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    implementations = wrong_twin(paged_attention=fail)
    with pytest.raises(TwinMismatch, match="illegal memory access") as caught:
        list(Replay(small(twins=("wrong",)), implementations, tmp_path).steps())
    assert caught.value.violation.law == ReplayLaw.RUNS.value


def test_an_unsupported_input_is_not_a_mismatch():
    def unsupported(*_, **__):
        raise NotImplementedError("head_size = 8 is less than this kernel takes (16)")

    implementations = wrong_twin(paged_attention=unsupported)
    with pytest.raises(NotImplementedError):
        list(Replay(small(twins=("wrong",)), implementations).steps())


def test_the_cache_of_a_stored_step_is_nan_in_unused_blocks(tmp_path):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        list(Replay(small(twins=("wrong",)), implementations, tmp_path).steps())
    stored, _ = load_step(caught.value.path)
    cache = stored.cache("cpu")
    batch = stored.batch
    slots = REFERENCE.compute_slot_mapping_batch(
        batch.query_lens, batch.num_computed_tokens, batch.block_rows, batch.block_size
    )
    assert cache.flatten(1, 2)[:, slots].isnan().all(), "not written yet"
    unused = sorted(set(range(stored.num_blocks)) - set(batch.used_blocks()))
    assert cache[:, unused].isnan().all()


def test_a_file_that_is_not_a_stored_step_raises(tmp_path):
    path = tmp_path / "step.pt"
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        reproduce(path)
    for content in (b"", b"nonsense", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a stored step"):
            reproduce(path)
    torch.save({"format": "pagetwin step 2"}, path)
    with pytest.raises(ValueError, match="missing or damaged entry"):
        reproduce(path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="not a stored step"):
        reproduce(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "7"),
        ("twins", []),
        ("query", torch.zeros(2)),
        ("query_lens", None),
        ("scheduled_tokens", [1, 2]),
        ("block_rows", [[0.5]]),
        ("block_ids", torch.tensor([10**6])),
        ("blocks", torch.zeros(2, 1, 1, 1, 1)),
        ("twin", 9),
        ("output", "none"),
    ],
)
def test_a_stored_step_with_a_wrong_entry_names_it(tmp_path, name, value):
    """Such a file once ended in a traceback, with the exit code of a step that is still wrong."""
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        settings = small(twins=("wrong",))
        list(Replay(settings, implementations, folder=tmp_path).steps())
    content = torch.load(caught.value.path, weights_only=True)
    assert load_step(caught.value.path)[0].step == caught.value.stored.step
    torch.save(content | {name: value}, tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match=rf"missing or damaged entry \({name}\)"):
        load_step(tmp_path / "wrong.pt")


def test_a_mismatch_is_reported_also_if_it_cannot_be_stored(tmp_path):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    replay = Replay(small(twins=("wrong",)), implementations, tmp_path / "missing")
    with pytest.raises(TwinMismatch, match="error budget") as caught:
        list(replay.steps())
    assert caught.value.path is None and caught.value.why_not_stored


def test_a_step_that_cannot_be_stored_leaves_no_half_a_file(tmp_path, monkeypatch):
    implementations = wrong_twin(paged_attention=drop_the_first_key)
    with pytest.raises(TwinMismatch) as caught:
        list(Replay(small(twins=("wrong",)), implementations).steps())
    assert caught.value.path is None

    def fail(content, path):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_step(tmp_path / "s.pt", caught.value.stored, caught.value.violation)
    assert list(tmp_path.iterdir()) == []
