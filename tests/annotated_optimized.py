"""The operations of pagetwin.optimized with their annotations checked."""

from annotated import annotated_twin
from pagetwin.conformance.harness.interpreter import speed_up

speed_up()
globals().update(annotated_twin("optimized"))
