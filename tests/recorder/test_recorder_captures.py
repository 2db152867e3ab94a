"""Samples of captured graphs: their buffers, the turns of layers, and groups of layers."""

from pagetwin.recorder.graphs import GraphSamples
from recorder_parts import call_of, capture, replay, tensors, write_of


def test_a_graph_that_is_captured_again_copies_the_same_layer() -> None:
    graphs = GraphSamples(2)
    for _ in range(2):
        capture(graphs, 6, "a", "b")
        (copied,) = replay(graphs, 6)
        assert copied.call.layer == "a"


def test_a_captured_graph_keeps_its_buffers() -> None:
    graphs = GraphSamples(2)
    first = graphs.prepare(tensors(6))
    graphs.capture(call_of("a", 6), "layers")
    assert graphs.prepare(tensors(6)) is not first
    # the new one is not captured yet, and the old one is the one that runs
    assert graphs.check_buffers(tensors(6), "others") is None
    assert graphs._graphs[6] is first


def test_each_group_has_its_own_buffers() -> None:
    graphs, one, other = GraphSamples(2), tensors(6), tensors(6)
    graphs.prepare(one, "a")
    graphs.prepare(other, "b")
    assert graphs.check_buffers(one, "a") is None
    assert graphs.check_buffers(other, "b") is None
    assert graphs.check_buffers(other, "a") is not None
    assert graphs.check_buffers(one, "b") is not None


def test_the_buffers_are_those_of_the_graph_that_was_captured() -> None:
    graphs, own, new = GraphSamples(2), tensors(6), tensors(6)
    graphs.prepare(own)
    graphs.capture(call_of("a", 6), "layers")
    graphs.prepare(new)
    assert graphs.check_buffers(own, "layers") is None


def test_a_capture_that_was_not_prepared_copies_nothing() -> None:
    graphs = GraphSamples(2)
    graphs.capture_write(write_of("a", 6))
    graphs.capture(call_of("a", 6), "layers")
    graphs.begin_replay(6, 0)
    assert graphs.replayed() == [] and not graphs._graphs


def test_a_layer_of_a_graph_is_captured_once() -> None:
    graphs = GraphSamples(2)
    capture(graphs, 6, "a", "a")
    assert graphs._graphs[6].layers == ["a"] and int(graphs._graphs[6].replays) == 1
    capture(graphs, 4, "a")
    (copied,) = replay(graphs, 4)
    assert copied.call.layer == "a"


def test_layers_take_turns_also_after_a_graph_of_fewer_layers() -> None:
    graphs = GraphSamples(2)
    for slots, layers in ((6, "ab"), (5, "a"), (4, "a"), (3, "ab")):
        capture(graphs, slots, *layers)
    (copied,) = replay(graphs, 3)
    assert copied.call.layer == "b"
    # the turn of the second one was a layer that it lacks
    assert replay(graphs, 5) == []
    assert replay(graphs, 4)[0].call.layer == "a"


def test_a_replay_of_another_group_is_of_that_group() -> None:
    graphs = GraphSamples(2)
    graphs.prepare(tensors(6), "others")
    graphs.capture_write(write_of("a", 6))
    graphs.capture(call_of("a", 6), "others")
    (copied,) = replay(graphs, 6)
    assert copied.group == "others" and copied.write is not None
    graphs.begin_replay(9, 0)  # no such graph
    assert graphs.replayed() == []
