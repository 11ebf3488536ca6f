"""Metrics in Prometheus' format, over HTTP, as a file, and before a real Prometheus."""

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmtrain.cli.main import run as run_command
from llmtrain.errors import UsageError
from llmtrain.observe.exporter import Exporter, exposition, serve, write_text_file
from llmtrain.observe.job_facts import read_job_facts
from llmtrain.observe.metrics import families
from tests.support.prometheus import RULES, dashboard_queries, tool
from tests.support.run_folder import make_run, write_attempt
from tests.support.sample_events import START, attempt_files, event, step_finished


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in order of name) -> value."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exported(*runs) -> str:
    return exposition(Exporter(lambda: runs, forget_seconds=1e12)).decode()


def test_values_of_a_restarted_run(tell) -> None:
    found = samples(exported(tell("restarted").run))
    run = "tiny-0003"
    assert found["llmtrain_step", run] == 41
    assert found["llmtrain_steps_executed_total", run] == 28 + 16
    assert found["llmtrain_steps_lost_total", run] == 3
    assert found["llmtrain_restarts_total", "rank_dead", "same", run] == 1
    cost = 3 * 0.5 + 0.6 + 3.4 + 2
    assert found["llmtrain_lost_seconds_total", "rank_dead", run] == pytest.approx(cost)
    assert found["llmtrain_tokens_total", run] == (28 + 16) * 2048
    assert found["llmtrain_checkpoint_stall_seconds", run] == 0.01
    assert found["llmtrain_rank_score", "7", run] == 1
    assert found["llmtrain_nodes", run, "healthy"] == 1
    assert found["llmtrain_heartbeat_age_seconds", "localhost", run] >= 0
    assert found["llmtrain_run_state", run, "running"] == 1
    assert sum(value for key, value in found.items() if key[0] == "llmtrain_run_state") == 1
    assert found["llmtrain_loss", run] == pytest.approx(5.5 / 41**0.2)
    assert found["llmtrain_tokens_per_second", run] == pytest.approx(4096)
    assert found["llmtrain_checkpoint_step", run] == 40
    assert found["llmtrain_ranks", run, "alive"] == 8
    assert found["llmtrain_rank_memory_bytes", "7", run] == 2**30
    assert found["llmtrain_node_last_seen_timestamp_seconds", "localhost", run] == pytest.approx(START + 30)
    assert ("llmtrain_exit_status", run) not in found


def test_nodes_that_may_be_lost_are_a_share_of_those_at_launch(tell) -> None:
    """Which may be fewer than the profile has, when the layout needs fewer."""
    run = tell("restarted").run
    job = json.loads(run.job_json.read_text())
    job["spec"] = {"recipe": {"faults": {"node_loss_budget": 0.4}}, "cluster": {"nodes": 8}}
    run.job_json.write_text(json.dumps(job))
    assert read_job_facts(run).nodes_lost_allowed == 3
    run.record_json.write_text(json.dumps({"nodes": list("abcde")}))
    assert read_job_facts(run).nodes_lost_allowed == 2


def test_every_story_is_valid_and_in_base_units(story) -> None:
    _, told = story
    text = exported(told.run)
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("llmtrain_") and family.documentation
        assert not re.search(r"(milli|percent|_ms|_kb|_gb|minutes|hours)", family.name)
        assert ("_ratio" not in family.name) or all(0 <= sample.value <= 1 for sample in family.samples)
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_several_runs_share_their_families(tell) -> None:
    runs = [tell("running").run, tell("failed").run]
    text = exported(*runs)
    assert text.count("# TYPE llmtrain_loss gauge") == 1
    assert samples(text)["llmtrain_exit_status", "tiny-0005"] == 93


def test_counters_never_go_back(tell) -> None:
    told = tell("restarting")
    exporter = Exporter(lambda: [told.run])
    before = samples(exposition(exporter).decode())
    write_attempt(told.run, 2, attempt_files(2, restored=25, steps=1, world_size=8, start=START + 20))
    after = samples(exposition(exporter).decode())
    assert after["llmtrain_step", "tiny-0002"] == 26 < before["llmtrain_step", "tiny-0002"] == 28
    for key, value in before.items():
        if key[0].endswith("_total"):
            assert after[key] >= value, key


def test_a_big_world_has_no_metrics_for_every_rank(tell, monkeypatch) -> None:
    view = tell("large").view()
    names = {family.name for family in families([view])}
    assert "llmtrain_rank_step_seconds" in names
    monkeypatch.setattr("llmtrain.observe.metrics.MOST_RANKS", 100)
    assert not [family.name for family in families([view]) if family.name.startswith("llmtrain_rank_")]


def test_old_and_broken_runs_are_left_out(tell, tmp_path) -> None:
    ended, running, broken = tell("finished").run, tell("running").run, make_run(tmp_path / "broken")
    broken.job_json.write_text("{")
    text = exposition(Exporter(lambda: [ended, running, broken], forget_seconds=-1e12)).decode()
    assert "tiny-0001" in text and "tiny-0004" not in text and "broken" not in text


def test_over_http_and_as_a_file(tell, tmp_path) -> None:
    exporter = Exporter(lambda: [tell_run])
    tell_run = tell("running").run
    url, stop = serve(exporter, "127.0.0.1", 0)
    try:
        first = urllib.request.urlopen(url, timeout=10).read().decode()
        more = event(step_finished(29), time=START + 17, rank=0)
        write_attempt(tell_run, 1, {"rank-00000.jsonl": [more]})
        second = urllib.request.urlopen(url, timeout=10).read().decode()
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(UsageError, match="cannot listen on"):
            serve(exporter, "127.0.0.1", port)
    finally:
        stop()
    assert samples(first)["llmtrain_step", "tiny-0001"] == 28
    assert samples(second)["llmtrain_step", "tiny-0001"] == 29
    write_text_file(exporter, tmp_path / "node" / "llmtrain.prom")
    assert samples((tmp_path / "node" / "llmtrain.prom").read_text())["llmtrain_step", "tiny-0001"] == 29
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["llmtrain.prom"]


def test_commands(capsys, tell, tmp_path) -> None:
    run = tell("running").run
    assert run_command(["metrics", str(run.path)]) == 0
    assert 'llmtrain_step{run="tiny-0001"} 28.0' in capsys.readouterr().out
    assert run_command(["metrics", "--listen", "here"]) == 2
    assert "'here' is no address" in capsys.readouterr().err
    assert run_command(["metrics", "--listen", "127.0.0.1:99999"]) == 2
    assert "port 99999 is out of range: 0 to 65535" in capsys.readouterr().err
    assert run_command(["metrics", "--text-file", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err
    assert run_command(["metrics", "--text-file", str(tmp_path / "none" / "a.prom")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert run_command(["dashboards", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "grafana-dashboard.json",
        "prometheus-rules.yaml",
        "prometheus-scrape.yaml",
    ]
    assert run_command(["dashboards", "--out", str(tmp_path / "out")]) == 2
    assert "give --force" in capsys.readouterr().err
    assert run_command(["dashboards", "--out", str(tmp_path / "out"), "--force"]) == 0


def test_rules_fire_and_stay_silent(tmp_path) -> None:
    promtool = tool("promtool")
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).with_name("rules_test.yaml"), tmp_path)
    for command in (["check", "rules", "--lint-fatal", RULES.name], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_ask_only_for_metrics_that_exist(tell) -> None:
    told = exported(tell("restarted").run, tell("failed").run)
    known = {key[0] for key in samples(told)} | {
        "llmtrain_mfu_ratio",  # not on this CPU run
        "llmtrain_planned_step_seconds",  # from plan.json
        "llmtrain_nodes_lost",  # from record.json
        "llmtrain_nodes_lost_allowed",
    }
    asked = set(re.findall(r"llmtrain_[a-z_]+", RULES.read_text() + json.dumps(dashboard_queries())))
    assert len(asked) > 20 and asked <= known
