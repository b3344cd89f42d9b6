"""Every op compiled to H200 machine code, once per choice of block sizes: it fits, and nothing spills."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200
from kernel_cases import BF16, F16, F32, SHAPES
from machine_code import usage

from pallas_kernels import (
    add_rms_norm,
    attention_scores,
    cached_attention,
    cached_step,
    gated_matmul,
    prefix_attention,
    rope_and_cache,
    row_selection,
    skinny_matmul,
    sparse_attention,
    sparse_step,
)
from pallas_kernels.attention_scores import blocks as scores_blocks
from pallas_kernels.cached_attention import blocks as dense_blocks
from pallas_kernels.cached_attention import triton as dense_triton
from pallas_kernels.row_selection import blocks as selection_blocks
from pallas_kernels.skinny_matmul import blocks as matmul_blocks
from pallas_kernels.sparse_attention import blocks as sparse_blocks

pytestmark = pytest.mark.gpu_compile

REGISTER_FILE = 65536
KV_HEADS = 4
INT = jnp.int32


def array(shape, dtype=INT):
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_op(function, *operands, **options):
    return compile_for_h200(functools.partial(function, backend="pallas", **options), *operands)


def one_per_cut(choose, *axes):
    """The first shape of every choice of block sizes, head dim and dtype; how many splits there are changes no code,
    but whether there are several does."""
    found = {}
    for shape in itertools.product(*axes):
        blocks = choose(*shape)
        cut = {**vars(blocks), "num_splits": min(getattr(blocks, "num_splits", 1), 2)}
        found.setdefault((*cut.values(), *(x for x in shape if x in (*SHAPES["head_dim"], F32, BF16))), shape)
    return list(found.values())


# Bytes of stack per thread that a kernel may use, where it is not 0: products of float32 keep whole tiles in registers.
# So do the running sums of hundreds of queries.
STACK = {
    ("cached_attention", F32, 256): 1024,
    ("sparse_attention", F32, 256): 1024,
    ("attention_scores", F16, 256): 1024,
}


def check(compiled, names, num_warps, dtype=BF16, head_dim=0):
    """Nothing spills, and the registers of a multiprocessor hold the program."""
    used = {name: use for name, use in usage(compiled).items() if name.split("__")[0] in names}
    assert {name.split("__")[0] for name in used} == set(names)
    for name, use in used.items():
        assert use.stack <= STACK.get((name, dtype, head_dim), 0), (name, use.registers, use.stack)
    main = used[names[0]]
    assert main.registers <= min(255, REGISTER_FILE // (32 * num_warps)), main.registers


def choose_dense(num_rows, group, head_dim, capacity, dtype):
    return dense_blocks.choose_block_sizes(1, num_rows, KV_HEADS, group, capacity, head_dim, dtype)


DENSE = one_per_cut(choose_dense, (1, 5, 7), (1, 7, 24), (64, 96, 256), (100, 4096), (BF16, F32))
# Every cut with one kind of scores, in turn.
DENSE = [(*shape, mode) for shape, mode in zip(DENSE, itertools.cycle((None, "weight", "logit")), strict=False)]
DENSE.append((7, 8, 128, 4096, F16, "weight"))


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_cached_attention(case):
    num_rows, group, head_dim, capacity, dtype, mode = case
    q = array((1, num_rows, KV_HEADS * group, head_dim), dtype)
    kv = array((1, capacity, KV_HEADS, head_dim), dtype)

    def call(q, k, v, start, scored, backend):
        options = {"scored_rows": scored, "score_mode": mode} if mode else {}
        return cached_attention(q, k, v, start, scale=0.1, backend=backend, **options)

    blocks = choose_dense(*case[:5])
    names = ["cached_attention", *(["cached_attention_merge"] if blocks.num_splits > 1 else [])]
    names += ["cached_attention_scores"] if mode == "weight" else []
    compiled = compile_op(call, q, kv, kv, array((1,)), array((1, 2)))
    check(compiled, names, blocks.num_warps, dtype, head_dim)


def choose_sparse(num_rows, group, head_dim, listed, dtype):
    return sparse_blocks.choose_block_sizes(1, num_rows, KV_HEADS, group, listed, 12, head_dim, dtype)


SPARSE = one_per_cut(choose_sparse, (1, 5, 7), (1, 7, 24), (64, 128, 256), (20, 2294), (BF16, F32))


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_sparse_attention(case):
    num_rows, group, head_dim, listed, dtype = case
    q = array((1, num_rows, KV_HEADS * group, head_dim), dtype)
    kv = array((1, 4096, KV_HEADS, head_dim), dtype)

    def call(q, k, v, rows, start, valid, backend):
        return sparse_attention(q, k, v, rows, start, valid=valid, window=12, scale=0.1, backend=backend)

    blocks = choose_sparse(*case)
    names = ["sparse_attention", *(["sparse_attention_merge"] if blocks.num_splits > 1 else [])]
    check(
        compile_op(call, q, kv, kv, array((1, listed)), array((1,)), array((1,))),
        names,
        blocks.num_warps,
        dtype,
        head_dim,
    )


def choose_scores(head_dim, capacity, columns, dtype):
    return scores_blocks.choose_block_sizes(2, 1, capacity, head_dim, columns, dtype)


SCORES = one_per_cut(choose_scores, (64, 128, 256), (4096,), (16,), (BF16, F32))
# More queries, and so many that there is room for fewer tiles of keys.
SCORES += [(128, 4096, 64, BF16), (256, 4096, 256, F16)]


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_attention_scores(case):
    head_dim, capacity, columns, dtype = case
    num_heads = columns // 8
    q, k = array((2, 8, 2 * num_heads, head_dim), dtype), array((2, capacity, 2, head_dim), dtype)
    heads = tuple(range(num_heads))
    compiled = compile_op(attention_scores, q, k, array((2, 8)), array((2,)), heads=heads, scale=0.1)
    names = ["attention_scores", "attention_scores_lse", "attention_scores_sum"]
    check(compiled, names, choose_scores(*case).num_warps, dtype, head_dim)


@pytest.mark.parametrize(
    ("batch", "queries", "head_dim", "capacity", "dtype", "listed"),
    [
        (1, 6144, 128, 32256, BF16, False),  # 32 branches of 32 tokens, 6 query heads a kv head
        (16, 768, 128, 32256, BF16, False),
        (1, 6144, 128, 2304, BF16, True),
        (1, 192, 128, 32256, BF16, False),
        (1, 3072, 64, 4096, BF16, False),
        (1, 6144, 128, 4096, F32, False),
    ],
)
def test_prefix_attention(batch, queries, head_dim, capacity, dtype, listed):
    def call(q, k, v, start, live, rows=None, *, backend):
        return prefix_attention(q, k, v, start, live, scale=0.1, rows=rows, backend=backend)

    q, kv = array((batch, 2, queries, head_dim), dtype), array((batch, capacity, 2, head_dim), dtype)
    rows = [array((batch, capacity))] if listed else []
    blocks = dense_blocks.choose_block_sizes(batch, queries, 2, 1, capacity, head_dim, dtype)
    compiled = compile_op(call, q, kv, kv, array((batch,)), array(()), *rows)
    check(compiled, ["prefix_attention", "prefix_attention_merge"], blocks.num_warps, dtype, head_dim)


SELECTION = one_per_cut(
    selection_blocks.choose_block_sizes,
    (1, 448),
    (63, 1000, 2000, 4096, 8192, 16384, 32768, 131072, 1 << 20),
    (BF16, F32),
)

# Rows that no load of 128 bits starts at.
SELECTION += [(448, 32761, BF16), (1, 131071, BF16)]


@pytest.mark.parametrize("case", SELECTION, ids=str)
def test_row_selection(case):
    num_rows, size, dtype = case
    scores, ints = array((num_rows, size), dtype), array((num_rows,))
    blocks = selection_blocks.choose_block_sizes(*case)
    compiled = compile_op(row_selection, scores, ints, ints, width=max(1, size // 20))
    others = {
        "spread": ["row_selection_first", "row_selection_digit"],
        "radix": ["row_selection_first", "row_selection_second"],
    }
    names = ["row_selection", *others.get(blocks.design, [])]
    check(compiled, names, blocks.num_warps)
    if blocks.design == "gather":
        # Rows share a multiprocessor, as many as make 1,024 threads.
        assert usage(compiled)["row_selection"].registers <= REGISTER_FILE // 1024
    assert " sort(" not in compiled.as_text()


# depths of models from 0.5B to 70B, and depths and columns that no block divides
SKINNY = one_per_cut(matmul_blocks.choose_block_sizes, (1, 32, 64), (896, 1000, 3584, 28672), (BF16, F32))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", SKINNY, ids=str)
def test_skinny_matmul(case, gated):
    num_rows, depth, dtype = case
    op, kernel = (gated_matmul, (depth, 2, 1100)) if gated else (skinny_matmul, (depth, 1152))
    compiled = compile_op(op, array((num_rows, depth), dtype), array(kernel, dtype))
    blocks = matmul_blocks.choose_block_sizes(*case, gated=gated)
    check(compiled, [op.__name__], blocks.num_warps, dtype)


# as the decoder calls them, with the partial sums of a product
@pytest.mark.parametrize("num_parts", [1, 5])
@pytest.mark.parametrize("size", [896, 8192])
def test_add_rms_norm(size, num_parts):
    x, scale = array((2, 3, size), BF16), array((size,), BF16)
    update = array((num_parts, 2, 3, size), F32) if num_parts > 1 else x
    check(compile_op(add_rms_norm, x, update, scale, eps=1e-6), ["add_rms_norm"], 16)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize(("group", "head_dim"), [(7, 64), (8, 128), (24, 256)])
def test_rope_and_cache(group, head_dim, num_parts):
    members = (2, 3, KV_HEADS, group + 2, head_dim)
    qkv = array((num_parts, *members), F32) if num_parts > 1 else array(members, BF16)
    cache, table = array((2, 100, KV_HEADS, head_dim), BF16), array((2, 3, head_dim // 2), F32)
    bias = array((KV_HEADS, group + 2, head_dim), BF16)

    def call(qkv, k, v, cos, sin, start, bias, backend):
        return rope_and_cache(qkv, k, v, cos, sin, start, bias=bias, backend=backend)

    check(compile_op(call, qkv, cache, cache, table, table, array((2,)), bias), ["rope_and_cache"], 2)


@pytest.mark.parametrize("op", [cached_step, sparse_step])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize(("group", "head_dim"), [(6, 128), (7, 64), (24, 256)])
def test_attention_step(group, head_dim, num_parts, op):
    members = (2, 1, KV_HEADS, group + 2, head_dim)
    qkv = array((num_parts, *members), F32) if num_parts > 1 else array(members, BF16)
    cache, table = array((2, 4096, KV_HEADS, head_dim), BF16), array((2, 1, head_dim // 2), F32)
    bias, ints, rows = array((KV_HEADS, group + 2, head_dim), BF16), array((2,)), array((2, 1100))

    def call(*operands, backend):
        *operands, attend_at, rows, valid, bias = operands
        options = {"scale": 0.1, "bias": bias, "backend": backend}
        if op is cached_step:
            return cached_step(*operands, attend_at, **options)
        return sparse_step(*operands, rows, attend_at, valid=valid, window=12, **options)

    compiled = compile_op(call, qkv, cache, cache, table, table, ints, ints, rows, ints, bias)
    check(compiled, [op.__name__, f"{op.__name__}_merge"], 4, BF16, head_dim)


def test_too_much_shared_memory_fails():
    blocks = dense_blocks.BlockSizes(64, 256, 2, num_warps=4, num_stages=4)
    q, kv = array((1, 1, 64, 256), BF16), array((1, 4096, 1, 256), BF16)
    call = functools.partial(dense_triton.cached_attention, scale=0.1, blocks=blocks)
    with pytest.raises(Exception, match=r"(?i)shared memory"):
        compile_for_h200(call, q, kv, kv, array((1,)))
