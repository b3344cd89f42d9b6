"""The knapsack over sublayers: which of them a draft may skip (KnapSpec, arXiv 2602.20217, algorithm 1).

Items are the 2L sublayers in order (or the L blocks). The dynamic program keeps, per total skipped weight j, one
residual stream of r reference tokens: the one most similar to the full model's. All of them advance through an item in
one batched forward, as branches that share the sequence's prefix in the cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.methods.base import Models
from jaxspec.models.layers import Attention, Block, RMSNorm, add_update, precision_of
from jaxspec.models.rope import rope_tables
from jaxspec.types import Array, KVCache, KVSelection, KVSelector, LayerCache
from pallas_kernels import prefix_attention, rope_and_cache

HEAD_CELLS = 8  # cells per step of the output head


class Frontier(NamedTuple):
    """What the dynamic program leaves: C cells, cell j with skipped weight j. Cell 0 skips nothing."""

    alive: Array  # bool [C]
    attn: Array  # bool [C, L]: sublayers that run
    mlp: Array  # bool [C, L]
    similarity: Array  # float32 [C]: mean cosine with the full model's last hidden state
    hits: Array  # int32 [C]: reference tokens after which the two agree on the next
    count: Array  # int32 []: reference tokens
    states: Array  # [B, C, r, D]: the residual streams after the last layer


def knapsack(
    models: Models,
    cache: KVCache,
    tokens: Array,
    start: Array,
    valid: Array,
    weights: Array,
    limit: Array,
    *,
    cells: int,
    tau: float,
    blocks: bool = False,
    selection: KVSelection | KVSelector | None = None,
) -> Frontier:
    """Runs the dynamic program on reference tokens whose prefix is in the cache; the cache is only read.

    The first and the last block always run. A cell whose mean cosine with the full model's hidden state falls below
    `tau` at any depth is dropped.

    Args:
        models: the target.
        cache: [B', S, K, H] per layer, B' >= B; of each sequence rows 0..start-1 are read.
        tokens: int32 [B, r], reference tokens at positions start..start+r-1.
        start: int32 [B].
        valid: bool [B, r]: which of them count; those before a counted one must count too.
        weights: int32 [2], of an attention and an MLP sublayer, at least 1 each; with `blocks` of a block, twice.
        limit: int32 [], the most skipped weight, at most cells - 1.
        cells: static, C.
        tau: the least similarity.
        blocks: whole blocks are the items, which makes this CLaSp's program (arXiv 2505.24196).
        selection: the prefix rows that drafts attend to. All cells then attend to those, cell 0 among them, and are
            compared with the full model's states, which take a branch of their own.
    """
    config = models.target.config
    branches = _Branches(models, cache, start, tokens.shape[1])
    full = models.params["embedding"][tokens][:, None]
    # all cells from the first item on: a state that grew would have every kernel compiled again for each of its sizes
    state, cell = jnp.repeat(full, cells, axis=1), jnp.arange(cells)
    alive, score = cell == 0, jnp.ones(cells, jnp.float32)
    skips, items = [], []
    for layer in range(config.num_layers):
        skippable = 0 < layer < config.num_layers - 1
        live = jnp.max(jnp.where(alive, cell + 1, 1))
        for kinds in ((0, 1),) if blocks else ((0,), (1,)):
            executed = state
            for kind in kinds:
                if kind:
                    executed = branches.mlp(layer, executed)
                    full = full if selection is None else branches.mlp(layer, full)
                elif selection is None:
                    executed = branches.attend(layer, executed, live)
                else:
                    rows = branches.selected_rows(layer, full, selection)
                    executed, full = branches.attend(layer, executed, live, rows), branches.attend(layer, full, 1)
            full = executed[:, :1] if selection is None else full
            run_score = _similarity(executed, full, valid)
            if not skippable:
                state, score = executed, run_score
                alive &= score >= tau
                continue
            source = cell - weights[kinds[0]]
            old = jnp.maximum(source, 0)
            can_skip = (source >= 0) & alive[old] & (cell <= limit)
            skip_score = jnp.where(can_skip, _similarity(state, full, valid)[old], -jnp.inf)
            run_score = jnp.where(alive, run_score, -jnp.inf)
            skip = skip_score > run_score
            state = jnp.where(skip[None, :, None, None], state[:, old], executed)
            score = jnp.maximum(skip_score, run_score)
            # without the barrier XLA fuses the choices of many items, and takes minutes to compile
            state, full, alive = jax.lax.optimization_barrier((state, full, score >= tau))
            skips.append(skip)
            items.append((layer, kinds))
    attn, mlp = _backtracked(skips, items, weights, config.num_layers, cells)
    hits = _top_tokens(models, state) == _top_tokens(models, full)
    hits = jnp.sum(hits & valid[:, None], axis=(0, 2), dtype=jnp.int32)
    return Frontier(alive, attn, mlp, score, hits, jnp.sum(valid, dtype=jnp.int32), state)


def reference_tokens(
    prompt: Array, prompt_length: Array, emitted: Array, length: Array, count: int
) -> tuple[Array, Array, Array]:
    """The last committed tokens of the first rows of a batch, `count` of them in all.

    Args:
        prompt: int32 [B', P].
        prompt_length: int32 [B'].
        emitted: int32 [B', W], tokens after the prompts.
        length: int32 [B'], how many tokens of prompt and `emitted` have their K/V in the cache, at least 1.
        count: static; each of the first B = min(B', count) rows gives r = count // B tokens.

    Returns:
        tokens int32 [B, r], start int32 [B], the first one's position, and valid bool [B, r]: shorter rows give less.
    """
    batch = min(prompt.shape[0], count)
    r = count // batch
    prompt_length, length = prompt_length[:batch, None], length[:batch, None]
    start = jnp.maximum(length - r, 0)
    position = start + jnp.arange(r, dtype=jnp.int32)
    before = jnp.take_along_axis(prompt[:batch], jnp.minimum(position, prompt.shape[1] - 1), axis=1)
    after = jnp.clip(position - prompt_length, 0, emitted.shape[1] - 1)
    after = jnp.take_along_axis(emitted[:batch], after, axis=1)
    return jnp.where(position < prompt_length, before, after), start[:, 0], position < length


def _backtracked(
    skips: list[Array], items: list[tuple[int, tuple[int, ...]]], weights: Array, num_layers: int, cells: int
) -> tuple[Array, Array]:
    """Which attention and MLP sublayers run, bool [C, L] each, from every item's choices [C]."""
    runs = jnp.ones((2, num_layers, cells), bool)
    if items:
        weight = jnp.stack([weights[kinds[0]] for _, kinds in items])

        def step(cell: Array, item: tuple[Array, Array]) -> tuple[Array, Array]:
            skip = item[0][cell]
            # of a dropped cell the way back may lead below 0
            return jnp.maximum(cell - skip * item[1], 0), skip

        _, skipped = jax.lax.scan(step, jnp.arange(cells), (jnp.stack(skips), weight), reverse=True)
        for kind in (0, 1):
            index = [i for i, (_, kinds) in enumerate(items) if kind in kinds]
            layers = jnp.array([items[i][0] for i in index])
            runs = runs.at[kind, layers].set(~skipped[jnp.array(index)])
    return runs[0].T, runs[1].T


class _Branches:
    """Sublayers over residual streams [B, C, r, D] that share each sequence's prefix."""

    def __init__(self, models: Models, cache: KVCache, start: Array, num_tokens: int) -> None:
        self._target, self._params, self._cache, self._start = models.target, models.params, cache, start
        config = models.target.config
        positions = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
        self._rope = rope_tables(config.rope, config.head_dim, positions)

    def attend(self, layer: int, x: Array, live: Array | int, rows: Array | None = None) -> Array:
        """x after the attention sublayer, over the whole prefix or over given rows of it [B, M] (-1 pads). Branches
        from `live` on are not wanted."""
        cache = self._cache[layer]
        if rows is not None:
            at = jnp.arange(x.shape[0])[:, None], jnp.maximum(rows, 0)
            cache = LayerCache(cache.k[at], cache.v[at])
        update = self._apply(layer, x, "branches", cache, self._start, jnp.asarray(live, jnp.int32), rows)
        return x + update.reshape(x.shape)

    def selected_rows(self, layer: int, full: Array, selection: KVSelection | KVSelector) -> Array:
        """int32 [B, M]: the rows that the selection keeps, and those newer than the ones it chose from."""
        batch = full.shape[0]
        if isinstance(selection, KVSelector):
            # by the full model's last query: one choice for all branches
            query = self._apply(layer, full, "queries")[:, -1:]
            position = (self._start + full.shape[2] - 1)[:, None]
            cache = LayerCache(*(x[:batch] for x in self._cache[layer]))
            rows = selection.select(layer, query, cache, position, selection.state)[:batch]
        else:
            rows = selection.rows[min(layer, selection.rows.shape[0] - 1), :batch]
        newer = selection.valid[:batch, None] + jnp.arange(selection.window, dtype=jnp.int32)
        return jnp.concatenate([rows, newer], axis=1)

    def _apply(self, layer: int, x: Array, method: str, *args: Array | LayerCache | None) -> Array:
        target, params = self._target, self._params[f"layers_{layer}"]
        norm = RMSNorm(target.config.hidden_size, target.config.rms_norm_eps, target.backend)
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        _, normed = norm.apply({"params": params["attention_norm"]}, flat)
        # each branch sits at the same positions, in cache rows of its own
        rope = tuple(jnp.tile(table, (1, x.shape[1], 1)) for table in self._rope)
        attention = _BranchAttention(target.config, layer, target.backend)
        return attention.apply({"params": params["attention"]}, normed, rope, x.shape[1], *args, method=method)

    def mlp(self, layer: int, x: Array) -> Array:
        target = self._target
        block = Block(target.config, layer, target.backend)
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        params = {"params": self._params[f"layers_{layer}"]}
        flat, update = block.apply(params, flat, None, method="feed_forward")
        return add_update(flat, update).reshape(x.shape)


class _BranchAttention(Attention):
    """Attention of C branches of r tokens each: to the prefix they share and, causally, to their own tokens."""

    def branches(
        self,
        x: Array,
        rope: tuple[Array, Array],
        cells: int,
        prefix: LayerCache,
        start: Array,
        live: Array,
        rows: Array | None,
    ) -> Array:
        """[B, C * r, D] of x [B, C * r, D]. Of the prefix [B', S, K, H] rows 0..start-1 are read, or with `rows` copies
        of those rows; cells from `live` on are not wanted."""
        c = self.config
        batch = x.shape[0]
        q, k, v = self._project(x, rope)
        q = q.reshape(batch, cells, -1, c.num_kv_heads, c.group_size, c.head_dim).transpose(0, 3, 1, 4, 2, 5)
        k, v = (t.reshape(batch, cells, -1, c.num_kv_heads, c.head_dim).transpose(0, 3, 1, 2, 4) for t in (k, v))
        out = _attend(q, k, v, prefix, start, live, rows, c.head_dim**-0.5, self.backend)
        return self.out(out.transpose(0, 2, 4, 1, 3, 5).reshape(*x.shape[:2], c.num_heads, c.head_dim))

    def queries(self, x: Array, rope: tuple[Array, Array], cells: int) -> Array:
        """[B, C * r, N, H], after rope."""
        return self._project(x, rope)[0]

    def _project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        c = self.config
        own = jnp.zeros((*x.shape[:2], c.num_kv_heads, c.head_dim), x.dtype)
        return rope_and_cache(
            self.qkv(x, add_bias=False),
            own,
            own,
            *rope,
            jnp.zeros(x.shape[0], jnp.int32),
            bias=self.qkv.bias if c.qkv_bias else None,
            q_scale=self.q_norm.scale if c.qk_norm else None,
            k_scale=self.k_norm.scale if c.qk_norm else None,
            eps=c.rms_norm_eps,
            backend=self.backend,
        )


def _attend(
    q: Array,
    k: Array,
    v: Array,
    prefix: LayerCache,
    start: Array,
    live: Array,
    rows: Array | None,
    scale: float,
    backend: str | None,
) -> Array:
    """q [B,K,C,G,r,H] over own k, v [B,K,C,r,H] and the prefix; the rest as in `prefix_attention`, `live` in cells."""
    batch, kv_heads, _, group, r, head_dim = q.shape
    options = {"preferred_element_type": jnp.float32, "precision": precision_of(q)}
    logits = jnp.einsum("bkcgrh,bkcsh->bkcgrs", q, k, **options) * scale
    logits = jnp.where(jnp.tril(jnp.ones((r, r), bool)), logits, -jnp.inf)
    flat = q.reshape(batch, kv_heads, -1, head_dim)
    out, lse = prefix_attention(flat, *prefix, start, live * group * r, scale=scale, rows=rows, backend=backend)
    out, lse = out.reshape(q.shape), lse.reshape(*q.shape[:-1], 1)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), lse)
    weights, before = jnp.exp(logits - top), jnp.exp(lse - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + before
    own = jnp.einsum("bkcgrs,bkcsh->bkcgrh", weights.astype(v.dtype), v, **options)
    return ((own + before * out) / total).astype(q.dtype)


def _similarity(x: Array, reference: Array, valid: Array) -> Array:
    """float32 [C]: mean cosine of x [B, C, r, D] with the reference [B, 1, r, D] over the valid tokens."""
    x, reference = x.astype(jnp.float32), reference.astype(jnp.float32)
    dot = jnp.sum(x * reference, axis=-1)
    norms = jnp.sum(x * x, axis=-1) * jnp.sum(reference * reference, axis=-1)
    cosine = dot * jax.lax.rsqrt(jnp.maximum(norms, 1e-30))
    return jnp.sum(jnp.where(valid[:, None], cosine, 0), axis=(0, 2)) / jnp.sum(valid)


def _top_tokens(models: Models, states: Array) -> Array:
    """int32 [B, C, r]: the likeliest next token of every state; a few cells at a time, as logits are large."""
    batch, cells, r, width = states.shape
    groups = -(-cells // HEAD_CELLS)
    padded = jnp.pad(states, ((0, 0), (0, groups * HEAD_CELLS - cells), (0, 0), (0, 0)))
    padded = jnp.moveaxis(padded.reshape(batch, groups, HEAD_CELLS * r, width), 1, 0)

    def top(x: Array) -> Array:
        return jnp.argmax(models.target.apply({"params": models.params}, x, method="logits"), axis=-1)

    tokens = jnp.moveaxis(jax.lax.map(top, padded), 0, 1).astype(jnp.int32)
    return tokens.reshape(batch, -1, r)[:, :cells]
