"""The teacher's answer key, and a log handed to chapters on somebody else's server."""

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import time

import httpx
import pytest

from qrecipe.errors import BadInput
from qrecipe.exercise import book
from qrecipe.serving import Server
from qrecipe.workshop import Seats, progress, reset, seat_keys, write_key, write_slips


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """What comes through the middleware when a key is sent, in a state folder of the test's own."""
    monkeypatch.setenv("QRECIPE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("VLLM_API_KEY", "the teacher's")
    got = {}

    async def app(scope, receive, send):
        got.update(scope)

    seats = Seats(app)

    def sent(key: str) -> str:
        headers = [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]
        asyncio.run(seats({"type": "http", "headers": headers}, None, None))
        return dict(got["headers"])[b"authorization"].decode().removeprefix("Bearer ")

    return sent


def test_a_seat_s_key_counts_as_the_server_s_until_it_is_renewed(sent, tmp_path):
    assert sent("x") == "x"  # no file yet
    keys = seat_keys(3)
    file = tmp_path / "state/seats.json"
    assert len(set(keys.values())) == 3 and file.stat().st_mode & 0o777 == 0o600
    assert [sent(key) for key in keys.values()] == ["the teacher's"] * 3 and sent("x") == "x"
    assert seat_keys(5) | keys == seat_keys(2)  # those that are there stay
    assert reset(2) == [] and sent(keys[2]) == keys[2] and sent(keys[1]) == "the teacher's"
    assert sent(seat_keys(3)[2]) == "the teacher's"
    file.write_text("{")
    os.utime(file, (1, 1))
    assert sent(keys[1]) == keys[1]  # a file that cannot be read lets nobody in
    seat_file = file.rename(file.with_suffix(".away"))
    seat_file.write_text(json.dumps(keys))
    seat_file.rename(file)
    assert sent(keys[1]) == "the teacher's"
    file.unlink()
    assert sent(keys[1]) == keys[1]  # nor does one that is gone


def test_a_seat_that_floods_waits_behind_itself_and_before_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setenv("QRECIPE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("VLLM_API_KEY", "the teacher's")
    monkeypatch.setenv("QRECIPE_SEAT_REQUESTS", "3")
    keys, at_work, most, done = seat_keys(2), 0, 0, []

    async def app(scope, receive, send):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1
        done.append(scope["path"])

    async def flood():
        seats = Seats(app)

        def ask(key, path, method="POST"):
            scope = {"type": "http", "method": method, "path": path}
            return seats(scope | {"headers": [(b"authorization", f"Bearer {key}".encode())]}, None, None)

        await asyncio.gather(
            *(ask(keys[1], "one") for _ in range(20)), ask(keys[2], "two"), ask(keys[1], "list", "GET")
        )

    asyncio.run(flood())
    assert most == 5 and len(done) == 22 and {"two", "list"} <= set(done[:5])


def test_a_reset_takes_the_answers_of_that_folder_alone(sent, tmp_path):
    seat_keys(2)
    for name in (
        "a/exercises/01_size_gpu.json",
        "a/20261130/exercises/03_serve.json",
        "b/exercises/04.json",
        "a/run.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(reset(1, tmp_path / "a")) == ["01_size_gpu", "03_serve"]
    assert (tmp_path / "a/run.json").exists() and (tmp_path / "b/exercises/04.json").exists()
    for seat, folder, words in ((3, "", "seat 3 has no key"), (1, tmp_path / "c", "there is no folder")):
        with pytest.raises(BadInput, match=words):
            reset(seat, folder)


def test_the_key_holds_every_exercise_and_only_its_owner_may_read_it(tmp_path):
    file = write_key(tmp_path / "key.md")
    text = file.read_text()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("## ")] == list(book())
    assert text.count("**Solution.**") == len(book())
    assert "4,539,265,536 × 2 bytes / 2**30 = 8.455 GiB" in text
    assert file.stat().st_mode & 0o777 == 0o600
    told = "".join(
        re.findall(r"\n\*\*Hint.*?(?=\n## |$)", text, re.S)
    )  # the questions show examples as they stand in the notebooks
    for found in re.findall(r"\{.*?\}+", told):  # an answer that is a dict, no figure left to be filled in
        assert isinstance(ast.literal_eval(found), dict), found
    assert "0.80 × 139.8" in text and "ceil(100000 / 528) + 3 = 193 blocks" in text and "107,712 tokens" in text
    assert told.count("student's own") == 5


def test_a_log_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    words = [sys.executable, "-m", "qrecipe.cli", "run", "03", "--log", str(tmp_path / "no.log")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no such file" in done.stderr


def test_a_slip_a_seat_holds_its_own_key_and_only_its_owner_may_read_it(tmp_path, monkeypatch):
    monkeypatch.setenv("QRECIPE_STATE", str(tmp_path))
    page = write_slips("export VLLM_API_KEY=...   # <own>", keys := seat_keys(3))
    slips = page.read_text().split("<pre>")[1:]
    assert [
        f"Seat {n}\n" in slip and f"KEY={key} " in slip.replace("'", "")
        for slip, (n, key) in zip(slips, keys.items(), strict=True)
    ] == [True] * 3
    assert "&lt;own&gt;" in slips[0] and page.stat().st_mode & 0o777 == 0o600


def test_who_is_stuck_is_told_from_the_cards_the_longest_silence_first(tmp_path):
    cards = {
        "7": (
            60,
            {
                "1.1": {"state": "right", "tries": ["8.4"]},
                "1.3": {"state": "wrong", "tries": ["1", "2"]},
                "1.4": {"state": "open", "tries": []},
            },
        ),
        "8": (600, {"1.1": {"state": "right", "tries": ["8.4"]}}),
        "9": (0, ["no card"]),
    }
    for seat, (age, card) in cards.items():
        file = tmp_path / seat / "runs/exercises/01_size_gpu.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(card))
        os.utime(file, (then := time.time() - age, then))
    (tmp_path / "10").mkdir()
    assert progress(tmp_path) == [("10", 0, "", "no card"), ("8", 1, "", 10), ("7", 1, "1.3 (2)", 1), ("9", 0, "", 0)]


def test_the_key_asks_what_the_notebooks_ask_and_tells_usual_mistakes(tmp_path):
    parts = re.split(r"\n## ", write_key(tmp_path / "key.md").read_text())[1:]
    assert all(len(part.split("**Hint.**")[0].split()) > 12 for part in parts), "a question is missing"
    assert "how many **GiB** of weights?" in parts[0] and "Half a byte each would be 4 bits" in parts[0]


def test_a_key_pasted_with_its_line_s_end_is_sent_without(monkeypatch):
    sent = []

    def get(url, headers, **_):
        sent.append(headers["Authorization"])
        raise httpx.ConnectError("")

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv("VLLM_API_KEY", " a-key\n")
    with pytest.raises(BadInput, match="no server answers"):
        Server.attach("http://192.0.2.7:8000/v1")
    assert sent == ["Bearer a-key"]
