"""Hub ids: what is downloaded, and one clear line for everything that can go wrong."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from convert import ConversionError, convert
from convert.sources import open_source
from jaxspec.checkpoint import load


@pytest.fixture
def hub(tiny, monkeypatch):
    """A hub with one repository."""
    requests = []

    def snapshot_download(repo, *, revision=None, allow_patterns=None):
        requests.append((repo, revision, allow_patterns))
        return str(tiny("llama")[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return requests


def test_hub_id_is_downloaded_and_converted(hub, tmp_path):
    report = convert("someone/a-model.v1", tmp_path / "out", progress=False)
    assert report.source == {"kind": "safetensors", "origin": "someone/a-model.v1"}
    ((repo, revision, patterns),) = hub
    assert (repo, revision) == ("someone/a-model.v1", None)
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "original/consolidated.00.pth",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "README.md",
        ],
        allow_patterns=patterns,
    )
    assert list(wanted) == [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_revision(hub):
    open_source("someone/model@refs/pr/3")
    assert hub[0][:2] == ("someone/model", "refs/pr/3")


def test_load_takes_hub_ids(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    load("someone/model")
    load("someone/model")
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "cache").iterdir()] == ["model-float32"]


def http_error(kind):
    return kind("the hub said no", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: http_error(errors.RepositoryNotFoundError), "no such repository on the hub"),
        (lambda: http_error(errors.RevisionNotFoundError), "no such revision"),
        (lambda: http_error(errors.GatedRepoError), "access must be granted"),
        (lambda: http_error(errors.HfHubHTTPError), "download failed: the hub said no"),
        (lambda: errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached; download the repository"),
        (lambda: errors.OfflineModeIsEnabled("offline"), "the hub cannot be reached; download the repository"),
        (lambda: errors.HFValidationError("bad"), "valid hub id"),
        (lambda: RuntimeError("of the HTTP client"), "download failed: of the HTTP client"),
        (lambda: OSError(28, "No space left on device"), "download failed: .*No space left"),
    ],
)
def test_errors(error, message, monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConversionError, match=message) as caught:
        open_source("someone/model")
    assert "someone/model" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "a/b/c", "../x/y", "a/", "/a", "a b/c", ""])
def test_what_is_no_hub_id_is_not_looked_up(name, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConversionError):
        open_source(name)
    assert not hub
