"""Python imports this module at the start of each process whose path has its folder.

So a changed file reaches the worker processes that a test starts, too.
"""

import os

if "PAGETWIN_OVERLAY" in os.environ:
    from changed_modules import install

    install()
