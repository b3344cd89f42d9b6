"""Calibration, attention recall, quality and speed of Dustin on a real pair of models; the parts of `dustin.py`."""

import dataclasses
import gc
import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
from acceptance_prompts import Text, rows_of_text, texts_from, tiny_checkpoint
from dustin_pair import Pair, Prefilled, rows_measured

import jaxspec
from jaxspec.calibration.configure import SIGNALS, arr_table, configure
from jaxspec.calibration.heads import retrieval_heads
from jaxspec.calibration.needles import chat_ends, make_needle
from jaxspec.calibration.records import DUSTIN, HEADS, read_record
from jaxspec.calibration.scan import Scan, scan_heads
from jaxspec.calibration.search import Budget, HeadSet
from jaxspec.calibration.traces import collect_traces
from jaxspec.dustin.config import options_from_config
from jaxspec.methods import DraftModel, Dustin, Models, Plain, SelfDustin

DEPTHS = tuple((i + 0.5) / 10 for i in range(10))


class Study:
    """The models, the texts, and one method per part."""

    def __init__(self, args, report) -> None:
        self.args, self.report = args, report
        if args.tiny:
            self.target, texts = tiny_checkpoint()
            self.draft, _ = tiny_checkpoint()
            self.texts, self.calibration = texts, [t.ids for t in texts.values()]
            self.encode, self.wrap = lambda text: [ord(c) % 97 for c in text], ("", "")
        else:
            self.target, self.draft = (jaxspec.load(path, dtype=args.dtype) for path in (args.target, args.draft))
            self.texts = texts_from(args.text, self.target.tokenizer)
            self.encode = lambda text: self.target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            paths = args.calibrate_text or [text.partition(":")[0] for text in args.text]
            self.calibration = [self.encode(Path(p).read_text(encoding="utf-8", errors="replace")) for p in paths]
            self.wrap = chat_ends(self.target.tokenizer) if self.target.tokenizer.chat_template else ("", "")
        self.models = Models(self.target.model, self.target.params, self.draft.params)
        self.names = (str(args.target), str(args.draft))
        self.config_path = args.config or args.folder / "dustin_config.json"
        self.heads_paths = tuple(args.folder / f"{role}_heads.json" for role in ("target", "draft"))

    def candidates(self) -> tuple[list[HeadSet], list[HeadSet]]:
        """The candidate signals of both models; of the configuration alone where there was no scan."""
        if not all(path.exists() for path in self.heads_paths):
            config = read_record(self.config_path, DUSTIN)
            return tuple(
                [HeadSet(layer, tuple(heads)) for layer, heads in config[name]]
                for name in ("target_heads", "draft_heads")
            )
        scores = [np.array(read_record(path, HEADS)["scores"]) for path in self.heads_paths]
        kv_heads = [loaded.config.num_kv_heads for loaded in (self.target, self.draft)]
        return tuple(retrieval_heads(s, k) for s, k in zip(scores, kv_heads, strict=True))

    def measured_rows(self) -> tuple[list[tuple[int, str]], list[list[int]]]:
        """(context, text) labels and prompts."""
        labels = [(context, name) for context in self.args.contexts for name in self.texts]
        return labels, [rows_of_text(self.texts[name], context, 1)[0] for context, name in labels]

    def calibrate(self) -> None:
        """Retrieval heads of both models and the configuration, on the calibration texts."""
        args = self.args
        if self.config_path.exists():
            print(f"  {self.config_path} is there", flush=True)
            return
        if args.tiny:
            # a random model answers no needle
            rng = np.random.default_rng(0)
            scores = [rng.random((m.config.num_layers, m.config.num_heads)) for m in (self.target, self.draft)]
        else:
            scores = []
            for name, loaded, path in zip(self.names, (self.target, self.draft), self.heads_paths, strict=True):
                record = read_record(path, HEADS) if path.exists() else scan_heads(
                    name, Models(loaded.model, loaded.params), self.encode, self.calibration,
                    Scan((args.needle_length,)), path, wrap=self.wrap, eos_ids=loaded.eos_ids,
                )  # fmt: skip
                best = np.sort(np.ravel(record["scores"]))[::-1][:4].round(2).tolist()
                print(f"  {name}: {record['answered']} of {len(record['recall'])} answered, best {best}", flush=True)
                self.report.add("heads", {"model": name, "answered": record["answered"], "best": best})
                scores.append(np.array(record["scores"]))
        # as many rows of the same lengths as are measured later, which then need no other program
        stream = [token for ids in self.calibration for token in ids]
        while len(stream) < 2 * max(args.contexts):
            stream += stream
        prompts = [
            row for n in args.contexts for row in rows_of_text(Text(stream, [], []), n, max(len(self.texts), 2))
        ][: len(args.contexts) * len(self.texts)]
        configure(
            self.names, self.models, self.draft.model, tuple(scores), prompts, self.config_path, budgets=args.budgets,
            num_draft=args.num_draft, rounds=args.rounds, progress=lambda line: print(f"  {line}", flush=True),
            **({"sinks": 2, "window": 4} if args.tiny else {}),
        )  # fmt: skip
        record = read_record(self.config_path, DUSTIN)
        self.report.add("configuration", {k: record[k] for k in ("target_heads", "draft_heads", "splits", "search")})

    def arr(self) -> None:
        """ARR by layer, budget, signal and context on the measured texts."""
        args, config = self.args, read_record(self.config_path, DUSTIN)
        target, draft = self.candidates()
        labels, rows = self.measured_rows()
        traces = list(
            collect_traces(
                self.models, self.draft.model, rows, target, draft, num_draft=args.num_draft, rounds=args.rounds
            )
        )
        ((layer, heads),) = config["target_heads"]
        chosen = target.index(HeadSet(layer, tuple(heads)))
        ahead = [draft.index(HeadSet(layer, tuple(heads))) for layer, heads in config["draft_heads"]]
        sinks, window = config["settings"]["sinks"], config["settings"]["window"]
        for context in args.contexts:
            found = [t for round_ in traces for t, label in zip(round_, labels, strict=True) if label[0] == context]
            for rows_read in args.budgets:
                split = config["splits"].get(str(rows_read), (rows_read - sinks - window) // 2)
                table = arr_table(found, chosen, ahead, split, Budget(rows_read, sinks, window))
                mean = {signal: float(np.mean(table[signal])) for signal in SIGNALS}
                print(f"  ARR at {context:6}, {rows_read:5} rows: "
                      + "  ".join(f"{signal} {value:.3f}" for signal, value in mean.items()), flush=True)  # fmt: skip
                result = {"context": context, "rows": rows_read, "split": split, "mean": mean, "by_layer": table}
                self.report.add("arr", result)

    def methods(self, budget: int) -> dict:
        """The methods of `quality`, by name."""
        options = options_from_config(read_record(self.config_path, DUSTIN), budget) | {
            "num_draft": self.args.num_draft
        }
        hybrid = Dustin(model=self.draft.model, **options)
        rival = {"target_heads": (), "draft_heads": ()}
        found = {
            "plain": Plain(),
            "draft-model": DraftModel(model=self.draft.model, num_draft=self.args.num_draft),
            "dustin": hybrid,
            "dustin, drafts on the last rows": dataclasses.replace(hybrid, sparse_drafts="last"),
            "dustin, drafts on recent rows": dataclasses.replace(hybrid, sparse_drafts="recent"),
            "history": dataclasses.replace(hybrid, signal="history"),
            "streaming": dataclasses.replace(hybrid, signal="recency", **rival),
            "snapkv": dataclasses.replace(hybrid, signal="snapkv", **rival),
            "quest": dataclasses.replace(hybrid, signal="quest", **rival),
        }
        # the target as its own draft: its retrieval heads look ahead as well as back
        shared = {f.name: getattr(hybrid, f.name) for f in dataclasses.fields(SelfDustin) if hasattr(hybrid, f.name)}
        shared |= {"draft_heads": hybrid.target_heads, "sparse_drafts": "last"}
        return found | {"self-dustin, drafts on the last rows": SelfDustin(**shared)}

    def quality(self) -> None:
        """Tokens per round, agreement with the full model and needle accuracy of every method."""
        args = self.args
        methods = {n: m for n, m in self.methods(args.budget).items() if args.only is None or n in args.only}
        labels, rows = self.measured_rows()
        stream = [token for text in self.texts.values() for token in text.ids]
        needles = [
            make_needle(self.encode, stream, n, depth, 17 * i, self.wrap)
            for n in args.needle_contexts
            for i, depth in enumerate(DEPTHS)
        ]
        needle_rows = [list(needle.ids) for needle in needles]
        batch = max(len(rows), len(needle_rows))
        rows, needle_rows = (x + x[:1] * (batch - len(x)) for x in (rows, needle_rows))
        longest = max(rows, needle_rows, key=lambda x: max(map(len, x)))
        pair = Pair(self.models, self.methods(args.budget)["history"], longest, args.new_tokens)
        texts, asked = (Prefilled(pair, x) for x in (rows, needle_rows))
        print(f"  prefilled in {texts.seconds:.0f} s with compile, {asked.seconds:.0f} s without", flush=True)
        pair.compile(methods, texts, self.report.attempt)
        for name, method in methods.items():
            if name not in pair.loops:
                continue
            self.report.attempt(f"quality of {name}", partial(self._texts, pair, texts, name, method, labels))
            self.report.attempt(f"needles of {name}", partial(self._needles, pair, asked, name, method, needles))
            # a run that failed has taken the caches with it
            texts = Prefilled(pair, rows) if texts.caches is None else texts
            asked = Prefilled(pair, needle_rows) if asked.caches is None else asked

    def _texts(self, pair, prepared, name, method, labels) -> None:
        run = pair.run(name, method, prepared)
        hits, gaps = pair.teacher_forced(run["tokens"], prepared)
        for context in self.args.contexts:
            at = np.array([i for i, label in enumerate(labels) if label[0] == context])
            result = rows_measured(run["stats"], at) | {
                "agreement": float(hits[at].mean()),
                "logprob_given_up": float(gaps[at].mean()),
                "agreement_by_text": {labels[i][1]: float(hits[i].mean()) for i in at},
            }
            print(f"  {name:32} {context:6}: {result['tokens_per_round'] or 1:.2f} tokens per round, agreement "
                  f"{result['agreement']:.3f}, {result['logprob_given_up']:.3f} nats given up", flush=True)  # fmt: skip
            shared = {"method": name, "lossless": method.lossless, "context": context, "budget": self.args.budget}
            self.report.add("quality", shared | result)

    def _needles(self, pair, prepared, name, method, needles) -> None:
        tokens = pair.run(name, method, prepared)["tokens"]
        for context in self.args.needle_contexts:
            at = [i for i in range(len(needles)) if needles[i].depth == DEPTHS[0]][
                self.args.needle_contexts.index(context)
            ]
            answered = [
                needles[i].recall(tokens[i, : 4 + len(needles[i].payload)].tolist()) == 1 for i in range(at, at + 10)
            ]
            print(f"  {name:32} {context:6}: {sum(answered)} of 10 needles", flush=True)
            shared = {"method": name, "context": context, "budget": self.args.budget}
            self.report.add("needles", {**shared, "answered": answered})

    def speed(self) -> None:
        """Tokens per second at the longest context that fits, by batch; phases of some."""
        for batch in self.args.batches:
            self.report.attempt(f"speed at batch {batch}", lambda batch=batch: self._speed(batch))
            gc.collect()
            jax.clear_caches()

    def _speed(self, batch: int) -> None:
        args = self.args
        limit = self.target.config.capacity_limit - args.new_tokens - 64
        context = max(args.contexts) if args.tiny else min(32768, limit)
        texts = [text for text in self.texts.values() if len(text.ids) >= context] or [
            Text([t for text in self.texts.values() for t in text.ids] * 2, [], [])
        ]
        per_text = [rows_of_text(text, context, -(-batch // len(texts))) for text in texts]
        rows = [row for group in zip(*per_text, strict=True) for row in group][:batch]
        names = ("plain", "draft-model", "dustin", "dustin, drafts on the last rows", "dustin, drafts on recent rows")
        names = [name for name in names if name == "plain" or not args.only or name in args.only]
        methods = {name: method for name, method in self.methods(args.budget).items() if name in names}
        pair = Pair(self.models, self.methods(args.budget)["history"], rows, args.new_tokens)
        prepared = Prefilled(pair, rows)
        phased = ("draft-model", "dustin", "dustin, drafts on the last rows") if batch in args.phase_batches else ()
        phased = tuple(name for name in phased if name in methods)
        pair.compile(methods, prepared, self.report.attempt, phased)
        plain = plain_all = None
        for name in [name for name in methods if name in pair.loops]:
            runs = [pair.run(name, methods[name], prepared) for _ in range(3)]
            best = min(runs, key=lambda run: run["seconds"])
            hits, gaps = pair.teacher_forced(best["tokens"], prepared)
            rate = batch * (args.new_tokens - 1) / best["seconds"]
            seconds, rounds, emitted = best["all_running"]
            if name == "plain":
                plain, plain_all = rate, emitted / seconds
            result = rows_measured(best["stats"], np.arange(batch)) | {
                "tokens_per_second": rate,
                "speedup": rate / plain if plain else None,
                "tokens_per_second_all_running": emitted / seconds,
                "speedup_all_running": emitted / seconds / plain_all if plain else None,
                "milliseconds_per_round": 1e3 * seconds / rounds,
                "agreement": float(hits.mean()),
                "logprob_given_up": float(gaps.mean()),
            }
            line = (
                f"  {name:32} batch {batch} at {context}: {rate:8.0f} tokens/s, {rate / (plain or rate):.2f} x plain, "
                f"{result['speedup_all_running'] or 1:.2f} while all run, "
            )
            line += (
                f"{result['tokens_per_round'] or 1:.2f} tokens per round of {result['milliseconds_per_round']:.2f} ms, "
            )
            print(line + f"agreement {result['agreement']:.3f}", flush=True)
            shared = {"method": name, "lossless": methods[name].lossless, "batch": batch, "context": context}
            self.report.add("speed", {**shared, "budget": args.budget, **result})
        for name in pair.phase_programs:
            rounds = max((args.new_tokens - 1) // (args.num_draft + 1), 3)
            phases = pair.phases(name, methods[name], prepared, rounds)
            print(f"  {name}: " + json.dumps(phases), flush=True)
            self.report.add("phases", {"method": name, "batch": batch, "context": context, "milliseconds": phases})
