"""Logs as people read them: the last lines, one rank, all ranks, followed into the next attempt."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import UsageError
from llmtrain.observe import logs
from llmtrain.observe.logs import LogFile, LogTail, follow_logs, last_lines, log_files, read_logs
from tests.support.run_folder import make_run


@pytest.fixture
def run(tmp_path):
    made = make_run(tmp_path / "runs" / "tiny-1")
    for attempt in (1, 2):
        folder = made.attempt(attempt).logs
        folder.mkdir(parents=True)
        for rank in range(3):
            made.attempt(attempt).rank_log(rank).write_text(
                f"a{attempt} r{rank} one\na{attempt} r{rank} two\n"
            )
        made.attempt(attempt).node_log(0).write_text(f"a{attempt} node\n")
    made.supervisor_log.write_text("supervisor says\n")
    return made


def test_newest_attempt_with_nodes_first_and_a_prefix(run) -> None:
    assert list(read_logs(log_files(run))) == [
        "[node 0] a2 node",
        "[rank 0] a2 r0 one",
        "[rank 0] a2 r0 two",
        "[rank 1] a2 r1 one",
        "[rank 1] a2 r1 two",
        "[rank 2] a2 r2 one",
        "[rank 2] a2 r2 two",
        "[supervisor] supervisor says",
    ]


def test_one_rank_of_one_attempt(run) -> None:
    files = log_files(run, rank=1, attempt=1)
    assert list(read_logs(files, prefix=False, lines=1)) == ["a1 r1 two"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"attempt": 3}, "run tiny-1 has no attempt 3", "attempts of this run: 1, 2"),
        ({"rank": 8}, "run tiny-1 has no rank 8", "its ranks are 0 to 7"),
    ],
)
def test_what_does_not_exist_is_named(run, options, message, hint) -> None:
    with pytest.raises(UsageError) as caught:
        log_files(run, **options)
    assert (caught.value.problems[0].message, caught.value.problems[0].hint) == (message, hint)


def test_a_run_without_attempt_shows_the_supervisor(tmp_path) -> None:
    run = make_run(tmp_path / "new")
    assert [file.label for file in log_files(run)] == ["supervisor"]
    assert list(read_logs(log_files(run))) == []
    assert log_files(run, rank=0) == []


@given(
    text=st.lists(st.sampled_from([b"", b"a", b"bb", b"\n", b"\r", b"\xff", b"x" * 40]), max_size=30).map(
        b"".join
    ),
    count=st.integers(0, 12),
    block=st.integers(1, 50),
)
def test_last_lines_equal_those_of_the_whole_file(tmp_path_factory, text, count, block) -> None:
    path = tmp_path_factory.getbasetemp() / "last-lines.log"
    path.write_bytes(text)
    whole = list(last_lines(path, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK", block)
        assert list(last_lines(path, count)) == (whole[-count:] if count else [])


def test_a_progress_bar_is_one_line_and_bytes_are_escaped(tmp_path) -> None:
    path = tmp_path / "rank.log"
    path.write_bytes(b"10%\r50%\r100%\r\nbad \xff byte\n")
    assert list(last_lines(path, None)) == ["100%", "bad \\xff byte"]


def test_a_very_long_line_comes_in_pieces(tmp_path) -> None:
    path = tmp_path / "rank.log"
    path.write_bytes(b"x" * 200_000)
    tail = LogTail(LogFile("rank 0", path))
    pieces = [*tail.poll(), *tail.poll(last=True)]
    assert max(map(len, pieces)) <= logs.LONGEST_LINE and sum(map(len, pieces)) == 200_000


def test_follow_reads_appended_lines_and_later_files_until_the_end(run) -> None:
    over = threading.Event()

    def work() -> None:
        time.sleep(0.1)
        with run.attempt(2).rank_log(0).open("a") as file:
            file.write("a2 r0 three\na2 r0 with")
            file.flush()
            time.sleep(0.1)
            file.write("out end")
        run.attempt(3).logs.mkdir(parents=True)
        run.attempt(3).rank_log(0).write_text("a3 r0 one\n")
        time.sleep(0.1)
        over.set()

    worker = threading.Thread(target=work)
    worker.start()
    found = list(
        follow_logs(
            lambda: log_files(run, rank=0), lines=1, prefix=False, ended=over.is_set, poll_seconds=0.02
        )
    )
    worker.join()
    assert found == ["a2 r0 two", "a2 r0 three", "a3 r0 one", "a2 r0 without end"]
