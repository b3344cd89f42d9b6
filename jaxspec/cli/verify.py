"""`jaxspec verify`: is the output of a method the target's own?"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.cli.device import default_dtype, keep_programs
from jaxspec.cli.measuring import tell
from jaxspec.cli.methods import add_method_flags, load_draft, method_from_flags, option_values
from jaxspec.text import read_text

PROMPT_TOKENS = (700, 450, 200)


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "verify",
        help="check that a method is lossless",
        description="Checks that a method's output is the target's own: every path of a tiny model enumerated, sampled "
        "tokens of your checkpoint by chi-square, and its greedy output against plain decoding.",
        epilog="example: jaxspec verify --model checkpoints/smollm2 --method vegas --min-keep 64",
    )
    parser.set_defaults(run=_verify, words={"prompt_length": "the prompt's tokens"})
    add = parser.add_argument
    add("--model", required=True, help="converted checkpoint, Hugging Face directory, hub id or GGUF file")
    add("--prompt-file", type=Path, help="a UTF-8 text to start from; without it, source code of this package")
    add("--max-new-tokens", type=int, default=64, help="tokens per prompt of the greedy check (default: 64)")
    add("--draws", type=int, default=500, help="rounds drawn for the chi-square check (default: 500)")
    add("--temperature", type=float, default=1.0, help="of the sampled checks (default: 1)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored; float32 on a CPU")
    add("--seed", type=int, default=0, help="default: 0")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_method_flags(parser)


def _verify(args: argparse.Namespace) -> int:
    import jax

    import jaxspec
    from jaxspec.lossless import Check, check_enumeration, check_greedy, check_sampling
    from jaxspec.methods import Models

    method = method_from_flags(args, lossy=False)
    if args.method == "plain":
        raise ValueError("choose a --method to verify: plain decoding is what the others are compared with")
    if args.draws < 100:
        raise ValueError(f"--draws must be at least 100, got {args.draws}")
    if not args.temperature >= 0.1:
        raise ValueError(f"--temperature must be at least 0.1, got {args.temperature}")
    source = args.prompt_file or Path(__file__).parents[1] / "decode.py"
    text = read_text(source)
    keep_programs()
    dtype = default_dtype(args.dtype)
    loaded = jaxspec.load(args.model, dtype=dtype)
    method, draft_params = load_draft(args, method, loaded, dtype)
    models = Models(loaded.model, loaded.params, draft_params)
    prompts = _prompts(args.model, loaded, source, text)
    unfiltered, filtered = jaxspec.Sampling(args.temperature), jaxspec.Sampling(args.temperature, top_p=0.8)
    checks: list[Check] = []

    def report(*new: Check) -> None:
        checks.extend(new)
        for check in () if args.json else new:
            print(f"{'passed' if check.passed else 'FAILED':7} {check.name:34} {check.detail}", flush=True)

    for sampling, name in (
        (unfiltered, "all paths of a tiny model"),
        (filtered, "all paths of a tiny model, top-p"),
    ):
        tell(f"checking {name}")
        report(check_enumeration(method, sampling, name))
    key = jax.random.key(args.seed)
    tell(f"checking {args.draws} sampled rounds")
    report(*check_sampling(models, method, prompts[-1], unfiltered, args.draws, key))
    tell(f"checking greedy output, {len(prompts)} prompts, {args.max_new_tokens} new tokens each")
    report(check_greedy(models, method, prompts, args.max_new_tokens))
    passed = all(check.passed for check in checks)
    if args.json:
        record = {"schema_version": 1, "model": args.model, "method": args.method, "options": option_values(method)}
        record |= {"passed": passed, "checks": [vars(check) for check in checks]}
        print(json.dumps(record, ensure_ascii=False))
    else:
        print(f"{args.method}: {'lossless in every check' if passed else 'NOT lossless'}", file=sys.stderr)
    return 0 if passed else 1


def _prompts(model: str, loaded: Any, source: Path, text: str) -> list[list[int]]:
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer")
    ids = loaded.tokenizer(text)["input_ids"]
    if len(ids) < PROMPT_TOKENS[0]:
        raise ValueError(f"--prompt-file {source}: {len(ids)} tokens, at least {PROMPT_TOKENS[0]} are needed")
    # drafts must have rows to leave out, so the prompts are as long as a check can afford
    return [ids[:n] for n in PROMPT_TOKENS]
