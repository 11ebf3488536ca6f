"""All nodes of a cluster: what each says of itself, how fast it is beside the others, one verdict a node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from llmtrain.backends.base import Backend, SurveyBackend
from llmtrain.backends.health import Check, judge
from llmtrain.backends.preflight import Report, gpus_text
from llmtrain.backends.survey import Survey
from llmtrain.backends.suspects import Measurements, Pair, Suspicion, best_pairs
from llmtrain.config.cluster import ClusterProfile
from llmtrain.errors import ExitStatus, Problem, UsageError
from llmtrain.observe.link_check import LinkCheck
from llmtrain.observe.terminal_views.tables import add_column, one_line_table
from llmtrain.observe.wording import STYLES
from llmtrain.run.node_history import Verdict, recall, remember, suspects

Word = Literal["fit", "warning", "slow", "unfit", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """What the doctor says of one node."""

    node: str
    verdict: Word
    reasons: tuple[Problem, ...]
    checks: tuple[Check, ...] = ()
    report: Report | None = None
    product_flops: tuple[float, ...] = ()
    """Sustained rate of each GPU, or of one core, FLOP/s."""
    bandwidth: float | None = None
    """Of the best pair that it is part of, bytes/s; None: not measured."""
    history: str = ""
    """Why it is used last, from earlier verdicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDiagnosis:
    """Verdicts on all nodes, and links between good nodes that are slow."""

    cluster: str
    nodes: tuple[NodeVerdict, ...]
    links: tuple[Suspicion, ...]
    needed: int
    pairs: dict[Pair, float]

    @property
    def fit(self) -> int:
        """Nodes that a run would use."""
        return sum(each.verdict in ("fit", "warning") for each in self.nodes)

    @property
    def verdict(self) -> str:
        """All of it in one sentence."""
        bad = [
            f"{each.node} is {each.verdict}" for each in self.nodes if each.verdict not in ("fit", "warning")
        ]
        bad += [f"the link between {' and '.join(link.nodes)} is slow" for link in self.links]
        sentence = f"{self.fit} of {len(self.nodes)} nodes are fit, {self.needed} are needed"
        return f"{sentence}: {'; '.join(bad)}" if bad else sentence

    @property
    def exit_status(self) -> ExitStatus:
        """DONE when every node is fit, they are enough, and no link is slow."""
        well = self.fit == len(self.nodes) >= self.needed and not self.links
        return ExitStatus.DONE if well else ExitStatus.FAILED

    def document(self) -> dict[str, Any]:
        """What `doctor --cluster --json` prints."""
        return {
            "schema": 1,
            "cluster": self.cluster,
            "verdict": self.verdict,
            "ok": self.exit_status is ExitStatus.DONE,
            "needed": self.needed,
            "nodes": [_node_document(each) for each in self.nodes],
            "links": [{"nodes": list(link.nodes), "why": link.why} for link in self.links],
            "pairs": [{"nodes": list(pair), "bandwidth": rate} for pair, rate in self.pairs.items()],
        }


def diagnose_cluster(
    cluster: ClusterProfile, backend: Backend, folder: Path, *, quick: bool = False
) -> ClusterDiagnosis:
    """Look at all nodes; unless `quick`, write a file on each and test all against each other.

    Verdicts are remembered in the folder. Raises LlmtrainError when there are no nodes to look at.
    """
    if not isinstance(backend, SurveyBackend):
        raise UsageError(f"the nodes of a `{cluster.backend.kind}` cluster are this machine alone")
    survey = backend.survey(folder, write=not quick)
    found = Measurements(device="cpu", products={}, pairs={}, errors={})
    slow: list[Suspicion] = []
    if not quick and survey.fit:
        found, slow, dead = LinkCheck(backend, backend.as_nodes(survey.fit)).run()
        survey = survey.with_problems({name: Problem(name, why) for name, why in dead.items()})
    now = time.time()
    gpus = {name: survey.reports[name].gpu_uuids if name in survey.reports else () for name in survey.names}
    known = suspects(recall(folder), gpus, now)
    diagnosis = ClusterDiagnosis(
        cluster=cluster.name,
        nodes=tuple(
            replace(_verdict(name, survey, found, slow), history=known.get(name, "")) for name in survey.names
        ),
        links=tuple(each for each in slow if len(each.nodes) == 2),
        needed=cluster.nodes - cluster.spares,
        pairs=dict(found.pairs),
    )
    remember(folder, _to_remember(diagnosis, slow, now, cleared=not quick))
    return diagnosis


def _verdict(name: str, survey: Survey, found: Measurements, slow: Sequence[Suspicion]) -> NodeVerdict:
    report = survey.reports.get(name)
    health = report.health if report is not None else None
    checks: tuple[Check, ...] = ()
    if health is not None:
        checks = tuple(judge(health.machine, health.disk, health.write, gpus=survey.gpus))
    own = [Problem(name, each.why) for each in slow if each.nodes == (name,)]
    reasons = [*survey.problems.get(name, ()), *own]
    worth_a_look = [
        Problem(name, f"{check.name}: {check.found}", check.hint)
        for check in checks
        if check.level == "warning"
    ]
    word: Word = "fit" if not worth_a_look else "warning"
    if own:
        word = "slow"
    if name in survey.problems:
        word = "unreachable" if report is None else "unfit"
    return NodeVerdict(
        node=name,
        verdict=word,
        reasons=tuple(reasons or worth_a_look),
        checks=checks,
        report=report,
        product_flops=tuple(found.products.get(name, ())),
        bandwidth=best_pairs(found).get(name),
    )


def _to_remember(
    diagnosis: ClusterDiagnosis, slow: Sequence[Suspicion], now: float, *, cleared: bool
) -> list[Verdict]:
    """Convictions; that a node is fit only after all tests. An unreachable node may be switched off, and what
    is wrong with all nodes is the fault of none."""
    if not diagnosis.fit:
        return []
    found = []
    for each in diagnosis.nodes:
        uuids = each.report.gpu_uuids if each.report is not None else ()
        if each.verdict == "unfit":
            why = each.reasons[0].message
            found.append(Verdict(node=each.node, time=now, verdict="unfit", why=why, by="doctor"))
        elif each.verdict == "slow":
            for suspicion in slow:
                if suspicion.nodes != (each.node,):
                    continue
                one = uuids[suspicion.gpu : suspicion.gpu + 1] if suspicion.gpu is not None else ()
                verdict = Verdict(
                    node=each.node, time=now, verdict="slow", why=suspicion.why, gpus=one, by="doctor"
                )
                found.append(verdict)
        elif each.verdict != "unreachable" and cleared:
            found.append(Verdict(node=each.node, time=now, verdict="fit", gpus=uuids, by="doctor"))
    return found


def verdicts_table(diagnosis: ClusterDiagnosis) -> Table:
    """One line a node."""
    table = one_line_table()
    for title in ("node", "verdict", "GPUs", "rate", "bandwidth", "why"):
        add_column(table, title, rest=title == "why")
    for each in diagnosis.nodes:
        style = {"fit": "alive", "warning": "warning"}.get(each.verdict, "failed")
        machine = each.report.health.machine if each.report and each.report.health else None
        reasons = "; ".join(reason.message for reason in each.reasons)
        if each.history and each.verdict in ("fit", "warning"):
            reasons = "; ".join(part for part in (reasons, f"until now: {each.history}") if part)
        table.add_row(
            each.node,
            Text(each.verdict, style=STYLES.get(style, "")),
            (gpus_text(machine) or "none") if machine else "",
            _rate(min(each.product_flops)) if each.product_flops else "",
            f"{each.bandwidth / 1e6:.4g} MB/s" if each.bandwidth is not None else "",
            reasons,
        )
    return table


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _node_document(each: NodeVerdict) -> dict[str, Any]:
    return {
        "node": each.node,
        "verdict": each.verdict,
        "reasons": [
            {"where": reason.where, "message": reason.message, "hint": reason.hint} for reason in each.reasons
        ],
        "product_flops": list(each.product_flops),
        "bandwidth": each.bandwidth,
        "history": each.history,
        "checks": [asdict(check) for check in each.checks],
        "report": None if each.report is None else asdict(each.report),
    }
