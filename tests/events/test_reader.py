"""Reading files that grow, are torn, are replaced, or are hostile."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llmtrain.events.event import LINE_LIMIT, encode_line
from llmtrain.events.reader import EventTail, FolderTail, merge, read_events, sample_events
from llmtrain.events.schema import Notice
from tests.support.sample_events import START, event


def line(text: str, time: float = START) -> bytes:
    return encode_line(event(Notice(message=text), time=time))


def texts(events) -> list[str]:
    return [found.payload.message for found in events]


def append(path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_tail_waits_for_a_missing_file_and_a_torn_line(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    tail = EventTail(path)
    assert tail.poll() == []
    whole = line("second")
    append(path, line("first") + whole[:20])
    assert texts(tail.poll()) == ["first"]
    assert tail.poll() == []
    append(path, whole[20:] + line("third"))
    assert texts(tail.poll()) == ["second", "third"]
    assert tail.skipped == 0


@given(cuts=st.lists(st.integers(0, 2000), max_size=10), count=st.integers(0, 8))
def test_any_cut_into_appends_reads_the_same(tmp_path_factory, cuts, count) -> None:
    path = tmp_path_factory.getbasetemp() / "tail.jsonl"
    path.unlink(missing_ok=True)
    data = b"".join(line(str(index)) for index in range(count))
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    tail, found = EventTail(path), []
    for begin, end in itertools.pairwise(places):
        append(path, data[begin:end])
        found += tail.poll()
    assert texts(found) == [str(index) for index in range(count)]


def test_hostile_lines_are_skipped_and_counted(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, b"\x00\xff garbage\n\n" + line("a") + b"[" * 5000 + b"\n" + line("b"))
    tail = EventTail(path)
    assert texts(tail.poll()) == ["a", "b"]
    assert tail.skipped == 2


def test_a_line_without_end_does_not_fill_the_memory(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    tail = EventTail(path)
    for _ in range(40):
        append(path, b"x" * (LINE_LIMIT // 8))
        assert tail.poll() == []
        assert len(tail._partial) <= 2 * LINE_LIMIT
    append(path, b"\n" + line("after"))
    assert texts(tail.poll()) == ["after"]
    assert tail.skipped == 1


def test_a_replaced_file_is_read_from_its_start(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, line("old one") + line("old two"))
    tail = EventTail(path)
    assert len(tail.poll()) == 2
    path.write_bytes(line("new"))
    assert texts(tail.poll()) == ["new"]


def test_tail_bytes_reads_only_the_end(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, b"".join(line(str(index)) for index in range(10_000)))
    one = len(line("9999"))
    found = texts(read_events(path, tail_bytes=10 * one))
    assert found == [str(index) for index in range(10_000 - len(found), 10_000)]
    assert 8 <= len(found) <= 10
    tail = EventTail(path, start=path.stat().st_size - 10 * one)
    assert texts(tail.poll()) == found
    append(path, line("more"))
    assert texts(tail.poll()) == ["more"]


def test_samples_are_spread_over_a_big_file_and_cost_the_same(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, b"".join(line(str(index)) for index in range(10_000)))
    end = path.stat().st_size
    found = sample_events(path, end=end, windows=100, kinds=["notice", "step_finished"])
    numbers = [int(text) for text in texts(found)]
    assert len(numbers) == 100 and numbers == sorted(numbers)
    assert max(after - before for before, after in itertools.pairwise(numbers)) < 130
    assert sample_events(path, end=end, windows=10, kinds=["step_finished"]) == []
    assert sample_events(tmp_path / "none", end=5, windows=10, kinds=["notice"]) == []


def test_whole_last_line_without_newline_is_read(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, line("a") + line("b")[:-1])
    assert texts(read_events(path)) == ["a", "b"]
    append(path, b"{")
    assert texts(read_events(path)) == ["a"]


def test_max_bytes_bounds_one_poll(tmp_path) -> None:
    path = tmp_path / "rank.jsonl"
    append(path, b"".join(line(str(index)) for index in range(100)))
    tail, found, polls = EventTail(path), [], 0
    while len(found) < 100:
        found += tail.poll(max_bytes=1000)
        polls += 1
    assert texts(found) == [str(index) for index in range(100)]
    assert polls == -(-path.stat().st_size // 1000)


def test_merge_orders_by_time_and_keeps_the_order_of_a_file() -> None:
    def stream(name: str, *times: float):
        return [event(Notice(message=f"{name}{index}"), time=time) for index, time in enumerate(times)]

    stepped_back = stream("a", 10, 5, 12)
    merged = texts(merge([stepped_back, stream("b", 1, 11, 13)]))
    assert merged == ["b0", "a0", "a1", "b1", "a2", "b2"]


def test_folder_tail_finds_later_files(tmp_path) -> None:
    tail = FolderTail(lambda: sorted(tmp_path.glob("*.jsonl")))
    assert tail.poll() == []
    append(tmp_path / "b.jsonl", line("2", START + 2))
    append(tmp_path / "a.jsonl", line("1", START + 1))
    assert texts(tail.poll()) == ["1", "2"]
    append(tmp_path / "c.jsonl", line("3", START + 3))
    append(tmp_path / "a.jsonl", line("4", START + 4))
    assert texts(tail.poll()) == ["3", "4"]
