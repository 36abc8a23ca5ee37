"""Where a policy's model lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.policy import local_model


def test_the_shipped_policy_and_a_folder_are_folders(tmp_path: Path) -> None:
    assert (local_model("tiny") / "config.json").is_file()
    (tmp_path / "config.json").write_text("{}")
    assert local_model(str(tmp_path)) == tmp_path


def test_a_name_that_the_hub_does_not_give_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nobody/nothing-here' is no folder here") as caught:
        local_model("nobody/nothing-here")
    assert "policy.model" in caught.value.where
    assert "folder" in caught.value.remedy


def test_a_path_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        local_model(str(tmp_path / "missing"))
