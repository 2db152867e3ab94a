"""`python -m pagetwin`: the command `pagetwin`, also where the package is not installed."""

from pagetwin.tools.cli import app

app(prog_name="pagetwin")
