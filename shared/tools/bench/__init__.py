"""How fast is attention, ours and that of others, on the same tensors?

Seventeen workloads, a reference that says who is right, one clock for all, and what the GPU could
do at best. `pagetwin bench` runs it.
"""

from .run import Benchmark as Benchmark
from .settings import Settings as Settings
from .settings import choose_settings as choose_settings
from .workloads import Workload as Workload
from .workloads import choose_workloads as choose_workloads
from .workloads import load_workloads as load_workloads
