"""Checkpoints named by their hub id."""

import re
from pathlib import Path

from convert.errors import ConversionError
from convert.hf_directory import TOKENIZER_FILES, HFDirectory

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# weights in the top folder only: `original/` and `onnx/` repeat them in other formats
_PATTERNS = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def download(hub_id: str) -> HFDirectory:
    """Downloads `owner/name` or `owner/name@revision` into the hub's own cache (once) and opens it.

    Raises:
        ConversionError: unknown or gated repository, no network, or contents that `HFDirectory` refuses.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = HUB_ID.fullmatch(hub_id)
    if match is None:
        raise ConversionError(f"{hub_id!r} is neither an existing path nor a hub id (owner/name)")
    try:
        directory = snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=[*_PATTERNS, *TOKENIZER_FILES]
        )
    except GatedRepoError as error:
        raise ConversionError(f"{hub_id}: access must be granted on the hub first (then: hf auth login)") from error
    except RevisionNotFoundError as error:
        raise ConversionError(f"{hub_id}: no such revision on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConversionError(
            f"{hub_id}: no such path here, and no such repository on the hub (a private one needs: hf auth login)"
        ) from error
    except HFValidationError as error:
        raise ConversionError(f"{hub_id!r} is neither an existing path nor a valid hub id") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConversionError(
            f"{hub_id}: no such path here, and the hub cannot be reached; download the repository where there is a "
            "network and give its directory"
        ) from error
    except Exception as error:  # the hub's client and the HTTP client below it each have their own
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{hub_id}: download failed: {first_line}") from error
    return HFDirectory(Path(directory), origin=hub_id)
