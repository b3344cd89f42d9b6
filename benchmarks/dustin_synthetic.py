"""Dustin's costs at Qwen2.5-7B + 0.5B sizes with random weights: each part of a round, and rounds as they run."""

import dataclasses
from functools import partial
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from kernels_timing import cache_sets, loop, random

from jaxspec.benchmarking.shapes import SHAPES, random_cache, random_params
from jaxspec.decode import decode_all
from jaxspec.dustin.scoring import choose_rows, head_scores
from jaxspec.methods import Dustin, Models, Plain
from jaxspec.methods.draft_model import DraftModelState
from jaxspec.models import Decoder, ModelConfig, RopeConfig, cache_capacity
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.types import DecodeState, ForwardOut, KVSelection, Stats
from pallas_kernels import cached_attention, sparse_attention

DRAFT = ModelConfig(
    "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 131072, RopeConfig(1e6), tie_word_embeddings=True, qkv_bias=True
)
TOKENS_PER_ROUND = 2.2  # the paper's, for its 7B target
STEPS = 24  # steps of a timed loop


def synthetic(args, report) -> None:
    """All batches and contexts."""
    tiny = args.tiny
    configs = (SHAPES["tiny"], SHAPES["tiny"]) if tiny else (SHAPES["qwen2.5-7b"], DRAFT)
    target, draft = map(Decoder, configs)
    models = Models(target, *map(random_params, configs))
    # one layer of the target, three of the draft, four heads each: what was published for such a pair
    heads = {
        "target_heads": ((configs[0].num_layers // 2, (0, 1)),) if tiny else ((14, (0, 1, 2, 3)),),
        "draft_heads": ((0, (0, 1)),) if tiny else ((6, (0, 1, 2, 3)), (12, (0, 1, 2, 3)), (18, (0, 1, 2, 3))),
    }
    sizes = {"sinks": 2, "window": 4, "split": 8} if tiny else {"split": 160}
    method = Dustin(model=draft, num_draft=args.num_draft, budget=args.budget, **sizes, **heads)
    for batch in args.synthetic_batches:
        report.attempt(f"synthetic, batch {batch}", lambda b=batch: _batch(args, report, models, method, b))
    report.attempt("attention alone", lambda: _attention(args, report, configs[0]))


def _batch(args, report, models: Models, method: Dustin, batch: int) -> None:
    contexts, ceiling = args.synthetic_contexts, report.results["ceiling_bytes_per_second"]
    capacity = cache_capacity(max(contexts) + (STEPS + 4) * (args.num_draft + 1))
    bench = Bench(models, method, batch, capacity)
    bench.compile(report.attempt)
    for context in contexts:
        times = {
            name: report.attempt(f"{name} at {context}", partial(bench.time, name, context)) for name in bench.programs
        }
        ms = {name: seconds * 1e3 for name, seconds in times.items() if seconds is not None}
        floor = batch * context * bench.scored_bytes / ceiling * 1e3
        derived = {"scoring_floor_ms": floor}
        if {"plain step", "scoring"} <= set(ms):
            derived["scoring_share_of_bytes_time"] = floor / ms["scoring"]
            derived["scoring_share_of_plain_step"] = ms["scoring"] / ms["plain step"]
            derived["floor_share_of_plain_step"] = floor / ms["plain step"]
        for name in ("dustin round", "dustin round, drafts on the last rows"):
            if {"plain step", name} <= set(ms):
                derived[f"speedup at {TOKENS_PER_ROUND} tokens per round, {name}"] = (
                    TOKENS_PER_ROUND * ms["plain step"] / ms[name]
                )
        print(
            f"  batch {batch} at {context}: " + "  ".join(f"{k} {v:.3f}" for k, v in (ms | derived).items()), flush=True
        )
        label = "random weights; speed-ups follow from an assumed number of tokens per round"
        shared = {"batch": batch, "context": context, "budget": args.budget, "num_draft": args.num_draft}
        report.add("synthetic", {**shared, "label": label, "milliseconds": ms, **derived})


class Bench:
    """Timed loops over caches of one capacity; lengths are traced, so all contexts share the programs."""

    def __init__(self, models: Models, method: Dustin, batch: int, capacity: int) -> None:
        self.models, self.method, self.batch = models, method, batch
        self.capacity = capacity
        self.caches = self._random_caches()
        self.scored_bytes = sum(
            len({head // config.group_size for head in chosen}) * config.head_dim * 2
            for config, heads in (
                (models.target.config, method.target_heads),
                (method.model.config, method.draft_heads),
            )
            for _, chosen in heads
        )
        sparse = dataclasses.replace(method, sparse_drafts="last")
        target, draft = (models.target, models.params), (method.model, models.draft_params)
        self.functions = {
            "plain step": partial(self._steps, *target, 0, 1, False),
            "draft step": partial(self._steps, *draft, 1, 1, False),
            "draft step, sparse": partial(self._steps, *draft, 1, 1, True),
            "verification": partial(self._steps, *target, 0, method.num_draft + 1, True),
            "scoring": self._scoring,
            "selection": self._selection,
            "dustin round": partial(self._rounds, method),
            "dustin round, drafts on the last rows": partial(self._rounds, sparse),
        }
        self.programs = {}

    def _random_caches(self):
        configs = self.models.target.config, self.method.model.config
        return tuple(random_cache(config, self.batch, self.capacity) for config in configs)

    def compile(self, attempt) -> None:
        """All loops, one after another: a GPU's compiler times its choices on the device, and keeps what it found."""
        length = jnp.zeros(self.batch, jnp.int32)
        started = perf_counter()

        def build(name: str) -> None:
            run = jax.jit(lambda models, caches, length: self.functions[name](models, caches, length), donate_argnums=1)
            self.programs[name] = run.lower(self.models, self.caches, length).compile()

        for name in self.functions:
            attempt(f"compile {name}", lambda name=name: build(name))
        self.programs = {name: self.programs[name] for name in self.functions if name in self.programs}
        print(f"  compiled {len(self.programs)} programs in {perf_counter() - started:.0f} s", flush=True)

    def time(self, name: str, context: int) -> float:
        """Seconds per step; per round for the rounds."""
        length, times = jnp.full(self.batch, context, jnp.int32), []
        for _ in range(3):
            # a program that fails has taken the caches with it
            caches, self.caches = self.caches or self._random_caches(), None
            started = perf_counter()
            self.caches, rounds, _ = jax.block_until_ready(self.programs[name](self.models, caches, length))
            times.append((perf_counter() - started) / int(rounds))
        return min(times)

    def _steps(self, model, params, which, rows, sparse, models, caches, length):
        params = (models.params, models.draft_params)[which]
        selection = self._some_rows(length) if sparse else None

        def step(_, carry):
            cache, tokens = carry
            chosen = None if selection is None else KVSelection(selection, length, rows)
            out = model.apply({"params": params}, tokens, cache, length, selection=chosen)
            return out.cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

        tokens = jnp.zeros((self.batch, rows), jnp.int32)
        cache, tokens = jax.lax.fori_loop(0, STEPS, step, (caches[which], tokens))
        caches = (cache, caches[1]) if which == 0 else (caches[0], cache)
        return caches, jnp.int32(STEPS), tokens

    def _some_rows(self, length):
        """Spread over the whole context, ascending."""
        k = self.method.budget
        slot = jnp.arange(k, dtype=jnp.int32)
        return (slot * (length[:, None] // k) + slot % 7 % jnp.maximum(length[:, None] // k, 1))[None]

    def _queries(self, config, heads, count):
        shape = (self.batch, count, config.num_heads, config.head_dim)
        return tuple(
            jax.random.normal(jax.random.key(i), shape, self.caches[0][0].k.dtype) for i, _ in enumerate(heads)
        )

    def _scoring(self, models, caches, length):
        method, config = self.method, models.target.config
        back = self._queries(config, method.target_heads, 1)
        ahead = self._queries(method.model.config, method.draft_heads, method.num_draft)
        ahead_pos = length[:, None] + jnp.arange(method.num_draft, dtype=jnp.int32)

        def step(_, carry):
            # every step's queries depend on the scores before
            turn = lambda qs: tuple(q + carry.astype(q.dtype) for q in qs)  # noqa: E731
            a = head_scores(turn(back), caches[0], method.target_heads, length[:, None] - 1, length, None)
            b = head_scores(turn(ahead), caches[1], method.draft_heads, ahead_pos, length, None)
            return 1e-6 * (a[0, 0] + b[0, 0])

        out = jax.lax.fori_loop(0, STEPS, step, jnp.float32(0))
        return caches, jnp.int32(STEPS), out

    def _selection(self, models, caches, length):
        method, capacity = self.method, caches[0][0].k.shape[1]
        history, ahead = (jax.random.uniform(jax.random.key(i), (self.batch, capacity)) for i in range(2))

        def step(_, carry):
            rows = choose_rows(
                history + carry, ahead + carry, length, budget=method.budget, sinks=method.sinks, window=method.window,
                split=method._draft_rows, backend=None,
            )  # fmt: skip
            return 1e-9 * jnp.sum(rows).astype(jnp.float32)

        out = jax.lax.fori_loop(0, STEPS, step, jnp.float32(0))
        return caches, jnp.int32(STEPS), out

    def _rounds(self, method, models, caches, length):
        """Rounds of the loop of `generate`; random models agree on little, so a round emits about one token."""
        g, batch, new = method.num_draft, self.batch, STEPS
        prompt = jnp.zeros((batch, 1), jnp.int32)
        ones = np.ones(batch, np.int32)
        request = check_request(
            models.target,
            np.zeros((batch, 1), np.int32),
            ones,
            jax.random.key(0),
            Plain(),
            Sampling(),
            new,
            (),
            0,
            None,
        )
        queries = self._queries(models.target.config, method.target_heads, 1)
        own = DraftModelState(caches[1], jnp.zeros(batch, jnp.int32))
        out = ForwardOut(None, caches[0], None, queries, None)
        zeros, trace = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, new), jnp.int16)
        state = DecodeState(
            tokens=jnp.zeros((batch, new + g + 1), jnp.int32),
            num_tokens=zeros + 1,
            length=length,
            last_token=zeros,
            finish=jnp.zeros(batch, jnp.int8),
            cache=caches[0],
            method_state=method.start(models, prompt, length, out, own),
            keys=request.keys,
            round=jnp.int32(1),
            stats=Stats(zeros, zeros, trace, trace),
            logprobs=None,
        )
        state = decode_all(models, state, request, method, new)
        return (state.cache, state.method_state.own.cache), jnp.max(state.stats.rounds), state.tokens


def _attention(args, report, config: ModelConfig) -> None:
    """One layer's attention of a verification, full against sparse."""
    rows, k = args.num_draft + 1, args.budget
    batch, context = (2, 256) if args.tiny else (16, 32768)
    for name, kv_heads, group in (("7b", config.num_kv_heads, config.group_size), ("K8 G8", 8, 8)):
        head_dim = 128
        sets = cache_sets(batch, context, kv_heads, head_dim)
        q = random(3, (batch, rows, kv_heads * group, head_dim))
        start = jnp.full(batch, context - rows, jnp.int32)
        chosen = jnp.tile(jnp.linspace(0, context - rows - 1, min(k, context // 2)).astype(jnp.int32), (batch, 1))
        full = partial(_full, start=start)
        sparse = partial(_sparse, rows=chosen, start=start, window=rows)
        nbytes = 2 * batch * context * kv_heads * head_dim * 2
        seconds = {"full": loop(full, q, sets, nbytes)(), "sparse": loop(sparse, q, sets, nbytes * k / context)()}
        ratio = seconds["full"] / seconds["sparse"]
        us = {key: value * 1e6 for key, value in seconds.items()}
        print(f"  attention {name}: full {us['full']:.1f} us, sparse {us['sparse']:.1f} us, {ratio:.1f} x", flush=True)
        shared = {"shape": name, "batch": batch, "context": context, "kv_heads": kv_heads, "group": group}
        report.add("attention", {**shared, "microseconds": us, "speedup": ratio})


def _full(q, k, v, *, start):
    return cached_attention(q, k, v, start, scale=q.shape[-1] ** -0.5)[0]


def _sparse(q, k, v, *, rows, start, window):
    return sparse_attention(q, k, v, rows, start, valid=start, window=window, scale=q.shape[-1] ** -0.5)
