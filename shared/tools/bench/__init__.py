"""Benchmark of attention: pagetwin and other libraries on the same tensors.

Two suites of workloads, an accuracy check against the reference, interleaved timing, and ceilings
that are measured in the same run. `pagetwin bench` runs it.
"""

from .run import Benchmark as Benchmark
from .settings import BenchSettings as BenchSettings
from .settings import choose_settings as choose_settings
from .workloads import Workload as Workload
from .workloads import choose_workloads as choose_workloads
from .workloads import load_workloads as load_workloads
