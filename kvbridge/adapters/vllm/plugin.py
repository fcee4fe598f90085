"""Makes `"kv_connector": "KVBridgeConnector"` known to vLLM by its short name (entry point `vllm.general_plugins`)."""

from __future__ import annotations

CONNECTOR_NAME = "KVBridgeConnector"
MODULE = "kvbridge.adapters.vllm.connector"


def register() -> None:
    """vLLM calls this in every process, and may call it twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, MODULE, CONNECTOR_NAME)
