"""vLLM's own attention backends on compute capability 9.0: what they serve, as data.

`docs/hooks/backend_table.py` shows it beside the plugin's own declarations.
"""

import ast
import zipfile
from typing import Any

from support.vllm_answers import BASE, CAPABILITY, Frame, ask
from support.vllm_conditions import Condition, NotFollowed, joined, negated
from support.vllm_source import Capability, Class, Source

REGISTRY = "vllm.v1.attention.backends.registry"
BACKENDS = (
    "FLASH_ATTN",
    "TRITON_ATTN",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "TURBOQUANT",
    "HPC_ATTN",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "TRITON_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM90",
)
"""Those for compute capability 9.0 whose class is written out."""
FACTS: dict[str, Any] = {
    # no other package has added a cache dtype
    "get_kv_cache_dtype_handler(kv_cache_dtype)": None,
    "isinstance(kv_cache_dtype, str)": True,
    # a model is built, and its latents have the sizes of DeepSeek's
    "vllm_config is None": False,
    "vllm_config is not None": True,
    "vllm_config.model_config is not None": True,
    "hf.kv_lora_rank != 512": False,
    "hf.qk_rope_head_dim not in (0, 64)": False,
    "hasattr(hf_text_config, 'index_topk')": True,
}
"""Values of expressions of vLLM."""
RANKS = "vllm_config.parallel_config.decode_context_parallel_size"
LAYER: dict[str, Any] = {
    "head_size": 128,
    "dtype": "torch.bfloat16",
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": Capability(*CAPABILITY),
    "attn_type": "decoder",
}
"""The plain layer, of which every feature changes something. For latent attention, size 576."""
COMBINED = [
    name for name in LAYER if name not in ("use_per_head_quant_scales", "attn_type")
]
"""The arguments of `supports_combination`."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": "torch.float32"},
    "head_size_80": {"head_size": 80},
    "head_size_512": {"head_size": 512},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "fp8_per_token_head": {"kv_cache_dtype": "fp8_per_token_head"},
    "int8_per_token_head": {"kv_cache_dtype": "int8_per_token_head"},
    "int4_per_token_head": {"kv_cache_dtype": "int4_per_token_head"},
    "int4_sinks": {"kv_cache_dtype": "int4_per_token_head", "has_sink": True},
    "nvfp4": {"kv_cache_dtype": "nvfp4"},
    "turboquant": {"kv_cache_dtype": "turboquant_4bit_nc"},
    "scales_per_head": {"use_per_head_quant_scales": True},
    "sliding_window": {"has_sliding_window": True},
    "sinks": {"has_sink": True},
    "images": {"use_mm_prefix": True},
    "images_fp8": {"use_mm_prefix": True, "kv_cache_dtype": "fp8"},
    "rswa": {"use_rswa": True},
    "non_causal": {"use_non_causal": True},
    "encoder_only": {"attn_type": "encoder_only"},
    "cross_attention": {"attn_type": "encoder_decoder"},
    "batch_invariant": {"use_batch_invariant": True},
    "trimmed_drafts": {"use_adaptive_verification": True},
    "dcp": {"use_dcp": True},
    "pcp": {"use_pcp": True},
    "sparse": {"use_sparse": True},
}
"""What every backend is asked: how the layer differs from a plain one."""


def record_backends(wheel: zipfile.ZipFile) -> dict[str, Any]:
    """Return what each backend declares, and its answer for each feature.

    An answer is True, False, or the expression that decides it.
    """
    names = _registered(wheel)
    found = {}
    for name in BACKENDS:
        module, _, class_name = names[name].rpartition(".")
        source = Source(wheel, dict(FACTS))
        owner = source.class_of(module, class_name)
        layer = LAYER | {
            "use_mla": ask(source, owner, "is_mla"),
            "use_sparse": ask(source, owner, "is_sparse"),
        }
        if layer["use_mla"]:
            layer["head_size"] = 576
        caches = list(ask(source, owner, "supported_kv_cache_dtypes"))
        if "auto" not in caches:
            layer["kv_cache_dtype"] = caches[0]
        asked = {}
        for feature, changes in FEATURES.items():
            if layer["use_mla"] and "head_size" in changes:
                continue
            source.facts |= {
                "envs.VLLM_BATCH_INVARIANT": feature == "batch_invariant",
                f"{RANKS} > 1": feature == "dcp",
            }
            asked[feature] = _plain(validate(source, owner, layer | changes))
        found[name] = {
            "class": class_name,
            "dtypes": [
                dtype.removeprefix("torch.")
                for dtype in ask(source, owner, "supported_dtypes")
            ],
            "cache_dtypes": caches,
            "head_sizes": _plain(ask(source, owner, "get_supported_head_sizes")),
            "block_sizes": _block_sizes(source, owner),
            "serves": asked,
        }
        if not layer["use_mla"]:
            asked["alibi"] = alibi(source, owner)
    return found


def record_defaults(wheel: zipfile.ZipFile) -> dict[str, bool]:
    """Return what a backend answers that does not override a method of vLLM's base class."""
    source = Source(wheel, {})
    base = source.class_of(BASE, "AttentionBackend")
    impl = source.class_of(BASE, "AttentionImplBase")
    methods = [
        statement.name
        for statement in base.nodes[0][0].body
        if isinstance(statement, ast.FunctionDef)
        and statement.name.startswith(("supports_", "is_"))
        and len(statement.args.args) == 1
    ]
    asked = {name: ask(source, base, name) for name in methods}
    asked |= {
        name: ask(source, impl, name) for name in ("supports_dcp", "supports_pcp")
    }
    return {name: value for name, value in asked.items() if isinstance(value, bool)}


def validate(source: Source, owner: Class, layer: dict[str, Any]) -> Any:
    """Return whether `validate_configuration` gives no reason against a layer."""
    node, module, number = source.member(owner, "validate_configuration")
    frame = Frame(source, module, owner, number)
    frame.bind(node, [], layer)
    answers = []
    for statement in node.body:
        if isinstance(statement, ast.If):
            if "combination_reason" in ast.unparse(statement.test):
                given = {name: layer[name] for name in COMBINED}
                answers.append(ask(source, owner, "supports_combination", **given))
            else:
                answers.append(negated(frame.value(statement.test)))
    return joined(answers, "and")


def alibi(source: Source, owner: Class) -> bool | str:
    """Return what a layer does with ALiBi slopes: True, False (an error), or "not read"."""
    impl = ask(source, owner, "get_impl_cls")
    node, _, _ = source.member(impl, "__init__")
    raising = {
        ast.unparse(statement.test)
        for statement in ast.walk(node)
        if isinstance(statement, ast.If)
        and any(isinstance(inner, ast.Raise) for inner in statement.body)
    }
    if "alibi_slopes is not None" in raising:
        return False
    lists = [
        statement
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List)
    ]
    for statement in lists:
        names = {ast.unparse(element) for element in statement.value.elts}
        if (
            "alibi_slopes" in names
            and f"any({ast.unparse(statement.targets[0])})" in raising
        ):
            return False
    attributes = [
        inner
        for class_node, _ in impl.nodes
        for inner in ast.walk(class_node)
        if isinstance(inner, ast.Attribute) and inner.attr == "alibi_slopes"
    ]
    if any(isinstance(attribute.ctx, ast.Load) for attribute in attributes):
        return True
    return "not read"


def _registered(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Return the path of each backend's class."""
    source = Source(wheel, {})
    node = source.class_of(REGISTRY, "AttentionBackendEnum").nodes[0][0]
    return {
        ast.unparse(statement.targets[0]): ast.literal_eval(statement.value)
        for statement in node.body
        if isinstance(statement, ast.Assign)
    }


def _block_sizes(source: Source, owner: Class) -> Any:
    try:
        return _plain(ask(source, owner, "get_supported_kernel_block_sizes"))
    except NotFollowed:
        return "by code"


def _plain(value: Any) -> Any:
    """Return a value as JSON: a condition as its expression."""
    if isinstance(value, Condition):
        return value.text
    return list(value) if isinstance(value, tuple) else value
