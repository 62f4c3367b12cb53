"""How the book reads: every chapter's opening and end, the half hour of the core path, glossary, landing page, spelling, links.

`python tests/test_reading.py` writes notebooks/glossary.md and notebooks/index.md anew from the list and the chapters.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = {p.stem: nbformat.read(p, 4).cells for p in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
CORE = [name for name in CHAPTERS if name[:2] <= "06"]
WORDS_A_MINUTE = 238  # silent reading of English non-fiction, mean of 190 studies
PAGES = ("index.md", "glossary.md")


def prose(cells) -> str:
    """What one reads: markdown without tables, the exercises (one works at those) and sections that are called optional."""
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown" and not c.id.startswith("ex-"))
    sections = re.split(r"(?m)^(?=## )", text)
    kept = "".join(part for part in sections if not re.match(r"## .*\(optional\)", part))
    return re.sub(r"(?m)^(\|.*| {4}.*)$", "", kept)


def minutes(name: str) -> float:
    return len(re.findall(r"[\w'’.-]*\w", prose(CHAPTERS[name]))) / WORDS_A_MINUTE


def opening(name: str) -> dict[str, str]:
    """title, mark, aim, needs, have: the parts of a chapter's first cell."""
    pattern = r"# \d+ · (?P<title>.+)\n\n\*(?P<mark>.+)\*\n\n\*\*Aim\.\*\* (?P<aim>.+)\n\n\*\*Needs\.\*\* (?P<needs>.+)\n\n\*\*At the end\*\* (?P<have>.+)"
    flat = re.sub(r"(?<!\n)\n(?!\n)", " ", CHAPTERS[name][0].source)
    found = re.fullmatch(pattern, flat)
    assert found, f"{name} does not open as the others do:\n{flat}"
    return found.groupdict()


def glossary() -> str:
    terms = tomllib.loads((ROOT / "qrecipe/data/glossary.toml").read_text())
    lines = ["# Glossary", "", "| term | means | chapter |", "|---|---|---|"]
    names = {int(name[:2]): name for name in CHAPTERS}
    for term in sorted(terms, key=str.lower):
        chapter, says = terms[term]
        lines.append(f"| **{term}** | {says} | [{chapter}]({names[chapter]}.ipynb) |")
    return "\n".join(lines) + "\n"


def index() -> str:
    rows = []
    for name in CHAPTERS:
        o = opening(name)
        rows.append(f"| [{int(name[:2])} · {o['title']}]({name}.ipynb) | {o['mark']} | {o['aim'].replace('|', ' ')} |")
    return (ROOT / "tests/data/landing.md").read_text().replace("CHAPTERS", "\n".join(rows))


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_opens_and_ends_as_the_others_do(name):
    number = int(name[:2])
    mark = opening(name)["mark"]
    assert mark.startswith(f"Core path, {number} of 6" if name in CORE else "Optional"), mark
    told = int(re.search(r"reading (\d+) min", mark)[1])
    assert abs(told - minutes(name)) <= 1, (told, minutes(name))
    assert re.search(r"running (about )?\d+ (s|min).* \(.*20\d\d-\d\d-\d\d\)", mark), mark
    last = [c for c in CHAPTERS[name] if c.cell_type == "markdown"][-1]
    assert last.source.startswith("## What you know now\n")
    assert re.search(r'next_step=(\(\s*)?f?"', CHAPTERS[name][-1].source)


def test_the_core_path_reads_in_half_an_hour():
    assert sum(minutes(name) for name in CORE) <= 30, {name: round(minutes(name), 1) for name in CORE}


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_those_of_the_list_and_the_chapters(name):
    made = {"index.md": index, "glossary.md": glossary}[name]()
    assert (ROOT / "notebooks" / name).read_text() == made, "python tests/test_reading.py writes it anew"


def test_a_term_of_the_glossary_stands_in_its_chapter():
    for term, (chapter, _) in tomllib.loads((ROOT / "qrecipe/data/glossary.toml").read_text()).items():
        for word in re.split(r", (?=\w)|\s\(", term.removesuffix(")")):
            seek = re.compile(rf"\b{re.escape(word)}".replace(r"\ ", "[ -]"), re.I)
            uses = [
                int(name[:2]) for name, cells in CHAPTERS.items() if seek.search("\n".join(c.source for c in cells))
            ]
            assert chapter in uses, f"{word!r} is not in chapter {chapter}, but in {uses}"


@pytest.mark.parametrize("name", [*CHAPTERS, *PAGES, "README.md"])
def test_links_lead_somewhere_and_commands_are_one_line(name):
    path = ROOT / name if name == "README.md" else ROOT / "notebooks" / name
    text = prose(CHAPTERS[name]) if name in CHAPTERS else path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert target.startswith("https://") or (path.parent / target.split("#")[0]).exists(), target
    for line in re.findall(
        r"(?m)^ {4}(\S.*)$", "\n".join(c.source for c in CHAPTERS.get(name, []) if c.cell_type == "markdown")
    ):
        assert not line.startswith(("$ ", "% ")) and not line.endswith("\\"), line


def test_the_words_are_spelt_right(tmp_path):
    pytest.importorskip("codespell_lib", reason="codespell is not installed: make setup")
    for name, cells in CHAPTERS.items():
        (tmp_path / f"{name}.md").write_text("\n\n".join(c.source for c in cells))
    shown = [
        ROOT / "README.md",
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "qrecipe").rglob("*.py"),
        *(ROOT / "qrecipe/data").glob("*.toml"),
    ]
    words = [
        sys.executable,
        "-m",
        "codespell_lib",
        "--ignore-words-list",
        "vailable",
        str(tmp_path),
        *map(str, shown),
    ]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


if __name__ == "__main__":
    for page, made in {"index.md": index(), "glossary.md": glossary()}.items():
        (ROOT / "notebooks" / page).write_text(made)
    print({name: round(minutes(name), 1) for name in CHAPTERS})
