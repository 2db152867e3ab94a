"""The picture of backend."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        222,
        "Once a step: metadata. Once a layer: write, then attend for both parts of the"
        " batch.",
    )
    d.text(20, 28, "once a step")
    d.box(20, 40, 200, 44, "requests of the step", "off")
    d.box(270, 40, 210, 44, "common metadata", "a")
    d.box(530, 40, 210, 44, "backend's metadata", "a")
    d.arrow(222, 62, 266, 62)
    d.arrow(482, 62, 526, 62)
    d.text(375, 102, "build_common_attn_metadata", "caption")
    d.text(635, 102, "builder.build", "caption")
    d.text(20, 140, "once a layer: impl.forward")
    d.box(20, 152, 200, 44, "write keys and values", "new")
    d.box(270, 152, 210, 44, "attend: the decodes", "b")
    d.box(530, 152, 210, 44, "attend: the prefills", "b")
    d.arrow(222, 174, 266, 174)
    d.arrow(482, 174, 526, 174)
    return d
