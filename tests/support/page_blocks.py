"""What each block of a page is: commands that a test runs as they stand, or why none does. tests/unit/test_documents.py
finds blocks that are not here.
"""

from __future__ import annotations

PAGES = "tests/system/test_pages.py"
VLLM = "tests/system/engines/test_walkthrough.py::test_the_quickstart_carries_a_prompt_through_its_router"
SGLANG = "tests/system/sglang/test_walkthrough.py::test_the_page_carries_a_prompt_from_one_server_to_the_other"
CROSS = "tests/system/cross/test_walkthrough.py::test_the_page_carries_a_prompt_from_one_engine_to_the_other"
REPLICAS = "tests/system/engines/test_replicas.py::test_the_page_spreads_prompts_over_replicas"
HOSTS = "tests/system/engines/test_two_hosts.py::test_the_page_spreads_prompts_over_replicas_of_two_hosts"
NODES = "tests/system/test_two_nodes.py::test_the_page_carries_a_prompt_from_one_node_to_the_other"
SGLANG_REPLICAS = "tests/system/sglang/test_replicas.py::test_the_page_spreads_prompts_over_replicas"
ROUTERS = "its flags, with other addresses: tests/system/routers/test_routers.py"
GPUS = f"needs GPUs; its names: {PAGES}::test_either_kind_of_machine_sets_what_both_kinds_run"
INSTALLS = "installs gigabytes; the wheel and its extras: tests/system/test_install.py"
WEIGHTS_OF_VLLM = "tests/integration/adapters/test_vllm_weights.py"
WEIGHTS_OF_SGLANG = "tests/integration/adapters/test_sglang_release.py"
OUTPUT = "output"
OPTIONS = f"{PAGES}::test_an_agent_takes_the_options_that_are_shown"
KEYS = f"{PAGES}::test_keys_are_made_and_agents_take_them_as_shown"

# The first words of each block, in order.
BLOCKS: dict[str, list[tuple[str, str]]] = {
    "README.md": [("python3 -m venv", INSTALLS), ("# GPUs", GPUS), ("agent()", VLLM), ("kill $(jobs", VLLM)],
    "SECURITY.md": [
        ("kvbridge keygen /etc/kvbridge/fleet.key", KEYS),
        ("kvbridge keygen /etc/kvbridge/agent.key", KEYS),
        ("dial = ", KEYS),
        ("peer_not_allowed", OUTPUT),
    ],
    "docs/adapters.md": [
        ("agent()", "tests/unit/test_adapter_guide.py::test_the_toy_engines_run_as_the_page_says"),
        ("fetched: True", OUTPUT),
    ],
    "docs/benchmarks.md": [("python -m testing.sim", "takes hours; fewer schedules: tests/unit/sim/test_sim.py")],
    "docs/data-parallel.md": [
        ("# four GPUs", "needs GPUs"),
        ("# four ranks on CPUs", REPLICAS),
        ("agent()", REPLICAS),
        ("# prefill: one replica", REPLICAS),
        ("# on A", HOSTS),
        ("# on B", HOSTS),
        ("# four GPUs, SGLang", "needs GPUs"),
        ("# four ranks of SGLang", SGLANG_REPLICAS),
        ("# SGLang: each side", SGLANG_REPLICAS),
    ],
    "docs/kubernetes.md": [
        ("kubectl create", f"{PAGES}::test_kubectl_takes_the_commands_without_a_cluster"),
        ("kubectl label", NODES),
        ("kubectl -n kvbridge get pods", NODES),
        ("make chart", "tests/system/test_chart.py::test_helm_takes_the_commands_of_the_page"),
        ("docker build", "needs docker and a registry; its file: tests/system/test_deploy.py"),
        ("FROM vllm", "an image that nobody has here"),
    ],
    "docs/models.md": [
        ("kvbridge plan --model Qwen3", f"{PAGES}::test_plan_says_of_models_what_the_page_says"),
        ("kvbridge plan --model gpt-oss", f"{PAGES}::test_plan_says_of_models_what_the_page_says"),
    ],
    "docs/operations.md": [
        ("$ .venv/bin/kvbridge up", OUTPUT),
        ("export CUDA_MPS", "needs a GPU"),
        ("back()", VLLM),
        ("$ kvbridge status --fleet", OUTPUT),
        ("kvbridge plan --model", f"{PAGES}::test_a_fleet_is_planned_as_the_page_shows"),
        ("cmpl-2-decode", OUTPUT),
        ("route  pools", OUTPUT),
        ("# vLLM 0.32", f"{WEIGHTS_OF_VLLM}::test_the_pages_commands_change_the_weights_through_vllms_own_routes"),
        ("# SGLang", f"{WEIGHTS_OF_SGLANG}::test_the_pages_commands_change_the_weights_through_sglangs_own_routes"),
    ],
    "docs/proxy.md": [
        ("pip install", f"{PAGES}::test_the_proxy_serves_with_the_engines_that_are_shown"),
        ("# GPUs", GPUS),
        ("# CPUs", CROSS),
        ("agent()", CROSS),
        ("$ kvbridge drain", OUTPUT),
    ],
    "docs/routers.md": [
        ("vllm serve", ROUTERS),
        ("vllm-router", ROUTERS),
        ("python -m smg", ROUTERS),
        ("python -m smg", ROUTERS),
        ("python -m sglang_router", ROUTERS),
        ("python -m sglang_router", ROUTERS),
        ("kvbridge proxy", ROUTERS),
        ("kubectl label", "needs a cluster; the labels: tests/integration/commands/test_cli.py"),
        ("KEY=", "as Python: tests/system/routers/test_pairing.py"),
    ],
    "docs/sglang.md": [
        ("KVBRIDGE_ENGINE_SOCKET", f"for GPUs and any model; a pair with these options: {SGLANG}"),
        ("# GPUs", GPUS),
        ("# CPUs", SGLANG),
        ("agent()", SGLANG),
        ("# ROLE", "tests/integration/adapters/test_sglang_roles.py::test_the_pages_command_is_sglangs_own_route"),
    ],
    "docs/rdma.md": [
        ("kvbridge doctor --only rdma", "tests/integration/doctor/test_rdma.py::test_the_page_asks_doctor"),
    ],
    "docs/systemd.md": [
        ("python3 -m venv", "changes the machine; the same in namespaces: tests/system/test_systemd.py"),
    ],
    "docs/threat-model.md": [("client ", OUTPUT)],
    "docs/upgrades.md": [
        ("sed -i", "tests/system/test_pages.py::test_an_engine_at_work_is_waited_for"),
    ],
    "docs/vllm.md": [
        ("kvbridge keygen", KEYS),
        ("kvbridge agent --name p0", OPTIONS),
        ("vllm serve", f"for any model; its options: {VLLM.partition('::')[0]}"),
        ("python3 -m venv", INSTALLS),
        ("# CPUs", VLLM),
        ("kvbridge agent --name r1", OPTIONS),
    ],
}  # fmt: skip
