"""`row_selection`: every backend and design equal to a brute-force stable sort."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BACKENDS, BF16, CAPACITIES, F32, KERNELS, compiled, covering

from pallas_kernels import row_selection
from pallas_kernels.row_selection import reference, triton
from pallas_kernels.row_selection.blocks import BlockSizes

KINDS = ("weights", "special", "constant", "signs")


def scores_of(kind, num_rows, size, dtype):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_rows, size))
    if kind == "weights":
        x = np.exp(3 * x) / size
    if kind == "special":
        # ties at every boundary, among them of infinities and of both zeros
        x = np.round(x * 3)
        for value, share in ((np.nan, 0.2), (-np.nan, 0.05), (-np.inf, 0.2), (np.inf, 0.05), (-0.0, 0.1)):
            x[generator.uniform(size=x.shape) < share] = value
    if kind == "constant":
        x[:] = 1.5
    return x.astype(dtype)


def brute_force(scores, length, k, width):
    rows = np.full((len(scores), width), -1, np.int32)
    count = np.zeros(len(scores), np.int32)
    for r, row in enumerate(scores.astype(np.float64)):
        eligible = [i for i in range(min(max(length[r], 0), row.size)) if not np.isnan(row[i])]
        best = sorted(eligible, key=lambda i: (-row[i], i))[: min(max(k[r], 0), width)]
        count[r] = len(best)
        rows[r, : len(best)] = sorted(best)
    return rows, count


def check(scores, length, k, width, run):
    """Equal with NaN and with infinity past the lengths."""
    expected = brute_force(scores, length, k, width)
    for value in (np.nan, np.inf):
        poisoned = np.where(np.arange(scores.shape[1]) < length[:, None], scores, value).astype(scores.dtype)
        rows, count = run(poisoned, length, k)
        np.testing.assert_array_equal(count, expected[1])
        np.testing.assert_array_equal(rows, expected[0])


def ragged(num_rows, size, width):
    """Whole rows and parts, no row at all, more wanted than there is and than fits, and none wanted."""
    length = np.array([size, size // 2, 0, size, size + 9, 3, size - 1, size], np.int32)[:num_rows]
    k = np.array([width, width // 2 + 1, 5, 2 * size, 1, width, width - 1, -3], np.int32)[:num_rows]
    return length, k


@pytest.mark.parametrize("backend", BACKENDS)
@covering(
    full=("num_rows", "size", "dtype", "kind", "share"),
    num_rows=(1, 8),
    size=(*CAPACITIES, 9000),
    dtype=(F32, BF16),
    kind=KINDS,
    share=(0.05, 0.5, 1),
)
def test_equals_stable_sort(case, backend):
    width = max(1, int(case["size"] * case["share"]))
    scores = scores_of(case["kind"], case["num_rows"], case["size"], case["dtype"])
    run = compiled(functools.partial(row_selection, width=width, backend=backend), backend)
    check(scores, *ragged(case["num_rows"], case["size"], width), width, run)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_a_stable_sort(kind):
    check(scores_of(kind, 8, 100, BF16), *ragged(8, 100, 40), 40, functools.partial(reference.row_selection, width=40))


DESIGNS = [
    BlockSizes(True, 1024, 2),
    BlockSizes(True, 1024, 1),
    BlockSizes(True, 1024, 4),
    BlockSizes(False, 256, 1),
    BlockSizes(False, 256, 1, depth=8),
]


# one program per row, and several programs per row
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("blocks", DESIGNS, ids=str)
def test_designs_agree(blocks, dtype, backend):
    options = {"width": 300, "blocks": blocks, "interpret": backend == "interpret"}
    run = compiled(functools.partial(triton.row_selection, **options), backend)
    for kind in KINDS:
        check(scores_of(kind, 7, 1000, dtype), *ragged(7, 1000, 300), 300, run)


def arguments(**changes):
    named = {"scores": jnp.zeros((2, 9)), "length": jnp.zeros(2, jnp.int32), "k": jnp.zeros(2, jnp.int32), "width": 4}
    return named | {"backend": "interpret"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": jnp.zeros(9)}, r"scores has shape \(9,\); it must be \[R,S\]"),
        ({"scores": jnp.zeros((2, 9), jnp.float16)}, "scores has dtype float16; allowed: bfloat16, float32"),
        ({"length": jnp.zeros(3, jnp.int32)}, r"length has shape \(3,\); it must be \[R\], here \[2\]"),
        ({"length": jnp.zeros(2)}, "length has dtype float32; allowed: int32"),
        ({"k": jnp.zeros((2, 1), jnp.int32)}, r"k has shape \(2, 1\); it must be \[R\]"),
        ({"width": 0}, r"width is 0; allowed is 1 .. 9, the row length of scores"),
        ({"width": 10}, r"width is 10; allowed is 1 .. 9"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        row_selection(**arguments(**changes))
