"""The operations of pagetwin.reference with their annotations checked."""

from support.annotated import annotated_twin

globals().update(annotated_twin("reference"))
