"""Selections, layer masks and collect requests against a decoder in float64 numpy."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import Decoder, init_cache
from jaxspec.types import Collect, KVSelection, KVSelector, LayerMask
from tests import reference
from tests.reference import jax_model, random_weights, tiny_config

# float32 rounding of logits up to 10; hidden states and scores are smaller
ATOL = 1e-4
PREFIX, LENGTH, CAPACITY, BATCH = 10, 14, 32, 2
LAYERS = 3


class Setup(NamedTuple):
    hf: dict
    weights: dict
    model: Decoder
    params: dict
    tokens: np.ndarray  # [B, LENGTH]
    cache: tuple  # holds the first PREFIX tokens
    start: np.ndarray  # [B] of PREFIX


@pytest.fixture(scope="module")
def setup():
    # of the families the one with the most parts: head norms, and biases on request
    hf = tiny_config("qwen3", num_hidden_layers=LAYERS, attention_bias=True)
    weights = random_weights(hf)
    model, params = jax_model(hf, weights)
    tokens = np.random.default_rng(0).integers(0, 61, (BATCH, LENGTH)).astype(np.int32)
    cache = init_cache(model.config, BATCH, CAPACITY, jnp.float32)
    cache = run(model, params, tokens[:, :PREFIX], cache, np.zeros(BATCH, np.int32)).cache
    return Setup(hf, weights, model, params, tokens, cache, np.full(BATCH, PREFIX, np.int32))


@partial(jax.jit, static_argnums=0)
def run(model, params, tokens, cache, start, selection=None, layers=None, collect=None, running=None):
    options = {"selection": selection, "layers": layers, "collect": collect, "running": running}
    return model.apply({"params": params}, tokens, cache, start, **options)


def traces(s, **options):
    return [reference.decoder(s.hf, s.weights, row, **options) for row in s.tokens]


def stacked(rows, field):
    return np.stack([getattr(row, field) for row in rows])


def test_hidden_states_and_queries(setup):
    s = setup
    collect = Collect(queries=(2, 0), hidden=True)
    out = run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start, collect=collect)
    expected = traces(s)
    assert out.hidden.shape == (2 * LAYERS + 1, BATCH, LENGTH - PREFIX, s.model.config.hidden_size)
    np.testing.assert_allclose(out.hidden, stacked(expected, "hidden")[:, :, PREFIX:].swapaxes(0, 1), atol=ATOL)
    np.testing.assert_allclose(out.logits, stacked(expected, "logits")[:, PREFIX:], atol=ATOL)
    # in the order asked for
    for queries, layer in zip(out.queries, (2, 0), strict=True):
        np.testing.assert_allclose(queries, stacked(expected, "queries")[:, layer, PREFIX:], atol=ATOL)
    assert out.row_scores is None
    plain = run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start)
    assert plain.hidden is None
    assert plain.queries == ()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("mode", ["weight", "logit"])
def test_row_scores(setup, mode, per_row):
    """Sums over heads, and over the scored queries unless per_row; -inf where any of those does not see the row."""
    s = setup
    scored = np.array([[0, 2], [3, 3]], np.int32)
    collect = Collect(scored_rows=jnp.asarray(scored), score_mode=mode, per_row=per_row)
    out = run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start, collect=collect)
    expected = np.full((LAYERS, BATCH, 2, CAPACITY), -np.inf)
    for b, trace in enumerate(traces(s)):
        source = trace.attention if mode == "weight" else trace.raw
        end = scored[b].min() + PREFIX + 1
        for r, query in enumerate(scored[b] + PREFIX):
            expected[:, b, r, :end] = source[:, :, query, :end].sum(axis=1)
    if not per_row:
        expected = expected.sum(axis=2)
    assert out.row_scores.dtype == jnp.float32
    np.testing.assert_allclose(out.row_scores, expected, atol=ATOL, rtol=1e-5)
    np.testing.assert_allclose(out.logits, stacked(traces(s), "logits")[:, PREFIX:], atol=ATOL)


def selection_case(seed, per_layer, width=7):
    """Random rows below a random `valid`, with pads last; and the visibility that they mean."""
    rng = np.random.default_rng(seed)
    valid = rng.integers(4, PREFIX + 1, BATCH)
    rows = np.full((LAYERS if per_layer else 1, BATCH, width), -1)
    visible = np.tril(np.ones((LENGTH, LENGTH), bool))[None, None].repeat(BATCH, 0).repeat(LAYERS, 1)
    for b in range(BATCH):
        for layer in range(rows.shape[0]):
            chosen = rng.permutation(valid[b])[: rng.integers(1, width)]
            rows[layer, b, : len(chosen)] = chosen
        for layer in range(LAYERS):
            chosen = rows[min(layer, rows.shape[0] - 1), b]
            for query in range(PREFIX, LENGTH):
                visible[b, layer, query, : valid[b]] = np.isin(np.arange(valid[b]), chosen)
    return rows.astype(np.int32), valid.astype(np.int32), visible


@pytest.mark.parametrize("per_layer", [False, True])
def test_selection(setup, per_layer):
    s = setup
    for seed in range(3):
        rows, valid, visible = selection_case(seed, per_layer)
        selection = KVSelection(rows=jnp.asarray(rows), valid=jnp.asarray(valid))
        out = run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start, selection)
        for b in range(BATCH):
            expected = reference.decoder(s.hf, s.weights, s.tokens[b], visible=visible[b])
            np.testing.assert_allclose(out.logits[b], expected.logits[PREFIX:], atol=ATOL)
            full = reference.decoder(s.hf, s.weights, s.tokens[b])
            assert np.abs(full.logits[PREFIX:] - expected.logits[PREFIX:]).max() > 0.01


def even_rows_but_one(layer, q, cache, positions, state):
    """Even rows but for row 2 * layer; also proves what a selector is given."""
    chex.assert_shape(q, (BATCH, LENGTH - PREFIX, 6, 8))
    chex.assert_equal_shape([cache.k, cache.v])
    chex.assert_shape(positions, (BATCH, LENGTH - PREFIX))
    even = jnp.arange(0, state["limit"].shape[0], 2)
    chosen = (even != 2 * layer) & (even < positions[:, :1] - 2)
    order = jnp.argsort(~chosen, axis=1)
    return jnp.where(jnp.take_along_axis(chosen, order, axis=1), even[order], -1).astype(jnp.int32)


def test_selector(setup):
    s = setup
    valid = np.full(BATCH, PREFIX - 2, np.int32)
    state = {"limit": jnp.zeros(PREFIX - 2)}
    selection = KVSelector(state=state, valid=jnp.asarray(valid), select=even_rows_but_one, window=8)
    out = run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start, selection)
    visible = np.tril(np.ones((LAYERS, LENGTH, LENGTH), bool))
    for layer in range(LAYERS):
        chosen = [r for r in range(0, PREFIX - 2, 2) if r != 2 * layer]
        visible[layer, PREFIX:, : PREFIX - 2] = np.isin(np.arange(PREFIX - 2), chosen)
    expected = traces(s, visible=visible)
    np.testing.assert_allclose(out.logits, stacked(expected, "logits")[:, PREFIX:], atol=ATOL)


def zeroed(s, attn, mlp):
    """The weights, with the residual branches that a mask skips adding nothing."""
    weights = dict(s.weights)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        skipped = [(attn[layer], f"{prefix}.self_attn.o_proj"), (mlp[layer], f"{prefix}.mlp.down_proj")]
        for kept, name in skipped:
            if not kept:
                for part in ("weight", "bias"):
                    if f"{name}.{part}" in weights:
                        weights[f"{name}.{part}"] = np.zeros_like(weights[f"{name}.{part}"])
    return weights


MASKS = [
    ((True, False, True), (True, True, False)),
    ((False, True, False), (False, True, True)),
    ((False, False, False), (False, False, False)),
]


@pytest.mark.parametrize(("attn", "mlp"), MASKS)
def test_layer_masks(setup, attn, mlp):
    """A static mask equals a traced one, equals the model whose skipped branches add zeros, equals the reference. The
    prefix ran in full, so the skipped attention's cache rows are those of the full model and stay untouched."""
    s = setup
    chunk = s.tokens[:, PREFIX:]
    traced = LayerMask(attn=jnp.array(attn), mlp=jnp.array(mlp))
    by_trace = run(s.model, s.params, chunk, s.cache, s.start, layers=traced, collect=Collect(hidden=True))

    @jax.jit
    def static(params, chunk, cache, start):
        layers = LayerMask(attn=attn, mlp=mlp)
        collect = Collect(hidden=True)
        return s.model.apply({"params": params}, chunk, cache, start, layers=layers, collect=collect)

    by_tuple = static(s.params, chunk, s.cache, s.start)
    chex.assert_trees_all_close(by_tuple, by_trace, atol=ATOL)
    _, params = jax_model(s.hf, zeroed(s, attn, mlp))
    by_zeros = run(s.model, params, chunk, s.cache, s.start)
    np.testing.assert_allclose(by_tuple.logits, by_zeros.logits, atol=ATOL)
    for layer in range(LAYERS):
        if not attn[layer]:
            chex.assert_trees_all_equal(by_tuple.cache[layer], s.cache[layer])
            np.testing.assert_array_equal(by_tuple.hidden[2 * layer], by_tuple.hidden[2 * layer + 1])
        if not mlp[layer]:
            np.testing.assert_array_equal(by_tuple.hidden[2 * layer + 1], by_tuple.hidden[2 * layer + 2])


def test_layer_mask_equals_the_reference(setup):
    s = setup
    attn, mlp = (True, False, True), (True, True, False)
    cache = init_cache(s.model.config, BATCH, CAPACITY, jnp.float32)
    layers = LayerMask(attn=jnp.array(attn), mlp=jnp.array(mlp))
    out = run(s.model, s.params, s.tokens, cache, np.zeros(BATCH, np.int32), layers=layers)
    expected = traces(s, attn=attn, mlp=mlp)
    np.testing.assert_allclose(out.logits, stacked(expected, "logits"), atol=ATOL)


@pytest.mark.parametrize("poison", [np.nan, 1e4, -1e4, np.inf])
def test_scratch_rows_change_nothing(setup, poison):
    """Rows at or past each row's own length, in the first row three of those that the second uses."""
    s = setup
    start = np.array([PREFIX - 3, PREFIX], np.int32)
    chunk = s.tokens[:, PREFIX:]
    row = np.arange(CAPACITY)[None, :, None, None]
    scratch = row >= start[:, None, None, None]
    poisoned = jax.tree.map(lambda x: jnp.where(scratch, poison, x), s.cache)
    for options in (
        {"collect": Collect(scored_rows=jnp.zeros((BATCH, 1), jnp.int32), hidden=True)},
        {"selection": KVSelection(rows=jnp.array([[[3, 0, 4, -1]] * BATCH]), valid=start - 1)},
    ):
        clean = run(s.model, s.params, chunk, s.cache, start, **options)
        dirty = run(s.model, s.params, chunk, poisoned, start, **options)
        chex.assert_trees_all_equal(clean._replace(cache=()), dirty._replace(cache=()))
        for kept, other in zip(jax.tree.leaves(clean.cache), jax.tree.leaves(dirty.cache), strict=True):
            for b in range(BATCH):
                end = start[b] + LENGTH - PREFIX
                np.testing.assert_array_equal(kept[b, :end], other[b, :end])


def test_rows_that_do_not_run_see_nothing(setup):
    """Their cache may hold NaN; their logits are finite, their scores -inf, and their K/V go where they always do."""
    s = setup
    chunk, running = s.tokens[:, PREFIX:], np.array([True, False])
    poisoned = jax.tree.map(lambda x: jnp.where(running[:, None, None, None], x, jnp.nan), s.cache)
    rows = jnp.array([[[3, 0, 4, -1]] * BATCH])
    scored = jnp.array([[0, LENGTH - PREFIX - 1]] * BATCH)
    for options in (
        {"collect": Collect(scored_rows=scored)},
        {"collect": Collect(scored_rows=scored, score_mode="logit")},
        {"selection": KVSelection(rows=rows, valid=s.start - 1)},
        {"layers": LayerMask(attn=jnp.ones(LAYERS, bool), mlp=jnp.ones(LAYERS, bool))},
    ):
        every = run(s.model, s.params, chunk, s.cache, s.start, **options)
        out = run(s.model, s.params, chunk, poisoned, s.start, running=running, **options)
        np.testing.assert_allclose(out.logits[0], every.logits[0], atol=ATOL)
        assert np.all(np.isfinite(out.logits[1]))
        if out.row_scores is not None:
            np.testing.assert_allclose(out.row_scores[:, 0], every.row_scores[:, 0], atol=ATOL)
            np.testing.assert_array_equal(out.row_scores[:, 1], -np.inf)
        for old, new in zip(jax.tree.leaves(poisoned), jax.tree.leaves(out.cache), strict=True):
            np.testing.assert_array_equal(old[1, :PREFIX], new[1, :PREFIX])
            assert np.all(np.isfinite(new[1, PREFIX:LENGTH]))


def dots(jaxpr):
    """Every dot_general of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from dots(inner)


@pytest.mark.parametrize("selected", [False, True])
def test_float32_uses_the_highest_precision(setup, selected):
    """A GPU would otherwise multiply float32 matrices in TF32, with 10 bits."""
    s = setup
    selection = KVSelection(rows=jnp.zeros((1, BATCH, 4), jnp.int32) - 1, valid=jnp.asarray(s.start) - 1)
    layers = LayerMask(attn=jnp.ones(LAYERS, bool), mlp=jnp.ones(LAYERS, bool))
    jaxpr = jax.make_jaxpr(lambda *args: run(s.model, *args, selection if selected else None, layers))(
        s.params, s.tokens[:, PREFIX:], s.cache, s.start
    )
    found = list(dots(jaxpr.jaxpr))
    assert len(found) >= 6 * LAYERS + 1
    highest = jax.lax.Precision.HIGHEST
    assert all(eqn.params["precision"] in (highest, (highest, highest)) for eqn in found), found


def test_contradictions_raise(setup):
    s = setup
    call = partial(jax.eval_shape, partial(run.__wrapped__, s.model), s.params, s.tokens[:, PREFIX:])
    selection = KVSelection(rows=jnp.zeros((1, BATCH, 4), jnp.int32), valid=jnp.asarray(s.start))
    mask = LayerMask(attn=jnp.ones(LAYERS, bool), mlp=jnp.ones(LAYERS, bool))
    scored = Collect(scored_rows=jnp.zeros((BATCH, 1), jnp.int32))
    with pytest.raises(ValueError, match=f"{LAYERS} layer caches"):
        call(s.cache[:-1], s.start)
    with pytest.raises(ValueError, match="scores need full attention"):
        call(s.cache, s.start, selection, None, scored)
    with pytest.raises(ValueError, match="excludes collecting"):
        call(s.cache, s.start, None, mask, scored)
    with pytest.raises(ValueError, match=f"selection.rows .*{LAYERS} or 1"):
        call(s.cache, s.start, selection.replace(rows=jnp.zeros((2, BATCH, 4), jnp.int32)))
    for attn, mlp in ((LAYERS - 1, LAYERS), (LAYERS, LAYERS + 1)):
        with pytest.raises(ValueError, match=f"layer mask needs {LAYERS} entries"):
            call(s.cache, s.start, None, LayerMask(attn=jnp.ones(attn, bool), mlp=jnp.ones(mlp, bool)))


@pytest.mark.parametrize("queries", [(LAYERS,), (0, -1)])
def test_unknown_query_layers_raise(setup, queries):
    s = setup
    with pytest.raises(ValueError, match=r"collect\.queries"):
        run(s.model, s.params, s.tokens[:, PREFIX:], s.cache, s.start, collect=Collect(queries=queries))
