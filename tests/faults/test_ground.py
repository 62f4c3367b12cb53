"""Faults of the ground that a server stands on: ports, state files, locks, disks, permissions, clock, paths."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from harness import Place, end, slow, swept, until  # noqa: F401 - swept is a fixture

CORRUPT = [b"", b'{"status": "ready"}', *(pytest.param(c, marks=slow) for c in (b"{", b"\xff\xfe\x00", b"[1, 2]"))]


@contextlib.contextmanager
def small_disk(folder, kib: int = 256, *more: str):
    """A disk of its own at `folder`; where this user may mount nothing the test is skipped, and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={kib}k", *more]), "tmpfs", folder], capture_output=True
    )
    if done.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder) -> None:
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as f:
        while f.write(bytes(4096)):
            pass


def listening(port: int) -> socket.socket:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", port))
    s.listen()
    return s


def refused(place: Place, words: str) -> None:
    """A start ends at once in one sentence with these words, and nothing of it is left."""
    said = end(place.owner("begun"))
    assert words in said and "BadInput" in said.splitlines()[-1], said
    assert place.clean()


def test_port_held_by_something_else(tmp_path):
    place = Place(tmp_path)
    with listening(place.port):
        said = end(place.owner("begun"))
        assert f"held by process {os.getpid()}" in said and "choose another port" in said
        assert not place.left()
    place.good()


def test_port_stolen_between_check_and_bind(tmp_path):
    place = Place(tmp_path, "load=1.5")
    owner = place.owner("begun")
    until(lambda: place.part("worker"))
    with listening(place.port):
        said = end(owner)
        assert "Address already in use" in said or "address already in use" in said
        assert place.server()["status"] == "failed" and not place.left()
    place.good()


@pytest.mark.parametrize("content", CORRUPT, ids=range(5))
def test_corrupt_state_file_before_a_start(tmp_path, content):
    place = Place(tmp_path)
    folder = place.state / f"servers/port-{place.port}"
    folder.mkdir(parents=True)
    (folder / "server.json").write_bytes(content)
    end(place.owner())
    assert (folder / "server.damaged").read_bytes() == content
    place.good()


@pytest.mark.parametrize("harm", ["garbage", "removed"])
def test_state_file_of_a_running_server_damaged(tmp_path, harm):
    place = Place(tmp_path)
    owner = place.owner()
    before, file = place.server(), place.state / f"servers/port-{place.port}/server.json"
    if harm == "garbage":
        (file.parent / "x").write_text("no JSON")
        os.replace(file.parent / "x", file)
    else:
        file.unlink()
    until(lambda: place.server() == before)
    second = place.owner()  # joins, and does not start another
    assert place.server()["token"] == before["token"]
    end(owner)
    end(second)
    place.good()


def test_whole_state_folder_removed_under_a_running_server(tmp_path):
    place = Place(tmp_path)
    owner = place.owner()
    os.rename(place.state, tmp_path / "elsewhere")
    end(owner)
    place.good()


def ended(tmp_path):
    """A place whose server has ended, and that server's state file."""
    place = Place(tmp_path)
    end(place.owner())
    assert place.clean()
    return place, place.state / f"servers/port-{place.port}/server.json"


def test_stale_state_of_a_process_that_is_gone(tmp_path):
    place, file = ended(tmp_path)
    file.write_text(json.dumps(place.server() | {"status": "ready", "supervisor": [os.getpid(), 1]}))
    status = place.cli("status", "--json")
    assert json.loads(status.communicate()[0])[0]["status"] == "died" and status.returncode == 1
    place.good()


def test_starter_killed_before_its_supervisor_came_up(tmp_path):
    place, file = ended(tmp_path)
    state = {k: v for k, v in place.server().items() if k != "supervisor"}
    file.write_text(json.dumps(state | {"status": "launching", "started": time.monotonic() - 18}))
    place.good()


def test_lock_held_by_a_process_that_dies(tmp_path):
    place = Place(tmp_path)
    folder = place.state / f"servers/port-{place.port}"
    folder.mkdir(parents=True)
    code = f"import filelock, time; lock = filelock.FileLock({str(folder / 'lock')!r}); lock.acquire(); print(1, flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    holder.stdout.readline()
    waiting = place.owner("begun")
    time.sleep(1)
    assert not place.server()
    holder.kill()
    holder.wait()
    assert waiting.stdout.readline() == "ready\n"
    end(waiting)
    place.good()


def test_two_starts_at_once_become_one(tmp_path):
    place = Place(tmp_path, "load=1")
    both = [place.owner("begun") for _ in range(3)]
    assert {p.stdout.readline() for p in both} == {"ready\n"}
    assert len(list((place.state / "logs").iterdir())) == 1
    for p in both:
        end(p)
    place.good()


def test_two_books_in_two_folders_want_one_port(tmp_path):
    one, two = Place(tmp_path / "one"), Place(tmp_path / "two")
    two.port = one.port
    owner = one.owner()
    said = end(two.owner("begun"))
    assert "held by process" in said and one.server()["status"] == "ready" and not two.left()
    two.port += 1
    end(two.owner())
    end(owner)
    assert one.clean() and two.clean()


@pytest.mark.parametrize("what", ["state", "log"])
def test_disk_full_before_the_start(tmp_path, what):
    place = Place(tmp_path)
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        if what == "state":
            place.env["QRECIPE_STATE"] = str(disk / "state")
        said = end(place.owner("begun", log_dir=str(disk) if what == "log" else ""))
        assert "No space left on device" in said and "free some disk" in said
        assert place.clean()


@pytest.mark.parametrize("what", ["state", "log"])
def test_disk_full_while_it_runs(tmp_path, what):
    """A ready server lives on without a state file that can be written; one whose log is full may end, and says why."""
    with small_disk(tmp_path / "disk", 512) as disk:
        place = Place(tmp_path, "load=3")
        place.state = disk / "state" if what == "state" else place.state
        place.env["QRECIPE_STATE"] = str(place.state)
        owner = place.owner("begun", log_dir=str(disk) if what == "log" else "")
        until(lambda: place.part("worker"))
        fill(disk)
        said = owner.stdout.readline(), end(owner, 30)[-600:]
        assert said[0] == "ready\n" or "is full: free some" in said[1], said
        assert place.clean()
        (disk / "filler").unlink()
        place.good()


@pytest.mark.parametrize("where", ["/proc/qrecipe", "read-only disk", "a file"])
def test_state_folder_that_cannot_be_written(tmp_path, where):
    place = Place(tmp_path)
    with small_disk(tmp_path / "disk", 64, "ro") if where == "read-only disk" else contextlib.nullcontext() as disk:
        (tmp_path / "file").touch()
        place.env["QRECIPE_STATE"] = {"a file": str(tmp_path / "file")}.get(where, str(disk or where))
        refused(place, "set QRECIPE_STATE")


def test_state_folder_that_everybody_may_write_in(tmp_path):
    place = Place(tmp_path)
    place.state.mkdir()
    place.state.chmod(0o777)
    refused(place, "everybody may write in")


def test_home_that_cannot_be_written(tmp_path):
    place = Place(tmp_path, HOME="/proc/nobody")
    code, said, run = place.run("import os; print('home', os.path.expanduser('~'))", "qrecipe.finish({})")
    assert code == 0, said
    end(place.owner())
    place.good()


def test_clock_that_jumps(tmp_path):
    place = Place(tmp_path, STUB_CLOCK="1")
    owner = place.owner()
    assert 0 < place.server()["ready_seconds"] < 20
    end(owner)
    place.good()


def test_paths_that_are_long_with_spaces_and_not_ascii(tmp_path):
    folder = tmp_path / "mein Büchlein 数学 'x' $HOME" / ("long" * 50)
    folder.mkdir(parents=True)
    place = Place(folder)
    code, said, run = place.run("chapter.server()", "qrecipe.finish({})")
    assert (code, run["chapters"][0]["reason"]) == (0, ""), said
    assert run["server"]["ready_seconds"] > 0
    place.good()


def test_logs_are_rotated_by_count_and_never_the_one_in_use(tmp_path):
    place = Place(tmp_path)
    owner = place.owner()
    log = place.server()["log"]
    folder = place.state / "logs"
    for i in range(30):
        (folder / f"server-2999{i:02}.log").touch()
    other = Place(tmp_path)
    end(other.owner())
    assert os.path.exists(log) and len(list(folder.iterdir())) <= 22
    end(owner)
    assert place.clean() and other.clean()
