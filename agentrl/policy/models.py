"""A policy's model as a folder on this machine, which tokenizer, server and trainer all read."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.policy.command import model_location

_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def local_model(model: str) -> Path:
    """The folder of `model`: the shipped policy, a folder, or a hub name's snapshot (downloaded once).

    Raises ConfigError for a path that is no model folder and for a name that the hub does not give.
    """
    location = model_location(model)
    if Path(location).is_dir():
        return Path(location)
    # Imported here: only a hub name needs the hub's client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(location, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model {model!r} is no folder here and the hub does not give it: {reason[:200]}",
            where="policy.model",
            remedy="give a model folder, or make the hub reachable (network, HF_TOKEN, HF_HUB_OFFLINE unset)",
        ) from error
