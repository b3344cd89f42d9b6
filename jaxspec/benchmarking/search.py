"""Which method, with which options, decodes fastest: a search over measured runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.methods.vegas import Vegas
from jaxspec.selection import buffer_width
from pallas_kernels.tiling import QUERY_TILE

Spec = dict[str, Any]

PLAIN: Spec = {"method": "plain", "options": {}}
RHOS = (0.02, 0.03, 0.05, 0.07, 0.10)
DRAFTS = (2, 3, 4, 6, 8, 10)
# accepted tokens have stopped growing when less than this share of them is missing
ENOUGH = 0.98


@dataclass(frozen=True)
class Measured:
    """What one short run of a candidate gave."""

    spec: Spec
    tokens_per_second: float
    tokens_per_round: float


@dataclass
class Search:
    """The steps of a search; `measure` runs a candidate once, and equal candidates are run once only.

    `length` is the most rows that a sequence fills, prompt and new tokens; `group` the query heads per kv head;
    `layer_shares` measures, for a Vegas, what its option of that name should be; `plans` gives masks that KnapSpec's
    planner finds over the rows of a method, as fields of a `Plan`.
    """

    measure: Callable[[Spec], Measured]
    log: Callable[[str], None]
    length: int
    group: int = 1
    layer_shares: Callable[[Spec], Sequence[float]] | None = None
    plans: Callable[[Spec], Sequence[dict[str, Any]]] | None = None
    seen: list[Measured] = field(default_factory=list)

    def best_of(self, specs: Sequence[Spec], by: str = "tokens_per_second") -> Measured:
        """The best of these candidates."""
        return max((self._once(spec) for spec in specs), key=lambda measured: getattr(measured, by))

    def vegas(self) -> Measured:
        """The recipe of the Vegas paper (arXiv 2602.07223): the smallest rho with which accepted tokens stop growing,
        then the number of drafts with the highest throughput, then rho once more, by throughput; then the cheaper
        scores of logit mode; last, rows by layer, with which a smaller rho may do."""
        # where min_keep covers several shares, drafts read as many rows with each; the largest stands for them
        rhos = tuple({buffer_width(rho, Vegas().min_keep, self.length): rho for rho in RHOS}.values())
        trials = [self._once(_vegas(rho, 6)) for rho in rhos]
        enough = ENOUGH * max(trial.tokens_per_round for trial in trials)
        rho = next(rho for rho, trial in zip(rhos, trials, strict=True) if trial.tokens_per_round >= enough)
        self.log(f"vegas: accepted tokens stop growing at rho {rho}")
        # one draft more than fits verification's tile of query rows costs as much attention as several
        fitting = QUERY_TILE // self.group - 1
        tried = sorted({*DRAFTS, fitting} if fitting in range(DRAFTS[0], DRAFTS[-1]) else DRAFTS)
        drafts = self.best_of([_vegas(rho, g) for g in tried]).spec["options"]["num_draft"]
        self.log(f"vegas: {drafts} drafts are fastest at rho {rho}")
        at = rhos.index(rho)
        best = self.best_of([_vegas(r, drafts) for r in rhos[max(at - 1, 0) : at + 2]])
        self.log(f"vegas: rho {best.spec['options']['rho']} is fastest with {drafts} drafts")
        logit = {"method": "vegas", "options": {**best.spec["options"], "score_mode": "logit"}}
        best = self.best_of([best.spec, logit])
        self.log(f"vegas: {best.spec['options'].get('score_mode', 'weight')} scores are faster")
        if self.layer_shares is None:
            return best
        self.log("vegas: measuring what each layer loses by reading few rows")
        at, shares = rhos.index(best.spec["options"]["rho"]), list(self.layer_shares(best.spec))
        by_layer = [{**best.spec["options"], "rho": r, "layer_shares": shares} for r in rhos[max(at - 1, 0) : at + 1]]
        best = self.best_of([best.spec, *({"method": "vegas", "options": options} for options in by_layer)])
        self.log(f"vegas: {'rows by layer' if 'layer_shares' in best.spec['options'] else 'equal rows'} are faster")
        return best

    def knapspec(self, selection: Spec) -> Measured:
        """Layer-skipped drafts as the planner chooses them, alone and over the rows of `selection`; then fixed plans
        over those rows, which need no planning, with the number of drafts of `selection`."""
        rows = {key: value for key, value in selection["options"].items() if key != "num_draft"}
        composed = {"method": selection["method"], "options": rows}
        alone, over_rows = ({"method": "knapspec", "options": o} for o in ({}, {"selection": composed}))
        best = self.best_of([alone, over_rows])
        if self.plans is None:
            return best
        drafts = selection["options"].get("num_draft", Vegas().num_draft)
        plans = [plan | {"num_draft": drafts} for plan in self.plans(over_rows)]
        options = [{"max_draft": drafts, "selection": composed, "plan": plan} for plan in plans]
        return self.best_of([best.spec, *({"method": "knapspec", "options": o} for o in options)])

    def draft_model(self) -> Measured:
        """A draft model, by its number of drafts."""
        return self.best_of([{"method": "draft-model", "options": {"num_draft": g}} for g in DRAFTS[:-1]])

    def dustin(self, budgets: Sequence[int]) -> Measured:
        """Sparse verification with a draft model, dense and sparse drafts, by budget and number of drafts."""
        options = [{"budget": budget, "num_draft": 4} for budget in budgets]
        best = self.best_of([{"method": "dustin", "options": o} for o in options])
        sparse = [{**best.spec["options"], "num_draft": g, "sparse_drafts": "last"} for g in (2, 3, 4, 6, 8)]
        return max(best, self.best_of([{"method": "dustin", "options": o} for o in sparse]), key=_speed)

    def _once(self, spec: Spec) -> Measured:
        for measured in self.seen:
            if measured.spec == spec:
                return measured
        self.seen.append(self.measure(spec))
        return self.seen[-1]


def _speed(measured: Measured) -> float:
    return measured.tokens_per_second


def _vegas(rho: float, num_draft: int) -> Spec:
    return {"method": "vegas", "options": {"rho": rho, "num_draft": num_draft}}
