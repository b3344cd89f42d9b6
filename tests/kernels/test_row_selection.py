"""`row_selection`: every backend and design equal to a brute-force stable sort."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BACKENDS, BF16, CAPACITIES, F32, KERNELS, compiled, covering

from pallas_kernels import dispatch, row_selection
from pallas_kernels.row_selection import histogram, reference, triton
from pallas_kernels.row_selection.blocks import BlockSizes, choose_block_sizes

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
    x = x.astype(dtype)
    if kind == "subnormal":
        # of both signs, where few bits tell the magnitudes apart
        bits = np.uint16 if dtype == BF16 else np.uint32
        pattern = x.view(bits)
        x = (pattern & bits(0x3F) | (pattern & bits(1 << (8 * x.dtype.itemsize - 1)))).view(x.dtype)
    return x


def brute_force(scores, length, k, width):
    rows = np.full((len(scores), width), -1, np.int32)
    count = np.zeros(len(scores), np.int32)
    for r, row in enumerate(scores.astype(np.float64)):
        eligible = [i for i in range(min(max(length[r], 0), row.size)) if not np.isnan(row[i])]
        best = sorted(eligible, key=lambda i: (-row[i], i))[: min(max(k[r], 0), width)]
        count[r] = len(best)
        rows[r, : len(best)] = sorted(best)
    return rows, count


def stable_sort(scores, length, k, width):
    """The same by NumPy, for rows that are too long for the brute force."""
    index = np.arange(scores.shape[1])
    rows = np.full((len(scores), width), -1, np.int32)
    eligible = (index < length[:, None]) & ~np.isnan(scores)
    count = np.clip(np.minimum(k, eligible.sum(axis=1)), 0, width).astype(np.int32)
    for r, row in enumerate(scores.astype(np.float32)):
        best = np.argsort(np.where(eligible[r], -row, np.nan), kind="stable")[: count[r]]
        rows[r, : count[r]] = np.sort(best)
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
@pytest.mark.parametrize("other", [reference.row_selection, stable_sort])
def test_reference_is_a_stable_sort(other, kind):
    check(scores_of(kind, 8, 100, BF16), *ragged(8, 100, 40), 40, functools.partial(other, width=40))


# size, width and block sizes; the dtypes that a design knows are below
DESIGNS = [
    (1000, 300, BlockSizes("resident", 1024, 2)),
    (1000, 300, BlockSizes("resident", 1024, 1)),
    (1000, 300, BlockSizes("resident", 1024, 4)),
    (1000, 300, BlockSizes("spread", 256, 1)),
    (1000, 300, BlockSizes("spread", 256, 1, depth=8)),
    (63, 63, BlockSizes("gather", 256, 1)),
    (100, 40, BlockSizes("gather", 256, 1)),
    (1000, 300, BlockSizes("gather", 1024, 4)),
    (2048, 2048, BlockSizes("gather", 2048, 2)),
    (63, 63, BlockSizes("radix", 256, 1)),
    (100, 40, BlockSizes("radix", 256, 1)),
    (1000, 300, BlockSizes("radix", 256, 1)),
    (2048, 2048, BlockSizes("radix", 512, 2)),
]
PACKED = ("gather", "radix")


# one program per row, and several programs per row
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("size", "width", "blocks", "dtype"),
    [
        pytest.param(*case, dtype, id=f"{case[2]}-{case[0]}-{jnp.dtype(dtype).name}")
        for case in DESIGNS
        for dtype in (F32, BF16)
        if dtype == BF16 or case[2].design not in PACKED
    ],
)
def test_designs_agree(size, width, blocks, dtype, backend):
    options = {"width": width, "blocks": blocks, "interpret": backend == "interpret"}
    run = compiled(functools.partial(triton.row_selection, **options), backend)
    for kind in (*KINDS, "subnormal"):
        check(scores_of(kind, 7, size, dtype), *ragged(7, size, width), width, run)


def test_a_row_of_infinities_and_of_nan():
    scores = np.full((4, 300), -np.inf, BF16)
    scores[1], scores[2], scores[3] = np.inf, np.nan, -np.nan
    scores[2, 290] = -np.inf
    length, k = np.full(4, 300, np.int32), np.full(4, 30, np.int32)
    for blocks in (BlockSizes("gather", 512, 2), BlockSizes("radix", 256, 1)):
        run = compiled(functools.partial(triton.row_selection, width=40, blocks=blocks, interpret=True), "interpret")
        check(scores, length, k, 40, run)


# rows of the lengths and numbers that the choice of designs tells apart
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("num_rows", "size", "width"),
    [
        (448, 32768, 1639),
        (36, 131072, 6554),
        (16, 32768, 512),
        (1, 131072, 4096),
        (5, 32761, 32761),
        (3, 131071, 9000),
        (2, 1 << 20, 50000),
        (2, (1 << 20) + 8, 50000),
    ],
)
def test_long_rows(num_rows, size, width, dtype):
    generator = np.random.default_rng(1)
    k = generator.integers(0, width + width // 4 + 2, num_rows).astype(np.int32)
    length = generator.integers(-1, size + 9, num_rows).astype(np.int32)
    k[0], length[0] = width, size
    run = jax.jit(functools.partial(row_selection, width=width, backend="pallas"))
    for kind in ("weights", "special", "subnormal"):
        scores = scores_of(kind, num_rows, size, dtype)
        scores[np.arange(size) >= length[:, None]] = np.inf
        got, again = run(scores, length, k), run(scores, length, k)
        jax.tree.map(np.testing.assert_array_equal, got, again)
        jax.tree.map(np.testing.assert_array_equal, got, stable_sort(scores, length, k, width))


def launches(size):
    """How many kernels the chosen design takes for rows of `size` bfloat16 scores."""
    call = functools.partial(triton.row_selection, width=40, interpret=True)
    ints = jax.ShapeDtypeStruct((2,), jnp.int32)
    return str(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((2, size), BF16), ints, ints)).count("pallas_call")


def test_without_histograms_long_rows_are_spread(monkeypatch):
    assert launches(40000) == 3
    with monkeypatch.context() as patch:
        # as in a release of JAX that has moved it
        patch.delattr("jax._src.pallas.triton.lowering.register_lowering")
        importlib.reload(histogram)
        assert not histogram.AVAILABLE
        assert launches(40000) == 5
        assert launches(20000) == 1
    importlib.reload(histogram)
    assert launches(40000) == 3


def test_an_older_gpu_takes_what_it_can_run(monkeypatch):
    monkeypatch.setattr(dispatch, "at_least_hopper", lambda: False)
    assert launches(40000) == launches(20000) == 5
    assert triton.unavailable() == {"gather", "radix"}
    assert choose_block_sizes(448, 32768, BF16, triton.unavailable()).design == "resident"


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
