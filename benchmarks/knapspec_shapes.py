"""Latencies at the sizes of a large model with random weights, for knapspec.py: fit, phases, the planner's own cost."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import KnapSpec, Plan, Sampling, Vegas
from jaxspec.benchmarking.shapes import SHAPES, random_cache, random_params
from jaxspec.decode import decode_step, draft_tokens
from jaxspec.methods import Method, Models, Plain
from jaxspec.methods.knapspec import traced_plan
from jaxspec.models import Decoder, cache_capacity
from jaxspec.planning import PlannerOptions, expected_tokens
from jaxspec.planning.loops import decode_state, selecting_state
from jaxspec.planning.measure import measure
from jaxspec.planning.plan import fitted, search_plan
from jaxspec.requests import check_request

DRAFTS, STEPS, REPEATS = 5, 8, 5
ROOM = 1024  # tokens that a state has room for; no row ends while it is timed
PUBLISHED = 0.97  # acceptance of KnapSpec on Llama3.1-8B, AIME24


def shapes(report, models, texts: dict, args) -> None:
    """Everything at every context length; a batch size shares its programs over all of them."""
    config = SHAPES[args.shape]
    models = Models(Decoder(config), random_params(config))
    for batch in args.batches:
        contexts = sorted(args.shape_contexts)
        while contexts and not _fits(models, batch, contexts[-1]):
            report.add("shapes_too_large", {"shape": args.shape, "batch": batch, "context": contexts.pop()})
        while contexts:
            if report.attempt("shapes", _batch, report, models, batch, contexts, args):
                break
            # most likely the longest does not fit the memory
            contexts = contexts[:-1]


def _fits(models: Models, batch: int, context: int) -> bool:
    """Whether weights and one cache fit the device's memory, as far as that is known."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    config, leaves = models.target.config, jax.tree.leaves(models.params)
    rows = batch * (context + ROOM)
    cache = 2 * config.num_layers * rows * config.num_kv_heads * config.head_dim * leaves[0].dtype.itemsize
    return limit is None or cache + sum(leaf.nbytes for leaf in leaves) < 0.97 * limit


def _batch(report, models: Models, batch: int, contexts: list[int], args) -> bool:
    config, num_layers = models.target.config, models.target.config.num_layers
    vegas = Vegas(rho=args.rho, min_keep=args.min_keep)
    composed = KnapSpec(
        plan=Plan((True,) * num_layers, (True,) * num_layers, DRAFTS), max_draft=DRAFTS, selection=vegas
    )
    measured = measure(models, batch, contexts, max_draft=args.max_draft, steps=16, selection=vegas)
    report.add(
        "shapes_latency",
        {
            "shape": args.shape,
            "batch": batch,
            "fit_error": measured.fit_error,
            "plain_error": measured.plain_error,
            "c2_nanoseconds_per_row": 1e9 * measured.profile.attention.slope,
            "c3_microseconds": 1e6 * measured.profile.attention.intercept,
            "mlp_microseconds": 1e6 * measured.profile.mlp,
            "head_microseconds": 1e6 * measured.profile.head,
            "seconds": measured.seconds,
            "contexts": measured.contexts,
            "attention": measured.attention,
            "plain": measured.plain,
            "profile": measured.profile.as_dict(),
        },
    )
    # every second sublayer between the first and the last block
    run = np.ones((2, num_layers), bool)
    run[0, 1:-1:2], run[1, 2:-1:2] = False, False
    plan = Plan(tuple(run[0].tolist()), tuple(run[1].tolist()), DRAFTS)
    capacity = cache_capacity(contexts[-1] + (STEPS + 1) * (DRAFTS + 1))
    cache = random_cache(config, batch, capacity, models.params["embedding"].dtype)
    jobs = {
        "plain step": (_rounds, Plain(), None),
        "static round": (_rounds, KnapSpec(plan=plan, max_draft=DRAFTS), None),
        "static drafts": (_drafts, KnapSpec(plan=plan, max_draft=DRAFTS), None),
        "traced round": (_rounds, KnapSpec(execution="traced", max_draft=DRAFTS), plan),
        "traced drafts": (_drafts, KnapSpec(execution="traced", max_draft=DRAFTS), plan),
        "composed round": (_rounds, composed, None),
    }
    request = check_request(
        models.target, np.zeros((batch, 1), np.int32), np.ones(batch, np.int32), jax.random.key(0), Plain(),
        Sampling(), ROOM, (), 0, None,
    )  # fmt: skip
    costs, lengths = measured.profile.costs(), (contexts[0], contexts[-1])
    options = fitted(PlannerOptions(max_draft=args.max_draft), costs, num_layers, lengths)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (batch, contexts[-1] + 1)).astype(np.int32)

    def planner_arguments(n: int) -> tuple:
        return models, cache, prompt, np.full(batch, n + 1), np.zeros((batch, 1), np.int32), np.full(batch, n), costs

    started = time.perf_counter()
    select = partial(selecting_state, method=composed.selection)
    owns = {composed: jax.eval_shape(select, models, cache, np.int32(0))[1].method_state}
    lowered = [job.lower(models, cache, np.int32(0), request, owns.get(m, ()), m, p) for job, m, p in jobs.values()]
    lowered.append(search_plan.lower(*planner_arguments(contexts[0]), options))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda low: low.compile(), lowered))
    report.add("shapes_compile", {"batch": batch, "programs": len(lowered), "seconds": time.perf_counter() - started})
    for n in contexts:
        ms = {}
        cache, state = select(models, cache, np.int32(n))
        owns[composed] = state.method_state
        for name, (job, method, p) in jobs.items():
            times = []
            for repeat in range(REPEATS + 1):
                jax.block_until_ready(cache)
                started = time.perf_counter()
                done, cache = job(models, cache, np.int32(n), request, owns.get(method, ()), method, p)
                jax.block_until_ready(done)
                if repeat:
                    times.append(time.perf_counter() - started)
            ms[name] = 1e3 * statistics.median(times) / STEPS
        planning = []
        for _ in range(4):
            started = time.perf_counter()
            jax.block_until_ready(search_plan(*planner_arguments(n), options).cell)
            planning.append(time.perf_counter() - started)
        planning = statistics.median(planning[1:])
        predicted = 1e3 * float(costs.round(plan.num_attention, plan.num_mlp, DRAFTS, n))
        round_ms = ms["static round"]
        sparse = 1e3 * float(measured.profile.costs(sparse=True).round(num_layers, num_layers, DRAFTS, n))
        tokens = float(expected_tokens(PUBLISHED, DRAFTS))
        report.add(
            "shapes",
            {
                "shape": args.shape,
                "batch": batch,
                "context": n,
                **{name.replace(" ", "_") + "_ms": value for name, value in ms.items()},
                "static_draft_step_over_plain": ms["static drafts"] / DRAFTS / ms["plain step"],
                "traced_draft_step_over_plain": ms["traced drafts"] / DRAFTS / ms["plain step"],
                "predicted_round_ms": predicted,
                "round_error": predicted / round_ms - 1,
                "predicted_composed_round_ms": sparse,
                "composed_round_error": sparse / ms["composed round"] - 1,
                "speedup_at_published_acceptance": tokens * ms["plain step"] / round_ms,
                "planner_ms": 1e3 * planning,
                "planner_branches": options.max_cells,
                "planner_share_at_64_rounds": 1e3 * planning / (64 * round_ms),
                "rounds_for_2_percent": 1e3 * planning / (0.02 * round_ms),
            },
        )
    return True


def _state(models: Models, cache, start, request, own, method: Method, plan: Plan | None):
    batch = cache[0].k.shape[0]
    length = jnp.full(batch, start, jnp.int32)
    token, own = jnp.zeros(batch, jnp.int32), own if plan is None else traced_plan(plan, own)
    return decode_state(cache, length, token, own, request.keys, ROOM, method.max_draft)


@partial(jax.jit, static_argnums=(5, 6), donate_argnums=1)
def _rounds(models: Models, cache, start, request, own, method: Method, plan: Plan | None):
    state = _state(models, cache, start, request, own, method, plan)
    # a while loop, as decoding is
    state = jax.lax.while_loop(
        lambda state: state.round < STEPS + 1,
        lambda state: decode_step(models, state, request, method, ROOM)[0],
        state,
    )
    return state.tokens, state.cache


@partial(jax.jit, static_argnums=(5, 6), donate_argnums=1)
def _drafts(models: Models, cache, start, request, own, method: Method, plan: Plan | None):
    state = _state(models, cache, start, request, own, method, plan)

    def step(_, state):
        state, draft = draft_tokens(models, state, request, method)
        return state.replace(last_token=draft.tokens[:, -1])

    state = jax.lax.fori_loop(0, STEPS, step, state)
    return state.last_token, state.cache
