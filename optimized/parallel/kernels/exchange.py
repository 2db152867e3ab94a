"""Exchange of tensors among the GPUs of one host, by stores into each other's memory.

Every rank has a buffer that all ranks can address: signals, then two halves with one entry per
rank. A program copies its part of the sent words into the buffer of each rank, sets a signal there,
waits for the signals of all ranks, and copies what they stored to the output. Programs of the same
index on all ranks meet, and no others.

Calls alternate between the halves. A rank writes a half again two calls later. By then it has seen
the signal of the call in between, which the receiver sets after it has read the half. The number of
a call is kept on the device, so a captured launch may be replayed. It starts again after 2**30
calls, so only differences are compared.
"""

import triton
import triton.language as tl

LAST_CALL = tl.constexpr(2**30 - 1)


@triton.jit
def is_earlier(seen, call):
    """Return whether a signal is that of an earlier call. Ranks differ by one call at most."""
    return ((seen - call) & LAST_CALL) > LAST_CALL // 2


@triton.jit(do_not_specialize=["rank", "words", "capacity", "tries"])
def exchange_kernel(
    sent,
    received,
    buffers,
    calls,
    late,
    rank,
    words,
    capacity,
    tries,
    RANKS: tl.constexpr,
    TO_ALL: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send words to each rank, and store what each has sent.

    Args:
        sent: [words] int32 if TO_ALL, else [RANKS, words], entry r for rank r.
        received: [RANKS, words] int32. If ADDS, [words] float32, the sum in the order of the ranks.
        buffers: [RANKS] int64 addresses of the ranks' buffers.
        calls: [programs] int32 calls so far.
        late: [RANKS] int32, set to 1 for a rank whose signal does not arrive.
        words: elements of an entry, at most `capacity`.
        tries: how often a signal is read before the rank counts as late.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = (tl.load(calls + program) + 1) & LAST_CALL
    first_entry = programs * RANKS + (call & 1) * RANKS * capacity
    in_block = tl.arange(0, BLOCK)
    own = tl.load(buffers + rank).to(tl.pointer_type(tl.int32))
    # step: store this rank's words in the buffer of each other rank
    for peer in tl.static_range(RANKS):
        if peer != rank:
            buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.int32))
            source = sent if TO_ALL else sent + peer * words
            entry = buffer + first_entry + rank * capacity
            for first in range(program * BLOCK, words, programs * BLOCK):
                word = first + in_block
                value = tl.load(source + word, mask=word < words)
                tl.store(entry + word, value, mask=word < words)
    # all threads have stored before one of them signals
    tl.debug_barrier()
    # step: signal each other rank
    for peer in tl.static_range(RANKS):
        if peer != rank:
            buffer = tl.load(buffers + peer).to(tl.pointer_type(tl.int32))
            signal = buffer + program * RANKS + rank
            tl.atomic_xchg(signal, call, sem="release", scope="sys")
    # step: wait for the signal of each other rank
    for peer in tl.static_range(RANKS):
        if peer != rank:
            signal = own + program * RANKS + peer
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
            tried = 0
            while is_earlier(seen, call) & (tried < tries):
                seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
                tried += 1
            if is_earlier(seen, call):
                tl.store(late + peer, 1)
    tl.debug_barrier()
    # step: copy what has arrived
    for first in range(program * BLOCK, words, programs * BLOCK):
        word = first + in_block
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == rank:
                source = sent if TO_ALL else sent + peer * words
                value = tl.load(source + word, mask=word < words)
            else:
                entry = own + first_entry + peer * capacity
                # another GPU stored it: not loaded from this multiprocessor's L1 cache
                value = tl.load(entry + word, mask=word < words, cache_modifier=".cg")
            if ADDS:
                total += value.to(tl.float32, bitcast=True)
            else:
                tl.store(received + peer * words + word, value, mask=word < words)
        if ADDS:
            tl.store(received + word, total, mask=word < words)
    tl.store(calls + program, call)
