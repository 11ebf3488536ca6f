"""What must hold between the two planes, the collectives' settings and the variables of a cluster profile."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmtrain.config.cluster import ClusterProfile, InterNodeConfig
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.errors import Problem

_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")
_ADAPTER = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?::\d+)?")


@rule("inter_node")
def _names(profile: ClusterProfile) -> Iterator[Problem]:
    planes = profile.inter_node
    if planes is None:
        return
    if planes.data_interface and not _INTERFACE.fullmatch(planes.data_interface):
        message = f"`{planes.data_interface}` is not the name of a network interface"
        yield Problem("inter_node.data_interface", message, "e.g. `eth1`")
    for name in planes.adapters:
        if not _ADAPTER.fullmatch(name):
            message = f"`{name}` is not the name of an InfiniBand adapter"
            yield Problem("inter_node.adapters", message, "e.g. `mlx5_0` or `mlx5_0:1`; see `ibv_devices`")


@rule("inter_node")
def _data_plane(profile: ClusterProfile) -> Iterator[Problem]:
    planes = profile.inter_node
    if planes is None:
        return
    kind = planes.data.kind
    if planes.adapters and not planes.is_infiniband:
        yield Problem(
            "inter_node.adapters",
            f"inter_node.adapters names InfiniBand adapters, but inter_node.data.kind is {kind}",
            "set data.kind to ib-hdr, ib-ndr, ..., or remove adapters",
        )
    if planes.data_interface and planes.is_infiniband:
        yield Problem(
            "inter_node.data_interface",
            f"collectives go over {kind}, not over the interface {planes.data_interface}",
            "name the adapters in inter_node.adapters; inter_node.interface is for the control plane",
        )


@rule("inter_node", "environment")
def _variables_agree(profile: ClusterProfile) -> Iterator[Problem]:
    """Variables of the profile win over derived ones; but the profile must not say two things."""
    planes, variables = profile.inter_node, profile.environment.variables
    if planes is None:
        return
    for name, allowed, said in _statements(planes):
        value = variables.get(name)
        if value is not None and value not in allowed:
            yield Problem(
                f"environment.variables.{name}",
                f"{name}={value} contradicts {said}",
                "change one of both",
            )


def _statements(planes: InterNodeConfig) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(variable, values that agree, what says so)."""
    kind = f"inter_node.data.kind = {planes.data.kind}"
    if planes.is_infiniband:
        yield "NCCL_IB_DISABLE", ("0",), kind
        yield "NCCL_NET", ("IB", "ib"), kind
    elif planes.data.kind == "tcp":
        yield "NCCL_IB_DISABLE", ("1",), kind
        yield "NCCL_NET", ("Socket", "socket"), kind
    if planes.adapters:
        said = f"inter_node.adapters = {', '.join(planes.adapters)}"
        yield "NCCL_IB_HCA", (",".join(planes.adapters), f"={','.join(planes.adapters)}"), said
    control, data = planes.interface, planes.data_interface
    if data or control:
        said = f"inter_node.data_interface = {data}" if data else f"inter_node.interface = {control}"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield name, (data or control, f"={data or control}"), said
    if control:
        yield "TP_SOCKET_IFNAME", (control, f"={control}"), f"inter_node.interface = {control}"


NETWORK_RULES: tuple[Rule[ClusterProfile], ...] = (_names, _data_plane, _variables_agree)
