"""The teacher's answer key, and a log handed to chapters on somebody else's server."""

import subprocess
import sys

from conftest import ROOT

from qrecipe.exercise import book
from qrecipe.workshop import write_key


def test_the_key_holds_every_exercise_and_only_its_owner_may_read_it(tmp_path):
    file = write_key(tmp_path / "key.md")
    text = file.read_text()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("## ")] == list(book())
    assert text.count("**Solution.**") == len(book())
    assert "4,539,265,536 × 2 bytes / 2**30 = 8.455 GiB" in text
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_students_copy_of_the_book_holds_no_key():
    shown = [p.name for p in (ROOT / "notebooks").iterdir() if "key" in p.name]
    assert shown == []


def test_a_log_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    words = [sys.executable, "-m", "qrecipe.cli", "run", "03", "--log", str(tmp_path / "no.log")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no such file" in done.stderr
