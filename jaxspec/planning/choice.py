"""Which draft ends a batch first, by the acceptance that was predicted and measured. Host only."""

import numpy as np

from jaxspec.planning.latency import expected_tokens

ROW_WEIGHT = 2.0  # rejected drafts: rows are taken to differ by 1 / sqrt(2) of their mean in how many they reject


def acceptance_by_row(
    base: float, shares: np.ndarray, accepted: np.ndarray, tried: np.ndarray, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """The chance that a draft token is accepted, by kind of drafts and by row.

    A kind's chance over all rows is the mean of a Beta posterior whose prior is what was predicted. In a row each kind
    is rejected as many times more often as drafts were so far: those rejected over those expected at all rows' chances,
    `ROW_WEIGHT` added to both. With one kind, of chance alpha over all rows, that is the mean of a Beta posterior as
    well, whose prior is alpha on ROW_WEIGHT / (1 - alpha) drafts.

    Args:
        base: predicted chance of the first kind, drafts that skip nothing.
        shares: [C], predicted chances relative to the first kind's, so that what is measured of that one holds for all.
        accepted: [C, B], drafts of each kind that each row accepted.
        tried: [C, B], drafts that it accepted or rejected.
        weight: drafts that a prediction counts for.

    Returns:
        Chances over all rows [C] and by row [C, B].
    """
    hits, trials = accepted.sum(axis=1), tried.sum(axis=1)
    prior = np.full(len(shares), base)
    prior[1:] = np.minimum(shares[1:] * (hits[0] + weight * base) / (trials[0] + weight), 1)
    pooled = (hits + weight * prior) / (trials + weight)
    ratio = (np.sum(tried - accepted, axis=0) + ROW_WEIGHT) / ((1 - pooled) @ tried + ROW_WEIGHT)
    return pooled, np.maximum(1 - (1 - pooled)[:, None] * ratio, 0)


def time_to_end(alpha: np.ndarray, left: np.ndarray, price: np.ndarray) -> np.ndarray:
    """How long it takes until the last row has ended: a batch is decoded when its slowest row is.

    With the same chance and the same tokens left in every row the least of it is the most tokens per second (TPT).

    Args:
        alpha: [C, B], chances that a draft token is accepted, by kind of drafts and row.
        left: [B], tokens left to each row; at least one row.
        price: [C, G], what a round costs with 0..G-1 drafts.

    Returns:
        [C, G], in the unit of `price`.
    """
    tokens = expected_tokens(alpha[:, :, None], np.arange(price.shape[1]))
    return np.max(left[:, None] / tokens, axis=1) * price
