"""Pytest plugin: `pytest --pagetwin my_adapter.py` runs one test per law.

Every pytest run in an environment with pagetwin imports this file. So it imports only pytest;
everything else is imported if `--pagetwin` is given.
"""

import pytest


def pytest_addoption(
    parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager
) -> None:
    """Add the options of the plugin, and let pagetwin be imported as without it.

    Pytest compiles every module of a package with a plugin anew, to explain its assertions. Imports
    of `pagetwin.optimized` in a user's tests would take three times as long, and explain nothing.
    """
    marked: set[str] = getattr(pluginmanager.rewrite_hook, "_must_rewrite", set())
    marked.discard(__name__.partition(".")[0])
    group = parser.getgroup("pagetwin", "conformance suite of paged attention")
    group.addoption(
        "--pagetwin",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="Check this adapter, a .py file or a module: one test per law. May be repeated.",
    )
    group.addoption(
        "--pagetwin-xfails",
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file of laws that are known to be broken, or that are not to be run, each with"
        " a reason that has a link to an issue. May be repeated.",
    )
    group.addoption(
        "--pagetwin-seconds",
        type=float,
        default=None,
        metavar="N",
        help="Time limit of all laws together. Laws that take longer are not finished, and are"
        " reported as skipped.  (no limit)",
    )
    group.addoption(
        "--pagetwin-device",
        default=None,
        metavar="DEVICE",
        help="cpu, cuda, or one GPU such as cuda:1.  (cuda if there is a GPU)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the rest of the plugin if an adapter is given.

    Raises:
        pytest.UsageError: An option is given that has no meaning without an adapter.
    """
    config.addinivalue_line("markers", "pagetwin: a law of `--pagetwin`")
    if config.getoption("--pagetwin"):
        from .plugin import LawPlugin

        config.pluginmanager.register(LawPlugin(config), "pagetwin-laws")
        return
    for option in ("--pagetwin-xfails", "--pagetwin-seconds", "--pagetwin-device"):
        if config.getoption(option):
            raise pytest.UsageError(f"{option}: expected with --pagetwin ADAPTER")
