"""Options of Dustin and self-Dustin that are refused, and what is said of them."""

import jax
import pytest
from dustin_cases import TARGET_HEADS
from method_cases import make_case, prompts, similar_model

from jaxspec.methods import Dustin

DRAFT = similar_model()[0]
HEADS = {"target_heads": TARGET_HEADS, "draft_heads": ((0, (1,)),)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None, **HEADS}, "Dustin model must be a Decoder"),
        ({"budget": 0, **HEADS}, r"budget must be an integer in 1\.\."),
        ({"budget": 19, **HEADS}, r"at least sinks \+ window \+ split = 20, got 19"),
        ({"split": 493, **HEADS}, r"= 513, got 512"),
        ({"signal": "both", **HEADS}, "one of hybrid, history, draft, recency, snapkv, quest"),
        ({"sparse_drafts": "yes", **HEADS}, "one of off, last, recent"),
        ({"min_arr": 1.5, **HEADS}, "at most 1"),
        ({"num_draft": 0, **HEADS}, "num_draft must be at least 1 with signal hybrid"),
        ({}, "needs target_heads: jaxspec calibrate dustin finds them"),
        ({"target_heads": TARGET_HEADS}, "needs draft_heads"),
        ({"signal": "recency", "min_arr": 0.5}, "needs target_heads"),
        ({"signal": "quest", "sparse_drafts": "last"}, "excludes sparse_drafts"),
        ({**HEADS, "draft_heads": ((0, (1, 1)),)}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": ((0, (1,)), (0, (2,)))}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": ((0, ()),)}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": [[0, [1]]]}, "nested tuples"),
        ({**HEADS, "draft_heads": ((2, (1,)),)}, r"layers up to 2; the model has layers 0\.\.1"),
        ({**HEADS, "draft_heads": ((0, (4,)),)}, r"heads up to 4; the model has heads 0\.\.3"),
    ],
)
def test_wrong_options_name_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Dustin(**{"model": DRAFT, **options})


def test_heads_that_the_target_lacks():
    case = make_case("dustin", target_heads=((2, (0,)),))
    with pytest.raises(ValueError, match=r"target_heads names layers up to 2"):
        case.generate(*prompts(), jax.random.key(0), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"must be some, not all, of the model's layers 0\.\.1, got \(0, 1\)"):
        make_case("self-dustin", skipped_layers=(0, 1), signal="history").generate(
            *prompts(), jax.random.key(0), max_new_tokens=2
        )
    with pytest.raises(ValueError, match="must lie in layers that run"):
        make_case("self-dustin", skipped_layers=(0,))
