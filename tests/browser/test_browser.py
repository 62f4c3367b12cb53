"""The book in JupyterLab, driven by Playwright in the system's Chromium: chapters 01 and 04, with QRECIPE_BROWSER=all every one.

The notebooks are copied into a folder with a space in its name, so nothing is written into the sources. Screenshots go to
QRECIPE_SCREENSHOTS when that is set. No request may leave this machine.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest
from conftest import ROOT, free_port
from test_publish import RUN

from qrecipe.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not CHROMIUM:
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)

ALL = os.environ.get("QRECIPE_BROWSER") == "all"
CHAPTERS = [
    p.stem for p in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")) if ALL or p.stem[:2] in ("01", "04")
]
ANSWERS = json.loads((ROOT / "tests/data/answers.json").read_text())
BY_MACHINE = {"ex-3-2", "ex-3-4", "ex-5-4", "ex-7-1", "ex-8-2"}  # the machine's own, or of another server
STARTS = {
    "imports and configuration": "a",
    "reading the weights": "b",
    "compiling and profiling": "c",
    "warming up": "d",
}
LIMIT = 900  # seconds for one Run All (a server's start among them)
STATE = """() => {
    const panel = window.jupyterapp.shell.currentWidget
    if (!panel?.content?.widgets) return []
    return panel.content.widgets.filter(c => c.model.type === 'code').map(c => ({
        id: c.model.id, count: c.model.executionCount, busy: c.model.executionState === 'running' || c.prompt === '*',
        outputs: c.model.outputs.toJSON()}))
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab over a copy of the book: its address with the token. The book's server, if one was started, is stopped."""
    folder, port, book_port = tmp_path_factory.mktemp("a book"), free_port(), free_port()
    (folder / "notebooks").mkdir()
    for p in (ROOT / "notebooks").glob("[!.]*.*"):
        text = re.sub(r"port = 8000( *)", rf"port = {book_port}\1", p.read_text())
        if p.stem.startswith("04"):  # in `make test` without a server
            text = text if ALL else text.replace('log = \\"\\" ', 'log = \\"recorded\\" ')
        (folder / "notebooks" / p.name).write_text(text)
    shutil.copy(ROOT / "pyproject.toml", folder)
    settings = folder / "settings/@jupyterlab"
    for name, value in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        (settings / name).parent.mkdir(parents=True, exist_ok=True)
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(value))
    env = os.environ | {
        "QRECIPE_STATE": str(folder / ".qrecipe"), "QRECIPE_RUNS": str(folder / "runs"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }  # fmt: skip
    words = ["jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", f"--ServerApp.root_dir={folder}"]
    words += [f"--port={port}", "--IdentityProvider.token=t", "--ServerApp.port_retries=0"]
    with open(folder / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *words], env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                assert httpx.get(f"{base}/api?token=t", timeout=5).status_code == 200
                break
            except httpx.TransportError:
                assert server.poll() is None and time.monotonic() < deadline, (folder / "lab.log").read_text()[-2000:]
                time.sleep(0.5)
        yield base
    finally:
        subprocess.run(
            [sys.executable, "-m", "qrecipe.cli", "stop", "--port", str(book_port)],
            env=env,
            cwd=folder,
            capture_output=True,
        )
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as p:
        quiet = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
        ]
        browser = p.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page on which every request to another machine is stopped, and fails the test."""
    page = chromium.new_page(viewport={"width": 1280, "height": 1000})
    gone = []

    def look(route):
        if re.match(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|data:|blob:|file:", route.request.url):
            return route.continue_()
        gone.append(route.request.url)
        route.abort()

    page.route("**/*", look)
    yield page
    page.close()
    assert gone == []


def shoot(page, name):
    """The whole notebook on one picture, or on as many as it takes."""
    if folder := os.environ.get("QRECIPE_SCREENSHOTS"):
        wide = page.viewport_size["width"]
        os.makedirs(folder, exist_ok=True)
        inner = page.evaluate(
            """() => { const outer = document.querySelector('.jp-WindowedPanel-outer')
            if (outer) outer.scrollTop = 0
            return Math.max(1400, outer ? outer.scrollHeight : document.body.scrollHeight) }"""
        )
        page.set_viewport_size({"width": wide, "height": min(16000, inner + 140)})
        for part in range(1 + inner // 15900):  # more than one picture can hold
            page.evaluate("top => document.querySelector('.jp-WindowedPanel-outer')?.scrollTo(0, top)", 15800 * part)
            page.wait_for_timeout(1500)
            page.screenshot(path=f"{folder}/{name}{f'-{part + 1}' if part else ''}.png")
        page.set_viewport_size({"width": wide, "height": 1000})


def open_chapter(page, lab, name):
    page.goto(f"{lab}/lab/tree/notebooks/{name}.ipynb?token=t&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=180_000)
    page.wait_for_function(
        "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=180_000
    )


def run_all(page):
    """Run All by the menu; wait until every cell has run. Returns the cells by id."""
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
    return wait(page, lambda cells: all(c["count"] for c in cells.values()))


def wait(page, good, seconds=LIMIT):
    """Until the cells are good; a kernel that does nothing for 90 s has stopped without an error (a magic's usage)."""
    quiet = began = time.monotonic()
    while time.monotonic() < min(began + seconds, quiet + 90):
        cells = {c["id"]: c for c in page.evaluate(STATE)}
        broken = {i: o for i, c in cells.items() for o in c["outputs"] if o["output_type"] == "error"}
        assert not broken, broken
        if cells and good(cells):
            return cells
        if any(c["busy"] for c in cells.values()):
            quiet = time.monotonic()
        page.wait_for_timeout(300)
    ran = [c for c in cells.values() if c["count"]]
    raise AssertionError(
        [i for i, c in cells.items() if not c["count"]], ran and text_of(max(ran, key=lambda c: c["count"]))
    )


def text_of(cell):
    return "".join(
        "".join(o.get("text", [])) + "".join(o.get("data", {}).get("text/plain", [])) for o in cell["outputs"]
    )


def run_cell(page, cell, answer=None):
    """Run one cell and return its text. `answer` goes into the first line that assigns one, as a reader does it."""
    before = page.evaluate(STATE)
    place = page.evaluate(
        "id => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(c => c.model.id === id)", cell
    )
    lines = page.locator(".jp-Notebook .jp-Cell").nth(place).locator(".cm-content .cm-line")
    (lines.first if answer is None else lines.filter(has_text=re.compile("^my_answer = ")).first).click()
    if answer is not None:
        page.keyboard.press("Home")
        page.keyboard.press("Shift+End")
        page.keyboard.insert_text(f"my_answer = {answer!r}")
    count = next(c["count"] for c in before if c["id"] == cell)
    page.keyboard.press("Control+Enter")
    cells = wait(page, lambda cells: cells[cell]["count"] not in (None, count) and not cells[cell]["busy"], 60)
    return text_of(cells[cell])


def worked_out(cells):
    """Exercises whose answer is this machine's own, from what the chapter printed: cell -> wrong, what is said of it, right."""

    def read(cell, pattern):
        return re.search(pattern, text_of(cells[cell])).groups() if cell in cells else None

    found = {}
    if told := read("stages", r"of the start of this server: ([\w ]+)"):
        right = STARTS[told[0].strip()]
        found["ex-3-2"] = "d" if right != "d" else "a", " s here", right
    if told := read("ex-5-4", r"E2E ([\d.]+) ms, TTFT ([\d.]+) ms, (\d+) tokens"):
        after, tokens = float(told[0]) - float(told[1]), int(told[2])
        found["ex-5-4"] = f"{after / tokens} ms", "n − 1 gaps", f"{after / (tokens - 1)} ms"
    if told := read("batch-table", r"the batch is ([\d.]+) times"):
        found["ex-7-1"] = f"{3 * float(told[0])} times", "as large", f"{told[0]} times"
    if told := read("ex-8-2", r"([\d.]+) requests/s, mean E2E (\d+) ms"):
        inside = float(told[0]) * float(told[1]) / 1000
        found["ex-8-2"] = f"{1000 * inside} requests", "a thousandth", f"{inside} requests"
    return found


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_in_the_browser(name, lab, page):
    open_chapter(page, lab, name)
    cells = run_all(page)
    assert f"qrecipe: {name} complete" in text_of(cells["finish"])
    pictures = page.locator(".jp-OutputArea img")
    assert all(pictures.nth(i).get_attribute("alt") for i in range(pictures.count()))
    exercises = [i for i in cells if re.fullmatch(r"ex-\d-\d", i)]
    for cell in exercises:
        assert "not answered yet" in text_of(cells[cell]) or "cannot be checked" in text_of(cells[cell])
    if name.startswith("01"):
        budget_redraws(page)
    first = next(i for i in exercises if i not in BY_MACHINE)
    known = ANSWERS[first.removeprefix("ex-").replace("-", ".")]
    answers = {first: (*known["wrong"][0], known["right"][0])} | worked_out(cells)
    for cell, (mistake, named, right) in answers.items():
        told = run_cell(page, cell, mistake)
        assert "not yet" in told and named in told, (cell, told)
        assert "right" in run_cell(page, cell, right), cell
    assert run_cell(page, "finish").count("✓ right, 2 tries") == len(answers)
    for theme, picture in (("Dark", f"{name}-dark"), ("Light", name)):
        if os.environ.get("QRECIPE_SCREENSHOTS"):
            page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})")
            page.wait_for_timeout(2500)
            shoot(page, picture)


def test_the_book_s_own_page_opens_rendered_and_leads_to_a_chapter(lab, page):
    page.goto(f"{lab}/lab/tree/notebooks/index.md?token=t&reset")
    page.wait_for_selector(".jp-MarkdownViewer h1", timeout=180_000)
    shoot(page, "index")
    page.click(".jp-MarkdownViewer a:has-text('Glossary'), .jp-MarkdownViewer a:has-text('glossary')")
    page.wait_for_selector(".jp-MarkdownViewer h1:has-text('Glossary')", timeout=30_000)
    shoot(page, "glossary")
    page.goto(f"{lab}/lab/tree/notebooks/index.md?token=t&reset")
    page.click(".jp-MarkdownViewer a:has-text('1 · Size the GPU')", timeout=180_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell h1:has-text('Size the GPU')", timeout=60_000)


@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_fits_narrow_and_wide(width, page, tmp_path):
    names = ["01_size_gpu", "04_read_memory_profile"]
    for name in names:
        shutil.copy(ROOT / f"tests/golden/{name}.ipynb", tmp_path)
    run = RUN | {"chapters": [RUN["chapters"][0] | {"name": name} for name in names]}
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(write_report(tmp_path, run).as_uri())
    assert page.locator("section.chapter").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shoot(page, f"report-{width}")


def budget_redraws(page):
    """The menu and the slider of chapter 1 move the drawing."""
    picture = page.locator(".jupyter-widgets svg[role=img]").first
    picture.scroll_into_view_if_needed()
    seen = [picture.get_attribute("aria-label")]
    page.locator(".jupyter-widgets select").first.select_option("T4")
    for key in ("ArrowRight", "ArrowLeft"):
        page.wait_for_function(
            "old => document.querySelector('.jupyter-widgets svg[role=img]').ariaLabel !== old",
            arg=seen[-1],
            timeout=5000,
        )
        seen.append(picture.get_attribute("aria-label"))
        page.locator(".jupyter-widgets .noUi-handle").first.press(key)
    assert "T4" in seen[1] and len(set(seen)) == 3


def test_a_kernel_restarted_midway_and_the_chapter_run_again(lab, page):
    name = CHAPTERS[-1] if not ALL else "03_serve"
    open_chapter(page, lab, name)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    wait(page, lambda cells: sum(bool(c["count"]) for c in cells.values()) >= len(cells) // 2)
    page.click(".lm-MenuBar-itemLabel:text-is('Kernel')")
    page.click(".lm-Menu-itemLabel:text-is('Restart Kernel and Run All Cells…')")
    page.click(".jp-Dialog button:has-text('Restart')")
    wait(page, lambda cells: not all(c["count"] for c in cells.values()))  # what the first run left is gone
    cells = wait(page, lambda cells: all(c["count"] for c in cells.values()) and "complete" in text_of(cells["finish"]))
    assert f"qrecipe: {name} complete" in text_of(cells["finish"])
    assert list(cells.values())[0]["count"] == 1  # a fresh kernel counts from one
