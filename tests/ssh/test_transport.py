"""Commands, files and conversations over real sshds."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path

import pytest

from llmtrain.transport.base import TransportError
from tests.support.beds import unavailable

pytestmark = pytest.mark.e2e
PYTHON = sys.executable
HOSTILE = [
    "",
    " ",
    "-rf",
    "a b",
    "'",
    '"',
    "'\"'\"'",
    "$(touch /tmp/llmtrain-owned)",
    "`touch /tmp/llmtrain-owned`",
    "; touch /tmp/llmtrain-owned",
    "a\nb",
    "\n",
    "\\",
    "\\n",
    "*",
    "~",
    "!x",
    "%s",
    "$HOME",
    "${IFS}",
    "#",
    "&",
    "|",
    ">",
    "caf\u00e9 \u6f22",
    "\udcff",
    "\t",
    "\x01",
]
ECHO = """import sys
words = [word.encode("utf-8", "surrogateescape") for word in sys.argv[1:]]
sys.stdout.buffer.write(repr(words).encode())
"""


def assert_gone(bed, name: str, pattern: str, seconds: float = 10.0) -> None:
    """No process of a node has `pattern` in its command line, now or a little later."""
    deadline = time.monotonic() + seconds
    while found := bed.processes(name, pattern):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_arguments_arrive_as_they_are_whatever_they_hold(to) -> None:
    done = to("node1").run([PYTHON, "-c", ECHO, *HOSTILE], timeout=20)
    assert done.exit_code == 0, done.stderr
    assert eval(done.stdout) == [each.encode("utf-8", "surrogateescape") for each in HOSTILE]
    assert not Path("/tmp/llmtrain-owned").exists()


@pytest.mark.parametrize("shell", ["bash", "dash", "tcsh", "fish", "zsh"])
def test_login_shell_of_the_user_does_not_matter(to, ssh_bed, shell) -> None:
    path = f"/bin/{shell}"
    if not Path(path).exists():
        unavailable(f"the shell {shell} is not installed")
    ssh_bed.add_user("node1", "someone", shell=path)
    argv = ["printf", "%s|", *[each for each in HOSTILE if each != "\udcff"]]
    done = to("node1", user="someone").run(argv, timeout=20)
    assert done.stdout.decode() == "".join(f"{each}|" for each in HOSTILE if each != "\udcff")
    assert to("node1", user="someone").run(["id", "-un"], timeout=20).stdout == b"someone\n"


def test_nul_in_an_argument_is_refused(to) -> None:
    with pytest.raises(TransportError, match="holds a NUL character"):
        to("node1").run(["echo", "a\0b"], timeout=5)


def test_exit_codes_output_and_input(to) -> None:
    node = to("node2")
    assert node.run(["sh", "-c", "exit 7"], timeout=5).exit_code == 7
    assert node.run(["sh", "-c", "kill -9 $$"], timeout=5).exit_code == -9
    assert node.run(["sh", "-c", "kill -TERM $$"], timeout=5).exit_code == -15
    done = node.run(["sh", "-c", "hostname; echo no >&2; wc -c"], timeout=20, stdin=b"x" * 5_000_000)
    assert (done.stdout, done.stderr) == (b"node2\n5000000\n", b"no\n")


def test_much_input_and_much_output_at_once_do_not_block_each_other(to) -> None:
    data = bytes(range(256)) * 40_000
    assert to("node1").run(["cat"], timeout=60, stdin=data).stdout == data


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/no/such/python", "-c", "1"], "node1: `/no/such/python` is not there"),
        (["no-such-command"], "node1: `no-such-command` is not there"),
        (["/etc"], "node1: `/etc` "),
    ],
)
def test_command_that_cannot_start(to, argv, message) -> None:
    with pytest.raises(TransportError) as caught:
        to("node1").run(argv, timeout=5)
    assert str(caught.value).startswith(message)


def test_command_that_takes_too_long_is_killed_with_its_children(to, ssh_bed) -> None:
    began = time.monotonic()
    with pytest.raises(TransportError, match="node1: `sh` took longer than 1 s and was killed"):
        to("node1").run(["sh", "-c", "sleep 98765 & sleep 98765"], timeout=1)
    assert time.monotonic() - began < 3
    assert_gone(ssh_bed, "node1", "sleep 98765")


def test_command_is_killed_on_time_although_the_link_is_cut(to, ssh_bed) -> None:
    node = to("node3")
    node.connect()
    threading.Timer(0.5, ssh_bed.fault, ("cut", "node3")).start()
    with pytest.raises(TransportError):
        node.run(["sleep", "98764"], timeout=2)
    assert_gone(ssh_bed, "node3", "sleep 98764")


def test_files_come_and_go_whole(to, tmp_path) -> None:
    node, path = to("node1"), tmp_path / "new folder" / "-a $(b)\n'c'.bin"
    data = bytes(range(256)) * 1000
    node.put(path, data, mode=0o640)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert node.get(path, limit=10) == data[-10:]
    assert node.get(path, limit=1 << 30) == data


def test_put_onto_a_full_disk_keeps_the_old_file(to, ssh_bed, tmp_path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    ssh_bed.run("node1", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small))
    try:
        node = to("node1")
        node.put(small / "file", b"old")
        with pytest.raises(TransportError) as caught:
            node.put(small / "file", b"n" * 200_000)
        assert str(caught.value) == f"node1: {small}/file cannot be written: no space left on device"
        assert node.get(small / "file", limit=10) == b"old"
        assert ssh_bed.run("node1", "ls", "-A", str(small)).split() == ["file"]
    finally:
        ssh_bed.run("node1", "umount", str(small))


def test_get_of_a_missing_file(to) -> None:
    with pytest.raises(TransportError) as caught:
        to("node1").get(Path("/no/such"), limit=1)
    assert str(caught.value) == "node1: /no/such cannot be read: no such file or directory"


# ---- conversations
def talk(node, argv, tmp_path, environment=None):
    lines: queue.Queue[bytes | None] = queue.Queue()
    channel = node.open(argv, on_line=lines.put, stderr=tmp_path / "agent.log", environment=environment or {})
    return channel, lines


def test_conversation(to, tmp_path) -> None:
    code = "import sys, os\nprint(os.environ['SECRET'], flush=True)\nprint('no', file=sys.stderr)\n" + (
        "for line in sys.stdin: print(line.strip()[::-1], flush=True)\nsys.exit(3)"
    )
    secret = "a'b\nc $(d)"
    channel, lines = talk(to("node1"), [PYTHON, "-u", "-c", code], tmp_path, {"SECRET": secret})
    assert lines.get(timeout=10) + b"\n" + lines.get(timeout=10) == secret.encode()
    for index in range(200):
        assert channel.send(f"<{index}".encode())
    assert [lines.get(timeout=10) for _ in range(200)] == [f"<{index}"[::-1].encode() for index in range(200)]
    assert channel.exit_code() is None
    channel.finish()
    assert lines.get(timeout=10) is None
    assert channel.exit_code() == 3
    assert (tmp_path / "agent.log").read_text() == "no\n"


def test_secrets_do_not_show_in_the_process_list(to, ssh_bed, tmp_path) -> None:
    channel, lines = talk(to("node1"), ["cat"], tmp_path, {"TOKEN": "hunter2"})
    channel.send(b"up")
    assert lines.get(timeout=10) == b"up"
    assert ssh_bed.processes("node1", "cat")
    assert ssh_bed.processes("node1", "hunter2") == []
    channel.kill()


def test_killed_conversation_leaves_nothing(to, ssh_bed, tmp_path) -> None:
    code = """import signal, time
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
time.sleep(3600)
"""
    channel, lines = talk(to("node1"), [PYTHON, "-c", code], tmp_path)
    assert lines.get(timeout=10) == b"up"
    channel.kill()
    assert lines.get(timeout=10) is None
    assert_gone(ssh_bed, "node1", "signal.SIG_IGN")


def test_kill_arrives_although_the_connection_is_closed_at_once(to, ssh_bed, tmp_path) -> None:
    node = to("node1")
    channel, lines = talk(node, ["sh", "-c", "trap '' HUP TERM; echo up; sleep 98763"], tmp_path)
    assert lines.get(timeout=10) == b"up"
    channel.kill()
    node.close()
    assert lines.get(timeout=10) is None
    assert_gone(ssh_bed, "node1", "trap ''")
    ssh_bed.run("node1", "pkill", "-f", "sleep 98763", check=False)
    with pytest.raises(TransportError, match="node1: the connection was closed"):
        node.run(["true"], timeout=5)


def test_exit_by_signal_is_told(to, tmp_path) -> None:
    channel, lines = talk(to("node1"), ["sh", "-c", "kill -KILL $$"], tmp_path)
    assert lines.get(timeout=10) is None
    assert channel.exit_code() == -9


@pytest.mark.parametrize("fault", ["cut", "power", "linkdown", "portdown", "freeze"])
def test_silently_lost_node_ends_the_conversation_within_ten_seconds(to, ssh_bed, tmp_path, fault) -> None:
    channel, lines = talk(to("node2"), ["cat"], tmp_path)
    channel.send(b"up")
    assert lines.get(timeout=10) == b"up"
    began = time.monotonic()
    ssh_bed.fault(fault, "node2")
    assert lines.get(timeout=20) is None
    assert time.monotonic() - began < 10
    assert channel.exit_code() is None


def test_crashed_node_ends_the_conversation_at_once(to, ssh_bed, tmp_path) -> None:
    channel, lines = talk(to("node2"), ["cat"], tmp_path)
    channel.send(b"up")
    assert lines.get(timeout=10) == b"up"
    began = time.monotonic()
    ssh_bed.fault("crash", "node2")
    assert lines.get(timeout=20) is None
    assert time.monotonic() - began < 1.5
    ssh_bed.restore()
    assert to("node2").run(["hostname"], timeout=10).stdout == b"node2\n"


def test_short_cut_is_survived(to, ssh_bed, tmp_path) -> None:
    channel, lines = talk(to("node2"), ["cat"], tmp_path)
    channel.send(b"up")
    assert lines.get(timeout=10) == b"up"
    ssh_bed.fault("cut", "node2")
    time.sleep(3)
    channel.send(b"sent while cut")
    ssh_bed.restore()
    assert lines.get(timeout=15) == b"sent while cut"
    channel.kill()


def test_transport_connects_again_after_a_loss(to, ssh_bed) -> None:
    node = to("node2")
    assert node.run(["hostname"], timeout=10).stdout == b"node2\n"
    ssh_bed.fault("crash", "node2")
    ssh_bed.restore()
    assert node.run(["hostname"], timeout=10).stdout == b"node2\n"


def test_more_conversations_than_one_connection_may_hold(to, tmp_path) -> None:
    """sshd's default MaxSessions is 10; the eleventh session needs a second connection."""
    node = to("node1")
    talks = [talk(node, ["cat"], tmp_path) for _ in range(21)]
    for channel, lines in talks:
        channel.send(b"up")
        assert lines.get(timeout=10) == b"up"
    assert node.run(["hostname"], timeout=10).stdout == b"node1\n"
    for channel, lines in talks:
        channel.finish()
        assert lines.get(timeout=10) is None


def test_site_that_allows_one_session(to, ssh_bed, tmp_path) -> None:
    settings = ssh_bed.work / "nodes" / "node4" / "sshd_config"
    before = settings.read_text()
    ssh_bed.fault("sshd-stop", "node4")
    settings.write_text(before + "MaxSessions 1\n")
    try:
        ssh_bed.restore()
        node = to("node4")
        channel, lines = talk(node, ["cat"], tmp_path)
        channel.send(b"up")
        assert lines.get(timeout=10) == b"up"
        assert node.run(["hostname"], timeout=10).stdout == b"node4\n"
        channel.kill()
    finally:
        settings.write_text(before)
        ssh_bed.fault("sshd-stop", "node4")
        ssh_bed.restore()
