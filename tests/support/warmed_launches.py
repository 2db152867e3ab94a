"""Print which calls within a spec launch a kernel that `warm_up` has not compiled.

    PYTHONPATH=tests python tests/support/warmed_launches.py 90 [tuned]

Launches are recorded instead of made, on host tensors, as in compile_kernels.py. A kernel is
compiled once per set of types, constants and alignments. One JSON object: `warmed`, the number of
kernels that `warm_up` compiled; `calls`, how many calls followed; `missing`, the calls that needed
another one. With "tuned" all tiles, thresholds and rates of the portable kernels are others.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"

import json
import random
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS, head_size_of
from pagetwin.contract.layer_pages import split_scaled_cache, state_bytes
from pagetwin.optimized.kernels.portable.host.cost import Rates
from pagetwin.optimized.kernels.portable.host.tuning import Thresholds, Tiles
from pagetwin.optimized.kernels.portable.tables.active_tables import (
    ActiveTables,
    activate,
)
from pagetwin.optimized.kernels.portable.tables.kernel_tables import (
    KernelTables,
    TileKey,
)
from pagetwin.optimized.kernels.sm90.latent import family as latent_family
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from support.compile_kernels import pretend, specialize_launch

MAX_NUM_REQS, MAX_QUERY_LEN, MAX_SEQ_LEN, BLOCK_SIZE = 200, 600, 9000, 16


class Layer(NamedTuple):
    """A layer of a model.

    Attributes:
        options: of its calls.
        heads: query heads.
        max_query_len: new tokens of a request.
        is_latent: whether its values are the first columns of one head's keys.
        name: format of its cache. Scales that are measured are stored in its pages.
    """

    options: AttentionOptions = AttentionOptions()
    heads: int = 32
    max_query_len: int = MAX_QUERY_LEN
    is_latent: bool = False
    name: str = "auto"

    def make_caches(self) -> tuple[torch.Tensor, torch.Tensor, AttentionOptions]:
        """Return the cache of keys, that of values, and the options of calls over them."""
        form = FORMATS[self.name]
        if self.is_latent:
            key = torch.zeros(20, BLOCK_SIZE, 1, 576, dtype=torch.bfloat16)
            return key, key[..., :512], self.options
        if form.is_measured:
            shape = (20, 8, BLOCK_SIZE, state_bytes(form, 128, 128))
            page = torch.zeros(shape, dtype=torch.uint8)
            key, value, k_scale, v_scale = split_scaled_cache(page, 128, form)
            return key, value, replace(self.options, k_scale=k_scale, v_scale=v_scale)
        both = torch.zeros(2, 20, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16)
        return both[0], both[1], self.options

    @property
    def cascades(self) -> bool:
        """Whether it makes cascades too."""
        return self == Layer()


LAYERS = (
    Layer(),
    Layer(AttentionOptions(sliding_window=256, sinks=torch.ones(32))),
    Layer(AttentionOptions(batch_invariant=True)),
    # with 16 heads one new token has few rows, and with 128 heads two row tiles
    Layer(heads=16, max_query_len=1, is_latent=True),
    Layer(heads=16, max_query_len=128, is_latent=True),
    Layer(heads=128, max_query_len=4, is_latent=True),
    Layer(name="int8_per_token_head"),
    Layer(AttentionOptions(sinks=torch.ones(32)), name="int4_per_token_head_vllm"),
    Layer(AttentionOptions(k_global_scale=0.5, v_global_scale=0.5), name="nvfp4"),
)


def keys_of(launches: list[Any]) -> set[str]:
    """Return what the recorded launches are compiled for."""
    found = set()
    for kernel, values, given in launches:
        # triton keeps the type of these numbers only; 7 is neither 1 nor a multiple of 16
        plain = {
            param.name: 7
            for param in kernel.params
            if param.do_not_specialize and isinstance(values.get(param.name), int)
        }
        maps = {
            name: value
            for name, value in values.items()
            if isinstance(value, TensorDescriptor)
        }
        types = specialize_launch(kernel, values | plain | dict.fromkeys(maps))
        boxes = [
            (name, tuple(descriptor.block_shape)) for name, descriptor in maps.items()
        ]
        found.add(str((kernel.__name__, *types, boxes, sorted(given.items()))))
    return found


def draw_lens(pick: random.Random, max_query_len: int) -> list[tuple[int, int]]:
    """Return new tokens and keys of the requests of a batch within the spec."""
    kind = pick.choice(["decode", "verify", "prefill", "mixed", "one"])
    num_reqs = (
        1 if kind == "one" else pick.choice([1, 2, 16, 17, 33, 129, MAX_NUM_REQS])
    )
    most = pick.choice([1, 2, 4, 5, 9, 16, 33, 64, 200, MAX_QUERY_LEN])
    most = min(most, max_query_len)
    lens = []
    for _ in range(num_reqs):
        new = 1 if kind == "decode" else pick.randint(1, most)
        if kind == "mixed" and lens:
            new = 1
        keys = max(new, pick.choice([1, 100, 2048, 2049, 5000, MAX_SEQ_LEN]))
        lens.append((new, keys))
    return lens


def call(
    lens: list[tuple[int, int]], caches: Any, layer: Layer, lse: bool, prefix: int
) -> None:
    """Make one call of paged attention, or of a cascade if there is a prefix.

    A layer whose scales are measured writes the new keys and values before.
    """
    key_cache, value_cache, options = caches
    twin = import_module("pagetwin.optimized")
    tokens, longest = sum(new for new, _ in lens), max(keys for _, keys in lens)
    starts = torch.tensor([0, *(new for new, _ in lens)]).cumsum(0).int()
    arguments = (
        torch.empty(tokens, layer.heads, head_size_of(key_cache), dtype=torch.bfloat16),
        key_cache,
        value_cache,
        torch.zeros(len(lens), -(-longest // BLOCK_SIZE), dtype=torch.int32),
        starts,
        torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        max(new for new, _ in lens),
        longest,
    )
    given: dict[str, Any] = {"options": options}
    if FORMATS[layer.name].is_measured:
        new = torch.empty(2, tokens, key_cache.shape[2], 128, dtype=torch.bfloat16)
        slots = torch.full((tokens,), -1)
        twin.reshape_and_cache(
            *new, key_cache, value_cache, slots, options.k_scale, options.v_scale, layer.name,
            options.k_global_scale, options.v_global_scale,
        )  # fmt: skip
    if lse:
        given["lse"] = torch.empty(layer.heads, tokens)
    if prefix:
        twin.cascade_attention(*arguments, prefix, **given)
    else:
        twin.paged_attention(*arguments, **given)


class OtherTables(KernelTables):
    """Tables in which no tile is the default one."""

    def find(self, key: TileKey, default: Tiles) -> Tiles:
        """Return narrower tiles with another number of warps, and of programs."""
        return replace(
            default,
            block_n=max(16, default.block_n // 2),
            num_warps=8 if default.num_warps == 4 else 4,
            programs=0 if key.role == "prefill" else 3,
        )


def use_other_tables() -> None:
    """Let host tensors, which stand for those of a GPU, have other tables."""
    other = OtherTables(
        thresholds=Thresholds(1024, 7, 300, 0.5), rates=Rates(split_us=20.0)
    )
    activate(torch.device("cpu"), ActiveTables(other))


def main(chip: int, is_tuned: bool) -> None:
    """Warm up, then make calls."""
    if is_tuned:
        use_other_tables()
    launches: list[Any] = []
    pretend(chip, launches)
    twin = import_module("pagetwin.optimized")
    # of the kernels for Hopper, which need a CUDA device, those of latent attention
    latent_family.is_hopper = lambda device: chip == 90
    for layer in LAYERS:
        key_cache, value_cache, options = layer.make_caches()
        spec = twin.WarmUpSpec(
            key_cache=key_cache,
            value_cache=value_cache,
            num_query_heads=layer.heads,
            max_num_reqs=MAX_NUM_REQS,
            max_query_len=layer.max_query_len,
            max_seq_len=MAX_SEQ_LEN,
            options=(options,),
            lse=(False, True),
            cascades=layer.cascades,
            dtype=torch.bfloat16,
            kv_cache_dtype=None if layer.is_latent else layer.name,
        )
        told = twin.warm_up(spec)
        assert told
    warmed = keys_of(launches)
    missing, pick, calls = [], random.Random(0), 0
    for layer, lse in product(LAYERS, (False, True)):
        caches = layer.make_caches()
        for prefix in (0, 32) if layer.cascades else (0,):
            for _ in range(25):
                launches.clear()
                lens = draw_lens(pick, layer.max_query_len)
                if prefix:
                    lens = [(new, max(keys, new + prefix)) for new, keys in lens]
                call(lens, caches, layer, lse, prefix)
                calls += 1
                assert launches
                if keys_of(launches) - warmed:
                    name = launches[-1][0].__name__
                    missing.append(
                        [name, str(layer.options.given), lse, prefix, lens[:3]]
                    )
    print(json.dumps({"warmed": len(warmed), "calls": calls, "missing": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["tuned"])
