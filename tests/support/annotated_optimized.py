"""The operations of pagetwin.optimized with their annotations checked."""

from pagetwin.conformance.running.interpreter import speed_up

from support.annotated import annotated_twin

speed_up()
globals().update(annotated_twin("optimized"))
