"""Pictures of layer-skipping plans: which sublayers drafts run, by context length, and what that was worth."""

from typing import Any

import numpy as np

MOST = 10  # plans shown side by side


def draw_plans(sublayers: Any, rates: Any, plans: list[dict[str, Any]]) -> None:
    """Draws what `Chunk.plans` holds.

    Args:
        sublayers: matplotlib axes for the plans, one column each: a cell per sublayer, attention on the left.
        rates: axes for predicted and measured tokens per second over the context length.
        plans: the plans, in the order in which they were made.
    """
    taken = [plan for plan in plans if plan["taken"] in ("first", "changed", "same")] or plans
    # as many as there is room for, the first and the last among them
    taken = [taken[i] for i in sorted({round(i) for i in np.linspace(0, len(taken) - 1, MOST)})]
    columns = [np.stack([p["attn"], p["mlp"]], axis=1) for p in taken]
    # an empty column between two plans
    picture = np.concatenate([np.pad(c, ((0, 0), (0, 1))) for c in columns], axis=1).astype(float)[:, :-1]
    picture[:, 2::3] = np.nan
    sublayers.imshow(picture, aspect="auto", origin="lower", interpolation="nearest", cmap="Blues", vmin=-0.3, vmax=1)
    labels = [f"{p['length']:.0f}\n{p['num_draft'] or 'no'} drafts" for p in taken]
    sublayers.set_xticks([3 * i + 0.5 for i in range(len(taken))], labels)
    sublayers.yaxis.get_major_locator().set_params(integer=True)
    sublayers.set(xlabel="context length: attention, MLP (dark: run)", ylabel="layer")
    lengths = [p["length"] for p in plans]
    for name, label, size in (
        ("predicted_plain_tokens_per_second", "plain, predicted", 9),  # seen around a prediction that equals it
        ("predicted_tokens_per_second", "predicted", 6),
        ("measured_tokens_per_second", "measured", 6),
    ):
        rates.plot(lengths, [p.get(name, np.nan) for p in plans], "o-", markersize=size, label=label)
    # the limits of a single plan end at its dots
    rates.set(xlabel="context length", ylabel="tokens/s per sequence", ylim=(0, 1.1 * rates.dataLim.y1))
    rates.legend()
