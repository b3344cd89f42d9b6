"""Damaged headers, and the bounds within which they must be refused."""

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

MEMORY_LIMIT = 16 << 20
ROUNDS = 1000


@contextmanager
def bounded() -> Iterator[None]:
    """Fails on more than 16 MiB or 5 seconds: neither may depend on what a header claims."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
        assert time.process_time() - started < 5
    finally:
        tracemalloc.stop()


def mutated(data: bytes, header: int, rng: np.random.Generator) -> bytes:
    """`data` with its first `header` bytes damaged in one of several ways, or cut."""
    changed = bytearray(data)
    kind = rng.integers(6)
    at = int(rng.integers(header))
    if kind == 0:
        return data[: int(rng.integers(len(data)))]
    if kind == 1:  # one bit
        changed[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:  # one byte
        changed[at] = int(rng.integers(256))
    elif kind == 3:  # a length or count of any size
        at = min(at, header - 8)
        changed[at : at + 8] = struct.pack("<Q", int(rng.integers(2**63)) >> int(rng.integers(63)))
    elif kind == 4:  # a digit, so that JSON stays JSON
        digits = [i for i in range(header) if 48 <= changed[i] <= 57] or [at]
        changed[int(rng.choice(digits))] = 48 + int(rng.integers(10))
    else:  # a piece twice
        end = min(header, at + int(rng.integers(1, 16)))
        changed[at:at] = changed[at:end]
    return bytes(changed)
