"""Support: the domain that an adapter declares for its kernel, and why a call is outside of it.

The domain says which tensors, sizes, lengths and option values the kernel takes. A kernel is called
only inside of it, unless `pagetwin check --outside` tries other calls too.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ...contract.latent_formats import find_latent_format

REJECTS = ("shapes", "contents", "undeclared")
KV_LAYOUTS = ("NHD", "HND")
STRIDES = ("packed", "packed heads", "rows")
DEVICES = ("cpu", "cuda")
KINDS = (
    "bool", "int", "float", "tensor", "per request", "per head", "per slot", "one element",
)  # fmt: skip
"""Kinds of option values, beside the values themselves."""
ALIGNED = ("query", "key", "value", "key_cache", "value_cache", "kv_cache", "out")
"""Tensors whose addresses and strides `Support.alignment` is about."""


class OutsideSupport(NotImplementedError):
    """A call is outside of the candidate's declared support: it was not made, or it raised."""


@dataclass(frozen=True)
class Support:
    """The calls that an adapter's kernel supports. A field that is not set imposes no limit.

    Args:
        operations: Optional. The operations that are supported. Others are not called, and laws
            that need them are skipped. If None, all operations are expected.
        devices: Optional. "cpu", "cuda", or compute capabilities such as "sm_90".
        dtypes: Optional. Names of the element types of queries, such as "bfloat16".
        cache_dtypes: Optional. Names of the element types of caches, or of formats of latents that
            are stored as records, such as "fp8_ds_mla".
        tensor_dtypes: Element types of other tensors, by argument: {"sinks": ["bfloat16"]}. A
            tensor of another type is converted for the kernel if that loses nothing. Otherwise
            the call is outside.
        head_sizes: Optional. Supported numbers of elements per head.
        group_sizes: Optional. Supported numbers of query heads per KV head.
        block_sizes: Optional. Supported numbers of slots per block.
        kv_layouts: Optional. "NHD" (a block's tokens are its outer axis) and "HND" (its heads are).
        strides: Strides that tensors need, by argument: "packed" (contiguous, in either KV
            layout), "packed heads" (the heads of a token are contiguous, and the stride of tokens
            is free, as in a slice of a fused QKV tensor) or "rows" (only the last axis is
            contiguous). Other tensors may have any strides.
        same_strides: Arguments that need the same strides: [("key_cache", "value_cache")].
        alignment: Optional. Bytes of which the addresses and strides of queries, keys, values and
            outputs are multiples. The stride of the last axis does not count.
        query_lens: Optional. Supported numbers of new tokens per request, such as range(0, 2).
        seq_lens: Optional. Supported numbers of keys per request, such as range(1, 131073).
        options: Optional. Names of the supported fields of `AttentionOptions` and of the supported
            arguments among `scale`, `out` and `lse`. "value_head_size" means that values may have
            another head size than keys. A mapping gives the supported values of each:
            {"causal": "bool", "sliding_window": None, "value_head_size": [128]}. None means any
            value. A value is itself or a kind: "bool", "int", "float", "tensor", "per request",
            "per head", "per slot" (scales of a cache) or "one element". A function with a
            parameter `options` gets an `AttentionOptions`. Any other function gets the options that
            are not at their default as keyword arguments.
        never_together: Options that cannot be combined: [("causal", "alibi_slopes")] means that
            a call with slopes is causal.
        reads_past: Arguments past whose end the kernel reads memory that it does not use, such as
            ["block_table"]. Laws that forbid it do not guard that memory.
        rejects: Optional. The kinds of invalid input that are validated. "shapes" means everything
            that shapes, dtypes, devices and numbers show. "contents" means the elements of
            tensors, if PAGETWIN_CHECK_VALUES=1, which the laws set. A call with invalid input
            must raise, or return the result of the call that was meant. "undeclared" promises
            the same for every call outside of this support. If None, shapes and contents are
            validated. If empty, nothing is validated, and the laws about invalid input are skipped.
        batch_invariant: Whether the result of a token is bitwise equal whatever else is in the
            batch, in however many steps its prompt is computed, and whichever blocks hold its
            keys. A function is called instead of `paged_attention`, with the same arguments, to
            get such results. If False, results are batch-invariant only if the operation takes
            the option `batch_invariant`, which is then set.

    Raises:
        ValueError: A field contradicts another one, or leaves nothing to call.
    """

    operations: Collection[str] | None = None
    devices: Collection[str] | None = None
    dtypes: Collection[str] | None = None
    cache_dtypes: Collection[str] | None = None
    tensor_dtypes: Mapping[str, Collection[str]] = field(default_factory=dict)
    head_sizes: Collection[int] | None = None
    group_sizes: Collection[int] | None = None
    block_sizes: Collection[int] | None = None
    kv_layouts: Collection[str] | None = None
    strides: Mapping[str, str] = field(default_factory=dict)
    same_strides: Collection[Collection[str]] = ()
    alignment: int | None = None
    query_lens: Collection[int] | None = None
    seq_lens: Collection[int] | None = None
    options: Collection[str] | Mapping[str, Any] | None = None
    never_together: Collection[Collection[str]] = ()
    reads_past: Collection[str] = ()
    rejects: Collection[str] | None = None
    batch_invariant: bool | Callable[..., Any] = False

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f"SUPPORT.{problem}")

    def _problems(self) -> Iterator[str]:
        """Yield what contradicts itself, each as the rest of a sentence after `SUPPORT.`."""
        for declared in fields(self):
            value = getattr(self, declared.name)
            yield from _problems_of_type(declared.name, value)
            may_be_empty = (
                "options",
                "rejects",
                "strides",
                "same_strides",
                "never_together",
                "reads_past",
            )
            is_list = (
                isinstance(value, Collection) and declared.name not in may_be_empty
            )
            if is_list and not value and declared.name != "tensor_dtypes":
                yield f"{declared.name} = {value!r}: expected at least one, or no such field"
        for name, known in (
            ("rejects", REJECTS),
            ("kv_layouts", KV_LAYOUTS),
            ("devices", DEVICES),
        ):
            for one in getattr(self, name) or ():
                if one not in known and not (known is DEVICES and one[:3] == "sm_"):
                    yield f"{name} has {one!r}: expected {' or '.join(known)}"
        for name, lowest in (
            ("head_sizes", 1),
            ("group_sizes", 1),
            ("block_sizes", 1),
            ("query_lens", 0),
            ("seq_lens", 0),
        ):
            sizes = getattr(self, name)
            for one in () if isinstance(sizes, range) else sizes or ():
                if not isinstance(one, int):
                    yield f"{name} has {one!r}: expected whole numbers"
            if sizes and bounds_of(sizes)[0] < lowest:
                yield f"{name} has {bounds_of(sizes)[0]}: expected at least {lowest}"
        for name, stride in self.strides.items():
            if stride not in STRIDES:
                some = " or ".join(map(repr, STRIDES))
                yield f"strides[{name!r}] = {stride!r}: expected {some}"
        for names in self.same_strides:
            if isinstance(names, str):
                yield f"same_strides has {names!r}: expected pairs of arguments"
        if self.alignment is not None and (
            self.alignment < 1 or self.alignment & (self.alignment - 1)
        ):
            yield f"alignment = {self.alignment}: expected a power of two, in bytes"
        if self.query_lens and self.seq_lens:
            fewest, most = bounds_of(self.query_lens)[0], bounds_of(self.seq_lens)[1]
            if max(1, fewest) > most:
                yield (
                    f"query_lens begins at {fewest}, and seq_lens ends at {most}: expected"
                    " new tokens that a sequence can hold"
                )
        yield from self._problems_of_options()

    def _problems_of_options(self) -> Iterator[str]:
        if self.options is None:
            return
        for name, values in self._values().items():
            kinds = [values] if isinstance(values, str) else values
            if kinds is None:
                continue
            if not isinstance(kinds, Collection) or not kinds:
                yield f"options[{name!r}] = {values!r}: expected values, a kind, or None"
            elif unknown := [k for k in kinds if isinstance(k, str) and k not in KINDS]:
                yield (
                    f"options[{name!r}] has {unknown[0]!r}: expected a value, or one of"
                    f" {', '.join(KINDS)}"
                )
        for names in self.never_together:
            if isinstance(names, str):
                yield f"never_together has {names!r}: expected pairs of options"
            if lacking := [name for name in names if name not in self.options]:
                yield f"never_together has {lacking[0]!r}, which options lacks"
        if "sinks" in self.tensor_dtypes and "sinks" not in self.options:
            yield "tensor_dtypes has 'sinks', which options lacks"
        caches = list(self.cache_dtypes or ())
        is_quantised = caches != [] and all("float8" in cache for cache in caches)
        if is_quantised and "k_scale" not in self.options:
            yield (
                f"cache_dtypes has only {', '.join(caches)}, and options lacks 'k_scale',"
                " without which no such cache can be read"
            )

    def _values(self) -> Mapping[str, Any]:
        """Return the supported values of each option; None for any value."""
        taken = self.options or ()
        return taken if isinstance(taken, Mapping) else dict.fromkeys(taken)

    def why_not_options(self, options: Mapping[str, Any]) -> str | None:
        """Return the first reason why the options of a call are not supported, or None.

        Args:
            options: The options that are not at their default, with their values.
        """
        if self.options is None:
            return None
        declared = self._values()
        for name, value in options.items():
            if name not in declared:
                return f"option {name}"
            if not _is_among(name, value, declared[name]):
                shown = kind_of(name, value) if isinstance(value, Tensor) else value
                return f"option {name} = {shown}"
        for names in self.never_together:
            if set(names) <= set(options):
                return f"options {' and '.join(names)} together"
        return None

    def why_not(
        self,
        tensors: Mapping[str, Tensor],
        options: Mapping[str, Any],
        query_lens: Sequence[int] = (),
        seq_lens: Sequence[int] = (),
    ) -> str | None:
        """Return the first reason why a call is not supported, or None if it is supported.

        Args:
            tensors: The tensors of the call by argument, with queries as "query", [tokens, heads,
                head_size], and caches as "key_cache", [num_blocks, block_size, kv_heads,
                head_size]. What is missing is not checked.
            options: The options that are not at their default, with their values.
            query_lens, seq_lens: New tokens and keys of the requests, and their bounds.
        """
        outputs = tensors.get("prefix_output")  # of partial results that are merged
        query = tensors.get("query", tensors.get("key", outputs))
        cache = tensors.get("key_cache")
        stored = cache is not None and name_of(cache)
        records = find_latent_format(tensors.get("kv_cache", torch.empty(0)))
        if records is not None and records.name in (self.cache_dtypes or ()):
            stored = records.name
        for what, value, taken in (
            ("dtype", query is not None and name_of(query), self.dtypes),
            ("cache dtype", stored, self.cache_dtypes),
            ("block size", cache is not None and cache.shape[1], self.block_sizes),
            ("head size", query is not None and query.shape[-1], self.head_sizes),
            ("group size", _group_of(tensors), self.group_sizes),
        ):
            if taken is not None and value is not False and value not in taken:
                return f"{what} {value}"
        for what, lens, lengths in (
            ("new tokens", query_lens, self.query_lens),
            ("keys", seq_lens, self.seq_lens),
        ):
            for one in lens if lengths is not None else ():
                if one not in (lengths or ()):
                    return f"{one} {what} of a request"
        given = {**tensors, **options}
        for name, dtypes in self.tensor_dtypes.items():
            tensor = given.get(name)
            if isinstance(tensor, Tensor) and converted(tensor, dtypes) is None:
                return f"{name} in {name_of(tensor)} that {' or '.join(dtypes)} cannot hold"
        return self.why_not_options(options) or self.why_not_strides(tensors)

    def why_not_strides(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the first tensor whose strides or alignment are not supported, or None."""
        for name, tensor in tensors.items():
            if self.kv_layouts is not None and tensor.dim() == 4:
                layouts = layouts_of(tensor)
                if not set(layouts) & set(self.kv_layouts):
                    return f"KV layout {layouts[0]}"
            if not _has_strides(tensor, self.strides.get(name)):
                return f"{name} that is not {self.strides[name]}"
            if self.alignment is not None and name in ALIGNED:
                size = tensor.element_size()
                steps = [
                    step * size
                    for step, count in zip(
                        tensor.stride()[:-1], tensor.shape, strict=False
                    )
                    if count > 1
                ]
                if any(
                    number % self.alignment for number in [*steps, tensor.data_ptr()]
                ):
                    return f"{name} that is not aligned to {self.alignment} bytes"
        for names in self.same_strides:
            given = [tensors[name] for name in names if name in tensors]
            if len({tuple(tensor.stride()) for tensor in given}) > 1:
                return f"other strides of {' than of '.join(names)}"
        return None

    def why_not_device(self, device: torch.device) -> str | None:
        """Return why a device is not supported, or None if it is."""
        names = [device.type]
        if device.type == "cuda":
            names.append("sm_{}{}".format(*torch.cuda.get_device_capability(device)))
        if self.devices is None or set(names) & set(self.devices):
            return None
        return f"device {names[-1]}; SUPPORT declares {', '.join(self.devices)}"


def _problems_of_type(name: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the type of a field, as the rest of a sentence."""
    if value is None or name == "batch_invariant":
        return
    expected: tuple[type, str] = (Collection, "a list")
    if name in ("strides", "tensor_dtypes"):
        expected = (Mapping, "a mapping by argument")
    if name == "alignment":
        expected = (int, "a number of bytes")
    if isinstance(value, str) or not isinstance(value, expected[0]):
        yield f"{name} = {value!r}: expected {expected[1]}"


def name_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as `Support` spells it."""
    return str(tensor.dtype).removeprefix("torch.")


def kind_of(name: str, value: Any) -> str:
    """Return the kind of an option's value: one of KINDS."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if name == "causal":
        return "per request"
    if not name.endswith("_scale"):
        return "per head" if value.dim() == 1 else "tensor"
    if value.dim() > 2:
        return "per slot"
    return "one element" if value.numel() == 1 else "per head"


def _is_among(name: str, value: Any, declared: Any) -> bool:
    """Return whether an option's value is among the declared values and kinds."""
    if declared is None:
        return True
    taken = [declared] if isinstance(declared, str) else declared
    kinds = {kind_of(name, value)} | (
        {"tensor"} if isinstance(value, Tensor) else set()
    )
    if kinds & {kind for kind in taken if isinstance(kind, str)}:
        return True
    return not isinstance(value, Tensor) and value in taken


def _group_of(tensors: Mapping[str, Tensor]) -> int | bool:
    """Return the number of query heads per KV head, or False if it is not known."""
    query = tensors.get("query")
    keys = tensors.get("key_cache", tensors.get("key"))
    if query is None or keys is None or query.dim() < 3 or keys.dim() < 3:
        return False
    return query.shape[-2] // max(1, keys.shape[-2])


def converted(tensor: Tensor, dtypes: Collection[str]) -> Tensor | None:
    """Return a tensor in the first dtype that holds all its values, or None."""
    if name_of(tensor) in dtypes or tensor.is_meta:
        return tensor
    for name in dtypes:
        other = tensor.to(getattr(torch, name))
        if torch.equal(other.to(tensor.dtype), tensor):
            return other
    return None


def layouts_of(cache: Tensor) -> list[str]:
    """Return the KV layouts that the strides of a [blocks, block_size, heads, size] cache fit."""
    _, by_token, by_head, _ = cache.stride()
    if 1 in cache.shape[1:3] or by_token == by_head:
        return list(KV_LAYOUTS)
    return ["NHD" if by_token > by_head else "HND"]


def _has_strides(tensor: Tensor, needed: str | None) -> bool:
    if needed == "packed":
        is_cache = tensor.dim() == 4
        turned = tensor.transpose(1, 2) if is_cache else tensor
        return tensor.is_contiguous() or turned.is_contiguous()
    if needed == "packed heads":
        heads = tensor[(0,) * (tensor.dim() - 2)] if tensor.numel() else tensor
        return heads.is_contiguous()
    if needed == "rows":
        return tensor.dim() == 0 or tensor.shape[-1] < 2 or tensor.stride(-1) == 1
    return True


def has_same_caches(support: Support) -> bool:
    """Return whether key and value caches need the same strides."""
    pairs = [set(names) for names in support.same_strides]
    return any({"key_cache", "value_cache"} <= pair for pair in pairs)


def bounds_of(numbers: Collection[int]) -> tuple[int, int]:
    """Return the smallest and the largest of some numbers."""
    if isinstance(numbers, range):
        return min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])
    return min(numbers), max(numbers)


def nearest_length(length: int, lengths: Collection[int] | None) -> int:
    """Return the largest supported length that is not longer, or else the shortest one."""
    if lengths is None or length in lengths:
        return length
    is_sorted = isinstance(lengths, range) and lengths.step > 0
    ordered: Sequence[int] = lengths if is_sorted else sorted(lengths)  # type: ignore[assignment]
    return ordered[max(0, bisect_right(ordered, length) - 1)]
