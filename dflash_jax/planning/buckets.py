"""Shapes that programs are compiled for: row counts of rounds, chunk lengths of prefill.

Here because the plan must know the widest pass before anything is compiled.
"""

CHUNKS = (32, 128, 512, 2048)


def row_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Row counts that rounds are compiled for: 1, 2, 4, … and the whole batch."""
    sizes = [1 << i for i in range(max_batch_size.bit_length()) if 1 << i < max_batch_size]
    return (*sizes, max_batch_size)


def chunk_buckets(max_seq_len: int, max_num_tokens: int) -> tuple[int, ...]:
    """Chunk lengths that prefill is compiled for; the longest bounds a chunk."""
    longest = min(max_seq_len, max_num_tokens, CHUNKS[-1])
    return (*(size for size in CHUNKS if size < longest), longest)
