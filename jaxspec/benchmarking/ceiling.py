"""The rate that memory-bound work is held against: a large copy on the device, in the same run."""

import time

import jax
import jax.numpy as jnp


def copy_ceiling(num_bytes: int = 1 << 31) -> float:
    """Bytes per second, read plus written, of device copies of `num_bytes` each; the best of five tries.

    Copies are queued back to back and waited for once; two queue lengths are subtracted, so that dispatch and waiting
    do not count.
    """
    # jitted, because its parts would be programs and arrays of their own
    source = jax.jit(lambda: jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32))()
    copy = jax.jit(jnp.copy)

    def seconds(count: int) -> float:
        started = time.perf_counter()
        copies = [copy(source) for _ in range(count)]
        jax.block_until_ready(copies)
        return time.perf_counter() - started

    seconds(10)
    return max(8 * 2 * source.nbytes / (seconds(10) - seconds(2)) for _ in range(5))
