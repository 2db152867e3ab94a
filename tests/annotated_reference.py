"""The operations of pagetwin.reference with their annotations checked."""

from annotated import annotated_twin

globals().update(annotated_twin("reference"))
