"""Every figure of the documentation in one command, spread over the GPUs of a machine.

    python benchmarks/everything.py --model MODEL --draft DRAFT --text novel.txt manual.txt:question code.py \
        --calibrate-text dictionary.txt other.py --folder results --limit 3600
    python benchmarks/everything.py --folder results --only kernels rounds_7b     # random weights, no checkpoints

Each job is one of the other commands, run in a process of its own on a GPU of its own; the next one starts where a GPU
is free. None is started that would have less than a quarter of its own time. Output goes to FOLDER/NAME.log, figures to
FOLDER/NAME.json, and what became of every job to FOLDER/jobs.json. Compiled programs are kept in FOLDER/programs,
unless JAX_COMPILATION_CACHE_DIR is set. Without --model, --draft or texts the jobs that need them are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
VEGAS = ["plain", "streaming", "vegas", "vegas:score_mode=logit", "vegas:rho=0.05,num_draft=8"]


@dataclass(frozen=True)
class Job:
    """A command that writes one JSON file, and how long it may take."""

    name: str
    command: list[str]
    seconds: float  # the most it is given
    needs: tuple[str, ...] = ()  # arguments without which it is left out


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All jobs, most wanted first."""
    files = [text.partition(":")[0] for text in args.text]
    kinds = [part for text in args.text for part in ("--text", text)]

    def script(name: str, *rest: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py"), *rest]

    def bench(batch: int, *methods: str) -> list[str]:
        source = [sys.executable, "-m", "jaxspec.cli", "bench", "--model", str(args.model), "--text", *files]
        shape = ["--batch", str(batch), "--context", str(args.context), "--new-tokens", "256", "--repeats", "2"]
        return [*source, "--methods", *methods, *shape]

    folder = ["--folder", str(args.folder)]
    pair = ["--target", str(args.model), "--draft", str(args.draft), *kinds, "--calibrate-text", *args.calibrate_text]
    real, both = ("model", "text"), ("model", "text", "draft", "calibrate_text")
    knapspec = script("knapspec", str(args.model), *kinds, "--parts")
    dustin = script("dustin", *pair, *folder, "--parts")
    cases = [f"{batch}x{args.context}" for batch in (1, 16)]
    jobs = [
        Job("bench_32", bench(32, *VEGAS), 400, real),
        Job("knapspec", [*knapspec, "table", "--batches", "16", "1"], 900, real),
        Job("dustin", [*dustin, "calibrate", "speed", "quality", "--name", "dustin"], 900, both),
        Job("bench_8", bench(8, *VEGAS[:4]), 250, real),
        Job("bench_64", bench(64, *VEGAS[:3]), 300, real),
        Job("bench_1", bench(1, *VEGAS[:4]), 250, real),
        Job("kernels", script("kernels"), 900),
        Job("rounds_7b", script("rounds", "--shape", "qwen2.5-7b"), 250),
        Job("decode_7b", script("decode"), 200),
        Job("knapspec_7b", script("knapspec", "--parts", "shapes"), 600),
        Job("dustin_7b", script("dustin", *folder, "--parts", "synthetic", "--name", "dustin_7b"), 600),
        Job("peers", script("peers", str(args.model), "--text", *files, "--cases", *cases), 1200, real),
        Job("knapspec_plans", [*knapspec, "rivals", "correlation", "share"], 1200, real),
        Job("dustin_arr", [*dustin, "arr", "--name", "dustin_arr"], 600, both),
        Job("acceptance", script("acceptance", str(args.model), *kinds), 1200, real),
    ]
    for job in jobs:
        if str(HERE / "dustin.py") not in job.command:
            job.command.extend(["--json", str(args.folder / f"{job.name}.json")])
    given = {name for name in ("model", "draft", "text", "calibrate_text") if getattr(args, name)}
    return [job for job in jobs if given.issuperset(job.needs) and (not args.only or job.name in args.only)]


def run_jobs(jobs: list[Job], gpus: int, deadline: float, folder: Path) -> list[dict]:
    """Runs the jobs, one at a time on each GPU; writes and returns what became of them.

    Args:
        jobs: in the order in which they are started.
        gpus: how many; 0 runs one job at a time on whatever JAX finds.
        deadline: of `time.monotonic`; what still runs then is stopped.
        folder: of the logs.
    """
    waiting, outcomes, lock = list(jobs), [], threading.Lock()

    def work(gpu: int | None) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                job = waiting.pop(0)
            outcome = run_job(job, gpu, deadline, folder)
            with lock:
                outcomes.append(outcome)
                print(f"{outcome['name']:16} {outcome['outcome']} after {outcome['seconds']:.0f} s", flush=True)
                (folder / "jobs.json").write_text(json.dumps({"schema_version": 1, "jobs": outcomes}, indent=1) + "\n")

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in (range(gpus) if gpus else [None])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes


def run_job(job: Job, gpu: int | None, deadline: float, folder: Path) -> dict:
    """Runs one job: its name, outcome, seconds and command."""
    started = time.monotonic()
    seconds = min(job.seconds, deadline - started)
    outcome = "not started, out of time"
    if seconds >= job.seconds / 4:
        environment = {**shared_programs(folder), **os.environ, "PYTHONUNBUFFERED": "1"}
        if gpu is not None:
            environment |= {"CUDA_VISIBLE_DEVICES": str(gpu), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with (folder / f"{job.name}.log").open("w") as log:
            try:
                status = subprocess.run(
                    job.command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=False
                ).returncode
                outcome = "done" if status == 0 else f"failed with status {status}"
            except subprocess.TimeoutExpired:
                outcome = "stopped, out of time"
    seconds = time.monotonic() - started
    return {"name": job.name, "outcome": outcome, "seconds": seconds, "command": job.command}


def shared_programs(folder: Path) -> dict[str, str]:
    """Environment in which jobs share what they compile, and what the compiler's measurements on the device chose."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "programs"),
        # a kernel's code says where in its source it comes from, so that moved lines or folders would compile again
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    }


def visible_gpus() -> int:
    """How many GPUs nvidia-smi lists, without starting anything on them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="what jaxspec.load takes")
    add("--draft", help="a small model of the same tokenizer, for Dustin")
    add("--text", nargs="+", default=[], metavar="FILE[:KIND]", help="KIND: continue, summary, question")
    add("--calibrate-text", nargs="+", default=[], metavar="FILE", help="others than --text")
    add("--context", type=int, default=32000, help="of bench and peers")
    add("--only", nargs="+", metavar="NAME", help="these jobs")
    add("--gpus", type=int, default=visible_gpus(), help="default: all")
    add("--limit", type=float, default=7200, metavar="SECONDS")
    add("--folder", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Runs everything that there is time for."""
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(args)
    outcomes = run_jobs(jobs, args.gpus, time.monotonic() + args.limit, args.folder)
    sys.exit(any(outcome["outcome"] != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
