"""The operations of pagetwin.optimized with their annotations checked."""

from annotated import annotated_twin

globals().update(annotated_twin("optimized"))
