"""Cache formats: how a KV cache stores keys and values, and what scales belong to them.

A cache either stores numbers as they are, or codes of fewer bits. A code times its scale is the
number. Formats differ in the dtype of the codes, and in the axes of the scales. The scales of some
are given with the call; those of others are measured by the write, one per token and head or one
per block of channels, and stored with the codes.

A format has one file of its own in each of these folders, named by its field `file`:
`reference/cache/formats/` (store and load), `optimized/kernels/portable/formats/` (the same in
kernels) and `shared/validation/formats/` (its scales, checked and drawn).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import torch
from torch import Tensor

from .checks import check_positive
from .option_files import import_files


class ScaleAxes(Enum):
    """The axes of a cache's scales; keys and values have scales of their own."""

    TENSOR = "one number for all"
    HEAD = "[kv_heads]"
    TOKEN_HEAD = "[num_blocks, block_size, kv_heads]"
    BLOCK = "[num_blocks, block_size, kv_heads, head_size / 16]"


@dataclass(frozen=True)
class CacheFormat:
    """How a cache stores keys and values.

    Args:
        name: vLLM's name, the value of `kv_cache_dtype`.
        file: Name of its files. Formats that share code share a file.
        dtype: Optional. Dtype of the stored elements. If None, that of the keys and values.
        codes_per_element: Codes in a stored element: 2 if a byte holds two of four bits.
        channels_per_scale: Channels of a key or value with the same scale, if it has several. A
            global scale, which is given, multiplies them. If 0, it has one scale at most.
        is_rotated: Whether keys and values are rotated before they are codes.
        includes_zero: Whether every row has a code for 0. If not, the codes of a row go from its
            smallest to its largest number.
        scale_dtype: Of scales that the write measures.
        scales: The axes that its scales may have. None if numbers are stored as they are.
        aliases: Other names of the format.
        loses: Rows of which nothing is left in their codes, in words. If empty, none: a key that
            outweighs 131,072 others does so as codes too.

    Example:
        int8_per_token_head: 8 heads of 128 codes for keys and for values, each with a float32
        scale: 8 * 2 * (128 + 4) = 2,112 bytes per slot. A page of 16 slots has 33,792 bytes. In
        int4_per_token_head a byte holds two codes: 8 * 2 * (64 + 4) * 16 = 17,408 bytes. In
        bfloat16 the page has 65,536.

        >>> FORMATS["int8_per_token_head"].page_bytes(16, 8, 128, 128, torch.bfloat16)
        33792
        >>> FORMATS["int4_per_token_head"].page_bytes(16, 8, 128, 128, torch.bfloat16)
        17408
        >>> FORMATS["auto"].page_bytes(16, 8, 128, 128, torch.bfloat16)
        65536
    """

    name: str
    file: str
    dtype: torch.dtype | None = None
    codes_per_element: int = 1
    channels_per_scale: int = 0
    is_rotated: bool = False
    includes_zero: bool = True
    scale_dtype: torch.dtype = torch.float32
    scales: tuple[ScaleAxes, ...] = ()
    aliases: tuple[str, ...] = ()
    loses: str = ""

    @property
    def is_quantised(self) -> bool:
        """Whether elements are codes, which are multiplied by a scale."""
        return bool(self.scales)

    @property
    def scales_whole_rows(self) -> bool:
        """Whether elements are codes, and one scale multiplies all of a key or value."""
        return self.is_quantised and not self.channels_per_scale

    @property
    def has_levels(self) -> bool:
        """Whether codes are integers, and one scale multiplies all of a key or value."""
        is_integer = self.dtype is not None and not self.dtype.is_floating_point
        return is_integer and self.scales_whole_rows

    @property
    def is_measured(self) -> bool:
        """Whether a write measures the scales and stores them; otherwise they are given."""
        return bool({ScaleAxes.TOKEN_HEAD, ScaleAxes.BLOCK} & {*self.scales})

    @property
    def has_token_scales(self) -> bool:
        """Whether a write measures one scale per token and head."""
        return ScaleAxes.TOKEN_HEAD in self.scales

    @property
    def has_global_scale(self) -> bool:
        """Whether a number that is given multiplies the scales that are stored."""
        return ScaleAxes.BLOCK in self.scales

    @property
    def head_size_step(self) -> int:
        """What head sizes are multiples of."""
        return self.channels_per_scale or self.codes_per_element

    def page_bytes(
        self,
        block_size: int,
        kv_heads: int,
        head_size: int,
        value_head_size: int,
        dtype: torch.dtype,
    ) -> int:
        """Return the bytes of a block: its keys, its values, and the scales that are stored.

        Args:
            dtype: Dtype of the keys and values.
        """
        check_positive(
            block_size=block_size,
            kv_heads=kv_heads,
            head_size=head_size,
            value_head_size=value_head_size,
        )
        sizes = (head_size, value_head_size)
        rows = [self.row_bytes(size, self.dtype or dtype) for size in sizes]
        return block_size * kv_heads * sum(rows)

    def row_bytes(self, head_size: int, dtype: torch.dtype = torch.uint8) -> int:
        """Return the bytes of a key or value, and of the scales that are stored with it.

        Args:
            dtype: Of the stored elements.
        """
        codes = self.elements(head_size) * dtype.itemsize
        return codes + self.scale_bytes(head_size)

    def scale_bytes(self, head_size: int) -> int:
        """Return the bytes of the scales that are stored with a key or value."""
        if self.channels_per_scale:
            return head_size // self.channels_per_scale
        return 4 * self.is_measured

    def empty_scales(self, codes: Tensor) -> Tensor:
        """Return memory for the scales that are stored with keys or values.

        Args:
            codes: [..., kv_heads, elements].

        Returns:
            [..., kv_heads] float32; or [..., kv_heads, blocks] float8_e4m3fn.
        """
        blocks = self.scale_bytes(head_size_of(codes)) // self.scale_dtype.itemsize
        shape = (*codes.shape[:-1], blocks)
        scales = torch.empty(shape, dtype=self.scale_dtype, device=codes.device)
        return scales if self.channels_per_scale else scales.squeeze(-1)

    def view_scales(self, stored: Tensor) -> Tensor:
        """Return the scales in bytes of a page.

        Args:
            stored: [..., kv_heads, bytes] an element per byte.

        Returns:
            [..., kv_heads] float32; or [..., kv_heads, blocks] float8_e4m3fn.
        """
        scales = stored.view(self.scale_dtype)
        return scales if self.channels_per_scale else scales.squeeze(-1)

    def elements(self, head_size: int) -> int:
        """Return the stored elements of a key or value.

        Raises:
            ValueError: `head_size` codes do not fill the elements, or the blocks of a scale.
        """
        if head_size % self.head_size_step:
            why = (
                "channels of a scale" if self.channels_per_scale else "codes in a byte"
            )
            raise ValueError(
                f"head_size = {head_size} in the format {self.name}: expected a multiple of"
                f" {self.head_size_step}, the {why}"
            )
        return head_size // self.codes_per_element


FORMATS = {
    form.name: form
    for form in (
        CacheFormat("auto", "plain"),
        CacheFormat(
            name="fp8_e4m3",
            file="fp8",
            dtype=torch.float8_e4m3fn,
            scales=(ScaleAxes.TENSOR, ScaleAxes.HEAD),
            aliases=("fp8", "fp8_inc"),
        ),
        CacheFormat(
            name="fp8_e5m2",
            file="fp8",
            dtype=torch.float8_e5m2,
            scales=(ScaleAxes.TENSOR, ScaleAxes.HEAD),
        ),
        CacheFormat(
            name="int8_per_token_head",
            file="int8_per_token_head",
            dtype=torch.int8,
            scales=(ScaleAxes.TOKEN_HEAD,),
        ),
        CacheFormat(
            name="fp8_per_token_head",
            file="fp8_per_token_head",
            dtype=torch.float8_e4m3fn,
            scales=(ScaleAxes.TOKEN_HEAD,),
        ),
        CacheFormat(
            name="int4_per_token_head",
            file="int4_per_token_head",
            dtype=torch.uint8,
            codes_per_element=2,
            is_rotated=True,
            scales=(ScaleAxes.TOKEN_HEAD,),
        ),
        CacheFormat(
            name="int4_per_token_head_vllm",
            file="int4_per_token_head_vllm",
            dtype=torch.uint8,
            codes_per_element=2,
            is_rotated=True,
            includes_zero=False,
            scales=(ScaleAxes.TOKEN_HEAD,),
            loses="rows whose rotation has one sign, such as those of their first channel, or that"
            " float16 does not reach",
        ),
        CacheFormat(
            name="nvfp4",
            file="nvfp4",
            dtype=torch.uint8,
            codes_per_element=2,
            channels_per_scale=16,
            scale_dtype=torch.float8_e4m3fn,
            scales=(ScaleAxes.BLOCK,),
        ),
        CacheFormat(
            name="nvfp4_4over6",
            file="nvfp4_4over6",
            dtype=torch.uint8,
            codes_per_element=2,
            channels_per_scale=16,
            scale_dtype=torch.float8_e4m3fn,
            scales=(ScaleAxes.BLOCK,),
        ),
    )
}
"""All formats by name."""

PLAIN = FORMATS["auto"]
"""Elements are the keys and values themselves."""

CODE_DTYPES = tuple(
    dict.fromkeys(form.dtype for form in FORMATS.values() if form.dtype is not None)
)
"""Dtypes of caches whose elements are codes."""

CODES_PER_ELEMENT = {
    form.dtype: form.codes_per_element
    for form in FORMATS.values()
    if form.dtype is not None
}
"""Codes in an element of a cache, by its dtype: formats with the same dtype have as many."""

TENSOR_SCALE_DTYPES = tuple(
    form.dtype
    for form in FORMATS.values()
    if form.dtype is not None and ScaleAxes.TENSOR in form.scales
)
"""Dtypes of codes that one number for all may multiply. Layers of an engine, latent caches, queries
and outputs take these."""


def find_format(
    dtype: torch.dtype, scale: Tensor | float | None = None, name: str | None = None
) -> CacheFormat:
    """Return the format of a cache.

    Args:
        dtype: Dtype of its elements.
        scale: Optional. Scale of its keys. It tells formats with the same dtype apart. If None,
            the first format with that dtype is returned.
        name: Optional. Name of the format, for formats whose caches are read alike. If None, the
            first one is returned.

    Raises:
        ValueError: No format has this name, or its caches have another dtype or other scales.
    """
    if name is not None:
        named, alike = named_format(name), find_format(dtype, scale)
        if (named.dtype or dtype, named.scales) != (dtype, alike.scales):
            raise ValueError(
                f"kv_cache_dtype = {name!r}, but the cache is {dtype} with the scales of the format"
                f" {alike.name!r}: expected the name of its own format"
            )
        return named
    found = [form for form in FORMATS.values() if form.dtype == dtype]
    if len(found) > 1 and scale is not None:
        axes = _AXES_BY_COUNT.get(scale.dim() if isinstance(scale, Tensor) else 0, ())
        found = [form for form in found if {*axes} & {*form.scales}] or found
    return found[0] if found else PLAIN


_AXES_BY_COUNT = {
    0: (ScaleAxes.TENSOR, ScaleAxes.HEAD),
    1: (ScaleAxes.TENSOR, ScaleAxes.HEAD),
    3: (ScaleAxes.TOKEN_HEAD,),
    4: (ScaleAxes.BLOCK,),
}
"""The axes that scales may have, by their number."""


def named_format(name: str) -> CacheFormat:
    """Return the format with a name of vLLM's, or one of ours.

    Raises:
        ValueError: No format has this name.
    """
    for form in FORMATS.values():
        if name in (form.name, *form.aliases):
            return form
    names = [known for form in FORMATS.values() for known in (*form.aliases, form.name)]
    raise ValueError(f"kv_cache_dtype = {name!r}: expected {', '.join(names)}")


def head_size_of(cache: Tensor) -> int:
    """Return the numbers in a key or value of a cache.

    Args:
        cache: [..., elements], keys or values as they are stored.

    Example:
        64 bytes of a packed cache hold 128 codes.

        >>> head_size_of(torch.zeros(3, 16, 8, 64, dtype=torch.uint8))
        128
    """
    return cache.shape[-1] * CODES_PER_ELEMENT.get(cache.dtype, 1)


CACHE_DTYPE_NAMES = {
    name: form.dtype
    for form in FORMATS.values()
    if form.dtype is not None and ScaleAxes.TENSOR in form.scales
    for name in (*form.aliases, form.name)
}
"""vLLM's names of quantized caches whose scales a layer has."""


def cache_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache by vLLM's name.

    Args:
        name: "auto" for the model's dtype, "fp8" or the name of a format.
        model_dtype: dtype of the keys and values.

    Raises:
        ValueError: no format has this name.
    """
    return named_format(name).dtype or model_dtype


def split_layer_cache(
    kv_cache: Tensor, head_size: int, kv_cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Return the key and value views of one layer's cache, which share its memory.

    Args:
        kv_cache: [num_blocks, 2, block_size, kv_heads, head_size], as in vLLM 0.25; or
            [num_blocks, kv_heads, block_size, elements], where a state has its key first and its
            value after it, as in 0.26 and later. Any strides.
        head_size: elements of a key.
        kv_cache_dtype: vLLM's name of the cache's dtype. vLLM allocates FP8 caches as uint8.

    Returns:
        Views [num_blocks, block_size, kv_heads, head_size] and [..., head_size_v].

    Raises:
        ValueError: the cache has neither of the two shapes.

    Example:
        [100, 8, 16, 256] with head_size 128: two views [100, 16, 8, 128]; the values of a state
        start 128 elements after its keys.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        key, value = kv_cache.unbind(1)
    elif kv_cache.dim() == 4 and kv_cache.shape[3] > head_size:
        states = kv_cache.transpose(1, 2)
        key, value = states[..., :head_size], states[..., head_size:]
    else:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [num_blocks, 2, block_size,"
            f" kv_heads, {head_size}] or [num_blocks, kv_heads, block_size, elements] with more"
            f" than {head_size} elements"
        )
    fp8 = CACHE_DTYPE_NAMES.get(kv_cache_dtype)
    if fp8 is not None and kv_cache.dtype != fp8:
        key, value = key.view(fp8), value.view(fp8)
    return key, value


def split_page(
    page: Tensor, head_size: int, value_head_size: int, form: CacheFormat
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of the keys, the values and their scales in pages that hold all of them.

    The bytes of one slot and head are, in this order, the codes of its key, the key's scale, the
    codes of its value and the value's scale.

    Args:
        page: [num_blocks, block_size, kv_heads, bytes] uint8 or int8, with any strides but 1 for
            the last axis. A page that is stored head by head is a transposed view.
        head_size, value_head_size: Elements of a key and of a value.
        form: A format whose scales are measured.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them.

    Raises:
        ValueError: the page has another dtype, other axes or another number of bytes per slot and
            head, the scales of the format are not measured, a size is below 1, a scale does not
            begin at a multiple of its own bytes, or the codes of a key or value do not fill its
            bytes.
    """
    if form.dtype is None or not form.is_measured:
        names = ", ".join(other.name for other in FORMATS.values() if other.is_measured)
        raise ValueError(
            f"form is {form.name}: expected a format whose scales the write measures, one of"
            f" {names}"
        )
    check_positive(head_size=head_size, value_head_size=value_head_size)
    sizes = [
        width
        for size in (head_size, value_head_size)
        for width in (
            form.elements(size) * form.dtype.itemsize,
            form.scale_bytes(size),
        )
    ]
    bytes_of_page = torch.uint8, torch.int8
    if (
        page.dim() != 4
        or page.dtype not in bytes_of_page
        or page.shape[3] != sum(sizes)
    ):
        raise ValueError(
            f"page is {page.dtype} and has shape {list(page.shape)}: expected torch.uint8 or"
            f" torch.int8 [num_blocks, block_size, kv_heads, {sum(sizes)}]"
        )
    starts = [*page.stride()[:-1], page.storage_offset(), sizes[0], sizes[2]]
    unit = form.scale_dtype.itemsize
    if page.stride(-1) != 1 or any(start % unit for start in starts):
        raise ValueError(
            f"head_size = {head_size} and value_head_size = {value_head_size} in a page with"
            f" strides {list(page.stride())}: expected bytes without gaps, and scales at multiples"
            f" of {unit} bytes; keep them in tensors of their own"
        )
    key, k_scale, value, v_scale = torch.split(page, sizes, dim=-1)
    return (
        key.view(form.dtype),
        value.view(form.dtype),
        form.view_scales(k_scale),
        form.view_scales(v_scale),
    )


def import_format_files(package: str, folder: Iterable[str]) -> dict[str, ModuleType]:
    """Return the modules of a package by the name of their file.

    Args:
        package: Name of the package, its `__name__`.
        folder: Its `__path__`.

    Raises:
        ImportError: A format has no file, or a file belongs to no format.
    """
    wanted = sorted({form.file for form in FORMATS.values()})
    found = import_files(package, folder, wanted, "a cache format: expected its name")
    if missing := [name for name in wanted if name not in found]:
        raise ImportError(
            f"{package}.{missing[0]}: expected a file for each cache format"
        )
    return found
