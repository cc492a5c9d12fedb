"""Models of the Hugging Face hub, as mlx-lm fetches them."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..errors import ModelNotFound
from .progress import Progress, ReportProgress

FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


def hub_directory(repository: str, progress: ReportProgress) -> Path:
    """The snapshot of `org/name`, from the hub's cache folder or fetched into it.

    Raises `ModelNotFound`, saying what was looked for and where.
    """
    progress(Progress("downloading", 0, 0))
    try:
        return Path(snapshot_download(repository, allow_patterns=FILES))
    except GatedRepoError as error:
        reason = "the hub wants you to accept its terms and log in"
        raise _not_found(repository, reason) from error
    except RepositoryNotFoundError as error:
        raise _not_found(repository, "the hub has no such model") from error
    except HFValidationError as error:
        raise _not_found(repository, "the hub allows no such name") from error
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached (no connection, or HF_HUB_OFFLINE is set)"
        raise _not_found(repository, reason) from error
    except (HfHubHTTPError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise _not_found(repository, f"the hub could not be asked: {said[0]}") from error


def _not_found(repository: str, reason: str) -> ModelNotFound:
    return ModelNotFound(
        f"no model {repository!r}: no folder of this name, not in the hub's cache "
        f"{constants.HF_HUB_CACHE}, and {reason}"
    )
