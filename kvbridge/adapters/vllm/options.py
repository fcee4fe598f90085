"""What an operator may set in `kv_connector_extra_config`; read and checked once, at start-up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ...errors import OperatorError
from ..engine.weights import NAME_FORM, weights_name

PREFIX = "kvbridge_"
Policy = Literal["requantize", "adopt"]


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """The options. An operator writes each name with `kvbridge_` in front.

    socket       the agent's unix socket, an absolute path; `{rank}` is the rank's number among this engine's ranks on
                 this host
    agent_uids   users whose agents may have this engine's memory, besides our own user and root
    allow_unwatched  attach also to an agent whose end cannot be seen: before Linux 6.5, one in another PID namespace.
                 When it dies, blocks count as free a second later, although its kernels may still write them
    hold_s       how long a prefilled prompt is kept for a decode engine that says nothing about it; it is kept longer
                 while a request waits for it there
    deadline_s   how long a decoding request waits for its KV before the engine's failure policy applies
    connect_s    how long start-up waits for the agent; without one the engine starts anyway
    model_name   what both engines call the model; the last part of the model's path if not set
    draft_name   the same for the draft model. Modules of the model itself (MTP) are called as the model is
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

    socket: str = "/run/kvbridge/agent-{rank}.sock"
    agent_uids: tuple[int, ...] = ()
    allow_unwatched: bool = False
    hold_s: float = 30.0
    deadline_s: float = 60.0
    connect_s: float = 30.0
    model_name: str = ""
    draft_name: str = ""
    weights: str = "default"
    resets_keep_weights: bool = False
    prefill: str = ""
    untagged_params: bool = True
    bootstrap_port: int = 7700
    scales: Policy = "requantize"
    cross_layer: bool = False

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> VLLMOptions:
        """Raises OperatorError for an unknown name or a value of the wrong kind."""
        known = {field.name: field for field in fields(cls)}
        ours = {name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)}
        for name, value in ours.items():
            if name not in known:
                spelled = ", ".join(PREFIX + name for name in known)
                raise OperatorError("option_unknown", f"{PREFIX}{name}: not an option, known are {spelled}")
            wanted = type(known[name].default)
            if wanted is float and not isinstance(value, bool) and isinstance(value, int | float):
                if not 0 < value <= 86400:
                    raise OperatorError("option_invalid", f"{PREFIX}{name}: {value}, must be in (0, 86400]")
            elif wanted is tuple:
                ours[name] = _uids(name, value)
            elif not isinstance(value, wanted):
                raise OperatorError(
                    "option_invalid", f"{PREFIX}{name}: {value!r} is {type(value).__name__}, must be {wanted.__name__}"
                )
        options = cls(**ours)
        if type(options.bootstrap_port) is not int or not 0 < options.bootstrap_port < 65536:
            raise OperatorError(
                "option_invalid", f"{PREFIX}bootstrap_port: {options.bootstrap_port!r}, must be in [1, 65535]"
            )
        if not options.socket.startswith("/"):
            raise OperatorError("option_invalid", f"{PREFIX}socket: {options.socket!r}, must be an absolute path")
        if options.weights != weights_name(options.weights):
            raise OperatorError("option_invalid", f"{PREFIX}weights: {options.weights!r:.60}, must be {NAME_FORM}")
        if options.scales not in (policies := get_args(Policy)):
            raise OperatorError(
                "option_invalid", f"{PREFIX}scales: {options.scales!r}, must be one of {', '.join(policies)}"
            )
        return options

    def socket_of(self, rank: int) -> str:
        """The socket of one rank's agent."""
        return self.socket.replace("{rank}", str(rank))


def _uids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(uid) is int and uid >= 0 for uid in value):
        raise OperatorError("option_invalid", f"{PREFIX}{name}: {value!r}, must be a list of users' numbers")
    return tuple(value)
