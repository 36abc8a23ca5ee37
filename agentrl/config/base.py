"""What every group of settings is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Unknown keys are errors; a configuration never changes once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
