"""Failures: how often, how many spares, how often to save, what is left of the time, and what it costs.

Checkpoint interval after Young 1974 and Daly 2006 (higher order): with saves of `delta` seconds and a mean
time between
failures M, sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta, and M itself when delta >= 2M.
"""

from __future__ import annotations

from math import exp, sqrt

from llmtrain.config.checkpoint import CheckpointConfig
from llmtrain.config.cluster import ClusterProfile
from llmtrain.plan.memory.host_memory import host_copies, replicas_of, survives
from llmtrain.plan.plan import Candidate, Reliability
from llmtrain.units import DAY

STATE_BYTES = 12.0
"""FP32 master weights and two moments, bytes a parameter: what a checkpoint holds."""
_ENOUGH = 0.95


def reliability(
    candidate: Candidate, parameters: int, cluster: ClusterProfile, checkpoint: CheckpointConfig
) -> Reliability:
    """Return what failures make of a plan."""
    nodes = -(-candidate.layout.world_size // cluster.gpus_per_node)
    failures = cluster.failures
    between = failures.node_mtbf / nodes
    saved = STATE_BYTES * parameters
    save = saved / cluster.storage.bandwidth
    interval = checkpoint_interval(save, between)
    share = goodput(save, between, interval, failures.restart)
    days = candidate.predicted.train_days / max(share, 1e-9)
    spares = spares_needed(nodes * failures.repair / failures.node_mtbf)
    price = None
    if cluster.gpu_hour_price is not None:
        price = cluster.gpu_hour_price * (nodes + spares) * cluster.gpus_per_node * days * 24.0
    kept = replicas_of(checkpoint, candidate.layout, cluster.gpus_per_node)
    return Reliability(
        mtbf_seconds=between,
        failures=days * DAY / between,
        spares=spares,
        checkpoint_bytes=saved,
        checkpoint_seconds=save,
        checkpoint_interval=interval,
        goodput=share,
        days=days,
        snapshot_bytes_per_node=saved / nodes,
        host_bytes_per_node=saved / nodes * host_copies(checkpoint, kept.losable_nodes),
        survives=survives(checkpoint, candidate.layout, cluster.gpus_per_node),
        price=price,
    )


def checkpoint_interval(save: float, between: float) -> float:
    """Seconds of work between two saves that lose least time."""
    if save <= 0.0:
        return 0.0
    if save >= 2.0 * between:
        return between
    return (
        sqrt(2.0 * save * between) * (1.0 + sqrt(save / (2.0 * between)) / 3.0 + save / (18.0 * between))
        - save
    )


def goodput(save: float, between: float, interval: float, restart: float) -> float:
    """Share of the time that moves training forward (Daly 2006, exponential failures).

    Finishing `interval` of work takes M e^(R/M) (e^((interval + save)/M) - 1) on average.
    """
    work = max(interval, 1.0)
    rate = (work + save) / between
    if rate > 50.0 or restart / between > 50.0:
        return 0.0
    return work / (between * exp(restart / between) * (exp(rate) - 1.0))


def spares_needed(expected_away: float) -> int:
    """Fewest spares that cover a Poisson number of nodes in repair in 95 of 100 cases."""
    term = total = exp(-min(expected_away, 700.0))
    spares = 0
    while total < _ENOUGH and spares < 10_000:
        spares += 1
        term *= expected_away / spares
        total += term
    return spares
