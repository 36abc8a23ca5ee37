"""Report and viewer in a real headless browser: the scripts run, draw, and keep hostile text as text."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.telemetry.report import write_report

pytestmark = pytest.mark.browser
Dump = Callable[[str], str]


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    return fake.make_run(tmp_path_factory.mktemp("runs") / "hostile", fake.Shape(steps=4, hostile=True))


@pytest.fixture(scope="module")
def report(hostile_run: Path) -> str:
    out = hostile_run / "report.html"
    write_report([hostile_run], out)
    return out.as_uri()


@pytest.fixture(scope="module")
def viewer(hostile_run: Path) -> Iterator[str]:
    """A viewer in its own process, ended as a user ends it; yields its URL."""
    code = "import sys, pathlib; from agentrl.telemetry.viewer import serve; serve(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(hostile_run)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "the viewer printed no URL within 60 s"
        line = os.read(process.stdout.fileno(), 4096).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        process.stdout.close()


def title(dom: str) -> str:
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert found is not None
    return found[1]


def check_tokens(dom: str) -> None:
    """The token page of a compressed trajectory: two segments, three kinds, shaded, hostile text as text."""
    assert title(dom) != "owned"
    assert dom.count('class="segment"') == 2
    assert "segment 2 of 2" in dom
    for kind in ("span prompt", "span environment", "span agent", "span agent summarise"):
        assert f'class="{kind}"' in dom
    assert len(re.findall(r'class="t[^"]*surprise', dom)) > 50
    assert "\\x1b" in dom
    assert re.search(r'class="t cut"[^>]*>€<', dom)
    assert "decode" in dom
    assert "<img" not in dom.lower().split("<body")[1].split('type="application/json"')[0]
    assert "&lt;img src=x onerror=document.title='owned'&gt;" in dom


def test_report_draws(report: str, dump_dom: Dump) -> None:
    dom = dump_dom(report)
    assert title(dom) == "agentrl · hostile"
    names = set(re.findall(r'class="plot js-plotly-plot" id="chart-(\w+)"', dom))
    assert names >= {"learning", "learning_hours", "concurrency", "throughput", "tokens", "phases", "idle", "kv"}
    assert names >= {"agent_share", "staleness", "fairness", "effective", "ess", "masked"}
    assert len(re.findall(r'<tr class="linked"', dom)) >= 60
    assert "64 trajectories" in dom
    assert "<img" not in dom.split('type="application/json"')[0]


def test_report_shows_a_trajectory(report: str, dump_dom: Dump) -> None:
    dom = dump_dom(report + "#t/0/s0004-g00-r1")
    assert re.search(r'<main class="wrap" id="overview" hidden', dom)
    check_tokens(dom)


EVIL = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
USE = """<script>
const cells = (row) => [...row.cells].map((cell) => cell.textContent);
const rows = () => [...document.querySelectorAll("tbody tr")].map(cells);
const say = (name, value) => { document.body.dataset[name] = value; };
const tokens = [...document.querySelectorAll("th button")].find((b) => b.textContent === "tokens");
tokens.click(); say("most", rows()[0][6]); tokens.click(); say("least", rows()[0][6]);
const [outcome] = document.querySelectorAll("select"), search = document.querySelector(".search");
search.value = "s0003-g02"; search.dispatchEvent(new Event("input")); say("found", rows().length);
search.value = ""; outcome.value = "infrastructure"; outcome.dispatchEvent(new Event("input"));
say("broken", rows().length);
document.querySelector("[data-axis=minutes]").click();
say("axis", document.querySelector("#chart-learning .xtitle").textContent);
document.getElementById("theme").click(); say("theme", document.documentElement.dataset.theme);
</script>"""


def test_an_injected_script_would_not_run(report: str, hostile_run: Path, dump_dom: Dump) -> None:
    """Were the escaping to fail, the page's policy still blocks; without it the same page is owned."""
    page = (hostile_run / "report.html").read_text(encoding="utf-8")
    page = page.replace("<main", EVIL + "<main", 1)
    guarded, open_page = hostile_run / "guarded.html", hostile_run / "open.html"
    guarded.write_text(page, encoding="utf-8")
    open_page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page), encoding="utf-8")
    assert title(dump_dom(guarded.as_uri())) == "agentrl · hostile"
    assert title(dump_dom(open_page.as_uri())) == "owned"


def test_report_sorts_filters_and_switches(report: str, hostile_run: Path, dump_dom: Dump) -> None:
    page = (hostile_run / "report.html").read_text(encoding="utf-8")
    used = hostile_run / "used.html"
    used.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", USE + "</body>"), encoding="utf-8")
    body = re.search(r"<body([^>]*)>", dump_dom(used.as_uri()))
    assert body is not None
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', body[1]))
    assert int(said["most"]) > 700
    assert said | {"most": ""} == {
        "most": "", "least": "0", "found": "4", "broken": "4", "axis": "minutes", "theme": "dark",
    }  # fmt: skip


def test_viewer_index(viewer: str, dump_dom: Dump) -> None:
    dom = dump_dom(viewer)
    assert title(dom) == "hostile · agentrl"
    assert 'href="/trajectory/s0004-g00-r1"' in dom
    assert len(re.findall(r'<tr class="linked"', dom)) == 64


def test_viewer_trajectory(viewer: str, dump_dom: Dump) -> None:
    dom = dump_dom(viewer + "trajectory/s0004-g00-r1")
    check_tokens(dom)
    assert 'href="/trajectory/s0004-g00-r2"' in dom
