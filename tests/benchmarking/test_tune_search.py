"""The search of `jaxspec tune`, on made-up speeds."""

import pytest

from jaxspec.benchmarking.runs import expected_tokens
from jaxspec.benchmarking.search import DRAFTS, PLAIN, RHOS, Measured, Search


def search_over(speed, tokens=lambda spec: 1.0, length=32_000, group=1):
    measured = []

    def measure(spec):
        measured.append(spec)
        return Measured(spec, speed(spec), tokens(spec))

    return Search(measure, lambda line: None, length, group), measured


@pytest.mark.parametrize("enough", RHOS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_vegas_recipe(enough, drafts):
    """Accepted tokens grow up to `enough`; `drafts` are fastest, and among the neighbours of rho the smallest is."""

    def tokens(spec):
        return 5.0 if spec["options"]["rho"] >= enough else 4.5

    def speed(spec):
        return 100 - abs(spec["options"]["num_draft"] - drafts) - spec["options"]["rho"]

    search, measured = search_over(speed, tokens)
    chosen = search.vegas().spec["options"]
    before = RHOS[max(RHOS.index(enough) - 1, 0)]
    assert chosen == {"rho": before, "num_draft": drafts}
    assert len(measured) == len({str(spec) for spec in measured})


@pytest.mark.parametrize(
    ("length", "rhos"),
    [(200, [0.1]), (2560, [0.1]), (2570, [0.07, 0.1]), (6000, [0.03, 0.05, 0.07, 0.1]), (13_000, list(RHOS))],
)
def test_each_budget_is_tried_once(length, rhos):
    """By default drafts read at least 256 rows, whatever their share."""
    search, measured = search_over(lambda spec: 1.0, length=length)
    search.vegas()
    assert sorted({spec["options"]["rho"] for spec in measured}) == rhos


@pytest.mark.parametrize(("group", "extra"), [(1, set()), (4, set()), (6, {9}), (7, set()), (8, {7}), (16, set())])
def test_as_many_drafts_as_fit_a_tile_are_tried(group, extra):
    """With their bonus row and a kv head's queries they fill 64 rows."""
    search, measured = search_over(lambda spec: 1.0, group=group)
    search.vegas()
    assert {spec["options"]["num_draft"] for spec in measured} == {*DRAFTS, *extra}


@pytest.mark.parametrize("faster", ["weight", "logit"])
def test_logit_scores_are_tried_last(faster):
    search, measured = search_over(lambda spec: 2.0 if spec["options"].get("score_mode", "weight") == faster else 1.0)
    assert search.vegas().spec["options"].get("score_mode", "weight") == faster
    assert measured[-1]["options"]["score_mode"] == "logit"


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [((3.0, 2.0, 1.0), (RHOS[1], False)), ((1.0, 3.0, 2.0), (RHOS[1], True)), ((1.0, 2.0, 3.0), (RHOS[0], True))],
)
def test_rows_by_layer_are_tried_with_rho_and_a_smaller_one(speeds, chosen):
    """Equal rows, and rows by layer at two shares."""

    def speed(spec):
        options = spec["options"]
        if options["rho"] not in RHOS[:2]:
            return 0.5
        if "layer_shares" not in options:
            return speeds[0] - (options["rho"] != RHOS[1]) - 0.1 * (options["num_draft"] != 6)
        return speeds[2 if options["rho"] == RHOS[0] else 1]

    search, _ = search_over(speed, lambda spec: 5.0 if spec["options"]["rho"] >= RHOS[1] else 4.5)
    search.layer_shares = lambda spec: (0.5, 1.5)
    best = search.vegas().spec["options"]
    assert (best["rho"], "layer_shares" in best) == chosen
    assert best.get("layer_shares", [0.5, 1.5]) == [0.5, 1.5]


def test_a_gain_of_less_than_two_percent_is_no_growth():
    search, _ = search_over(lambda spec: 1.0, lambda spec: 5.0 + spec["options"]["rho"])
    assert search.vegas().spec["options"]["rho"] == RHOS[0]


def test_knapspec_is_tried_alone_and_over_rows():
    search, measured = search_over(lambda spec: 2.0 if "selection" in spec["options"] else 1.0)
    best = search.knapspec({"method": "vegas", "options": {"rho": 0.05, "num_draft": 8}})
    assert best.spec["options"]["selection"] == {"method": "vegas", "options": {"rho": 0.05}}
    assert {"method": "knapspec", "options": {}} in measured


@pytest.mark.parametrize("faster", [None, 0, 1])
def test_fixed_plans_are_tried_over_the_rows(faster):
    plans = [{"attn": [True, False], "mlp": [True, i == 0]} for i in range(2)]

    def speed(spec):
        plan = spec["options"].get("plan")
        if plan is None:
            return 2.0
        return 3.0 if faster is not None and plan == {**plans[faster], "num_draft": 8} else 1.0

    search, measured = search_over(speed)
    search.plans = lambda spec: plans
    best = search.knapspec({"method": "vegas", "options": {"rho": 0.05, "num_draft": 8}}).spec["options"]
    assert len(measured) == 4
    assert best.get("plan") == (None if faster is None else {**plans[faster], "num_draft": 8})
    if faster is not None:
        assert (best["max_draft"], best["selection"]["options"]) == (8, {"rho": 0.05})


def test_dustin_tries_sparse_drafts_at_the_best_budget():
    def speed(spec):
        options = spec["options"]
        return options["budget"] + (100 if options.get("sparse_drafts") == "last" else 0) + options["num_draft"]

    search, _ = search_over(speed)
    best = search.dustin((256, 512)).spec["options"]
    assert best == {"budget": 512, "num_draft": 8, "sparse_drafts": "last"}


def test_plain_is_measured_once():
    search, measured = search_over(lambda spec: 1.0)
    search.best_of([PLAIN])
    search.best_of([PLAIN])
    assert measured == [PLAIN]


@pytest.mark.parametrize(("acceptance", "g", "tokens"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 2, 1.75)])
def test_expected_tokens(acceptance, g, tokens):
    assert expected_tokens(acceptance, g) == tokens
