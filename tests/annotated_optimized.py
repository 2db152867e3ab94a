"""The operations of pagetwin.optimized with their annotations checked."""

from annotated import annotated_twin
from interpreter import list_builtins_once

list_builtins_once()
globals().update(annotated_twin("optimized"))
