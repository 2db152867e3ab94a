"""The concepts of pagetwin, their operations, and how to load an implementation by name."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Concept:
    """One file of each twin; of some, the optimized file re-exports the reference's bodies.

    Args:
        name: name of the concept, of its page and of its worked examples.
        module: file of the concept in both twins, such as "cache.slot_mapping".
        summary: first line of that file.
        operations: public functions and classes of the concept.
        is_single: whether the bodies of all operations are in the reference and serve both twins.
    """

    name: str
    module: str
    summary: str
    operations: tuple[str, ...]
    is_single: bool = False

    def path(self, twin: str) -> str:
        """Return the concept's file in one of the twins.

        Example:
            "reference/cache/slot_mapping.py".
        """
        return f"{twin}/{self.module.replace('.', '/')}.py"


CONCEPTS = (
    Concept(
        "block_table",
        "cache.block_table",
        "Block tables: the cache blocks of each request, in sequence order.",
        ("blocks_needed", "make_block_table", "append_blocks"),
    ),
    Concept(
        "slot_mapping",
        "cache.slot_mapping",
        "Slot mapping: the cache slot of every new token.",
        (
            "compute_slot_mapping",
            "compute_slot_mapping_batch",
            "compute_slot_mapping_device",
            "compute_slot_mapping_start_idx",
        ),
    ),
    Concept(
        "block_manager",
        "cache.block_manager",
        "Block manager: which request holds which block, and which blocks are shared.",
        ("BlockManager",),
        is_single=True,
    ),
    Concept(
        "block_table_rows",
        "cache.block_table_rows",
        "Persistent block-table rows: append, move, swap and clear as requests come and go.",
        ("BlockTable", "mamba_get_block_table_tensor"),
    ),
    Concept(
        "kv_cache",
        "cache.kv_cache",
        "KV cache: its shape, memory layout and views.",
        (
            "get_kv_cache_shape",
            "allocate_kv_cache",
            "view_kv_cache",
            "reshape_kv_cache",
            "reshape_layered_kv_cache",
            "split_kv_cache",
            "get_packed_kv_cache_shape",
            "split_packed_kv_cache",
        ),
        is_single=True,
    ),
    Concept(
        "kv_cache_init",
        "cache.kv_cache_init",
        "KV caches of a model: allocation, reshaping and binding to layers.",
        (
            "get_kv_cache_spec",
            "allocate_kv_caches",
            "reshape_kv_caches",
            "bind_kv_cache",
            "init_kv_cache",
        ),
        is_single=True,
    ),
    Concept(
        "cache_ops",
        "cache.cache_ops",
        "Cache operations: write, gather, copy and swap keys and values.",
        ("reshape_and_cache", "gather_cache", "copy_blocks", "swap_blocks"),
    ),
    Concept(
        "scheduler",
        "batch.scheduler",
        "Scheduler: which request computes how many tokens in the next step.",
        ("Scheduler",),
        is_single=True,
    ),
    Concept(
        "batch_split",
        "batch.batch_split",
        "Batch order: decodes first, then prefills, and the boundary between them.",
        (
            "reorder_batch_to_split_decodes_and_prefills",
            "split_decodes_and_prefills",
            "split_decodes_prefills_and_extends",
            "split_prefill_chunks",
        ),
    ),
    Concept(
        "metadata",
        "batch.metadata",
        "Attention metadata of one step: start locations, lengths, block table and slots.",
        ("build_common_attn_metadata", "build_attn_metadata"),
    ),
    Concept(
        "step_buffers",
        "batch.step_buffers",
        "Step buffers: tensors with fixed addresses that hold each step's metadata.",
        ("StepBuffers",),
    ),
    Concept(
        "batch_slices",
        "batch.batch_slices",
        "Micro-batches: one step cut into slices of its requests and tokens.",
        (
            "slice_query_start_locs",
            "make_metadata_with_slice",
            "split_attn_metadata",
        ),
    ),
    Concept(
        "sequence_metadata",
        "v0.sequence_metadata",
        "Attention metadata from sequence groups, the form of vLLM V0.",
        ("is_block_tables_empty", "make_tensor_with_pad", "CommonMetadataBuilder"),
    ),
    Concept(
        "encoder_decoder",
        "v0.encoder_decoder",
        "Encoder-decoder models: the lengths and block table of each attention type.",
        (
            "is_all_encoder_attn_metadata_set",
            "is_all_cross_attn_metadata_set",
            "get_seq_len_block_table_args",
            "get_num_prefill_decode_query_kv_tokens",
        ),
        is_single=True,
    ),
    Concept(
        "paged_attention",
        "attention.paged",
        "Paged attention: new tokens attend to keys and values in cache blocks.",
        ("paged_attention",),
    ),
    Concept(
        "encoder_attention",
        "attention.encoder",
        "Encoder attention: tokens attend to each other without a cache.",
        ("encoder_attention",),
    ),
    Concept(
        "merge_states",
        "attention.merge_states",
        "Merging of partial attention results by their log-sum-exp.",
        ("merge_attn_states", "lse_weighted_combine", "log2_lse_to_ln"),
    ),
    Concept(
        "cascade_attention",
        "attention.cascade",
        "Cascade attention: a prefix that all requests share is read once.",
        ("use_cascade_attention", "cascade_attention"),
    ),
    Concept(
        "latent_attention",
        "attention.latent",
        "Multi-head latent attention: the cache holds one latent vector per token.",
        (
            "get_mla_dims",
            "concat_and_cache_mla",
            "gather_latent_cache",
            "latent_decode_attention",
            "latent_prefill_attention",
        ),
    ),
    Concept(
        "sparse_attention",
        "sparse.attention",
        "Sparse attention: each query attends to the cache slots that it names.",
        ("convert_req_index_to_global_index", "sparse_attention"),
    ),
    Concept(
        "indexer",
        "sparse.indexer",
        "Indexer: cheap scores of all keys of a sequence, and the positions of the largest ones.",
        ("indexer_k_quant_and_cache", "index_scores", "select_keys"),
    ),
    Concept(
        "indexer_batch",
        "sparse.indexer_batch",
        "Batches of the indexer: gathered keys of a chunk, rows per rank, drafts one by one.",
        (
            "build_prefill_chunk_metadata",
            "balanced_prefill_row_shard",
            "prepare_uniform_decode",
        ),
        is_single=True,
    ),
    Concept(
        "sparse_slots",
        "sparse.slots",
        "Slots for sparse attention: states of groups, sliding windows, and rings.",
        (
            "get_compressed_slot_mapping",
            "compute_swa_indices_and_lens",
            "compute_kpool_tail_slot_mapping",
        ),
    ),
    Concept(
        "local_attention",
        "batch.local_attention",
        "Chunked local attention: each chunk of a sequence as a request of its own.",
        ("make_local_attention_virtual_batches",),
    ),
    Concept(
        "fast_prefill",
        "batch.fast_prefill",
        "Fast prefill: the last layers run only on tokens whose logits are wanted.",
        (
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "subclass_attention_backend",
            "subclass_attention_metadata",
            "create_fast_prefill_custom_backend",
        ),
    ),
    Concept(
        "spec_decode",
        "batch.spec_decode",
        "Speculative decoding: the draft tokens of a request as a batch axis.",
        ("reshape_query_for_spec_decode", "reshape_attn_output_for_spec_decode"),
        is_single=True,
    ),
    Concept(
        "draft_steps",
        "batch.draft_steps",
        "Steps of a draft model: lengths, slots and tokens that the host does not know.",
        (
            "eagle_prepare_next_token_padded",
            "eagle_prepare_inputs_padded",
            "eagle_step_update_slot_mapping_and_metadata",
            "compute_token_to_req_indices",
        ),
    ),
    Concept(
        "causal_conv",
        "batch.causal_conv",
        "Causal convolution: the chunk of tokens that each program processes.",
        ("compute_causal_conv1d_metadata",),
    ),
    Concept(
        "layer_parameters",
        "batch.layer_parameters",
        "Layer parameters: the attention settings that one plan must fix for all layers.",
        ("get_per_layer_parameters", "infer_global_hyperparameters"),
        is_single=True,
    ),
    Concept(
        "context_parallel",
        "attention.context_parallel",
        "Decode context parallelism: one sequence's keys distributed over ranks.",
        ("get_dcp_ranks", "get_dcp_local_seq_lens", "dcp_attention"),
    ),
    Concept(
        "tensor_parallel",
        "parallel.heads",
        "Tensor parallelism over heads: the query heads and KV heads of each rank.",
        ("get_tp_heads", "get_dcp_groups"),
        is_single=True,
    ),
    Concept(
        "parallel_step",
        "parallel.decode",
        "Parallel attention step: ranks share each sequence's keys and combine their partial"
        " results.",
        ("DecodeContextParallel",),
    ),
    Concept(
        "prefill_parallel",
        "parallel.prefill",
        "Prefill context parallelism: ranks compute chunks of each prompt in zig-zag order.",
        ("PrefillContextParallel",),
    ),
    Concept(
        "ring_prefill",
        "parallel.ring",
        "Ring prefill: keys and values pass from rank to rank, and results of rounds are merged.",
        ("RingContextParallel",),
    ),
    Concept(
        "multimodal_prefix",
        "batch.multimodal_prefix",
        "Multimodal prefixes: bidirectional attention among the tokens of one image.",
        (
            "compute_mm_prefix_ranges",
            "compute_mm_prefix_range_tensor",
            "fill_mm_prefix_query_ranges",
        ),
    ),
    Concept(
        "rswa",
        "batch.rswa",
        "Reference sliding windows (R-SWA): the prompt stays visible, and a window limits the"
        " rest.",
        ("fill_rswa_query_ranges",),
    ),
    Concept(
        "graph_state",
        "v0.graph_state",
        "CUDA graph state: captured decode steps and the buffers they read.",
        ("get_attn_cg_support", "CommonAttentionState"),
    ),
    Concept(
        "backend",
        "backends.backend",
        "Attention backend: all operations as one object with an engine's interface.",
        (),
    ),
)


def concept(name: str) -> Concept:
    """Return the concept of that name.

    Raises:
        KeyError: the concept does not exist. The message lists all concepts.
    """
    for candidate in CONCEPTS:
        if candidate.name == name:
            return candidate
    names = ", ".join(known_concept.name for known_concept in CONCEPTS)
    raise KeyError(f"concept = {name!r}: expected one of {names}")


class Implementation:
    """Every public operation of one twin, as an attribute: `twin.reshape_and_cache(...)`."""

    def __init__(self, name: str, top: ModuleType) -> None:
        self.name = name
        self.operations = find_operations(top)
        self._top = top

    @property
    def backends(self) -> tuple[Any, ...]:
        """The attention backends of the implementation; empty if it has none."""
        return find_backends(self._top)

    def __getattr__(self, operation: str) -> Any:
        operations: dict[str, Any] = self.__dict__.get("operations", {})
        if operation in operations:
            return operations[operation]
        if any(operation in known_concept.operations for known_concept in CONCEPTS):
            raise AttributeError(f"{self.name} has no {operation}")
        raise AttributeError(f"{operation!r} is not one of pagetwin's operations")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the names, as a module has neither."""
        return _import, (self.name, self._top.__name__)

    def __repr__(self) -> str:
        return f"Implementation({self.name!r})"


def _import(name: str, module: str) -> Implementation:
    return Implementation(name, importlib.import_module(module))


def load_implementation(name: str) -> Implementation:
    """Return an implementation by name, importing nothing but that one.

    Args:
        name: "reference", "optimized", or the dotted name of a module or package that has
            functions with the names of operations, or files with the paths of the twins.

    Raises:
        ModuleNotFoundError: the module does not exist.
        ValueError: it has none of the operations.
    """
    package = f"pagetwin.{name}" if name in ("reference", "optimized") else name
    implementation = _import(name, package)
    if not implementation.operations:
        raise ValueError(
            f"{package} has none of the operations: expected functions with names such as"
            " paged_attention, reshape_and_cache or compute_slot_mapping_device"
        )
    return implementation


def find_operations(top: ModuleType) -> dict[str, Any]:
    """Return the operations of a module or package by name.

    Args:
        top: a module or package. An operation is taken from the file of its concept, such as
            `cache/slot_mapping.py`, if the package has it. Otherwise it is taken from `top`.
    """
    found: dict[str, Any] = {}
    for concept in CONCEPTS:
        modules = [top]
        if hasattr(top, "__path__"):
            modules = [*_submodule(f"{top.__name__}.{concept.module}"), top]
        for operation in concept.operations:
            for module in modules:
                if callable(getattr(module, operation, None)):
                    found.setdefault(operation, getattr(module, operation))
    return found


def find_backends(top: ModuleType) -> tuple[Any, ...]:
    """Return the backends of a module, or of a package's backend file."""
    modules = [top]
    if hasattr(top, "__path__"):
        modules += _submodule(f"{top.__name__}.{concept('backend').module}")
    found: list[Any] = [getattr(module, "BACKENDS", ()) for module in modules]
    return tuple(next((backends for backends in found if backends), ()))


def _submodule(name: str) -> list[ModuleType]:
    """Return a module in a list, which is empty if the module does not exist."""
    try:
        return [importlib.import_module(name)]
    except ModuleNotFoundError as error:
        # the file or its folder is missing; other errors come from inside the file
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return []
