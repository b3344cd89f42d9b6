"""`jaxspec generate`."""

import argparse
import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxspec.benchmarking.shapes import check_memory
from jaxspec.cli.device import default_dtype, keep_programs
from jaxspec.cli.methods import add_method_flags, load_draft, method_from_flags, option_values
from jaxspec.cli.report import SCHEMA_VERSION, check_outputs, figures_line, write_plot, write_trace
from jaxspec.method_specs import files_of
from jaxspec.metrics import measure
from jaxspec.text import read_text


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    generate = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Streams generated text, then prints one line of figures (to standard error).",
        epilog='example: jaxspec generate --model checkpoints/smollm2 --chat --prompt "What is a KV cache?"',
    )
    generate.set_defaults(run=_generate, words={"prompt_length": "the prompt's tokens"})
    add = generate.add_argument
    add("--model", required=True, help="converted checkpoint, Hugging Face directory, hub id or GGUF file")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the prompt; standard input where neither this nor --prompt-file is given")
    source.add_argument("--prompt-file", type=Path, help="a UTF-8 file that holds the prompt")
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template, as the user's message")
    add("--max-new-tokens", type=int, default=256, help="default: 256")
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-k", type=int, help="sample from the k likeliest tokens")
    add("--top-p", type=float, help="sample from the likeliest tokens that hold this probability")
    add("--min-p", type=float, help="sample from tokens at least this fraction as likely as the likeliest")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--seed", type=int, default=0, help="default: 0")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored; float32 on a CPU")
    add("--json", action="store_true", help="print one JSON object instead of streaming")
    add("--trace", type=Path, metavar="FILE", help="write how many tokens each round drafted and accepted as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw acceptance by draft position and tokens per round")
    add_method_flags(generate)


def _generate(args: argparse.Namespace) -> int:
    import jax

    import jaxspec

    if args.temperature == 0 and not (args.top_k is None and args.top_p is None and args.min_p is None):
        raise ValueError("--top-k, --top-p and --min-p need --temperature above 0")
    filters = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p} if args.temperature != 0 else {}
    sampling = jaxspec.Sampling(args.temperature if args.temperature != 0 else None, **filters)
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must lie in 0..{2**32 - 1}, got {args.seed}")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    sampling.check(1)
    if "" in args.stop:
        raise ValueError("--stop must be text, got an empty string")
    method = method_from_flags(args)
    read = (args.model, args.draft, args.prompt_file, args.config, args.tuned, *files_of(vars(args)))
    check_outputs({"--trace": args.trace, "--plot": args.plot}, read)
    prompt = _read_prompt(args)
    keep_programs()
    dtype = default_dtype(args.dtype)
    loaded = jaxspec.load(args.model, dtype=dtype)
    method, draft_params = load_draft(args, method, loaded, dtype)
    if loaded.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    ids = _encode(loaded.tokenizer, prompt, args.chat)
    rows, itemsize = len(ids) + args.max_new_tokens, loaded.params["embedding"].dtype.itemsize
    check_memory(args.model, loaded.model.config, 1, rows, itemsize)
    clock = _Clock()
    chunks = jaxspec.stream(
        loaded.model,
        loaded.params,
        [ids],
        [len(ids)],
        jax.random.key(args.seed),
        method=method,
        draft_params=draft_params,
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        eos_ids=loaded.eos_ids,
        tokenizer=loaded.tokenizer,
        stop=tuple(args.stop),
    )
    text, shown, tokens, finish, prefill_seconds = "", 0, [], None, None
    for chunk in chunks:
        # a method that plans does so after the first chunk, and what it says meanwhile must not land in the text
        held = prefill_seconds is None and method.segment_rounds and chunk.stats is None
        prefill_seconds = clock.seconds() if prefill_seconds is None else prefill_seconds
        text += chunk.text[0]
        tokens += chunk.tokens[0]
        finish = chunk.finish[0]
        if not args.json and not held:
            print(text[shown:], end="", flush=True)
            shown = len(text)
    decode_seconds, planning_seconds = clock.seconds() - prefill_seconds, None
    if chunk.decode_seconds is not None:
        decode_seconds, planning_seconds = chunk.decode_seconds, max(decode_seconds - chunk.decode_seconds, 0.0)
    figures = {
        "prompt_tokens": len(ids),
        "prompt_tokens_per_second": len(ids) / prefill_seconds,
        "new_tokens": len(tokens),
        "decode_tokens_per_second": (len(tokens) - 1) / decode_seconds if len(tokens) > 1 else None,
        "planning_seconds": planning_seconds,
        "compile_seconds": clock.compile_seconds,
        "peak_memory_bytes": _peak_memory(jax.devices()[0]),
    }
    metrics, ended = measure(chunk.stats), finish.name.lower()
    run = {"model": args.model, "method": args.method, "options": option_values(method)}
    run["lossless"] = method.lossless
    if chunk.report:
        run["report"] = {name: values[0].item() for name, values in chunk.report.items()}
    if args.json:
        record = {"schema_version": SCHEMA_VERSION, "text": text, "tokens": tokens, "finish": ended, **figures, **run}
        print(json.dumps({**record, "metrics": metrics.as_dict()}, ensure_ascii=False))
    else:
        print(flush=True)
        print(figures_line(figures, metrics, ended, jax.devices()[0], run, chunk.plans), file=sys.stderr)
    if args.trace is not None:
        plans = {} if chunk.plans is None else {"plans": chunk.plans}
        write_trace(args.trace, {**run, "finish": ended, **figures, **plans}, chunk.stats, metrics)
    if args.plot is not None:
        write_plot(args.plot, f"{args.method}, prompt of {len(ids)} tokens", chunk.stats, metrics, chunk.plans)
    if finish is jaxspec.Finish.NAN:
        raise ValueError("the logits are NaN or infinite: the checkpoint is damaged, or its dtype too narrow")
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file is not None:
        prompt = read_text(args.prompt_file)
    elif sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt, --prompt-file or text on standard input")
    else:
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("the prompt is empty")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is not valid UTF-8")
    return prompt


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("--chat needs a model whose tokenizer has a chat template")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    # a chat template writes its own special tokens
    ids = tokenizer(prompt, add_special_tokens=not chat)["input_ids"]
    if not ids:
        raise ValueError("the prompt holds no token of this model")
    return ids


class _Clock:
    """Seconds since the start, without those that compiling took."""

    def __init__(self) -> None:
        import jax

        self.compile_seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._start = time.perf_counter()

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        # what a thread compiles in the background takes none of the time
        if event.startswith("/jax/core/compile/") and threading.current_thread() is threading.main_thread():
            self.compile_seconds += seconds

    def seconds(self) -> float:
        return time.perf_counter() - self._start - self.compile_seconds


def _peak_memory(device: Any) -> int:
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
