"""Usual mistakes of the puzzles, as changes of the solutions, with the hints that they must get.

Each entry is the name of a hint, and pairs of a text of the solution and what replaces it.
"""

Change = tuple[str, str]
Mistake = tuple[str, tuple[Change, ...]]

NAN_ROWS = "torch.where(m_new == -torch.inf, 0.0, m_new)"
LOOP = "    for scores, values in tiles:\n"

MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "slot_mapping": (
        (
            "no_table",
            (("block_table[position // block_size]", "position // block_size"),),
        ),
        (
            "block_edge",
            (("[position // block_size]", "[(position - 1) // block_size]"),),
        ),
        (
            "next_block",
            (("[position // block_size]", "[(position + 1) // block_size]"),),
        ),
        ("no_offset", ((" + position % block_size", ""),)),
        ("block_not_slot", ((" * block_size + position % block_size", ""),)),
        ("unit", (("block_id * block_size", "block_id"),)),
        ("context", (("range(context_len, seq_len)", "range(seq_len - context_len)"),)),
        ("only_new", (("range(context_len, seq_len)", "range(seq_len)"),)),
        ("padding_written", (("position < start_idx", "False"),)),
        ("start_edge", (("position < start_idx", "position <= start_idx"),)),
        (
            "start_counts_positions",
            (("position < start_idx", "position - context_len < start_idx"),),
        ),
        ("dtype", (("dtype=torch.int64", "dtype=torch.int32"),)),
        (
            "law",
            (
                (
                    "return torch.tensor(slots, dtype=torch.int64)",
                    "return torch.tensor([(s + 2**31) % 2**32 - 2**31 for s in slots],"
                    " dtype=torch.int64)",
                ),
            ),
        ),
    ),
    "append_blocks": (
        (
            "strides",
            (
                (
                    "block_table[row, counts[row]]",
                    "block_table.view(-1)[row * block_table.shape[1] + counts[row]]",
                ),
            ),
        ),
        (
            "strides",
            (
                (
                    "block_table[row, counts[row]]",
                    "block_table.reshape(-1)[row * block_table.shape[1] + counts[row]]",
                ),
            ),
        ),
        (
            "overwrite",
            (
                ("for block_id in blocks", "for entry, block_id in enumerate(blocks)"),
                ("[row, counts[row]]", "[row, entry]"),
            ),
        ),
        ("block_edge_late", (("[row, counts[row]]", "[row, counts[row] + 1]"),)),
        ("block_edge_early", (("[row, counts[row]]", "[row, counts[row] - 1]"),)),
        (
            "row_length",
            (
                ("for block_id in blocks", "for entry, block_id in enumerate(blocks)"),
                ("[row, counts[row]]", "[row, num_blocks[0] + entry]"),
            ),
        ),
        ("one_entry", (("[row, counts[row]]", "[row, num_blocks[row]]"),)),
        ("old_counts", (("return counts", "return num_blocks.clone()"),)),
        ("only_new", (("return counts", "return counts - num_blocks"),)),
        (
            "in_place",
            (
                (
                    "    counts = num_blocks.clone()\n",
                    "    counts = num_blocks.clone()\n    block_table = block_table.clone()\n",
                ),
            ),
        ),
        ("changed", (("num_blocks.clone()", "num_blocks"),)),
        (
            "changed",
            (
                (
                    "            counts[row] += 1\n",
                    "            counts[row] += 1\n            held = num_blocks[row]\n"
                    "            held += 1\n",
                ),
            ),
        ),
        ("count", (("    return counts", "    counts"),)),
    ),
    "gather": (
        (
            "strides",
            (
                (
                    "value_cache[block_ids, offsets]",
                    "value_cache.view(-1, *value_cache.shape[2:])"
                    "[block_ids * block_size + offsets]",
                ),
            ),
        ),
        (
            "no_table",
            (
                (
                    "block_row[positions // block_size].long()",
                    "positions // block_size",
                ),
            ),
        ),
        (
            "padding_read",
            (
                (
                    "torch.arange(seq_len)",
                    "torch.arange(-(-seq_len // block_size) * block_size)",
                ),
            ),
        ),
        (
            "block_edge",
            (
                (
                    "torch.arange(seq_len)",
                    "torch.arange(seq_len // block_size * block_size)",
                ),
            ),
        ),
        (
            "unused_entry",
            (
                (
                    "    return key_cache[block_ids, offsets], value_cache[block_ids, offsets]",
                    "    rows = key_cache[block_row], value_cache[block_row]\n"
                    "    key, value = (row.flatten(0, 1)[:seq_len] for row in rows)\n"
                    "    return key, value",
                ),
            ),
        ),
        ("order", (("block_row[positions", "block_row.sort().values[positions"),)),
        (
            "entry_per_token",
            (("block_row[positions // block_size]", "block_row[positions]"),),
        ),
        ("values", (("value_cache[block_ids", "key_cache[block_ids"),)),
        (
            "shape",
            (
                (
                    "positions // block_size].long()",
                    "positions // block_size].long()[:, None]",
                ),
            ),
        ),
    ),
    "causal_mask": (
        ("itself", (("key <= query", "key < query"),)),
        ("context", ((" + context", ""),)),
        ("future", (("key <= query", "key <= query + 1"),)),
        ("inverted", (("key <= query", "key > query"),)),
        ("reversed", (("key <= query", "key >= query"),)),
        ("no_mask", (("key <= query", "key <= query + kv_len"),)),
        ("context_only", (("key <= query", "(key < context) | (key == query)"),)),
        ("dtype", (("key <= query", "(key <= query).float()"),)),
        ("shape", (("return key <= query", "return (key <= query).T"),)),
    ),
    "sliding_window": (
        ("window_too_wide", (("distance < window", "distance <= window"),)),
        ("window_too_narrow", (("distance < window", "distance < window - 1"),)),
        ("context", ((" + context", ""),)),
        (
            "context_in_window",
            (("distance < window", "distance - context < window"),),
        ),
        (
            "future",
            (("(distance >= 0) & (distance < window)", "distance.abs() < window"),),
        ),
        ("no_causal", (("(distance >= 0) & ", ""),)),
        ("no_window", ((" & (distance < window)", ""),)),
        (
            "inverted",
            (
                (
                    "return (distance >= 0) & (distance < window)",
                    "return ~((distance >= 0) & (distance < window))",
                ),
            ),
        ),
    ),
    "online_softmax": (
        ("strides", (("p @ values", "p @ values.view(-1).view(-1, head_size)"),)),
        ("rescale_acc", (("acc * alpha[:, None]", "acc"),)),
        ("rescale_sum", (("l_i * alpha", "l_i"),)),
        ("rescale", (("alpha = torch.exp(m_i - base)", "alpha = torch.ones(rows)"),)),
        ("divide", (("0.0, acc / l_i[:, None]", "0.0, acc"),)),
        ("minus_inf", ((NAN_ROWS, "m_new"),)),
        (
            "empty_row",
            (
                (
                    "torch.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])",
                    "acc / l_i[:, None]",
                ),
            ),
        ),
        (
            "empty_lse",
            (
                (
                    "lse = m_i + torch.log(l_i)",
                    "lse = m_i - torch.log(1 / l_i) - m_i + m_i",
                ),
            ),
        ),
        ("lse_base", (("torch.log(l_i)", "torch.log2(l_i)"),)),
        (
            "base_2",
            (
                ("p = torch.exp(", "p = torch.exp2("),
                ("alpha = torch.exp(", "alpha = torch.exp2("),
                ("torch.log(", "torch.log2("),
            ),
        ),
        ("lse_maximum", (("lse = m_i + ", "lse = "),)),
        (
            "overflow",
            (
                (
                    "m_new = torch.maximum(m_i, scores.amax(1))",
                    "m_new = torch.zeros(rows)",
                ),
                ("alpha = torch.exp(m_i - base)", "alpha = 1.0"),
                ("acc * alpha[:, None]", "acc"),
            ),
        ),
        (
            "last_tile",
            (
                (
                    LOOP,
                    f"{LOOP}        m_i = torch.full((rows,), -torch.inf)\n"
                    "        l_i, acc = torch.zeros(rows), torch.zeros(rows, head_size)\n",
                ),
            ),
        ),
    ),
    "gqa": (
        (
            "strides",
            (
                (
                    "key.repeat_interleave(group, 1)",
                    "key.view(len(key), -1).view(key.shape).repeat_interleave(group, 1)",
                ),
            ),
        ),
        (
            "head_order",
            (
                ("key.repeat_interleave(group, 1)", "key.repeat(1, group, 1)"),
                ("value.repeat_interleave(group, 1)", "value.repeat(1, group, 1)"),
            ),
        ),
        (
            "one_kv_head",
            (
                (
                    "key.repeat_interleave(group, 1)",
                    "key[:, :1].expand(-1, query.shape[1], -1)",
                ),
                (
                    "value.repeat_interleave(group, 1)",
                    "value[:, :1].expand(-1, query.shape[1], -1)",
                ),
            ),
        ),
        ("scale_divided", (("* scale", "/ scale"),)),
        ("scale_missing", ((" * scale", ""),)),
        ("scale_default", (("* scale", "* query.shape[2] ** -0.5"),)),
        (
            "scale_late",
            ((" * scale", ""), ("weights, value)", "weights, value) * scale")),
        ),
        ("softmax_queries", (("softmax(2)", "softmax(1)"),)),
        ("softmax_heads", (("softmax(2)", "softmax(0)"),)),
        ("no_softmax", ((".softmax(2)", ""),)),
    ),
    "combine_splits": (
        (
            "strides",
            (
                (
                    "lses.amax(0)",
                    "lses.view(len(lses), -1).amax(0).view(lses.shape[1:])",
                ),
            ),
        ),
        ("mean", (("return output, lse", "return outputs.mean(0), lse"),)),
        (
            "logarithm",
            (
                (
                    "return output, lse",
                    "return ((lses / lses.sum(0))[..., None] * outputs).sum(0), lse",
                ),
            ),
        ),
        ("divide", (("summed / total[..., None]", "summed"),)),
        (
            "lse_base",
            (
                ("torch.exp(", "torch.exp2("),
                ("torch.log(", "torch.log2("),
            ),
        ),
        (
            "lse_base",
            (
                ("torch.exp(lses - base)", "torch.exp2(lses - base)"),
                ("base + torch.log(total)", "lses.logsumexp(0)"),
            ),
        ),
        (
            "nan_times_zero",
            (("outputs = torch.where(weights[..., None] > 0, outputs, 0.0)", ""),),
        ),
        (
            "empty_row",
            (
                (
                    "torch.where(total[..., None] > 0, summed / total[..., None], 0.0)",
                    "summed / total[..., None]",
                ),
            ),
        ),
        (
            "empty_row",
            (
                ("torch.where(largest == -torch.inf, 0.0, largest)", "largest"),
                (
                    "torch.where(total[..., None] > 0, summed / total[..., None], 0.0)",
                    "summed / total[..., None]",
                ),
            ),
        ),
        (
            "empty_lse",
            (("base + torch.log(total)", "largest + torch.log(total / (total > 0))"),),
        ),
        ("lse_sum", (("base + torch.log(total)", "lses.sum(0)"),)),
        ("lse_largest", (("base + torch.log(total)", "largest"),)),
        ("lse_maximum", (("base + torch.log(total)", "torch.log(total)"),)),
        (
            "overflow",
            (
                (
                    "torch.where(largest == -torch.inf, 0.0, largest)",
                    "torch.zeros_like(largest)",
                ),
            ),
        ),
    ),
    "cross_attention_lengths": (
        (
            "no_zero",
            (("return query_start_loc,", "return query_start_loc[1:],"),),
        ),
        (
            "starts_of_context",
            (("query_lens.cumsum(0)", "(query_lens + computed_lens).cumsum(0)"),),
        ),
        ("decoder_keys", (("encoder_lens.clone()", "query_lens + computed_lens"),)),
        (
            "decoder_keys",
            (
                (
                    "kv_lens, new_kv_lens, num_blocks\n",
                    "query_lens + computed_lens, new_kv_lens, num_blocks\n",
                ),
            ),
        ),
        ("growing_keys", (("encoder_lens.clone()", "encoder_lens + computed_lens"),)),
        (
            "growing_keys",
            (
                (
                    "kv_lens, new_kv_lens, num_blocks\n",
                    "kv_lens + computed_lens, new_kv_lens, num_blocks\n",
                ),
            ),
        ),
        (
            "written_again",
            (("torch.where(computed_lens == 0, encoder_lens, 0)", "encoder_lens"),),
        ),
        ("prompt_of_one", (("computed_lens == 0", "query_lens > 1"),)),
        (
            "query_keys_written",
            (("torch.where(computed_lens == 0, encoder_lens, 0)", "query_lens"),),
        ),
        (
            "block_edge",
            (("(kv_lens + block_size - 1) // block_size", "kv_lens // block_size"),),
        ),
        (
            "block_edge_full",
            (
                (
                    "(kv_lens + block_size - 1) // block_size",
                    "kv_lens // block_size + 1",
                ),
            ),
        ),
        ("dtype", (("query_start_loc, kv_lens", "query_start_loc.long(), kv_lens"),)),
    ),
    "cascade": (
        (
            "strides",
            (
                (
                    "query, suffix_key)",
                    "query, suffix_key.view(-1).view(suffix_key.shape))",
                ),
            ),
        ),
        (
            "mean",
            (
                (
                    "return prefix_share * prefix + suffix_share * suffix",
                    "return (prefix + suffix) / 2",
                ),
            ),
        ),
        (
            "key_counts",
            (
                (
                    "return prefix_share * prefix + suffix_share * suffix",
                    "lens = suffix_lens[:, None, None]\n"
                    "    share = lens / (lens + len(prefix_key))\n"
                    "    return (1 - share) * prefix + share * suffix",
                ),
            ),
        ),
        (
            "padding_read",
            (
                (
                    "suffix_value.masked_fill(is_padding[..., None, None], 0.0)",
                    "suffix_value",
                ),
                ("scores.masked_fill(is_padding[:, None], -torch.inf)", "scores"),
            ),
        ),
        (
            "nan_times_zero",
            (
                (
                    "suffix_value.masked_fill(is_padding[..., None, None], 0.0)",
                    "suffix_value",
                ),
            ),
        ),
        (
            "empty_suffix",
            (("total.clamp(min=1.0)", "total"),),
        ),
        (
            "empty_suffix",
            (("largest.masked_fill(largest == -torch.inf, 0.0)", "largest"),),
        ),
        (
            "empty_weight",
            (
                (
                    "lses = torch.stack(",
                    "suffix_lse = torch.where(total > 0, suffix_lse, 0.0)\n"
                    "    lses = torch.stack(",
                ),
            ),
        ),
        (
            "added",
            (
                (
                    "return prefix_share * prefix + suffix_share * suffix",
                    "return prefix + suffix",
                ),
            ),
        ),
        (
            "lse_sum",
            (("* suffix, lse", "* suffix, prefix_lse + suffix_lse"),),
        ),
        (
            "no_prefix",
            (
                (
                    "return prefix_share * prefix + suffix_share * suffix, lse",
                    "return suffix, suffix_lse",
                ),
            ),
        ),
        (
            "no_suffix",
            (
                (
                    "return prefix_share * prefix + suffix_share * suffix, lse",
                    "return prefix, prefix_lse",
                ),
            ),
        ),
        (
            "lse_base",
            (
                ("lses.softmax(0)", "(lses * 0.6931472).softmax(0)"),
                (
                    "lses.logsumexp(0)",
                    "(lses * 0.6931472).logsumexp(0) / 0.6931472",
                ),
            ),
        ),
        (
            "exchanged",
            (
                (
                    "prefix_share * prefix + suffix_share * suffix",
                    "suffix_share * prefix + prefix_share * suffix",
                ),
            ),
        ),
        ("scale_divided", (("* scale", "/ scale"),)),
        ("scale_missing", ((" * scale", ""),)),
        ("shape", (("* suffix, lse", "* suffix, lse.T"),)),
    ),
    "fp8_write": (
        (
            "strides",
            (
                (
                    "key_cache[slot // block_size, slot % block_size]",
                    "key_cache.view(-1, *key_cache.shape[2:])[slot]",
                ),
            ),
        ),
        (
            "strides",
            (
                (
                    "key_cache[slot // block_size, slot % block_size]",
                    "key_cache.reshape(-1, *key_cache.shape[2:])[slot]",
                ),
            ),
        ),
        ("scale_multiplied", (("/ scale[:, None]", "* scale[:, None]"),)),
        ("scale_missing", ((" / scale[:, None]", ""),)),
        ("saturate", ((".clamp(-largest, largest)", ""),)),
        (
            "saturate_order",
            (
                (".clamp(-largest, largest)", ""),
                ("key[token].float()", "key[token].float().clamp(-largest, largest)"),
            ),
        ),
        ("other_largest", (("torch.finfo(key_cache.dtype).max", "448"),)),
        ("rounding", (("quotient.clamp", "quotient.trunc().clamp"),)),
        ("padding_written", (("if slot < 0:", "if False:"),)),
        (
            "padding_tokens",
            (
                ("enumerate(slot_mapping.tolist())", "enumerate(range(len(key)))"),
                (
                    "        if slot < 0:",
                    "        slot = int(slot_mapping[token])\n        if slot < 0:",
                ),
            ),
        ),
        ("scale_axis", (("scale[:, None]", "scale"),)),
        ("one_scale", (("scale[:, None]", "scale[0]"),)),
        (
            "block_and_offset",
            (
                (
                    "[slot // block_size, slot % block_size]",
                    "[slot % block_size, slot // block_size]",
                ),
            ),
        ),
        (
            "law",
            (
                (
                    "key[token].float() / scale[:, None]",
                    "(key[token] / scale[:, None].to(key.dtype)).float()",
                ),
            ),
        ),
        ("count", (("    for token", "    return key_cache\n    for token"),)),
    ),
    "decode": (
        ("not_written", (("tl.store(output + row, acc / l_i)", "acc / l_i"),)),
        (
            "padding_read",
            (("block * BLOCK_SIZE + offsets < seq_len", "offsets < BLOCK_SIZE"),),
        ),
        (
            "nan_times_zero",
            (
                (
                    "tl.load(value_cache + place, mask=is_visible[:, None], other=0.0)",
                    "tl.load(value_cache + place)",
                ),
            ),
        ),
        ("block_edge", (("tl.cdiv(seq_len, BLOCK_SIZE)", "seq_len // BLOCK_SIZE"),)),
        (
            "last_token",
            (
                ("offsets < seq_len\n", "offsets < seq_len - 1\n"),
                (
                    "m_new = tl.maximum",
                    "qk = tl.where(is_visible, qk, -1e30)\n        m_new = tl.maximum",
                ),
                (
                    "p = tl.exp(qk - m_new)",
                    "p = tl.where(is_visible, tl.exp(qk - m_new), 0.0)",
                ),
            ),
        ),
        (
            "no_table",
            (
                (
                    "tl.load(block_table + req * max_blocks + block)",
                    "(req * 0 + block)",
                ),
                ("block).to(tl.int64)", "block)"),
            ),
        ),
        (
            "first_row",
            (("block_table + req * max_blocks + block", "block_table + block"),),
        ),
        ("head_order", (("kv_head = head // group", "kv_head = head % kv_heads"),)),
        ("scale_divided", ((" * scale", " / scale"),)),
        ("scale_missing", ((" * scale", ""),)),
        ("rescale_acc", (("acc * alpha", "acc"),)),
        ("rescale_sum", (("l_i * alpha", "l_i"),)),
        ("rescale", (("alpha = tl.exp(m_i - m_new)", "alpha = 1.0"),)),
    ),
}
