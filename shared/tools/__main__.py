"""`python -m pagetwin.tools`: the command `pagetwin`, where the package is not installed."""

from .cli import app

app(prog_name="pagetwin")
