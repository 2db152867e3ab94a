"""Exchange of tensors among the GPUs of one host, by stores into each other's memory.

Every rank has memory that all ranks can address. A word is stored there together with the number of
the call, as one element of 64 bits. So a rank that reads a word knows whether it has arrived, and
neither a signal nor a fence is needed: that is NCCL's protocol for low latency.

The memory has two halves with one entry per rank, and calls alternate between them. A rank writes a
half again two calls later. By then it has received the words of the call in between, which the
receiver sends after it has read the half. The number of a call is kept on the device, so a captured
launch may be replayed. It starts again after 2**30 calls.
"""

import triton
import triton.language as tl

LAST_CALL = tl.constexpr(2**30 - 1)


@triton.jit
def next_call(calls):
    """Return the number of the next call, given a pointer to that of the last one."""
    return (tl.load(calls) + 1) & LAST_CALL


@triton.jit
def find_memory(buffers, rank, call, half_words):
    """Return the pointer to the half of a rank's memory that a call uses.

    Args:
        buffers: [ranks] int64 addresses of the ranks' memory.
        half_words: words of a half.
    """
    memory = tl.load(buffers + rank).to(tl.pointer_type(tl.int64))
    return memory + (call & 1).to(tl.int64) * half_words


@triton.jit
def send(place, words, call, is_word):
    """Store words with the number of the call.

    Args:
        place, words, is_word: pointers into the memory of another rank, int32 words, and which of
            them exist; of any one shape.
    """
    # memory that was never written is 0, which is the number of no call
    tag = (call + 1).to(tl.int64) << 32
    tagged = (words.to(tl.int64) & 0xFFFFFFFF) | tag
    tl.store(place, tagged, mask=is_word, cache_modifier=".wt")


@triton.jit
def receive(place, call, is_word, late, tries):
    """Return words that another rank sends, and how many tries are left.

    Args:
        place, is_word: pointers into this rank's memory, and which of the words exist.
        late: pointer to a number, which is set to 1 if they do not arrive.
        tries: how often the words are read, at most.
    """
    tagged = tl.load(place, mask=is_word, other=0, volatile=True)
    missing = tl.max((is_word & ((tagged >> 32) != call + 1)).to(tl.int32))
    while (missing > 0) & (tries > 0):
        tagged = tl.load(place, mask=is_word, other=0, volatile=True)
        missing = tl.max((is_word & ((tagged >> 32) != call + 1)).to(tl.int32))
        tries -= 1
    if missing > 0:
        tl.store(late, 1)
    return tagged.to(tl.int32), tries


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

    Programs of the same index on all ranks exchange, and no others.

    Args:
        sent: [words] int32 if TO_ALL, else [RANKS, words], entry r for rank r.
        received: [RANKS, words] int32. If ADDS, [words] float32, the sum in the order of the ranks.
        buffers: [RANKS] int64 addresses of the ranks' memory.
        calls: [programs] int32 calls so far.
        late: [RANKS] int32, set to 1 for a rank whose words do not arrive.
        words: elements of an entry, at most `capacity`.
        tries: how often missing words are read before the rank counts as late.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = next_call(calls + program)
    in_block = tl.arange(0, BLOCK)
    # store this rank's words in the memory of each other rank
    for peer in tl.static_range(RANKS):
        if peer != rank:
            entry = find_memory(buffers, peer, call, RANKS * capacity) + rank * capacity
            source = sent if TO_ALL else sent + peer * words
            for first in range(program * BLOCK, words, programs * BLOCK):
                word = first + in_block
                value = tl.load(source + word, mask=word < words)
                send(entry + word, value, call, word < words)
    # copy what arrives
    own = find_memory(buffers, rank, call, RANKS * capacity)
    for first in range(program * BLOCK, words, programs * BLOCK):
        word = first + in_block
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == rank:
                source = sent if TO_ALL else sent + peer * words
                value = tl.load(source + word, mask=word < words)
            else:
                entry = own + peer * capacity
                value, tries = receive(
                    entry + word, call, word < words, late + peer, tries
                )
            if ADDS:
                total += value.to(tl.float32, bitcast=True)
            else:
                tl.store(received + peer * words + word, value, mask=word < words)
        if ADDS:
            tl.store(received + word, total, mask=word < words)
    tl.store(calls + program, call)
