"""What an operator may set in `kv_connector_extra_config`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..engine.names import WeightsName
from ..engine.options import EngineOptions, Flag, Seconds, Text

OPTION_PREFIX = "kvbridge_"


class VLLMOptions(EngineOptions, frozen=True, kw_only=True):
    """An operator writes each name with `kvbridge_` in front: those of `EngineOptions`, and these.

    deadline_s   how long a decoding request waits for its KV before the engine's failure policy applies
    weights      the name of the weights that the engine starts with. Rows are exchanged only between engines whose
                 weights have one name. vLLM's /update_weight_version sets another one
    resets_keep_weights  whether the weights are the same after a cache reset. If not, they have no name from a reset
                 until /update_weight_version, and prompts are computed where they are decoded
    prefill      the prefilling side's agent (tcp://host:port, with #KEY if it has one), for proxies that hand over no
                 kv_transfer_params
    untagged_params  whether a kv_producer returns kv_transfer_params for a one-token request that has none. It offers
                 such a request under its prompt alone; a router that passes on what the prefill side returns then
                 makes the decode side fetch it
    bootstrap_port  the port of prefill agents, where a router of the bootstrap style names none
    scales       what to do with rows under other scales than ours: "requantize" them to ours, or "adopt" theirs. The
                 latter works until a request was computed or received here; after that rows under others are refused
    cross_layer  ask vLLM up to 0.28 for one tensor that holds all layers (its V2 model runner has none); from 0.29 on
                 VLLM_KV_CACHE_LAYOUT=BLHNC does that
    """

    deadline_s: Seconds = 60.0
    weights: WeightsName = "default"
    resets_keep_weights: Flag = False
    prefill: Text = ""
    untagged_params: Flag = True
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535, description="a port in [1, 65535]")] = 7700
    scales: Literal["requantize", "adopt"] = "requantize"
    cross_layer: Flag = False

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> VLLMOptions:
        """Names without our prefix are others'. Raises OperatorError for an unknown name or a bad value."""
        ours = {name: value for name, value in extra.items() if name.startswith(OPTION_PREFIX)}
        return cls.checked(ours, OPTION_PREFIX.__add__)
