"""Integers that are not past 8 or 16 bits in any law, and mutants that keep them in fewer bits.

    PYTHONPATH=tests python -m mutants.run_widths reference              # the survey of a twin
    PYTHONPATH=tests python -m mutants.run_widths optimized --laws slots # laws with such words
    PYTHONPATH=tests python -m mutants.run_widths reference --try batch_split

The survey runs each law once with all integers watched. A site whose integers stay below 2**8 or
2**16 in all laws has a mutant that survives. `--try` plants the mutants of the files with such
words in their names, on the laws whose integers are large enough, the fastest first.
"""

import argparse
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .isolation import isolate

if __name__ == "__main__":
    isolate()

from hypothesis import Phase, settings
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import trial as trying
from pagetwin.conformance.running.interpreter import speed_up

from .widths import BITS, WIDTHS, Site, graft_instrumented

EXAMPLES, LISTED = 3, 4
"""Cases of a law in `make test-long`."""


@dataclass
class Survey:
    """What the laws gave to each site.

    Args:
        sites: All sites.
        largest: By site, the largest integer of each law that gave one above 255.
        seen: The largest integer of each site.
        seconds: The duration of each law.
    """

    sites: list[Site]
    largest: dict[int, dict[str, int]] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, law: str, seconds: float, largest: dict[int, int]) -> None:
        """Take over what one law gave."""
        self.seconds[law] = seconds
        for site, value in largest.items():
            self.seen[site] = max(self.seen[site], value)
            if value >> min(BITS):
                self.largest.setdefault(site, {})[law] = value

    def laws_of(self, site: int, bits: int) -> list[str]:
        """Return the laws that can notice a mutant, the fastest first."""
        found = self.largest.get(site, {})
        laws = [law for law, value in found.items() if value >> bits]
        return sorted(laws, key=lambda law: self.seconds[law])

    def small(self, bits: int) -> list[Site]:
        """Return the sites whose integers fit so many bits in all laws."""
        return [site for site in self.sites if 0 < self.seen[site.number] < 1 << bits]


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """Return what a function returns in a forked process; None if that ends early."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        found = pickle.dumps(work())
        with os.fdopen(write, "wb") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(write)
    begin = time.monotonic()
    os.set_blocking(read, False)
    data = b""
    while True:
        try:
            part = os.read(read, 1 << 20)
        except BlockingIOError:
            if time.monotonic() - begin > seconds:
                os.kill(child, 9)
                data = b""
                break
            time.sleep(0.01)
            continue
        if not part:
            break
        data += part
    os.close(read)
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


def try_law(law: Law, setting: Setting, twin: str) -> Status:
    """Return the status of a law on the cases of `make test-long`."""
    listed = LISTED if twin == "optimized" else None
    return trying.try_law(law, setting, 0, EXAMPLES, listed=listed).status


def survey(
    laws: Sequence[Law], setting: Setting, sites: list[Site], twin: str
) -> Survey:
    """Run laws with all integers watched, each in a process of its own."""
    found = Survey(sites)
    for law in laws:

        def watch(law: Law = law) -> dict[int, int]:
            WIDTHS.reset(len(sites))
            try_law(law, setting, twin)
            return {
                site: largest
                for site, largest in enumerate(WIDTHS.largest)
                if largest > 0
            }

        begin = time.monotonic()
        largest = in_child(watch, 600.0)
        seconds = time.monotonic() - begin
        found.add(law.name, seconds, largest or {})
        how = "" if largest is not None else " (its process ended)"
        print(f"{seconds:6.1f} s  {law.name}{how}", flush=True)
    return found


def is_killed(
    site: Site, bits: int, found: Survey, setting: Setting, twin: str
) -> bool:
    """Return whether a law notices that the integers of a site are kept in so many bits."""
    by_name = {law.name: law for law in ALL_LAWS}
    for name in found.laws_of(site.number, bits):

        def plant(law: Law = by_name[name]) -> bool:
            WIDTHS.chosen, WIDTHS.bits = site.number, bits
            return try_law(law, setting, twin) == Status.BROKEN

        # a crash of the process counts, and so does a law that no longer ends
        if in_child(plant, 20 + 10 * found.seconds[name]) in (True, None):
            return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if no mutant survived."""
    parser = argparse.ArgumentParser(description="Try integers in fewer bits")
    parser.add_argument("twin", choices=("reference", "optimized"))
    parser.add_argument("--laws", nargs="*", help="words of the laws that are run")
    parser.add_argument("--try", dest="files", nargs="*", help="words of files")
    given = parser.parse_args(arguments)
    speed_up()
    warnings.simplefilter("ignore")
    trying.SECONDS_TO_SHRINK = 0.0
    generate_only = settings(phases=[Phase.explicit, Phase.generate])
    settings.register_profile("mutants", generate_only)
    settings.load_profile("mutants")
    laws = [
        law
        for law in ALL_LAWS
        if not given.laws or any(word in law.name for word in given.laws)
    ]
    with tempfile.TemporaryDirectory() as folder:
        name, sites = graft_instrumented(given.twin, Path(folder))
        setting = trying.make_setting(load_candidate(name), "cpu")
        found = survey(laws, setting, sites, given.twin)
        survived = 0
        for bits in BITS:
            small = found.small(bits)
            print(f"{len(small)} of {len(found.seen)} integers fit {bits} bits")
            for site in sites if given.files else ():
                if not any(word in site.file for word in given.files):
                    continue
                if not found.seen[site.number]:
                    continue
                if not is_killed(site, bits, found, setting, given.twin):
                    survived += 1
                    print(f"survived in {bits} bits: {site.id}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
