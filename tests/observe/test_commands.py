"""`status`, `logs` and `doctor` as typed."""

import json
from pathlib import Path

import pytest

from llmtrain.cli.main import run as run_command
from tests.support.run_folder import abandon, make_run, write_attempt
from tests.support.sample_events import attempt_files


@pytest.fixture
def runs(tmp_path):
    for number in (1, 2):
        run = make_run(tmp_path / f"tiny-000{number}", steps=60)
        write_attempt(run, 1, attempt_files(1, restored=0, steps=12, world_size=8))
        abandon(run)
        run.attempt(1).logs.mkdir()
        run.attempt(1).rank_log(0).write_text("hello from rank 0\n")
    return str(tmp_path)


def outcome(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run_command(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_status_lists_runs(capsys, runs) -> None:
    code, out, _ = outcome(capsys, "status", "--runs", runs)
    assert code == 0 and "tiny-0001" in out and "tiny-0002" in out and "interrupted" in out
    code, out, _ = outcome(capsys, "status", "--runs", runs, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == 1
    assert sorted(entry["run"] for entry in document["runs"]) == ["tiny-0001", "tiny-0002"]
    assert {entry["step"] for entry in document["runs"]} == {12}


def test_status_of_no_runs(capsys, tmp_path) -> None:
    code, out, err = outcome(capsys, "status", "--runs", str(tmp_path / "none"))
    assert (code, out) == (0, "") and "llmtrain launch tiny" in err
    code, out, _ = outcome(capsys, "status", "--runs", str(tmp_path / "none"), "--json")
    assert code == 0 and json.loads(out) == {"schema": 1, "runs": [], "unreadable": []}


def test_status_of_one_run_by_path_and_by_beginning(capsys, runs) -> None:
    code, out, _ = outcome(capsys, "status", f"{runs}/tiny-0002", "--json")
    assert code == 0 and json.loads(out)["run"] == "tiny-0002"
    code, out, _ = outcome(capsys, "status", "tiny-0001", "--runs", runs)
    assert code == 0 and "12 of 60" in out and "llmtrain resume tiny-0001" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--watch"], "error: RUN: --watch needs a run"),
        (["status", "x", "--watch", "--json"], "error: --watch: --watch and --json exclude each other"),
        (["status", "tiny"], "error: RUN: 'tiny' is the beginning of 2 runs"),
        (["logs", "tiny-0001", "--attempt", "7"], "error: --attempt: run tiny-0001 has no attempt 7"),
        (["logs", "tiny-0001", "-f", "--json"], "error: --follow: --follow and --json exclude each other"),
        (["logs", "tiny-0001", "--rank", "8"], "error: --rank: run tiny-0001 has no rank 8"),
    ],
)
def test_mistakes_are_exit_code_2(capsys, runs, arguments, message) -> None:
    code, _, err = outcome(capsys, *arguments, "--runs", runs)
    assert code == 2 and err.startswith(message)


def test_logs(capsys, runs) -> None:
    assert outcome(capsys, "logs", "tiny-0001", "--runs", runs)[1] == "[rank 0] hello from rank 0\n"
    assert outcome(capsys, "logs", "tiny-0001", "--runs", runs, "--rank", "0")[1] == "hello from rank 0\n"
    code, out, _ = outcome(capsys, "logs", "tiny-0001", "--runs", runs, "-f")
    assert (code, out) == (0, "[rank 0] hello from rank 0\n"), "following a run that is over ends at once"
    code, out, err = outcome(capsys, "logs", "tiny-0001", "--runs", runs, "--rank", "1")
    logs = Path(runs) / "tiny-0001" / "attempts" / "1" / "logs"
    assert (code, out) == (0, "")
    assert err.startswith(f"nothing was printed: the logs in {logs} are empty; what it did: llmtrain status ")


def test_logs_as_json(capsys, runs) -> None:
    (Path(runs) / "tiny-0001" / "supervisor.log").write_bytes(b'it said "no"\n\xff\n')
    code, out, err = outcome(capsys, "logs", "tiny-0001", "--runs", runs, "--json")
    rank = {"source": "rank 0", "attempt": 1, "text": "hello from rank 0"}
    told = [{"source": "supervisor", "attempt": None, "text": text} for text in ('it said "no"', "\\xff")]
    assert (code, err) == (0, "")
    assert json.loads(out) == {"schema": 1, "run": "tiny-0001", "lines": [rank, *told]}
    last = json.loads(outcome(capsys, "logs", "tiny-0001", "--runs", runs, "-n", "1", "--json")[1])
    assert last["lines"] == [rank, told[1]]
    _, out, err = outcome(capsys, "logs", "tiny-0001", "--runs", runs, "--rank", "1", "--json")
    assert json.loads(out)["lines"] == [] and err == ""


def test_report_as_json(capsys, runs, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, out, err = outcome(capsys, "report", "tiny-0001", "--runs", runs, "--out", str(page), "--json")
    size = page.stat().st_size
    assert code == 0 and err == f"wrote {page}\n"
    assert json.loads(out) == {"schema": 1, "run": "tiny-0001", "path": str(page), "bytes": size}


def test_doctor(capsys, tmp_path) -> None:
    code, out, _ = outcome(capsys, "doctor", "--runs", str(tmp_path / "runs"))
    assert code == 0 and "write test" in out
    code, out, _ = outcome(capsys, "doctor", "--runs", str(tmp_path / "runs"), "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == 1 and document["ok"] is True
    assert {check["level"] for check in document["checks"]} <= {"ok", "warning"}
