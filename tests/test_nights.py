"""Nights side by side: what stands out of the spread is marked, what cannot be read is said, a change of parts comes first."""

import json
import os
import random

import pytest

from qrecipe import nights
from qrecipe.cli import main
from qrecipe.errors import BadInput
from qrecipe.nights import compare, judge_row, read_night, write_nights


def night(folder, day, ttft=75.0, kv=10.0, seconds=60.0, status="passed", **more):
    """One run folder of a made-up night."""
    folder = folder / f"night-{day:02}"
    folder.mkdir(parents=True)
    measured = {
        "TTFT": {"value": ttft, "unit": "ms"},
        "KV cache": {"value": kv, "unit": "GiB"},
        "picture": {"value": "3 × 2", "unit": ""},
    }
    chapter = {
        "name": "05_x",
        "status": status,
        "seconds": seconds,
        "reason": "",
        "cell": "",
        "line": "",
        "measured": measured,
    }
    run = {
        "format": 2, "passed": status == "passed", "date": f"2026-11-{day:02}T02:00:00+00:00", "seconds": 100.0, "engine": "gpu",
        "device": "NVIDIA H200", "weights": "real", "versions": {"vllm": "0.27.0"}, "lock_sha256": "a" * 64,
        "model": {"name": "m", "revision": "1" * 40}, "server": {"ready_seconds": 90.0 + day % 3}, "chapters": [chapter],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run | more))
    return folder


def marks(found) -> dict:
    return {r["figure"]: r["mark"] for r in found["rows"] if r["mark"]}


def test_a_quiet_week_has_no_marks(tmp_path):
    noise = random.Random(1)
    for day in range(1, 11):
        night(tmp_path, day, ttft=75 + noise.uniform(-2, 2), seconds=60 + noise.uniform(-5, 5))
    found = compare([tmp_path])
    assert len(found["nights"]) == 10 and marks(found) == {} and found["regressions"] == [] and found["notes"] == []


@pytest.mark.parametrize(
    "change, mark",
    [
        ({"ttft": 100.0}, {"05_x: TTFT, ms": "regression"}),
        ({"ttft": 50.0}, {"05_x: TTFT, ms": "better"}),
        ({"ttft": 80.0}, {"05_x: TTFT, ms": "changed"}),
        ({"kv": 8.0}, {"05_x: KV cache, GiB": "regression"}),
        ({"kv": 12.0}, {"05_x: KV cache, GiB": "better"}),
        ({"seconds": 90.0}, {"05_x, s": "regression"}),
    ],
)
def test_what_stands_out_is_marked_by_its_worse_side(tmp_path, change, mark):
    for day in range(1, 6):
        night(tmp_path, day, ttft=75 + day % 2 / 5)
    night(tmp_path, 9, **change)
    found = compare([tmp_path])
    assert marks(found) == mark
    assert bool(found["regressions"]) == ("regression" in mark.values())


def test_a_change_inside_the_spread_is_not_marked_and_one_bad_night_does_not_hide_the_next(tmp_path):
    for day, ttft in enumerate((60, 90, 75, 70, 85, 66, 80, 71), 1):
        night(tmp_path, day, ttft=ttft)
    night(tmp_path, 20, ttft=92)
    assert marks(compare([tmp_path])) == {}
    values = [75, 76, 74, 75, 200, 75, 76, 74, 75, 100]
    assert judge_row("TTFT, ms", values, 0.1)["mark"] == "regression"


@pytest.mark.parametrize("before", [3, 4, 5, 6, 8, 10, 16, 40])
def test_quiet_nights_of_fifty_noisy_figures_are_seldom_marked_and_a_doubled_one_is_in_time(before):
    noise = random.Random(before)
    for said, share in ((1.0, 0.006), (2.0, None)):
        rows = [[noise.gauss(75, 6) for _ in range(before)] + [noise.gauss(75, 6) * said] for _ in range(4000)]
        marked = sum(bool(judge_row("TTFT, ms", row, 0.1)["mark"]) for row in rows) / len(rows)
        assert marked < share if share else marked > (0.95 if before >= 6 else 0.1), marked


def test_with_two_nights_before_nothing_is_marked(tmp_path):
    for day, ttft in enumerate((75, 75, 200), 1):
        night(tmp_path, day, ttft=ttft)
    assert marks(compare([tmp_path])) == {}


def test_a_failed_chapter_is_a_regression(tmp_path):
    night(tmp_path, 1)
    night(tmp_path, 2, status="failed")
    assert compare([tmp_path])["regressions"] == ["05_x failed"]


def test_figures_that_are_no_longer_measured_are_told(tmp_path):
    night(tmp_path, 1)
    night(tmp_path, 2, chapters=[])
    assert compare([tmp_path])["notes"] == [
        "night-02: 3 figures of the run before are missing: 05_x, s; 05_x: KV cache, GiB; 05_x: TTFT, ms ..."
    ]


def test_other_parts_are_told_before_any_figure(tmp_path):
    for day in range(1, 6):
        night(tmp_path, day)
    parts = {
        "model": {"name": "m", "revision": "2" * 40, "shards_sha256": {"model.safetensors": "b" * 64}},
        "lock_sha256": "c" * 64,
    }
    night(tmp_path, 9, ttft=100.0, **parts)
    found = compare([tmp_path])
    assert [c.split(":")[0] for c in found["changed"]] == ["model revision", "model shards_sha256", "lock_sha256"]
    page = write_nights(tmp_path, found).read_text()
    assert page.index("What it is made of has changed") < page.index("Regressions") < page.index("<svg")


def test_nights_on_another_machine_are_named_and_left_out(tmp_path):
    night(tmp_path, 1, device="RTX 4090")
    night(tmp_path, 2)
    found = compare([tmp_path])
    assert len(found["nights"]) == 1
    assert found["notes"] == ["night-01: not compared (device RTX 4090 instead of NVIDIA H200)"]


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "run.json is damaged"),
        ('{"chapters": [', "run.json is damaged"),
        ('{"name": "left-pad", "version": "1.0"}', "of something else"),
        ("[1, 2]", "run.json is damaged"),
        (None, "run.json is missing"),
    ],
)
def test_what_is_no_run_is_said_and_the_rest_is_reported(tmp_path, content, words):
    good, bad = night(tmp_path, 2), tmp_path / "bad"
    bad.mkdir()
    if content is not None:
        (bad / "run.json").write_text(content)
    found = compare([bad, good])
    assert len(found["nights"]) == 1 and words in found["notes"][0]
    with pytest.raises(BadInput, match="no run to report"):
        compare([bad])


def test_a_killed_run_is_read_from_what_its_chapters_wrote(tmp_path):
    folder = night(tmp_path, 1)
    (folder / "run.json").unlink()
    record = {"chapter": "03_serve", "engine": "gpu", "device": "NVIDIA H200", "weights": "real", "date": "2026-11-01T02:00:00+00:00",
              "seconds": 9, "measured": {"server ready after": {"value": 90, "unit": "s"}}}  # fmt: skip
    (folder / "03_serve.json").write_text(json.dumps(record))
    found = read_night(folder)
    assert found.figures == {"03_serve, s": 9, "03_serve: server ready after, s": 90}
    assert "the 1 chapters that wrote their own JSON" in found.notes[0]


def test_an_older_format_and_odd_values_are_read_as_far_as_they_go(tmp_path):
    odd = [
        None,
        {"name": 7},
        {"name": "06_y", "measured": {"a": 3, "b": {"value": float("nan"), "unit": "s"}, "c": {"value": True}}},
    ]
    folder = night(tmp_path, 1, format=1, date="yesterday", server=None, model="m", chapters=odd)
    found = read_night(folder)
    assert found.figures == {} and len(found.notes) == 4
    assert compare([folder])["regressions"] == []


def test_the_page_escapes_and_the_command_answers_by_its_exit_code(tmp_path, monkeypatch, capsys):
    for day in range(1, 6):
        night(tmp_path / "runs", day, device="<script>alert(1)</script>")
    words = ["qrecipe", "report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    for more, code in (([], 0), (["--bound", "-1"], 2)):
        monkeypatch.setattr("sys.argv", words + more)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
    night(tmp_path / "runs", 9, ttft=150.0, device="<script>alert(1)</script>")
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and "regression: 05_x: TTFT, ms: 150 against 75" in capsys.readouterr().out
    assert "<script" not in (tmp_path / "out/nights.html").read_text()
    assert json.loads((tmp_path / "out/nights.json").read_text())["regressions"]


def test_a_run_without_a_model_is_no_change_and_a_file_is_no_run_folder(tmp_path):
    night(tmp_path, 1, model={"name": "m", "revision": "1" * 40, "shards_sha256": {"a": "2" * 64}})
    night(tmp_path, 2, model={})
    assert compare([tmp_path])["changed"] == []
    assert "a file, and the folder of a run is expected" in read_night(tmp_path / "night-01/run.json")
    assert "there is no such folder" in read_night(tmp_path / "none")


def test_no_file_however_hostile_costs_the_report_of_the_others(tmp_path):
    """Nested too deep, a device, a pipe, a date out of all calendars or ahead of today, a loop, a folder named twice."""
    good = night(tmp_path, 2)
    for name, text in (("deep", "[" * 100_000), ("early", '{"chapters": [], "date": "0001-01-01T00:00:00+14:00"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    for name in ("zero", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "zero/run.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe/run.json")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "again").symlink_to(good)
    ahead = night(tmp_path, 3, date="9999-12-31T23:59:59+00:00")
    found = compare([tmp_path, good, tmp_path / "loop"])
    assert sorted(n["name"] for n in found["nights"]) == ["night-02", "night-03"]
    assert "its date is in the future" in "".join(read_night(ahead).notes)
    for name in ("deep", "zero", "pipe", "loop", "early"):
        assert any(name in note for note in found["notes"]), name


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path, monkeypatch):
    good, closed = night(tmp_path, 2), night(tmp_path, 1)
    looked = nights.read_night

    def closed_to_us(folder):
        if folder == closed:
            raise PermissionError(13, "Permission denied")
        return looked(folder)

    monkeypatch.setattr(nights, "read_night", closed_to_us)
    found = compare([good, closed])
    assert len(found["nights"]) == 1 and found["notes"] == [f"{closed}: cannot be read (Permission denied); left out"]


def test_a_name_that_a_file_has_chosen_reaches_no_terminal(tmp_path, monkeypatch, capsys):
    night(tmp_path, 1, format="\x1b]0;x\x07\n::error::x")
    monkeypatch.setattr("sys.argv", ["qrecipe", "report", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert "::error::" in said and not any(line.startswith("::") for line in said.splitlines()) and "\x1b" not in said
