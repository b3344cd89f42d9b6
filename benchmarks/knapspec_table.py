"""The table of knapspec.py: plain decoding, KnapSpec, Vegas, and both in one, end to end."""

import numpy as np
from knapspec_setting import setting_of

from jaxspec import KnapSpec
from jaxspec.methods import Plain


def table(report, models, texts: dict, args) -> None:
    """One result per method, context length and batch size."""
    for batch in args.batches:
        for context in args.contexts:
            report.attempt("table", _case, report, models, texts, context, batch, args)


def _case(report, models, texts: dict, context: int, batch: int, args) -> None:
    setting = setting_of(report, models, texts, context, batch, args)
    methods = {
        name: KnapSpec(profile=setting.profile, selection=inner, max_draft=args.max_draft)
        for name, inner in (("knapspec", ""), ("knapspec+vegas", setting.vegas))
    }
    planners = [(method, method.planner_options) for method in methods.values()]
    compile_seconds = setting.compile([Plain(), setting.vegas], planners)
    shared = {"context": context, "batch": batch}
    plain = setting.run(Plain())
    expected = setting.tokens
    report.add("table", {"method": "plain", **shared, **plain, "compile_seconds": compile_seconds})

    def add(name: str, figures: dict) -> None:
        parted = int(np.sum(np.any(setting.tokens != expected, axis=1)))
        speedup = figures["tokens_per_second"] / plain["tokens_per_second"]
        ratios = {"speedup": speedup}
        if "tokens_per_second_all_running" in figures:
            rate = figures["tokens_per_second_all_running"]
            ratios["speedup_all_running"] = rate / plain["tokens_per_second_all_running"]
        report.add("table", {"method": name, **shared, **ratios, **figures, "rows_that_part": parted})

    add("vegas", setting.run(setting.vegas))
    for name, method in methods.items():
        figures = report.attempt("table", setting.run_adaptive, method)
        if figures is None:
            continue
        figures |= report.attempt("table", setting.planner_cost, method) or {}
        first = figures["plans"][0]
        plan = {key: first[key] for key in ("num_draft", "predicted_acceptance")}
        plan |= {"attention_run": sum(first["attn"]), "mlp_run": sum(first["mlp"]), "layers": len(first["attn"])}
        predicted = first["predicted_tokens_per_second"] / first["predicted_plain_tokens_per_second"]
        decoding = figures["tokens_per_second"] * figures["seconds"] / figures["decode_only_seconds"]
        add(
            name,
            {
                **plan,
                "predicted_speedup": predicted,
                "predicted_tokens_per_second": batch * first["predicted_tokens_per_second"],
                "speedup_without_planning": decoding / plain["tokens_per_second"],
                **figures,
            },
        )
