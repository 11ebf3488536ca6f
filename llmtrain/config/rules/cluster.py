"""What must hold inside a cluster profile, whatever the recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmtrain.config.cluster import VARIABLE_NAME, ClusterProfile, LinkConfig
from llmtrain.config.reading.nearest import nearest
from llmtrain.config.rules.network import NETWORK_RULES
from llmtrain.config.rules.rule import Rule, rule
from llmtrain.config.rules.slurm import SLURM_RULES
from llmtrain.config.rules.ssh import SSH_RULES
from llmtrain.errors import Problem
from llmtrain.hardware import ACCELERATORS, LINKS

TORCHRUN_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Set by torchrun for every rank; a profile that sets one would break the rendezvous."""

_SECRET = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$"
)


@rule("accelerator")
def _known_accelerator(profile: ClusterProfile) -> Iterator[Problem]:
    name = profile.accelerator
    if isinstance(name, str) and name not in ACCELERATORS:
        yield Problem(
            "accelerator",
            f"accelerator `{name}` is not in the hardware table",
            f"{_nearest(name, list(ACCELERATORS))}; or give name, peak_flops, memory, memory_bandwidth",
        )


@rule("intra_node")
def _intra_node_link(profile: ClusterProfile) -> Iterator[Problem]:
    yield from _link("intra_node", profile.intra_node, inside_node=True)


@rule("inter_node")
def _inter_node_links(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.inter_node is not None:
        yield from _link("inter_node.data", profile.inter_node.data, inside_node=False)
        yield from _link("inter_node.control", profile.inter_node.control, inside_node=False)


@rule("nodes", "inter_node")
def _several_nodes_need_links(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.nodes > 1 and profile.inter_node is None:
        yield Problem(
            "inter_node",
            f"nodes = {profile.nodes} needs inter_node links",
            "e.g. `inter_node: {data: {kind: ib-hdr}, control: {kind: tcp}}`",
        )


@rule("nodes", "spares")
def _spares_leave_a_node(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.spares >= profile.nodes:
        yield Problem(
            "spares",
            f"spares = {profile.spares} leaves none of nodes = {profile.nodes} to train on",
            f"at most {profile.nodes - 1}; spares are part of nodes",
        )


@rule("backend.kind", "storage.path")
def _shared_storage_is_absolute(profile: ClusterProfile) -> Iterator[Problem]:
    kind, path = profile.backend.kind, profile.storage.path
    if not path:
        yield Problem("storage.path", "storage.path is empty", "name the folder of run directories")
    elif kind != "local" and not path.startswith("/"):
        yield Problem(
            "storage.path",
            f"storage.path = `{path}` must be absolute with backend.kind = {kind}",
            "every node must see the same folder",
        )


@rule("environment")
def _environment_names(profile: ClusterProfile) -> Iterator[Problem]:
    variables, passed = profile.environment.variables, profile.environment.pass_through
    for section, names in (("variables", tuple(variables)), ("pass_through", passed)):
        for name in names:
            place = f"environment.{section}.{name}" if section == "variables" else f"environment.{section}"
            if not VARIABLE_NAME.fullmatch(name):
                yield Problem(
                    place, f"`{name}` is not a variable name", "letters, digits and `_`, no digit first"
                )
            elif name in TORCHRUN_VARIABLES or name.startswith("TORCHELASTIC_"):
                yield Problem(place, f"`{name}` is set by torchrun for every rank", "remove it")
    for name in variables:
        if _SECRET.search(name.upper()):
            yield Problem(
                f"environment.variables.{name}",
                f"`{name}` looks like a secret, and profiles are copied into run directories",
                f"set it in your shell and name it in environment.pass_through: [{name}]",
            )
        if "\x00" in variables[name]:
            yield Problem(f"environment.variables.{name}", f"the value of `{name}` holds a NUL character")


@rule("metrics")
def _metrics_places(profile: ClusterProfile) -> Iterator[Problem]:
    metrics = profile.metrics
    if metrics.port is not None and not metrics.address:
        yield Problem("metrics.address", "metrics.address is empty", "127.0.0.1, or 0.0.0.0 for all networks")
    if metrics.text_file and not metrics.text_file.startswith("/"):
        yield Problem(
            "metrics.text_file",
            f"metrics.text_file = `{metrics.text_file}` must be an absolute path",
            "e.g. /var/lib/node_exporter/llmtrain.prom",
        )
    elif metrics.text_file and not metrics.text_file.endswith(".prom"):
        yield Problem(
            "metrics.text_file",
            f"node_exporter does not read `{metrics.text_file}`",
            "the name must end in .prom",
        )


def _link(place: str, link: LinkConfig, *, inside_node: bool) -> Iterator[Problem]:
    """A link is in the table, or complete in numbers."""
    if link.kind in LINKS:
        return
    missing = [name for name in ("bandwidth", "latency") if getattr(link, name) is None]
    if missing:
        known = [name for name, entry in LINKS.items() if entry.inside_node == inside_node]
        yield Problem(
            f"{place}.kind",
            f"{place}.kind `{link.kind}` is not in the link table",
            f"{_nearest(link.kind, known)}; or give {' and '.join(missing)}",
        )


def _nearest(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    suggestion = f"did you mean `{close}`? " if close is not None else ""
    return f"{suggestion}known: {', '.join(known)}"


@rule("software.fused_loss")
def _own_loss_is_not_fused(profile: ClusterProfile) -> Iterator[Problem]:
    if profile.software.fused_loss and profile.software.framework == "llmtrain":
        yield Problem(
            "software.fused_loss",
            "`true` promises a kernel that this package's engine does not have",
            "remove it, or name the `software.framework` that has one",
        )


CLUSTER_RULES: tuple[Rule[ClusterProfile], ...] = (
    _known_accelerator,
    _intra_node_link,
    _inter_node_links,
    _several_nodes_need_links,
    _spares_leave_a_node,
    _shared_storage_is_absolute,
    _environment_names,
    _metrics_places,
    _own_loss_is_not_fused,
    *NETWORK_RULES,
    *SSH_RULES,
    *SLURM_RULES,
)
