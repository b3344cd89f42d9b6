"""sparse_attention and attention_scores beside their plain-jnp forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from kernels_timing import Run, brief, cache_sets, loop, random

from pallas_kernels.attention_scores import blocks as scores_blocks
from pallas_kernels.attention_scores import reference as scores_reference
from pallas_kernels.attention_scores import triton as scores_triton
from pallas_kernels.sparse_attention import blocks as sparse_blocks
from pallas_kernels.sparse_attention import reference as sparse_reference
from pallas_kernels.sparse_attention import triton as sparse_triton

# name, B, T, K, G, H, S, M, window
SPARSE_CASES = (
    ("512 rows of 32K, batch 16", 16, 6, 8, 8, 128, 32768, 512, 12),
    ("2048 rows of 32K, batch 16", 16, 6, 8, 8, 128, 32768, 2048, 12),
    ("287 rows of 4K, batch 1 (7B)", 1, 1, 4, 7, 128, 4096, 287, 12),
    ("2294 rows of 32K, batch 1 (7B)", 1, 1, 4, 7, 128, 32768, 2294, 12),
    ("2294 rows of 32K, batch 16 (7B)", 16, 1, 4, 7, 128, 32768, 2294, 12),
    ("2294 rows of 32K, batch 32 (1.5B)", 32, 1, 2, 6, 128, 32768, 2294, 12),
)
TINY_SPARSE_CASES = (("tiny", 1, 2, 2, 4, 64, 128, 40, 4),)
# name, B, R, K, G, H, S, heads
SCORES_CASES = (
    ("3 heads of 2 groups, 32K, batch 16", 16, 6, 2, 6, 128, 32768, (1, 4, 7)),
    ("1 head, 32K, batch 1 (7B)", 1, 6, 4, 7, 128, 32768, (5,)),
)
TINY_SCORES_CASES = (("tiny", 1, 2, 2, 4, 64, 128, (1, 5)),)


def time_sparse(run: Run, case: tuple) -> None:
    name, batch, rows, kv_heads, group, head_dim, capacity, listed, window = case
    sets = cache_sets(batch, capacity, kv_heads, head_dim)
    shape = (batch, rows, kv_heads * group, head_dim)
    q = random(5, shape)
    start = jnp.full((batch,), capacity - rows, jnp.int32)
    valid = start + rows - window
    generator = np.random.default_rng(0)
    # The data lists differ from set to set, so that small lists do not stay in the L2 cache either.
    lists = [
        np.sort(np.stack([generator.permutation(capacity - window)[:listed] for _ in range(batch)]), axis=1)
        for _ in sets
    ]
    sets = [(k, v, jnp.asarray(rows_, jnp.int32)) for (k, v), rows_ in zip(sets, lists, strict=True)]
    nbytes = 2 * batch * (listed + window) * kv_heads * head_dim * 2 + 2 * q.nbytes
    print(f"\nsparse_attention {name}: q {list(shape)} k {list(sets[0][0].shape)}", flush=True)

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    options = {"valid": valid, "window": window, "scale": head_dim**-0.5}

    def ours(blocks):
        call = functools.partial(sparse_triton.sparse_attention, **options, blocks=blocks, interpret=run.tiny)
        return loop(lambda q, k, v, table: call(q, k, v, table[None], start, layer=0), q, sets, nbytes)

    chosen = sparse_blocks.choose_block_sizes(batch, rows, kv_heads, group, listed, window, head_dim, q.dtype)
    report(f"ours {brief(chosen)}", lambda: ours(chosen))
    change = functools.partial(dataclasses.replace, chosen)
    steps = -(-(listed + window) // chosen.block_m)
    splits = sorted({1, 2, chosen.num_splits, 2 * chosen.num_splits, max(1, steps // 2), steps})
    options_for = [
        *(change(num_splits=n) for n in splits),
        *(change(num_splits=n, num_stages=4) for n in splits[:4]),
        *(change(num_splits=n, num_stages=5, block_m=32) for n in splits[:4]),
        *(change(num_splits=n, block_m=128, num_stages=2) for n in splits[:3]),
        *(change(num_splits=n, num_warps=chosen.num_warps // 2) for n in splits[1:4]),
        *(change(num_splits=n, num_warps=chosen.num_warps // 2, block_m=32, num_stages=4) for n in splits[1:4]),
    ]
    for blocks in dict.fromkeys(options_for) if run.candidates else ():
        if blocks != chosen:
            report(f"  {brief(blocks)}", lambda b=blocks: ours(b))
    reference = functools.partial(sparse_reference.sparse_attention, **options)
    report("XLA gather", lambda: loop(lambda q, k, v, t: reference(q, k, v, t, start), q, sets, nbytes))
    run.measure("sparse_attention", name, entries, nbytes)


def time_scores(run: Run, case: tuple) -> None:
    name, batch, rows, kv_heads, group, head_dim, capacity, heads = case
    sets = [(k,) for k, _ in cache_sets(batch, capacity, kv_heads, head_dim)]
    q = random(5, (batch, rows, kv_heads * group, head_dim))
    length = jnp.full((batch,), capacity - rows, jnp.int32)
    positions = length[:, None] + jnp.arange(rows)
    chosen_heads = len({head // group for head in heads})
    columns = max(16, 1 << (rows * len(heads) - 1).bit_length())
    nbytes = batch * capacity * chosen_heads * head_dim * 2 + 4 * batch * capacity
    print(f"\nattention_scores {name}: q {list(q.shape)} k {list(sets[0][0].shape)} heads {heads}", flush=True)

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    def timed(call):
        # The next query depends on the scores, by nothing.
        def step(q, k):
            scores = call(q, k, positions, length, heads, scale=head_dim**-0.5)
            return q + jnp.minimum(scores[:, :1, None, None], 0).astype(q.dtype), scores

        return loop(step, q, sets, nbytes, extra=True)

    chosen = scores_blocks.choose_block_sizes(batch, chosen_heads, capacity, head_dim, columns, q.dtype)
    ours = functools.partial(scores_triton.attention_scores, interpret=run.tiny)
    report(f"ours {brief(chosen)}", lambda: timed(functools.partial(ours, blocks=chosen)))
    change = functools.partial(dataclasses.replace, chosen)
    for blocks in (
        (
            change(num_splits=max(1, chosen.num_splits // 2)),
            change(num_splits=2 * chosen.num_splits),
            change(block_s=128, num_stages=3),
            change(num_stages=3),
        )
        if run.candidates
        else ()
    ):
        report(f"  {brief(blocks)}", lambda b=blocks: timed(functools.partial(ours, blocks=b)))
    report("XLA", lambda: timed(scores_reference.attention_scores))
    run.measure("attention_scores", name, entries, nbytes)


def bench_sparse(run: Run) -> None:
    for case in TINY_SPARSE_CASES if run.tiny else SPARSE_CASES:
        run.attempt(case[0], lambda case=case: time_sparse(run, case))


def bench_scores(run: Run) -> None:
    for case in TINY_SCORES_CASES if run.tiny else SCORES_CASES:
        run.attempt(case[0], lambda case=case: time_scores(run, case))
