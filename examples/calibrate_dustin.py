"""Calibrate Dustin for a pair of models, decode with it, and ask the full model what it thinks of the text. Lossy.

python examples/calibrate_dustin.py [TARGET DRAFT TEXT]    # checkpoints and a long text; else a tiny random pair
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.calibration.configure import configure
from jaxspec.calibration.scan import Scan, scan_heads
from jaxspec.dustin.config import options_from_config
from jaxspec.methods import Dustin, Models
from jaxspec.models import RopeConfig, init_params


def tiny_pair() -> tuple:
    """Two random models, a text of random ids, and scores under which all heads are alike: these retrieve nothing."""
    configs = [jaxspec.ModelConfig("llama", 64, 32, 64, layers, 4, 2, 8, 512, RopeConfig()) for layers in (2, 1)]
    models = Models(jaxspec.Decoder(configs[0]), *(init_params(c, jax.random.key(i)) for i, c in enumerate(configs)))
    text = np.random.default_rng(0).integers(0, 64, 300).tolist()
    return models, jaxspec.Decoder(configs[1]), text, [np.ones((2, 4)), np.ones((1, 4))], {"budgets": (40,)}


def real_pair(target: str, draft: str, text: str, folder: Path) -> tuple:
    """A pair of checkpoints, the token ids of a text, and the heads' scores by needles hidden in it."""
    loaded = [jaxspec.load(path) for path in (target, draft)]

    def encode(text: str) -> list[int]:
        return loaded[0].tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    ids, scores = encode(Path(text).read_text(encoding="utf-8"))[:2048], []
    for name, one in zip((target, draft), loaded, strict=True):
        path = folder / f"heads{len(scores)}.json"
        record = scan_heads(name, Models(one.model, one.params), encode, [ids], Scan((1024,)), path)
        scores.append(np.array(record["scores"]))
    return Models(loaded[0].model, loaded[0].params, loaded[1].params), loaded[1].model, ids, scores, {}


def main(*paths: str) -> None:
    """Runs the steps."""
    with tempfile.TemporaryDirectory() as folder:
        models, draft, ids, scores, options = real_pair(*paths, Path(folder)) if paths else tiny_pair()
        record = configure(("target", "draft"), models, draft, tuple(scores), [ids[:-50]], None, rounds=3, **options)
    method = Dustin(model=draft, sparse_drafts="last", refresh_every=4, **options_from_config(record))
    print(f"heads {method.target_heads} and {method.draft_heads}, {method.split} of {method.budget} rows by the draft")
    key, model = jax.random.key(0), models.target
    options = {"max_new_tokens": 48, "method": method, "draft_params": models.draft_params}
    output = jaxspec.generate(model, models.params, [ids[:-50]], [len(ids) - 50], key, **options)
    per_round = float(output.stats.emitted[0] / output.stats.rounds[0])
    share = int(output.report["agreed"][0]) / max(int(output.report["checked"][0]), 1)
    print(f"lossy: {per_round:.2f} tokens per round, {share:.0%} of the tokens checked are the full model's likeliest")


if __name__ == "__main__":
    main(*sys.argv[1:])
