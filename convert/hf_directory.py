"""Hugging Face directories: config.json, safetensors files and a tokenizer."""

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from convert.dtypes import DTYPES
from convert.errors import ConversionError
from convert.json_file import MAX_JSON_BYTES, parse_object, read_object
from convert.safetensors_file import SafetensorsFile
from convert.source import Source, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PICKLE_ADVICE = (
    "pickle checkpoints can run code when read and are not supported; make safetensors of it where you trust it: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)"
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_NUMBERED = re.compile(r"(?P<stem>.+?)-?(?P<number>\d{5})-of-(?P<total>\d{5})(?P<rest>.*)\.safetensors")
_STORED_DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class HFDirectory(Source):
    """A directory in the layout that `save_pretrained` writes."""

    kind = "safetensors"

    def __init__(self, directory: Path, origin: str | None = None) -> None:
        """Reads the configs, the index and every safetensors header; no tensor data.

        Raises:
            ConversionError: no config.json or no safetensors weights, or a file that is malformed.
        """
        self.directory = directory
        self.origin = origin or str(directory)
        self.problems = []
        self.config = read_object(directory / "config.json")
        generation = directory / "generation_config.json"
        self.generation_config = read_object(generation) if generation.is_file() else None
        self._files = [SafetensorsFile(path) for path in self._weight_files()]
        self._places: dict[str, SafetensorsFile] = {}
        for file in self._files:
            self._places |= dict.fromkeys(file.entries, file)
        self.tensors: dict[str, TensorInfo] = {n: f.entries[n].info for n, f in self._places.items()}
        self._check_duplicates()
        self._check_index()
        self.default_dtype = self._dominant_dtype()

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """See `Source.read`."""
        return self._places[name].read(name, dtype)

    def files(self) -> list[Path]:
        """See `Source.files`."""
        small = [self.directory / name for name in ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES)]
        return [path for path in small if path.is_file()] + [file.path for file in self._files]

    def write_tokenizer(self, directory: Path) -> list[str]:
        """See `Source.write_tokenizer`. The files are copied as they are once they have proved readable."""
        names = [name for name in TOKENIZER_FILES if (self.directory / name).is_file()]
        if not names:
            return []
        for name in names:
            path = self.directory / name
            if path.stat().st_size > MAX_JSON_BYTES:
                raise ConversionError(f"{path}: {path.stat().st_size} bytes is too large for a tokenizer file")
            if path.suffix == ".json":
                read_object(path)
        if "tokenizer.json" in names:
            check_tokenizer_json(self.directory / "tokenizer.json")
        for name in names:
            shutil.copyfile(self.directory / name, directory / name)
        # some tokenizer classes are found through the model's type only
        shutil.copyfile(self.directory / "config.json", directory / "config.json")
        return [*names, "config.json"]

    def _weight_files(self) -> list[Path]:
        present = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if (self.directory / INDEX).is_file():
            return self._indexed_files(present)
        if SINGLE in present:
            self._reject_leftover_shards(present, set())
            return [self.directory / SINGLE]
        if not present:
            self._raise_no_weights()
        groups: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for name in present:
            if match := _NUMBERED.fullmatch(name):
                groups[match["stem"], match["total"], match["rest"]].add(int(match["number"]))
        if len(present) == 1 and not groups:
            return [self.directory / present[0]]
        if len(groups) != 1 or len(present) != len(next(iter(groups.values()), ())):
            raise ConversionError(
                f"{self.directory}: no {INDEX} and no {SINGLE}; cannot tell which of these files make the model: "
                f"{_some(present)}"
            )
        ((_, total, _), numbers) = next(iter(groups.items()))
        missing = sorted(set(range(1, int(total) + 1)) - numbers) if int(total) <= 99_999 else []
        if missing and (example := _NUMBERED.fullmatch(present[0])):
            names = [
                f"{present[0][: example.start('number')]}{number:05d}{present[0][example.end('number') :]}"
                for number in missing[:20]
            ]
            self.problems.append(f"missing shards: {_some(names)}")
        return [self.directory / name for name in present]

    def _indexed_files(self, present: list[str]) -> list[Path]:
        weight_map = read_object(self.directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{self.directory / INDEX}: weight_map is missing or empty")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ConversionError(f"{self.directory / INDEX}: {name!r} is in {str(file)[:80]!r}, no shard's name")
        self._weight_map: dict[str, str] = weight_map
        wanted = sorted(set(weight_map.values()))
        if missing := [name for name in wanted if name not in present]:
            self.problems.append(f"missing shards (named by {INDEX}): {_some(missing)}")
        self._reject_leftover_shards(present, set(wanted))
        return [self.directory / name for name in wanted if name in present]

    def _reject_leftover_shards(self, present: Iterable[str], wanted: set[str]) -> None:
        """Shards that nothing refers to mean two saves in one directory: which one is meant cannot be told."""
        stray = [n for n in present if n not in wanted and (_NUMBERED.fullmatch(n) or (wanted and n == SINGLE))]
        if stray:
            reader = INDEX if wanted else SINGLE
            self.problems.append(f"weight files left over from another save, next to {reader}: {_some(stray)}")

    def _check_duplicates(self) -> None:
        count = Counter(name for file in self._files for name in file.entries)
        for name in sorted(name for name, times in count.items() if times > 1):
            shards = [file.path.name for file in self._files if name in file.entries]
            self.problems.append(f"duplicate tensor {name} (in {_some(shards)})")

    def _check_index(self) -> None:
        weight_map = getattr(self, "_weight_map", None)
        if weight_map is None:
            return
        read = {file.path.name: file for file in self._files}
        for name, shard in sorted(weight_map.items()):
            if shard in read and name not in read[shard].entries:
                self.problems.append(f"stale index: {INDEX} says that {name} is in {shard}, which does not hold it")
        for name in sorted(set(self.tensors) - set(weight_map)):
            self.problems.append(f"stale index: {name} (in {self._places[name].path.name}) is not listed in {INDEX}")

    def _dominant_dtype(self) -> str:
        size: Counter[str] = Counter()
        for info in self.tensors.values():
            size[_STORED_DTYPES.get(info.dtype, "")] += int(np.prod(info.shape, dtype=object))
        del size[""]
        return size.most_common(1)[0][0] if size else next(iter(DTYPES))

    def _raise_no_weights(self) -> None:
        pickles = sorted(path.name for pattern in PICKLES for path in self.directory.glob(pattern))
        if pickles:
            raise ConversionError(f"{self.directory}: only pickle weights ({_some(pickles)}): {PICKLE_ADVICE}")
        gguf = sorted(path.name for path in self.directory.glob("*.gguf"))
        advice = f"; give the GGUF file itself: {self.directory / gguf[0]}" if gguf else ""
        raise ConversionError(f"{self.directory}: no safetensors weights{advice}")


def check_tokenizer_json(path: Path) -> None:
    """Builds the tokenizer of a tokenizer.json.

    Raises:
        ConversionError: it cannot be built.
    """
    from tokenizers import Tokenizer

    parse_object(path.read_bytes(), str(path))
    try:
        Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the bindings raise plain Exception, or PanicException, which is not one
        raise ConversionError(f"{path}: not a tokenizer ({str(error)[:200]})") from error


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
