"""jaxspec beside Hugging Face transformers, greedy: the same device, weights, prompts and number of new tokens.

    python benchmarks/peers.py CHECKPOINT --text a.txt b.txt --cases 1x31000 16x31000 --json peers.json   # on a GPU
    python benchmarks/peers.py --shape qwen2.5-7b --cases 1x4096 --methods plain      # random weights, no checkpoint
    python benchmarks/peers.py --tiny                                                 # a quick run on a CPU

Peers: `eager` (dynamic cache, SDPA), `lookup` (drafts looked up in the prompt), `assisted` (a draft model, --draft),
`compiled` (static cache, torch.compile as generate does it: mode reduce-overhead) and `compiled-default` (mode
default); on a CPU generate compiles nothing. Tokens per second are of decoding alone: of transformers, the time of all
new tokens less that of the first on the same prompt, or of the first few where these do more than a prefill (see
FIRST_TOKENS in peers_transformers.py). The prefill is that of plain decoding and of each peer, with the first token. A
share is of the copy ceiling, see decode.py.

Both run one after the other in processes of their own, since neither gives back all its device memory before it ends. A
peer that fails is recorded with its reason, the others go on, and the JSON file is written after every result.
"""

import argparse
import importlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from peers_results import failure, line, print_table
from report import reason_of, save

from jaxspec.benchmarking.shapes import SHAPES

# those that compile come last: when time runs out, the others are there
PEERS = ("eager", "lookup", "assisted", "compiled", "compiled-default")
MIN_NEW_TOKENS = 16  # some more than the first ones, which do not count


class Refused(Exception):
    """A side could not begin."""


def main() -> None:
    """Runs jaxspec, then its peers, and prints a table for each case."""
    args = arguments()
    record = {
        "schema_version": 1,
        "kind": "peers",
        "command": " ".join(["python", *sys.argv]),
        "model": args.checkpoint or args.shape,
        "draft": args.draft,
        "synthetic": args.shape is not None,
        "new_tokens": args.new_tokens,
        "versions": {},
        "results": [],
    }

    def take(message: dict) -> None:
        if "result" in message:
            record["results"].append(message["result"])
            print(line(message["result"]), flush=True)
        else:
            record["versions"] |= message.pop("versions")
            record.update(message)
        save(record, args.json)

    jobs = [(name, case) for name in args.only for case in args.cases]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        args.folder = Path(folder)
        try:
            for message in in_process("peers_jaxspec", args):
                take(message)
        except (Refused, ChildProcessError) as error:
            raise SystemExit(f"jaxspec: {error}") from None
        while jobs:
            try:
                for message in in_process("peers_transformers", args, jobs, record["device"]):
                    take(message)
                    jobs = jobs[1:] if "result" in message else jobs
            except (Refused, ChildProcessError) as error:
                # what could not begin will not begin the next time either
                lost = jobs if isinstance(error, Refused) else jobs[:1]
                for name, case in lost:
                    take({"result": failure("transformers", name, case, str(error))})
                jobs = jobs[len(lost) :]
    for case in args.cases:
        print_table(record, case)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", nargs="?", help="what jaxspec.load takes")
    add("--shape", choices=SHAPES, help="known sizes with random weights and prompts, in place of a checkpoint")
    add("--tiny", action="store_true", help="tiny random models and short prompts")
    add("--draft", help="draft model of `assisted` and `draft-model`: what jaxspec.load takes, or a shape")
    add("--text", type=Path, nargs="+", default=[], help="prompts are cut from these; default: Python's own sources")
    add("--cases", nargs="+", default=["1x31000", "16x31000"], metavar="BxCONTEXT")
    add("--new-tokens", type=int, default=128)
    add("--repeats", type=int, default=2, help="measured runs after one that compiles and warms up")
    add("--methods", nargs="+", metavar="NAME[:OPTION=VALUE,...]", help="of jaxspec; default: plain, vegas, and "
        "draft-model where there is a draft model")  # fmt: skip
    add("--only", nargs="*", choices=PEERS, default=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}; default: all")
    add("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16, float32 on a CPU")
    add("--limit", type=float, default=540, help="seconds after which nothing new is started")
    add("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.draft, args.cases, args.new_tokens = "tiny", "tiny", ["1x96", "2x64"], MIN_NEW_TOKENS
    if (args.checkpoint is None) == (args.shape is None):
        parser.error("one of CHECKPOINT, --shape and --tiny is needed")
    if args.new_tokens < MIN_NEW_TOKENS or args.repeats < 1:
        parser.error(f"--new-tokens must be at least {MIN_NEW_TOKENS} and --repeats at least 1")
    if args.methods is None:
        args.methods = ["plain", "vegas", *(["draft-model"] if args.draft else [])]
    if args.methods[0] != "plain":
        args.methods.insert(0, "plain")
    args.only = [name for name in PEERS if name in args.only and (args.draft or name != "assisted")]
    args.deadline = time.time() + args.limit
    return args


def in_process(module: str, *arguments) -> Iterator[dict]:
    """What `run` of a module sends from a process of its own.

    Raises:
        Refused: it raised an exception.
        ChildProcessError: it died otherwise.
    """
    # a fork would take over the threads and device handles of this process
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, module, *arguments))
    process.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if "refused" in message:
                raise Refused(message["refused"])
            yield message
    except EOFError:
        process.join()
        if process.exitcode:
            raise ChildProcessError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        if process.exitcode is None:
            process.join(timeout=30)
        process.kill()


def _run(connection: Connection, module: str, *arguments) -> None:
    try:
        # here, not above: each side imports what the other may lack
        importlib.import_module(module).run(connection.send, *arguments)
    except Exception as error:
        connection.send({"refused": reason_of(error)})


if __name__ == "__main__":
    main()
