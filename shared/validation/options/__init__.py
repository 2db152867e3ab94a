"""Options of attention: one file per option, with its validation and its generator.

An option is a field of `AttentionOptions`. To add one, write the field and its file here, and list
it in OPTIONS; the laws then draw it together with all others.
"""

from . import (
    alibi,
    attention_chunk,
    batch_invariant,
    causal,
    position_bias,
    query_ranges,
    sinks,
    sliding_window,
    soft_cap,
    tree,
)
from .option import Drawing as Drawing
from .option import Option as Option
from .option import OptionCall as OptionCall

OPTIONS = {
    each.OPTION.name: each.OPTION
    for each in (
        causal,
        sliding_window,
        attention_chunk,
        soft_cap,
        alibi,
        position_bias,
        sinks,
        tree,
        batch_invariant,
        query_ranges,
    )
}
"""Options by name, in the order in which they are validated and drawn."""
