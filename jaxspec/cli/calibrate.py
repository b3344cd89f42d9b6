"""`jaxspec calibrate heads`, `jaxspec calibrate dustin` and `jaxspec calibrate rows`."""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from jaxspec.cli.device import default_dtype, keep_programs

CONTEXTS = (2048, 4096, 8192)


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    text = "find which heads matter and how many rows each layer needs, once per model"
    calibrate = commands.add_parser("calibrate", help=text)
    calibrate.set_defaults(run=calibrate.show_help)
    kinds = calibrate.add_subparsers(metavar="WHAT")
    heads = kinds.add_parser(
        "heads",
        help="score every attention head for retrieval",
        description="Hides facts in long texts, lets the model answer, and scores every head by its attention to the "
        "fact meanwhile. An interrupted run goes on where it stopped.",
        epilog="example: jaxspec calibrate heads --model checkpoints/qwen --out qwen-heads.json --plot qwen-heads.png",
    )
    heads.set_defaults(run=_heads)
    heads.add_argument("--model", required=True, help="converted checkpoint, Hugging Face directory, hub id or GGUF")
    haystacks = "haystacks, repeated where too short; without any, made-up prose"
    heads.add_argument("--text", nargs="*", default=[], metavar="FILE", help=haystacks)
    heads.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    _add_scan_flags(heads)
    _add_shared_flags(heads)

    dustin = kinds.add_parser(
        "dustin",
        help="choose the heads and the split of --method dustin for a pair of models",
        description="Measures in rounds of speculation which rows the target's attention needs, and chooses the layers "
        "and heads whose attention predicts them best.",
        epilog="example: jaxspec calibrate dustin --target checkpoints/qwen-7b --draft checkpoints/qwen-0.5b "
        "--text novel.txt manual.txt --out dustin.json",
    )
    dustin.set_defaults(run=_dustin, words={"budgets": "--budget"})
    dustin.add_argument("--target", required=True, metavar="MODEL", help="the model that verifies")
    dustin.add_argument("--draft", required=True, metavar="MODEL", help="the model that drafts")
    dustin.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 texts like those to come")
    dustin.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    for role in ("target", "draft"):
        text = f"file of jaxspec calibrate heads for the {role}; without it, that runs first"
        dustin.add_argument(f"--{role}-heads", type=Path, metavar="FILE", help=text)
    dustin.add_argument("--budget", type=int, nargs="+", default=[512], metavar="ROWS", help="default: 512")
    dustin.add_argument("--contexts", type=int, nargs="+", metavar="TOKENS", help="prompt lengths (default: 2048 4096 "
                        "8192, as far as texts and models reach)")  # fmt: skip
    dustin.add_argument("--num-draft", type=int, default=4, help="tokens drafted per round (default: 4)")
    dustin.add_argument("--rounds", type=int, default=8, help="rounds after each prompt (default: 8)")
    _add_scan_flags(dustin)
    _add_shared_flags(dustin)

    rows = kinds.add_parser(
        "rows",
        help="measure how many cache rows each layer of --method vegas should read",
        description="Measures on texts what drafts lose when one layer reads an eighth of its rows, and shares the "
        "rows out so that they lose least.",
        epilog="example: jaxspec calibrate rows --model checkpoints/qwen --text novel.txt manual.txt --out rows.json, "
        "then jaxspec generate --model checkpoints/qwen --method vegas --layer-shares rows.json ...",
    )
    rows.set_defaults(run=_rows)
    rows.add_argument("--model", required=True, help="converted checkpoint, Hugging Face directory, hub id or GGUF")
    rows.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 texts like those to come")
    rows.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    context = "of each text, those of the rounds included (default: 8192, or what model and texts have)"
    rows.add_argument("--context", type=int, metavar="TOKENS", help=context)
    rows.add_argument("--rounds", type=int, default=32, help="rounds in each text (default: 32)")
    form = "vegas with the options to be used, as in vegas:score_mode=logit,rho=0.05 (default: vegas)"
    rows.add_argument("--method", default="vegas", metavar="SPEC", help=form)
    _add_shared_flags(rows)


def _add_scan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", metavar="TOKENS", help="of needle prompts (default: 1024, 2048, 4096 ...)")
    add("--depths", type=int, default=10, help="depths of the needle per length (default: 10)")
    add("--repeats", type=int, default=1, help="needles per length and depth (default: 1)")
    add("--chat", action="store_true", help="wrap needle prompts in the model's chat template")
    add("--seed", type=int, default=0, help="default: 0")


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plot", type=Path, metavar="FILE", help="draw the result")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored; float32 on a CPU")


def _heads(args: argparse.Namespace) -> int:
    from jaxspec.calibration.plots import plot_heads
    from jaxspec.cli.report import check_outputs

    check_outputs({"--out": args.out, "--plot": args.plot}, (args.model, *args.text))
    record = _scan(args, args.model, _load(args, args.model), args.out)
    if args.plot is not None:
        plot_heads(args.plot, record)
    print(f"{args.out}: {record['answered']} of {len(record['recall'])} needles answered")
    return 0


def _dustin(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from jaxspec.calibration.configure import configure
    from jaxspec.calibration.needles import read_texts
    from jaxspec.calibration.plots import plot_arr
    from jaxspec.calibration.records import HEADS, model_hash, read_record
    from jaxspec.cli.methods import check_vocabularies
    from jaxspec.cli.report import check_outputs
    from jaxspec.methods import Models

    given = [args.target_heads, args.draft_heads]
    check_outputs({"--out": args.out, "--plot": args.plot}, (args.target, args.draft, *args.text, *given))
    records = [None if path is None else read_record(path, HEADS) for path in given]
    models_by_name = {name: _load(args, name) for name in dict.fromkeys((args.target, args.draft))}
    loaded = [models_by_name[name] for name in (args.target, args.draft)]
    check_vocabularies(*loaded)
    texts = read_texts(args.text, _encoder(loaded[0]))
    prompts = _prompts(args, texts, min(one.config.capacity_limit for one in loaded))
    for one, record in zip(loaded, records, strict=True):
        if record is None:
            _scan_of(args, one)
    for i, (name, one) in enumerate(zip((args.target, args.draft), loaded, strict=True)):
        if records[i] is None and i and args.draft == args.target:
            records[i] = records[0]
        elif records[i] is None:
            path = args.out.with_name(f"{args.out.stem}.{('target', 'draft')[i]}-heads.json")
            records[i] = _scan(args, name, one, path, texts)
        elif records[i]["model"]["hash"] != model_hash(one.model, one.params):
            raise ValueError(f"{given[i]} holds the heads of another model than {name}")
    models = Models(loaded[0].model, loaded[0].params, loaded[1].params)
    record = configure(
        (args.target, args.draft),
        models,
        loaded[1].model,
        (records[0]["scores"], records[1]["scores"]),
        prompts,
        args.out,
        budgets=args.budget,
        num_draft=args.num_draft,
        rounds=args.rounds,
        progress=tqdm.write,
    )
    if args.plot is not None:
        plot_arr(args.plot, record)
    print(f"{args.out}: target heads {record['target_heads']}, draft heads {record['draft_heads']}, splits "
          f"{record['splits']}; verification with them is lossy")  # fmt: skip
    return 0


def _rows(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from jaxspec.calibration.layer_shares import calibrate_rows
    from jaxspec.calibration.needles import read_texts
    from jaxspec.calibration.plots import plot_rows
    from jaxspec.cli.report import check_outputs
    from jaxspec.method_specs import build_method, parse_spec
    from jaxspec.methods import Models

    check_outputs({"--out": args.out, "--plot": args.plot}, (args.model, *args.text))
    spec = parse_spec(args.method)
    method = build_method(spec) if spec["method"] == "vegas" else None
    if method is None or method.layer_shares:
        raise ValueError(f"--method must be vegas without layer_shares, got {args.method!r}")
    loaded = _load(args, args.model)
    texts = read_texts(args.text, _encoder(loaded))
    most = loaded.config.capacity_limit - method.num_draft - 1
    context = min(8192, most, *map(len, texts)) if args.context is None else args.context
    bar = partial(tqdm, desc=f"rows for {Path(args.model).name}", unit="round", file=sys.stderr)
    record = calibrate_rows(
        args.model,
        Models(loaded.model, loaded.params),
        texts,
        method,
        args.out,
        context=context,
        rounds=args.rounds,
        progress=partial(bar, total=args.rounds * len(texts)),
    )
    if args.plot is not None:
        plot_rows(args.plot, record)
    shares, equal, least = record["shares"], record["overlap_of_equal_rows"], min(record["overlap"])
    print(f"{args.out}: layers read from {min(shares):.2f} to {max(shares):.2f} times the budget; overlap {equal:.3f} "
          f"with equal rows, down to {least:.3f} where one layer reads {record['least_share']:g} of them")  # fmt: skip
    return 0


def _load(args: argparse.Namespace, name: str) -> Any:
    import jaxspec

    keep_programs()
    loaded = jaxspec.load(name, dtype=default_dtype(args.dtype))
    if loaded.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer")
    return loaded


def _encoder(loaded: Any) -> Any:
    return lambda text: loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _scan(
    args: argparse.Namespace, name: str, loaded: Any, path: Path, texts: list[list[int]] | None = None
) -> dict[str, Any]:
    from tqdm import tqdm

    from jaxspec.calibration.needles import chat_ends, filler, read_texts
    from jaxspec.calibration.scan import scan_heads
    from jaxspec.methods import Models

    encode, scan = _encoder(loaded), _scan_of(args, loaded)
    if texts is None:
        # about 1.3 tokens a word; more than enough for the longest prompt to begin anywhere
        texts = read_texts(args.text, encode) or [encode(filler(2 * max(scan.lengths), args.seed))]
    wrap = chat_ends(loaded.tokenizer) if args.chat else ("", "")
    with ExitStack() as stack:
        bars: list[tqdm] = []

        def show(done: int, of: int) -> None:
            # a scan that is refused shows none
            if not bars:
                title = f"needles for {Path(name).name}"
                bars.append(stack.enter_context(tqdm(desc=title, total=of, unit="needle", file=sys.stderr)))
            bars[0].update(done - bars[0].n)

        models = Models(loaded.model, loaded.params)
        return scan_heads(name, models, encode, texts, scan, path, wrap=wrap, eos_ids=loaded.eos_ids, progress=show)


def _scan_of(args: argparse.Namespace, loaded: Any) -> Any:
    """What to scan, checked against the model's positions."""
    from jaxspec.calibration.scan import Scan, default_lengths

    limit = loaded.config.capacity_limit
    scan = Scan(tuple(args.lengths or default_lengths(limit)), args.depths, args.repeats, args.seed)
    scan.check(limit)
    return scan


def _prompts(args: argparse.Namespace, texts: list[list[int]], limit: int) -> list[list[int]]:
    """A prompt per text and context length, from the middle of texts that are long enough."""
    room = limit - (args.rounds + 1) * (args.num_draft + 1) - 2
    contexts = args.contexts or [n for n in CONTEXTS if n <= room]
    if not contexts:
        raise ValueError(f"--contexts must be given: these models have room for {room} tokens only")
    if max(contexts) > room:
        raise ValueError(f"--contexts must be at most {room} tokens with these models, got {max(contexts)}")
    prompts = []
    for text in texts:
        for context in contexts:
            if len(text) >= context:
                start = (len(text) - context) // 2
                prompts.append(text[start : start + context])
    needed = max(contexts) if args.contexts else min(contexts)
    if max(map(len, texts)) < needed:
        raise ValueError(f"--text: the longest text has {max(map(len, texts))} tokens, {needed} are needed")
    return prompts
