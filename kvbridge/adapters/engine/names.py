"""What both engines call a model and its draft model. Pure."""

from __future__ import annotations


def model_name(path: str) -> str:
    """The last part of a model's path."""
    return path.rstrip("/").rpartition("/")[2]


def draft_name(model: str, model_path: str, draft_path: str) -> str:
    """What a draft model is called. Modules of the model itself (MTP) are called as the model is, `model`."""
    return model if draft_path.rstrip("/") == model_path.rstrip("/") else model_name(draft_path)
