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
    columns = [np.stack([p["attn"], p["mlp"], p["mlp"]], axis=1) for p in taken]
    picture = np.concatenate(columns, axis=1)[:, :-1].astype(float)
    picture[:, 2::3] = np.nan  # a gap between plans
    for i, p in enumerate(taken):
        if not p["num_draft"]:  # there are no drafts that could run anything
            picture[:, 3 * i : 3 * i + 2] = np.nan
            middle = (len(picture) - 1) / 2
            sublayers.text(3 * i + 0.5, middle, "does not speculate", rotation=90, ha="center", va="center")
    sublayers.imshow(picture, aspect="auto", origin="lower", interpolation="nearest", cmap="Blues", vmin=-0.3, vmax=1)
    labels = [f"{p['length']:.0f}\n{p['num_draft']} drafts" for p in taken]
    sublayers.set_xticks([3 * i + 0.5 for i in range(len(taken))], labels)
    sublayers.set(xlabel="context length: attention, MLP (dark: drafts run it)", ylabel="layer")
    sublayers.yaxis.get_major_locator().set_params(integer=True)
    lengths = [p["length"] for p in plans]
    for name, label, style in (
        ("predicted_tokens_per_second", "predicted", {"marker": "o"}),
        ("measured_tokens_per_second", "measured", {"marker": "o"}),
        # around the plan's own where that is plain decoding
        ("predicted_plain_tokens_per_second", "plain, predicted", {"marker": "s", "ms": 10, "mfc": "none"}),
    ):
        rates.plot(lengths, [p.get(name, np.nan) for p in plans], label=label, **style)
    # the limits of a single plan end at its dots
    rates.set(xlabel="context length", ylabel="tokens/s per sequence", ylim=(0, 1.1 * rates.dataLim.y1))
    rates.legend()
