"""Comparing a converted checkpoint with transformers on real text."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.check_text import CHECK_TEXT
from convert.errors import ConversionError
from convert.hf_directory import HFDirectory
from convert.reference import ReferenceRun, run_reference
from convert.source import Source
from jaxspec.checkpoint import Loaded, restore
from jaxspec.models import ModelConfig, init_cache
from jaxspec.models.rope import inverse_frequencies, rope_tables
from jaxspec.types import Array, KVCache, Params

NUM_TOKENS = 512
NUM_CACHED = 32
ROPE_POSITIONS = (0, 1_000, 8_000, 60_000, 130_000)

LOGIT_TOLERANCE = 5e-5  # of the largest reference logit
KL_TOLERANCE = 1e-6
TOP1_MINIMUM = 0.99  # float32 rounding may still swap near-ties
FREQUENCY_TOLERANCE = 1e-6  # relative: a few units in the last place
ANGLE_TOLERANCE = 2.5e-7  # per position: an angle is position times frequency, and so is its rounding error


@dataclass(frozen=True)
class CheckRow:
    """One line of the table. `max_abs` is the largest absolute difference; the other figures belong to logits."""

    name: str
    passed: bool
    max_abs: float | None = None
    limit: float | None = None
    kl: float | None = None
    top1: float | None = None
    note: str = ""


class CheckFailed(ConversionError):
    """The converted model computes something else than transformers does; `rows` says where."""

    def __init__(self, origin: str, rows: list[CheckRow]) -> None:
        self.rows = rows
        failed = ", ".join(row.name for row in rows if not row.passed)
        super().__init__(f"{origin}: the converted model differs from transformers: {failed}")


def check_conversion(source: Source, directory: Path) -> list[CheckRow]:
    """Compares the checkpoint in `directory` with `source` as transformers runs it, in float32.

    Weights are rounded to the checkpoint's dtype on both sides, so that only faults of the conversion show.

    Returns:
        One row per comparison: tokenizer, full forward, cached decoding, rope tables, EOS ids.

    Raises:
        ConversionError: transformers cannot run the source.
    """
    loaded = restore(directory, dtype="float32")
    config = loaded.config
    tokens, tokenizer_row = _tokens(source, loaded)
    num_cached = min(NUM_CACHED, len(tokens) // 2)
    limit = config.capacity_limit
    positions = sorted({p for p in ROPE_POSITIONS if p < limit} | {limit - 1})
    with jax.default_matmul_precision("highest"):
        logits, cached = _run(loaded, tokens, num_cached)
    # the two float32 copies of the weights are not needed at once
    stored = np.dtype(loaded.report["dtype"])
    eos_ids = loaded.eos_ids
    tokenizer_eos = getattr(loaded.tokenizer, "eos_token_id", None)
    del loaded
    reference = run_reference(source, stored, tokens, num_cached, positions)
    named_eos = reference.eos_ids | {tokenizer_eos}
    expected_eos = {i for i in named_eos if i is not None and 0 <= i < config.vocab_size}
    return [
        tokenizer_row,
        _logit_row(f"full forward, {len(tokens)} tokens", logits, reference.logits),
        _logit_row(f"cached decoding, last {num_cached} tokens", cached, reference.cached_logits),
        *_rope_rows(config, positions, reference),
        CheckRow("EOS ids", set(eos_ids) == expected_eos, note=f"{sorted(eos_ids)} and {sorted(expected_eos)}"),
    ]


def print_table(rows: list[CheckRow]) -> None:
    """Prints the comparisons to stdout."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, form: str = ".2e") -> str:
        return "" if value is None else format(value, form)

    table = Table("comparison with transformers (float32)", "max abs", "limit", "KL", "top-1", "", title=None)
    for row in rows:
        verdict = "ok" if row.passed else "FAILED"
        verdict = f"{verdict}: {row.note}" if row.note else verdict
        figures = (number(row.max_abs), number(row.limit), number(row.kl), number(row.top1, ".2%"))
        table.add_row(row.name, *figures, verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _tokens(source: Source, loaded: Loaded) -> tuple[list[int], CheckRow]:
    count = min(NUM_TOKENS, loaded.config.capacity_limit)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        ids = [byte % loaded.config.vocab_size for byte in CHECK_TEXT.encode()]
        return _cut(ids, count), CheckRow("tokenizer", True, note="none; the text's bytes serve as ids")
    ids = tokenizer(CHECK_TEXT).input_ids
    if isinstance(source, HFDirectory):
        from transformers import AutoTokenizer

        expected = AutoTokenizer.from_pretrained(source.directory, local_files_only=True)(CHECK_TEXT).input_ids
        row = CheckRow("tokenizer: ids of the text", ids == expected, note=f"{len(ids)} ids")
    else:
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        row = CheckRow("tokenizer: text there and back", decoded == CHECK_TEXT, note=f"{len(ids)} ids")
    return _cut([i for i in ids if i < loaded.config.vocab_size], count), row


def _cut(ids: list[int], count: int) -> list[int]:
    if not ids:
        raise ConversionError("the tokenizer makes no ids of the text")
    return (ids * -(-count // len(ids)))[:count]


def _run(loaded: Loaded, tokens: list[int], num_cached: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 logits [T, V] of one forward, and [num_cached, V] of single steps over a cache of the tokens before."""

    @jax.jit
    def forward(params: Params, tokens: Array, cache: KVCache, start: Array) -> tuple[Array, KVCache]:
        out: Any = loaded.model.apply({"params": params}, tokens, cache, start)
        return out.logits[0], out.cache

    def start(position: int) -> Array:
        return jnp.full((1,), position, jnp.int32)

    ids = jnp.array([tokens], jnp.int32)
    empty = init_cache(loaded.config, 1, len(tokens), jnp.float32)
    logits, cache = forward(loaded.params, ids, empty, start(0))
    prefix = len(tokens) - num_cached
    # the rows to come are made unusable, so that each step depends on the row that it writes
    cache = jax.tree.map(lambda rows: rows.at[:, prefix:].set(jnp.nan), cache)
    steps = []
    for i in range(prefix, len(tokens)):
        step, cache = forward(loaded.params, ids[:, i : i + 1], cache, start(i))
        steps.append(np.asarray(step[0]))
    return np.asarray(logits), np.stack(steps)


def _logit_row(name: str, ours: np.ndarray, reference: np.ndarray) -> CheckRow:
    limit = LOGIT_TOLERANCE * max(1.0, float(np.abs(reference).max()))
    max_abs = float(np.abs(ours - reference).max())
    kl = float(np.mean([_kl(r, o) for r, o in zip(reference, ours, strict=True)]))
    top1 = float(np.mean(ours.argmax(-1) == reference.argmax(-1)))
    passed = max_abs <= limit and kl <= KL_TOLERANCE and top1 >= TOP1_MINIMUM
    return CheckRow(name, passed, max_abs, limit, kl, top1)


def _kl(reference: np.ndarray, ours: np.ndarray) -> float:
    """KL divergence of two rows of logits, in float64: float32 rounding is larger than what is measured."""
    p, q = (x - x.max() for x in (reference.astype(np.float64), ours.astype(np.float64)))
    p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(p) * (p - q)).sum())


def _rope_rows(config: ModelConfig, positions: list[int], reference: ReferenceRun) -> list[CheckRow]:
    ours = inverse_frequencies(config.rope, config.head_dim)
    relative = float(np.max(np.abs(ours / reference.inv_freq - 1)))
    rows = [CheckRow("rope frequencies, relative", relative <= FREQUENCY_TOLERANCE, relative, FREQUENCY_TOLERANCE)]
    cos, sin = rope_tables(config.rope, config.head_dim, jnp.array(positions, jnp.int32))
    difference = np.maximum(np.abs(cos - reference.cos), np.abs(sin - reference.sin)).max(axis=-1)
    for position, max_abs in zip(positions, difference.tolist(), strict=True):
        limit = 1e-6 + ANGLE_TOLERANCE * position
        rows.append(CheckRow(f"rope table at position {position}", max_abs <= limit, max_abs, limit))
    return rows
