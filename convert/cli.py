"""The command line of the converter."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from convert.errors import ConversionError
from convert.program import INTERRUPTED, run_program

EXAMPLE = """\
example:
  jaxspec-convert ./SmolLM2-135M-Instruct ./smollm2 --dtype bfloat16 --check
  jaxspec-convert Qwen/Qwen2.5-0.5B-Instruct ./qwen
  jaxspec-convert smollm2-135m-q8_0.gguf ./smollm2 --overwrite
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxspec-convert`.

    Returns:
        The exit code: 0, 1 if the check fails, 2 on errors, 130 when interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="jaxspec-convert",
        description="Converts a Hugging Face or GGUF checkpoint to one that jaxspec loads.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="Hugging Face directory, hub id (owner/name) or GGUF file")
    parser.add_argument("dst", metavar="DST", help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the parameters (default: the source's; bfloat16 for quantised GGUF files)",
    )
    parser.add_argument("--check", action="store_true", help="compare with transformers on real text (needs PyTorch)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST once the new checkpoint is complete")
    args = parser.parse_args(argv)
    # converting needs no accelerator, and jax would reserve most of its memory
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return _run(args)
    except ConversionError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"cannot access {error.filename or args.dst}: {error.strerror or error}", 2)
    except MemoryError:
        return _fail("out of memory", 2)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", INTERRUPTED)


def entry() -> NoReturn:
    """`main` as a program of its own."""
    run_program(main)


def _run(args: argparse.Namespace) -> int:
    from convert.writer import convert

    if args.check:
        from convert.check import CheckFailed, print_table

        try:
            report = convert(args.src, args.dst, dtype=args.dtype, check=True, overwrite=args.overwrite)
        except CheckFailed as error:
            print_table(error.rows)
            return _fail(str(error), 1)
        print_table(report.check)
    else:
        report = convert(args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite)
    print(
        f"{args.dst}: {report.model_type}, {report.num_parameters:,} parameters in {report.num_leaves} leaves, "
        f"{report.dtype}, {report.seconds:.1f} s"
    )
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"}.intersection(report.tokenizer):
        print(
            f"jaxspec-convert: note: {args.src} has no tokenizer; the checkpoint takes token ids only", file=sys.stderr
        )
    return 0


def _fail(message: str, code: int) -> int:
    print(f"jaxspec-convert: error: {' '.join(message.split())}", file=sys.stderr)
    return code
