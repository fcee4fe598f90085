"""The model on which tests run real engines. It is the demo's."""

from __future__ import annotations

from demo.model import HEAD_WIDTH, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, prompt, write_config, write_model

__all__ = ["HEAD_WIDTH", "HIDDEN", "KV_HEADS", "LAYERS", "VOCABULARY", "prompt", "write_config", "write_model"]
