"""Print how a warm-up compiles in threads, with a compiler and a driver that do nothing.

    PYTHONPATH=tests python tests/launch/compiled_ahead.py

Tensors are on the host and chips are pretended, as in compile_kernels.py, but Triton's own launch
runs. One JSON object per line, see `main`.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.compiler
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import PLAIN
from pagetwin.contract.operations import load_implementation
from pagetwin.integrations.vllm import context_parallel
from support.compile_kernels import pretend
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from warmed_ranks import Group, QuietRanks

DEVICE = 1
RUN = JITFunction.run


class Machine:
    """What was compiled and launched, and by which threads.

    Attributes:
        compiled: name of a kernel, whether the main thread compiled it, and the device that the
            compiling thread had set. A launch of the main thread has the device of the caller.
        launched: name of a kernel and its grid.
        at_once: compilations that ran at the same time, at most.
        fails: name of a kernel that cannot be compiled.
    """

    def __init__(self) -> None:
        self.fails = ""
        self._lock, self._of_thread = threading.Lock(), threading.local()
        self.clear()

    def clear(self) -> None:
        """Forget what was compiled and launched."""
        self.compiled: list[tuple[str, bool, int | None]] = []
        self.launched: list[tuple[str, tuple[int, ...]]] = []
        self.at_once = self._running = 0

    def set_device(self, device: int) -> None:
        """Set the device of this thread."""
        self._of_thread.device = device

    def compile(self, src: Any, target: Any, options: Any, **named: Any) -> Any:
        """Return what Triton's compiler returns, without code."""
        is_main = threading.current_thread() is threading.main_thread()
        name = src.fn.__name__
        with self._lock:
            self._running += 1
            self.at_once = max(self.at_once, self._running)
        time.sleep(0.01)
        with self._lock:
            self._running -= 1
            device = getattr(self._of_thread, "device", None)
            self.compiled.append((name, is_main, device))
        if name == self.fails:
            raise RuntimeError(f"{name} cannot be compiled")
        # nothing encodes tensor maps here: launches with them go through triton
        has_maps = any("tensordesc" in str(kind) for kind in src.signature.values())
        return SimpleNamespace(
            metadata=SimpleNamespace(tensordesc_meta=["map"] if has_maps else None),
            packed_metadata=None,
            function=0,
            launch_metadata=lambda *args: None,
            run=Launch(self, name),
        )


class Launch:
    """What notes the launches of one kernel.

    Args:
        machine: where they are noted.
        name: of the kernel.
    """

    launch = None

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def __call__(self, *args: Any) -> None:
        """Note a launch."""
        self.machine.launched.append((self.name, args[:3]))


def start(machine: Machine) -> Any:
    """Replace Triton's compiler, the driver and torch's device; return the optimized twin."""
    pretend(90, [])
    JITFunction.run = RUN  # type: ignore[method-assign]
    driver: Any = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(driver)
    compiler: Any = triton.compiler
    compiler.compile = machine.compile
    cuda: Any = torch.cuda
    cuda.set_device = machine.set_device
    for name in ("launcher", "compile_ahead", "repeat.writes"):
        module: Any = import_module(f"pagetwin.optimized.runtime.{name}")
        module.current_device = lambda: DEVICE
        module.current_stream = lambda device: 7
    ahead = import_module("pagetwin.optimized.runtime.compile_ahead")
    gpu = torch.device("cuda", DEVICE)
    for name in ("warm_up.warm_up", "parallel.warm_up_ranks"):
        module = import_module(f"pagetwin.optimized.{name}")
        module.launch_compiled = lambda launch, number, device: ahead.launch_compiled(
            launch, number, gpu
        )
    return import_module("pagetwin.optimized")


def forget() -> None:
    """Forget all compiled kernels and all plans, as in a new process."""
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()):
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    for name in ("dispatch", "cascade"):
        module = import_module(f"pagetwin.optimized.dispatch.{name}")
        module.PIPELINE.plans.clear()
    import_module("pagetwin.optimized.runtime.repeat.writes").WRITES.clear()


def warm_ups(twin: Any) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yield a name, and what warms up with a number of threads."""
    bounds = {"max_num_reqs": 40, "max_query_len": 600, "max_seq_len": 5000}
    caches = torch.zeros(2, 20, 16, 8, 128, dtype=torch.bfloat16)
    sinks = AttentionOptions(sliding_window=256, sinks=torch.ones(32))
    latents = torch.zeros(20, 16, 1, 576, dtype=torch.bfloat16)
    fp8 = caches.to(torch.float8_e4m3fn)
    scaled = AttentionOptions(k_scale=0.5, v_scale=2.0)
    for name, key, value, options, more in (
        ("plain", *caches, AttentionOptions(), {"cascades": True}),
        ("sinks, window", *caches, sinks, {"lse": (False, True)}),
        ("batch-invariant", *caches, AttentionOptions(batch_invariant=True), {}),
        ("FP8", *fp8, scaled, {}),
        ("latent", latents, latents[..., :512], AttentionOptions(), {"max_query_len": 1}),
        ("groups of five", *caches, AttentionOptions(), {"num_query_heads": 40}),
    ):  # fmt: skip
        spec = twin.WarmUpSpec(
            key_cache=key,
            value_cache=value,
            options=(options,),
            **({"num_query_heads": 32} | bounds | more),
        )
        yield name, lambda n, s=spec: twin.warm_up(replace(s, num_threads=n))
    kind, spec = share_keys(twin, bounds)
    yield (
        "ranks",
        lambda n: twin.warm_up_ranks(kind.step, replace(spec, num_threads=n)),
    )


def share_keys(twin: Any, bounds: dict[str, int]) -> tuple[Any, Any]:
    """Return what layers whose keys two ranks share have in common, and their spec."""
    context_parallel.RankGroup = QuietRanks  # type: ignore[assignment,misc]
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=600, max_num_seqs=40),
        speculative_config=None,
    )
    run, group = load_implementation("optimized"), Group()
    layer = context_parallel.SharedKeys(
        run, 16, 128, 128**-0.5, 1, PLAIN, True, config, group
    )
    query = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
    key, value = torch.zeros(2, 20, 16, 1, 128, dtype=torch.bfloat16)
    spec = twin.WarmUpSpec(
        key_cache=key,
        value_cache=value,
        num_query_heads=16,
        out_dtype=torch.float32,
        lse=(False, True),
        **bounds,
    )
    return layer.allocate(query, query), spec


def compare(machine: Machine, name: str, warm_up: Callable[[int], Any]) -> Any:
    """Return what a warm-up does with four threads, compared with one."""
    found = []
    for number in (1, 4):
        forget()
        machine.clear()
        told = warm_up(number)
        found.append((told, machine.launched, sorted(machine.compiled)))
    (alone, launched, compiled), (told, also_launched, _) = found
    at_once, ahead = machine.at_once, machine.compiled
    machine.clear()
    warm_up(4)
    # a repeated write is launched, not compiled
    first, second = (
        [launch for launch in launches if launch[0] != "write_kv_kernel"]
        for launches in (launched, machine.launched)
    )
    return {
        "case": name,
        "kernels": len(compiled),
        "alone": sorted({kernel[1:] for kernel in compiled}, key=str),
        "ahead": sorted({kernel[1:] for kernel in ahead}, key=str),
        "compiles_alike": [kernel[0] for kernel in compiled]
        == sorted(kernel[0] for kernel in ahead),
        "launches_alike": launched == also_launched != [],
        "tells_alike": alone == told,
        "at_once": at_once,
        "compiled_again": len(machine.compiled),
        "launches_again_alike": first == second,
    }


def fail(machine: Machine, twin: Any) -> Any:
    """Return what follows a kernel that cannot be compiled, and a rejected option."""
    key, value = torch.zeros(2, 20, 16, 8, 128, dtype=torch.bfloat16)
    good, bad = AttentionOptions(), AttentionOptions(sliding_window=0)

    def warm_up(*options: AttentionOptions) -> str:
        spec = twin.WarmUpSpec(
            key_cache=key, value_cache=value, num_query_heads=32, max_num_reqs=40,
            max_query_len=600, max_seq_len=5000, options=options, num_threads=2,
        )  # fmt: skip
        machine.clear()
        try:
            twin.warm_up(spec)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    forget()
    machine.fails = "append_kernel"
    errors = [warm_up(good), warm_up(good)]
    names = {kernel[0] for kernel in machine.compiled}
    machine.fails = ""
    repaired = [warm_up(good), len(machine.compiled) > 1, warm_up(good)]
    repaired.append(len(machine.compiled))
    forget()
    rejected = warm_up(good, bad)
    begun = len(machine.compiled)
    after = warm_up(good)
    in_all = begun + len(machine.compiled)
    forget()
    warm_up(good)
    return {
        "case": "errors",
        "errors": errors,
        "compiled_in_vain": sorted(names),
        "repaired": repaired,
        "rejected": rejected,
        "after_rejection": [after, in_all - len(machine.compiled)],
        "threads": threading.active_count(),
    }


def main() -> None:
    """Print one line per spec, and one on errors."""
    machine = Machine()
    twin = start(machine)
    for name, warm_up in warm_ups(twin):
        print(json.dumps(compare(machine, name, warm_up)), flush=True)
    print(json.dumps(fail(machine, twin)))


if __name__ == "__main__":
    main()
