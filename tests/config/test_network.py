"""The two planes between nodes: what the ranks' environment gets, and what contradicts itself."""

from __future__ import annotations

import socket
import time

import pytest

from llmtrain.agent.door import Door, knock
from llmtrain.config.job import resolve
from llmtrain.errors import ConfigError
from llmtrain.render.variables import settings
from llmtrain.supervise.detection.limits import limits_for


def variables(profile: str, *overrides: str) -> dict[str, str]:
    """Derived variables of a shipped profile."""
    spec = resolve("gpt-175b", profile, [f"cluster.{override}" for override in overrides])
    return {setting.name: setting.value for setting in settings(spec.cluster)}


def test_control_over_tcp_and_data_over_infiniband() -> None:
    found = variables("a100-32x8", "inter_node.interface=eth0", "inter_node.adapters=[mlx5_0, mlx5_1]")
    assert found["NCCL_NET"] == "IB"
    assert found["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"
    assert found["NCCL_SOCKET_IFNAME"] == found["TP_SOCKET_IFNAME"] == "eth0"
    assert found["NCCL_ALGO"] == "Ring,Tree"


def test_both_planes_over_tcp() -> None:
    found = variables(
        "a100-32x8",
        "inter_node.data.kind=tcp",
        "inter_node.interface=eth0",
        "inter_node.data_interface=eth1",
    )
    assert found["NCCL_NET"] == "Socket"
    assert found["TP_SOCKET_IFNAME"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "eth1"


def test_what_reduces_in_the_switch_is_not_forbidden_to() -> None:
    assert "NCCL_ALGO" not in variables("h100-32x8")
    assert variables("h100-32x8", "inter_node.algorithm=ring")["NCCL_ALGO"] == "Ring"
    assert "NCCL_ALGO" not in variables("a100-32x8", "nodes=1")


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        (
            ["inter_node.data.kind=tcp", "inter_node.adapters=[mlx5_0]"],
            "cluster.inter_node.adapters",
            "names InfiniBand adapters, but inter_node.data.kind is tcp",
        ),
        (
            ["inter_node.data_interface=eth1"],
            "cluster.inter_node.data_interface",
            "collectives go over ib-hdr, not over the interface eth1",
        ),
        (
            ["environment.variables.NCCL_IB_DISABLE=1"],
            "cluster.environment.variables.NCCL_IB_DISABLE",
            "NCCL_IB_DISABLE=1 contradicts inter_node.data.kind = ib-hdr",
        ),
        (
            ["inter_node.interface=eth0", "environment.variables.NCCL_SOCKET_IFNAME=ib0"],
            "cluster.environment.variables.NCCL_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME=ib0 contradicts inter_node.interface = eth0",
        ),
        (
            ["inter_node.adapters=[mlx5_0]", "environment.variables.NCCL_IB_HCA=mlx5_7"],
            "cluster.environment.variables.NCCL_IB_HCA",
            "NCCL_IB_HCA=mlx5_7 contradicts inter_node.adapters = mlx5_0",
        ),
        (["inter_node.adapters=['mlx5 0;reboot']"], "cluster.inter_node.adapters", "is not the name"),
        (["software.fused_loss=true"], "cluster.software.fused_loss", "this package's engine does not have"),
        (["inter_node.data_interface='a b'"], "cluster.inter_node.data_interface", "is not the name"),
    ],
)
def test_contradictions_are_told(overrides: list[str], where: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        variables("a100-32x8", *overrides)
    found = [problem for problem in raised.value.problems if message in problem.message]
    assert found, raised.value.problems
    assert where.removeprefix("cluster.") in found[0].where


def test_a_profile_may_say_the_same_twice() -> None:
    found = variables("a100-32x8", "environment.variables.NCCL_IB_DISABLE=0")
    assert found["NCCL_NET"] == "IB"


def test_a_call_of_the_control_plane_is_tried_four_times() -> None:
    limits = limits_for(1.0)
    assert (limits.control_call, limits.control_retries) == (0.3, 3)
    spec = resolve("tiny", "ssh", ["cluster.patience.control=50ms", "cluster.patience.control_retries=1"])
    patient = limits_for(1.0, spec.cluster.patience)
    assert (patient.control_call, patient.control_retries) == (0.05, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    assert knock("127.0.0.1", port, 0.3, 3) == "connection refused in 4 tries"
    assert time.monotonic() - began >= 0.1 + 0.2 + 0.4
    assert knock("127.0.0.1", port, 0.3, 0) == "connection refused"


def test_a_door_is_reached_at_once() -> None:
    door = Door()
    port = door.open()
    assert knock("127.0.0.1", port, 0.3, 3) == ""
    door.close()
