"""One page for one run: `index.html` holds the verdicts, what was measured, what it ran on, and every executed chapter.

It needs no network, and its policy (CSP) lets it run no script, whatever a log or a model has put into it.
"""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat

from .paths import write_whole

LONGEST = 50_000  # characters of one output that the page shows; the executed notebook holds all
CSS = """
:root{color-scheme:light}*{box-sizing:border-box}body{font:16px/1.55 system-ui,sans-serif;color:#1a1a1a;background:#fff;margin:0 auto;max-width:62rem;padding:1rem}
h1{font-size:1.6rem;margin:.6rem 0}h2{font-size:1.25rem;margin:1.4rem 0 .4rem}table{border-collapse:collapse;margin:.6rem 0;font-size:.92rem;display:block;max-width:100%;overflow-x:auto}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:break-word}th{border-bottom:2px solid #888}
.wide{overflow-x:auto}.passed{color:#00674a;font-weight:600}.failed{color:#a3261b;font-weight:600}.skipped{color:#6b5900;font-weight:600}
pre{background:#f5f5f5;padding:.5rem .7rem;overflow-x:auto;font-size:.85rem;line-height:1.4;margin:.4rem 0;white-space:pre-wrap;overflow-wrap:anywhere}
section.chapter{border-top:3px solid #0072b2;margin-top:2.4rem;padding-top:.4rem}img,svg{max-width:100%;height:auto}
div.input_prompt,div.output_prompt,div.prompt,.jp-InputPrompt,.jp-OutputPrompt,a.anchor-link{display:none}.jp-Cell{margin:.5rem 0}.jp-OutputArea-output pre{background:#fff;border-left:3px solid #56b4e9}
.nights td,.nights th{white-space:nowrap;text-align:right}.nights td:first-child,.nights th:first-child{text-align:left;white-space:normal;min-width:15rem}.nights svg{max-width:none}
nav{display:flex;flex-wrap:wrap}nav a{margin-right:1rem;white-space:nowrap}
"""


def page(title: str, body: str) -> str:
    """A whole HTML page without scripts."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{CSS}</style></head><body>{body}</body></html>\n"
    )


def write_report(folder: Path, run: dict) -> Path:
    """Write `index.html` into the run folder and return its path. Everything from logs and models is escaped."""
    bodies = {c["name"]: chapter_html(folder / f"{c['name']}.ipynb") for c in run["chapters"]}
    names = [html.escape(name) for name, body in bodies.items() if body]
    parts = [f"<style>{_code_css()}</style>", _head(run), _verdicts(run), _failures(run), _measured(run), _ran_on(run)]
    parts.append("<nav>" + "".join(f'<a href="#{n}">{n}</a>' for n in names) + "</nav>")
    parts += [f'<section class="chapter" id="{html.escape(n)}">{body}</section>' for n, body in bodies.items() if body]
    write_whole(folder / "index.html", page(f"qrecipe run {run['date']}", "".join(parts)))
    return folder / "index.html"


def write_junit(folder: Path, run: dict) -> Path:
    """Write `junit.xml`, one test case a chapter, for a CI that reads that; returns its path."""
    chapters = run["chapters"]
    count = {word: str(sum(c["status"] == word for c in chapters)) for word in ("failed", "skipped")}
    suite = ElementTree.Element(
        "testsuite", name="qrecipe", tests=str(len(chapters)), failures=count["failed"], skipped=count["skipped"], errors="0",
        time=str(run["seconds"]), timestamp=run["date"][:19],
    )  # fmt: skip
    for c in chapters:
        case = ElementTree.SubElement(suite, "testcase", classname="qrecipe", name=c["name"], time=str(c["seconds"]))
        if c["status"] != "passed":
            word = "failure" if c["status"] == "failed" else "skipped"
            part = ElementTree.SubElement(case, word, message=_xml(c["reason"]))
            part.text = (
                _xml(
                    "\n".join(
                        filter(None, [f"cell {c['cell']}: {c['line']}", c.get("mend", ""), c.get("log_tail", "")])
                    )
                )
                if word == "failure"
                else ""
            )
    file = folder / "junit.xml"
    write_whole(
        file, '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"
    )
    return file


def write_summary(folder: Path, run: dict) -> Path:
    """Write `summary.md`: verdicts and failures as Markdown, ready for a job summary or an issue; returns its path."""
    word = "passed" if run["passed"] else "FAILED"
    lines = [
        f"## qrecipe run {word}: {run['device']}, {run['date'][:16]}",
        "",
        "| chapter | verdict | seconds |",
        "|---|---|---|",
    ]
    lines += [f"| {c['name']} | {c['status']} | {c['seconds']:.0f} |" for c in run["chapters"]]
    for c in (c for c in run["chapters"] if c["status"] == "failed"):
        lines += ["", f"### {c['name']}, cell {c['cell'] or '?'}", *_fenced(f"{c['line']}\n{c['reason']}")]
        lines += _fenced(c["mend"]) if c.get("mend") else []
        lines += ["The server log ended so:", *_fenced(c["log_tail"])] if c.get("log_tail") else []
    versions = ", ".join(f"{k} {v}" for k, v in run["versions"].items())
    lines += [
        "",
        f"{versions}; lock {run['lock']} {run.get('lock_sha256') or 'departed from'}; model {run['model'].get('name', '-')} {run['model'].get('revision', '')}",
    ]
    write_whole(folder / "summary.md", "\n".join(lines) + "\n")
    return folder / "summary.md"


def _fenced(text: str) -> list[str]:
    """Text that Markdown shows as it is: a fence longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(m) for m in re.findall("`+", text)), default=0))
    return [fence + "text", text.strip(), fence]


def _xml(text: str) -> str:
    """Text without the control characters that XML has no way to write."""
    return "".join(
        ch for ch in text if ch in "\t\n" or (" " <= ch and ch not in "\ufffe\uffff" and not "\ud800" <= ch <= "\udfff")
    )


def chapter_html(notebook: Path) -> str:
    """The body of an executed notebook as HTML, "" when there is none, a sentence when it cannot be read."""
    from nbconvert import HTMLExporter

    if not notebook.is_file():
        return ""
    try:
        nb = nbformat.read(notebook, as_version=4)
        for output in (o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"):
            if (more := len(output.text) - LONGEST) > 0:
                output.text = f"{output.text[:LONGEST]}\n... and {more:,} more characters in {notebook.name}"
        return HTMLExporter(template_name="basic", embed_images=True, exclude_anchor_links=True).from_notebook_node(nb)[
            0
        ]
    except Exception as e:  # a damaged copy must not cost the report of the others
        return f"<p>{html.escape(notebook.name)} could not be shown: {html.escape(type(e).__name__)}</p>"


def _code_css() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default").get_style_defs(".highlight")


def _head(run: dict) -> str:
    word = "passed" if run["passed"] else "failed"
    return f'<h1>qrecipe: the book on {html.escape(run["device"])}</h1><p><span class="{word}">{word}</span> on {html.escape(run["date"])} in {run["seconds"]:.0f} s</p>'


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose cells are escaped, but for those that are pairs (class, text)."""
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{c[0]}">{html.escape(c[1])}</td>'
            if isinstance(c, tuple)
            else f"<td>{html.escape(str(c))}</td>"
            for c in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _verdicts(run: dict) -> str:
    rows = [
        [
            c["name"],
            (c["status"], c["status"]),
            f"{c['seconds']:.0f}",
            f"{c['cell']}: {c['reason']}".strip(": "),
        ]
        for c in run["chapters"]
    ]
    return "<h2>Chapters</h2>" + table(["chapter", "verdict", "seconds", "failing cell and why"], rows)


def _failures(run: dict) -> str:
    """For each failed chapter: its cell, the line, the mend, and what the server's log said last."""
    out = []
    for c in run["chapters"]:
        rows = [("cell", c["cell"]), ("line", c["line"]), ("why", c["reason"]), ("mend", c.get("mend", ""))]
        if c["status"] == "failed":
            out.append(f"<h2>{html.escape(c['name'])} failed</h2>" + table(["", ""], [r for r in rows if r[1]]))
            if c.get("log_tail", ""):
                out.append(f"<p>The server log at that moment ended so:</p><pre>{html.escape(c['log_tail'])}</pre>")
    return "".join(out)


def _measured(run: dict) -> str:
    rows = [
        [c["name"], name, _figure(m["value"]), m["unit"]] for c in run["chapters"] for name, m in c["measured"].items()
    ]
    return "<h2>What was measured</h2>" + table(["chapter", "figure", "value", "unit"], rows) if rows else ""


def _figure(value) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _ran_on(run: dict) -> str:
    server = run["server"]
    rows = [["engine", f"{run['engine']}: {run['reason']}"], ["device", run["device"]], ["date", run["date"]]]
    rows += [[name, version] for name, version in run["versions"].items()]
    away = run["lock_departures"]
    lock = (
        f"NOT this environment: {len(away)} packages differ, as run.json lists them"
        if away
        else f"sha256 {run['lock_sha256']}"
    )
    rows += [[f"lock {run['lock']}", lock], ["note", run["note"]], ["weights", run["weights"]]]
    rows += [[f"model {k}", v] for k, v in run["model"].items()]
    if server["log"]:
        rows += [["server ready after", f"{server['ready_seconds']} s"], ["server log", server["log"]]]
    return "<h2>What it ran on</h2>" + table(["", ""], rows)
