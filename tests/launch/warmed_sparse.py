"""Print which calls of a sparse layer of the vLLM plugin launch a kernel that is not warmed up.

    PYTHONPATH=tests python tests/launch/warmed_sparse.py 90

As in warmed_launches.py, launches are recorded instead of made. One JSON object: `warmed`, the
number of compiled kernels of each layer, and `missing`, the calls that needed another one.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"

import json
import sys
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from support.compile_kernels import pretend
from support.fake_vllm import VERSIONS, fake_vllm
from support.warmed_launches import keys_of, latent_family

TOKENS = (1, 2, 3, 16, 17, 64, 129, 200, 1000, 1025, 2111)
LAYERS = {
    "auto": (torch.bfloat16, 576, 16, 0),
    "auto, 128 heads, other layers between blocks": (torch.bfloat16, 576, 128, 36_864),
    "fp8": (torch.float8_e4m3fn, 576, 16, 0),
    "fp8_ds_mla": (torch.uint8, 656, 16, 0),
    "fp8_ds_mla, 128 heads": (torch.uint8, 656, 128, 0),
}
"""Dtype and elements of a cached token, query heads, and elements between blocks."""


def main(chip: int) -> None:
    """Warm up, then make calls."""
    launches: list[Any] = []
    pretend(chip, launches)
    # of the kernels for Hopper, which need a CUDA device, those of latent attention
    latent_family.is_hopper = lambda device: chip == 90
    run, warmed, missing = load_implementation("optimized"), {}, []
    with fake_vllm(VERSIONS[-1], use_mla=True, use_sparse=True):
        from pagetwin.integrations.vllm.sparse_warm_up import warm_up_sparse
        from pagetwin.integrations.vllm.warm_up import StepBounds

        for name, (dtype, width, heads, gap) in LAYERS.items():
            pages = torch.zeros(20, 64 * width + gap, dtype=dtype)
            key = pages[:, : 64 * width].unflatten(1, (64, width))[:, :, None]
            value = key if dtype == torch.uint8 else key[..., :512]
            options = AttentionOptions()
            if name == "fp8":
                scale = torch.ones(())
                options = AttentionOptions(k_scale=scale, v_scale=scale)
            query = torch.zeros(max(TOKENS), heads, 576, dtype=torch.bfloat16)
            launches.clear()
            warm_up_sparse(
                run, (key, value), query[:1], (8192, 2048), 0.1, options,
                StepBounds(256, 8192, 9000),
            )  # fmt: skip
            known = keys_of(launches)
            warmed[name] = len(known)
            for tokens in TOKENS:
                launches.clear()
                slots = torch.zeros(tokens, 2048, dtype=torch.int32)
                out = query.new_empty(tokens, heads, 512)
                run.sparse_attention(
                    query[:tokens], key, value, slots, 0.1, out, options=options
                )
                assert launches
                if keys_of(launches) - known:
                    missing.append([name, tokens])
    print(json.dumps({"warmed": warmed, "missing": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
