"""Plans held against each other, for knapspec.py: rivals at equal cost, correlation, change with length."""

import time
from dataclasses import replace

import numpy as np
from knapspec_setting import Setting, setting_of

from jaxspec import KnapSpec, Plan
from jaxspec.methods import Plain
from jaxspec.methods.knapspec import random_plan
from jaxspec.planning import PlannerOptions, expected_tokens


def rivals(report, models, texts: dict, args) -> None:
    """The planner's plan beside others of about the same cost, at the middle context and the first batch size."""
    report.attempt("rivals", _rivals, report, models, texts, args)


def _rivals(report, models, texts: dict, args) -> None:
    setting = setting_of(report, models, texts, _middle_context(args), args.batches[0], args)
    options = PlannerOptions(max_draft=args.max_draft)
    found = setting.plan(options)
    # at least one draft, so that there is something to compare
    chosen = max((c for c in found.frontier if c.weight), key=lambda c: c.tokens_per_second, default=found.frontier[0])
    chosen = replace(chosen.plan, num_draft=max(chosen.plan.num_draft, 2))
    cost = setting.planner_cost(KnapSpec(max_draft=args.max_draft))
    seconds = cost["planner_device_seconds"] + cost["planner_host_seconds"]
    clasp = setting.plan(replace(options, items="blocks", value="tpl"))
    skipped = 2 * len(chosen.attn) - chosen.num_attention - chosen.num_mlp
    searched, tried = _random_search(setting, chosen, seconds)
    plans = {
        "knapspec": chosen,
        "clasp, its own choice": clasp.plan,
        "clasp, same cost": _nearest(clasp, setting, chosen),
        "middle blocks": _middle(chosen),
        "random search": searched,
        **{f"random {i}": _shuffled(chosen, i) for i in range(3)},
    }
    g = chosen.num_draft
    plans = {name: p if name == "clasp, its own choice" else replace(p, num_draft=g) for name, p in plans.items()}
    alphas = dict(zip(plans, setting.agreement(list(plans.values())), strict=True))
    plain = setting.run(Plain())["tokens_per_second"]
    setting.compile([KnapSpec(plan=p, max_draft=args.max_draft) for p in plans.values()])
    for name, p in plans.items():
        figures = report.attempt("rivals", setting.run, KnapSpec(plan=p, max_draft=args.max_draft))
        if figures is None:
            continue
        traced = KnapSpec(plan=p, max_draft=args.max_draft, execution="traced")
        also = report.attempt("rivals", setting.run, traced) if name == "knapspec" else None
        report.add(
            "rivals",
            {
                "plan": name,
                "context": setting.context,
                "batch": setting.batch,
                "num_draft": p.num_draft,
                "attention_run": p.num_attention,
                "mlp_run": p.num_mlp,
                "predicted_acceptance": alphas[name],
                "speedup": figures["tokens_per_second"] / plain,
                **figures,
                "traced_milliseconds_per_round": also and also["milliseconds_per_round"],
                "skipped_of_knapspec": skipped,
                "search_seconds": seconds,
                "masks_tried": tried if name == "random search" else None,
                "attn": p.attn,
                "mlp": p.mlp,
            },
        )


def correlation(report, models, texts: dict, args) -> None:
    """Pearson correlation of predicted tokens/s, and of acceptance, with measured tokens/s over many plans."""
    report.attempt("correlation", _correlation, report, models, texts, args)


def _correlation(report, models, texts: dict, args) -> None:
    setting = setting_of(report, models, texts, _middle_context(args), args.batches[0], args)
    found = setting.plan(PlannerOptions(max_draft=args.max_draft))
    frontier = [c.plan for c in found.frontier if c.weight]
    step = max(len(frontier) * 3 // (2 * args.plans), 1)
    layers = models.target.config.num_layers
    plans = frontier[::step][: args.plans * 2 // 3]
    most = 2 * (layers - 2)
    plans += [random_plan(layers, 1 + i * most // (3 * args.plans), 1, seed=i) for i in range(args.plans - len(plans))]
    # all lengths of drafts occur, not only those that are best
    plans = [replace(p, num_draft=1 + (3 * i) % args.max_draft) for i, p in enumerate(plans)]
    alphas = setting.agreement(plans)
    costs, n = setting.profile.costs(), setting.context + setting.new_tokens / 2
    report.add("correlation_compile", {"plans": len(plans), "seconds": setting.compile(
        [KnapSpec(plan=p, max_draft=args.max_draft) for p in plans])})  # fmt: skip
    rows = []
    for p, alpha in zip(plans, alphas, strict=True):
        figures = report.attempt("correlation", setting.run, KnapSpec(plan=p, max_draft=args.max_draft))
        if figures is None:
            continue
        seconds = float(costs.round(p.num_attention, p.num_mlp, p.num_draft, n))
        row = {
            "num_draft": p.num_draft,
            "attention_run": p.num_attention,
            "mlp_run": p.num_mlp,
            "predicted_acceptance": alpha,
            "predicted_tokens_per_second": setting.batch * float(expected_tokens(alpha, p.num_draft)) / seconds,
            "predicted_milliseconds_per_round": 1e3 * seconds,
            **figures,
        }
        rows.append(row)
        report.add("correlation_plans", row)
    measured = np.array([row["tokens_per_second"] for row in rows])
    result = {"context": setting.context, "batch": setting.batch, "plans": len(rows)}
    for name in ("predicted_tokens_per_second", "predicted_acceptance", "acceptance"):
        values = np.array([row[name] or 0.0 for row in rows])
        result[f"pearson_{name}"] = float(np.corrcoef(values, measured)[0, 1])
    errors = [row["predicted_milliseconds_per_round"] / row["milliseconds_per_round"] - 1 for row in rows]
    result["round_time_error_median"] = float(np.median(np.abs(errors)))
    result["round_time_error_max"] = float(np.max(np.abs(errors)))
    report.add("correlation", result)


def share(report, models, texts: dict, args) -> None:
    """The planner's choice by context length, from one cache: how much of each kind of sublayer it skips."""
    for batch in args.batches:
        report.attempt("share", _share, report, models, texts, batch, args)


def _share(report, models, texts: dict, batch: int, args) -> None:
    setting = setting_of(report, models, texts, max(args.contexts), batch, args)
    lengths = sorted({n for n in (1024, 2048, 4096, 8192, 16384, 24576) if n < setting.context} | {setting.context})
    options = PlannerOptions(max_draft=args.max_draft)
    for method in (KnapSpec(), KnapSpec(selection=setting.vegas)):
        for n in lengths if setting.context > 1024 else (setting.context // 2, setting.context):
            found = setting.plan(options, method=method, length=n)
            layers = len(found.plan.attn)
            # the best plan that drafts at all, too: at short lengths the best may be none
            best = max(found.frontier, key=lambda c: c.tokens_per_second)
            report.add(
                "share",
                {
                    "batch": batch,
                    "length": n,
                    "sparse": method.sparse,
                    "weights": found.weights,
                    "num_draft": found.plan.num_draft,
                    "skipped_attention": 1 - best.plan.num_attention / layers,
                    "skipped_mlp": 1 - best.plan.num_mlp / layers,
                    "predicted_acceptance": found.alpha,
                    "predicted_speedup": found.tokens_per_second / found.plain_tokens_per_second,
                    "frontier": [
                        (c.weight, c.plan.num_attention, c.plan.num_mlp, c.alpha, c.similarity, c.plan.num_draft,
                         c.tokens_per_second / found.plain_tokens_per_second) for c in found.frontier
                    ],
                },
            )  # fmt: skip


def _middle_context(args) -> int:
    return sorted(args.contexts)[len(args.contexts) // 2]


def _shuffled(p: Plan, seed: int) -> Plan:
    """As many sublayers of each kind, drawn at random between the first and the last block."""
    rng = np.random.default_rng(seed)
    masks = [(mask[0], *rng.permutation(mask[1:-1]).tolist(), mask[-1]) for mask in (p.attn, p.mlp)]
    return Plan(*masks, p.num_draft)


def _middle(p: Plan) -> Plan:
    """As many sublayers of each kind, those in the middle skipped."""
    masks = []
    for mask in (p.attn, p.mlp):
        gone = len(mask) - sum(mask)
        first = (len(mask) - gone) // 2
        masks.append(tuple(not first <= i < first + gone for i in range(len(mask))))
    return Plan(*masks, p.num_draft)


def _nearest(found, setting: Setting, chosen: Plan) -> Plan:
    """The candidate whose draft step costs most nearly what the chosen plan's does."""
    costs = setting.profile.costs()

    def seconds(p: Plan) -> float:
        return float(costs.draft_step(p.num_attention, p.num_mlp, setting.context))

    return min((c.plan for c in found.frontier), key=lambda p: abs(seconds(p) - seconds(chosen)))


def _random_search(setting: Setting, chosen: Plan, seconds: float) -> tuple[Plan, int]:
    """SWIFT's kind of search with the planner's time: random masks of the same size, then changes to the best one."""
    rng, best, tried = np.random.default_rng(0), (-1.0, chosen), 0
    setting.agreement([chosen])  # compiles
    deadline = time.perf_counter() + seconds
    while tried < 2 or time.perf_counter() < deadline:
        p = _shuffled(chosen, tried)
        if tried % 2 and best[0] > 0:
            # one sublayer of the best mask is exchanged for another one
            masks = [list(best[1].attn), list(best[1].mlp)]
            mask = masks[rng.integers(2)]
            on, off = (np.flatnonzero(np.array(mask[1:-1]) == value) + 1 for value in (True, False))
            if on.size and off.size:
                mask[rng.choice(on)], mask[rng.choice(off)] = False, True
            p = Plan(*map(tuple, masks), chosen.num_draft)
        best, tried = max(best, (setting.agreement([p])[0], p), key=lambda pair: pair[0]), tried + 1
    return best[1], tried
