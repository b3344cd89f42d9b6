"""What the tests of the four ops share: cases, operands, tolerances, errors, and poisoned scratch rows."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
BACKENDS = ["xla", *KERNELS]
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
DTYPES = (F32, BF16, F16)

# Largest error relative to the largest value, against float64. The output is rounded once to its dtype; kernels also
# round the weights to it before the product with the values. `logit` scores come of a query in two parts of the dtype,
# which have twice its precision; float16 then leaves the order of float32 sums.
TOLERANCE = {
    "out": {F32: 2e-6, BF16: 2**-7, F16: 2**-10},
    "weight": {F32: 2e-6, BF16: 2**-7, F16: 2**-10},
    "logit": {F32: 2e-6, BF16: 2**-14, F16: 4e-6},
}

SHAPES = {"batch": (1, 3), "num_rows": (1, 2, 5, 7), "group": (1, 5, 6, 7, 8, 24), "head_dim": (64, 96, 128, 256)}
CAPACITIES = (63, 100, 1000)


def pairwise(**parameters):
    """Cases, each a dict, that together hold every pair of values of every two parameters."""
    names = sorted(parameters, key=lambda name: -len(parameters[name]))
    sizes = [len(parameters[name]) for name in names]
    axes = range(len(names))
    missing = {
        (a, i, b, j) for a, b in itertools.combinations(axes, 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    cases = []
    while missing:
        # One missing pair, then value by value whatever covers most of the others.
        a, i, b, j = min(missing)
        case = {a: i, b: j}
        for axis in axes:
            if axis not in case:
                # Ties go to another value in every case.
                order = [(v + len(cases)) % sizes[axis] for v in range(sizes[axis])]
                gains = [
                    sum(min(x, y) + max(x, y) in missing for y in case.items()) for x in ((axis, v) for v in order)
                ]
                case[axis] = order[gains.index(max(gains))]
        missing -= {(a, case[a], b, case[b]) for a, b in itertools.combinations(axes, 2)}
        cases.append({name: parameters[name][case[axis]] for axis, name in enumerate(names)})
    return cases


def covering(full=("batch", "num_rows", "group", "head_dim", "capacity"), **parameters):
    """pytest parameters: a pairwise covering set of at most 40 and, marked `kernels`, the product of the `full`
    parameters with the others taken in turn."""
    cases = pairwise(**parameters)
    assert len(cases) <= 40
    chosen = [pytest.param(case, id=_name(case)) for case in cases]
    # Collected only where it is wanted: skipped tests by the hundred would bury the others.
    if os.environ.get("JAXSPEC_ALL_KERNEL_SHAPES") == "1":
        others = {name: itertools.cycle(values) for name, values in parameters.items() if name not in full}
        for values in itertools.product(*(parameters[name] for name in full)):
            case = dict(zip(full, values, strict=True)) | {name: next(values) for name, values in others.items()}
            chosen.append(pytest.param(case, id=f"full-{_name(case)}", marks=pytest.mark.kernels))
    return pytest.mark.parametrize("case", chosen)


def attention_cases(**parameters):
    """`covering` over the shapes and dtypes of attention."""
    return covering(**SHAPES, capacity=CAPACITIES, dtype=DTYPES, **parameters)


def _name(case):
    return "-".join(f"{name[0]}{getattr(value, '__name__', value)}" for name, value in sorted(case.items()))


def compiled(function, backend):
    """`function` under jit. Compiling is most of an interpreted kernel's time, and its speed matters nowhere."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0} if backend == "interpret" else None)


def normal(seed, shape, dtype):
    # NumPy throughout: every eager JAX operation would compile once per shape
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def starts(batch, num_rows, capacity):
    """The longest row fills the cache, one sees nothing at first, or nothing at all, and one lies in between."""
    return np.array([capacity - num_rows, -min(num_rows, 2), (capacity - num_rows) // 2][:batch], np.int32)


def operands(batch, num_rows, group, head_dim, capacity, dtype, kv_heads=2):
    """q [B,T,N,H], k and v [B,S,K,H]."""
    cache = batch, capacity, kv_heads, head_dim
    q = normal(0, (batch, num_rows, kv_heads * group, head_dim), dtype)
    return q, normal(1, cache, dtype), normal(2, cache, dtype)


def poisoned(run, unseen, *caches):
    """`run(*caches)` with NaN in the rows `unseen` [B,S]; with 1e4 in them the result must be the same to the bit."""

    def poison(x, value):
        x = x.copy()
        x[unseen] = value
        return x

    got, again = (run(*(poison(x, value) for x in caches)) for value in (np.nan, 1e4))
    jax.tree.map(np.testing.assert_array_equal, got, again)
    return got


def error(got, want):
    """Largest error relative to the largest finite value; infinities must be where they belong."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert np.isfinite(got[finite]).all()
    return np.abs(got[finite] - want[finite]).max(initial=0) / max(np.abs(want[finite]).max(initial=0), 1e-30)


def softmax(logits, visible):
    """float64 softmax over the last axis among the visible entries; zeros where there is none."""
    logits = np.where(visible, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def head_logits(q, k, scale):
    """float64 [B,T,N,S] of q [B,T,N,H] and k [B,S,K,H]."""
    batch, num_rows, heads, head_dim = q.shape
    grouped = q.astype(np.float64).reshape(batch, num_rows, k.shape[2], -1, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, k.shape[2], -1, head_dim)
    logits = grouped @ k.astype(np.float64).transpose(0, 2, 3, 1)
    logits = logits.reshape(batch, k.shape[2], num_rows, -1, k.shape[1]).transpose(0, 2, 1, 3, 4)
    return scale * logits.reshape(batch, num_rows, heads, k.shape[1])


def weighted(weights, v):
    """float64 [B,T,N,H] of weights [B,T,N,S] and v [B,S,K,H]."""
    batch, num_rows, heads, capacity = weights.shape
    grouped = weights.reshape(batch, num_rows, v.shape[2], -1, capacity).transpose(0, 2, 1, 3, 4)
    out = grouped.reshape(batch, v.shape[2], -1, capacity) @ v.astype(np.float64).transpose(0, 2, 1, 3)
    out = out.reshape(batch, v.shape[2], num_rows, -1, v.shape[3]).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, num_rows, heads, v.shape[3])
