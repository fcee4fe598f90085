"""The model that tests run real engines on; the demo ships it."""

from __future__ import annotations

from kvbridge.demo.model import HEAD_WIDTH, HIDDEN, KV_HEADS, LAYERS, VOCABULARY, prompt, write_config, write_model

__all__ = ["HEAD_WIDTH", "HIDDEN", "KV_HEADS", "LAYERS", "VOCABULARY", "prompt", "write_config", "write_model"]
