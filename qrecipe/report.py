"""What a run leaves for people and machines, each made from its template in data/pages: `index.html` with the verdicts, what
was measured, what it ran on and every executed chapter; `junit.xml`; `summary.md`.

A page needs no network, and its policy (CSP) lets it run no script, whatever a log or a model has put into it.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from .paths import write_whole
from .show_table import number

LONGEST = 50_000  # characters of one output that the page shows; the executed notebook holds all


def write_page(folder: Path, name: str, **facts: Any) -> Path:
    """Write the page of this template into the folder. In HTML and XML whatever stands in `facts` is escaped."""
    write_whole(folder / name, templates().get_template(name).render(facts))
    return folder / name


def write_report(folder: Path, run: dict, made: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write a run's `index.html` into its folder, its executed chapters in it (`made`: those already in HTML, by name);
    returns the page's path."""
    from pygments.formatters import HtmlFormatter

    names = [c["name"] for c in run["chapters"]]
    chapters = {n: made[n] if n in made else chapter_html(folder / f"{n}.ipynb") for n in names}
    code_css = HtmlFormatter(style="default").get_style_defs(".highlight")
    return write_page(folder, "index.html", run=run, chapters=chapters, code_css=code_css)


@functools.cache
def templates() -> jinja2.Environment:
    """The templates with the filters that they use."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("qrecipe", "data/pages"), autoescape=jinja2.select_autoescape(), trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    found.filters |= {"number": number, "fenced": fenced, "xml": xml_text, "inline": inline}
    return found


def fenced(text: str) -> str:
    """Text that Markdown shows as it is: between fences longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text.strip()}\n{fence}"


def inline(text: Any) -> str:
    """Text in a line of Markdown: whatever could be markup, a mention or an issue's number there is a question mark."""
    return re.sub(r"[^\w .,:;()+/=%-]|(?<!\w)_|_(?!\w)", "?", str(text))


def xml_text(text: str) -> str:
    """Text without the characters that XML has no way to write."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)


def chapter_html(notebook: Path) -> str:
    """The body of an executed notebook as HTML, "" when there is none, a sentence when it cannot be read."""
    import nbformat
    from nbconvert import HTMLExporter

    if not notebook.is_file():
        return ""
    try:
        nb = nbformat.read(notebook, as_version=4)
        for output in (o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"):
            if (more := len(output.text) - LONGEST) > 0:
                output.text = f"{output.text[:LONGEST]}\n... and {more:,} more characters in {notebook.name}"
        exporter = HTMLExporter(template_name="basic", embed_images=True, exclude_anchor_links=True)
        page = exporter.from_notebook_node(nb)[0]
        # links to what lies beside the notebook in the book lead nowhere from here
        return re.sub(r'<a href="[\w.-]+\.(?:md|ipynb)">(.*?)</a>', r"\1", page)
    except Exception as e:  # a damaged copy must not cost the report of the others
        return f"<p>{notebook.stem} could not be shown: {type(e).__name__}</p>"
