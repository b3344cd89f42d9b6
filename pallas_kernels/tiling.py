"""How the work of a call is cut into tiles and programs: pure functions shared by the ops' block choices."""

from __future__ import annotations

# Of one H200. Another card changes which cut is fastest, never what is computed.
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024
# What a program needs besides its tiles: layout conversions, reductions and a kilobyte of the system's own.
OTHER_SHARED_MEMORY = 12 * 1024

# (query, head) pairs of one kv head that a warp group multiplies at once; attention over more takes larger programs.
QUERY_TILE = 64


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int, at_least: int = 1) -> int:
    """Returns the smallest power of two that is at least `n` and `at_least`."""
    return max(at_least, 1 << (n - 1).bit_length())


def attention_tile(rows: int, width: int, itemsize: int) -> tuple[int, int, int, int]:
    """Returns how an attention kernel cuts its work: rows of a tile, cache rows per step, warps and pipeline stages.

    Args:
      rows: (query, head) pairs of one kv head, a power of two.
      width: head dim, a power of two.
      itemsize: bytes of an element of the cache.
    """
    if itemsize == 4:
        # IEEE float32 products have no tensor-core path; both operands then sit in registers, and larger tiles spill.
        return (min(rows, 32), 32, 4, 2) if width <= 64 else (16, 16, 4 if width <= 128 else 8, 2)
    if width > 128:
        # Two warp groups share the columns of 64 rows: the output of more does not fit the registers.
        return min(rows, QUERY_TILE), 64, 8 if rows >= 32 else 4, 2
    # Two warp groups, or one.
    return (rows, 64, 4, 3) if rows <= QUERY_TILE else (2 * QUERY_TILE, 64, 8, 3)


def resident_programs(tile_bytes: int, most: int = 2) -> int:
    """Returns how many programs run at once, each with `tile_bytes` of pipelined tiles in shared memory."""
    return MULTIPROCESSORS * max(1, min(most, SHARED_MEMORY // (tile_bytes + OTHER_SHARED_MEMORY)))


def choose_splits(
    programs: int, steps: int, resident: int, startup_steps: int = 4, merge_steps: float = 5.0, least_steps: int = 2
) -> int:
    """Returns how many programs should share the `steps` of each of `programs` equal loops.

    Models the time, in steps, as waves of `resident` programs, each as long as its share of the steps plus a fixed
    start, plus a merge of `merge_steps` that grows slowly with the number of splits. The last wave is then nearly full:
    a few programs over one wave would cost as much as a second wave. No share is smaller than `least_steps`.
    """

    def cost(splits: int) -> float:
        waves = ceil_div(programs * splits, resident)
        merge = 0.0 if splits == 1 else merge_steps * (1 + splits / 40)
        return waves * (ceil_div(steps, splits) + startup_steps) + merge

    most = max(1, min(steps // least_steps, ceil_div(2 * resident, programs)))
    return min(range(1, most + 1), key=cost)
