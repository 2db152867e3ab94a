"""The picture of sequence_metadata."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        252,
        "A prompt of three tokens, and a decode. Both are written to the cache; only "
        "the"
        " decode reads from it.",
    )
    x, w = 170, 70
    d.text(20, 43, "new tokens")
    d.row(x, 20, [("s0", "a"), ("s0", "a"), ("s0", "a"), ("s1", "b")], w=w)
    d.text(x + 1.5 * w, 74, "a group in its prompt", "caption")
    d.text(x + 3.5 * w, 74, "a decode", "caption")
    d.text(20, 106, "slot_mapping")
    d.captions(x, 106, [20, 21, 22, 8], w=w)
    d.text(20, 132, "query_start_loc")
    for start in (0, 3, 4):
        left = x + start * w
        d.parts.append(f'<path d="M{left} 84 L{left} 116" class="cut"/>')
        d.text(left, 132, str(start), "caption")
    d.text(20, 178, "seq_lens")
    d.row(x, 156, [("3", "a"), ("5", "b")])
    d.text(x + 110, 178, "3 new; 4 in the cache + 1 new", "note")
    d.text(20, 228, "block_tables")
    d.row(x, 206, [("0", "off"), ("0", "off")])
    d.row(x + 110, 206, [("7", "b"), ("2", "b")])
    d.text(x + 216, 228, "the prompt's row is empty: nothing to read", "note")
    return d
