"""Where student and teacher disagree most, in a real headless browser: listed, explained, jumped to."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agentrl.telemetry.report import write_report
from agentrl.telemetry.trajectories import TrajectoryStore
from agentrl.trajectory import Trajectory, read_trajectories

pytestmark = pytest.mark.browser
Dump = Callable[[str], str]

USE = """<script>
const say = (name, value) => { document.body.dataset[name] = value; };
const text = (selector) => document.querySelector(selector).textContent;
const places = () => [...document.querySelectorAll(".place")];
say("first", places().length);
document.querySelector(".disagreements button.ghost").click();
say("gaps", places().map((place) => place.querySelector(".gap").textContent).join(" "));
places()[0].click();
say("here", [...document.querySelectorAll(".t.here")].map((node) => node.textContent).join(""));
say("mark", text(".place.on mark"));
say("told", text(".place.on small"));
say("tip", [...document.querySelectorAll(".tip dd")].map((node) => node.textContent).join("|"));
say("mode", text(".shading button.on"));
say("minus", document.querySelectorAll(".t.minus").length);
document.querySelector('.shading button[title^="the next"]').click();
say("second", [...document.querySelectorAll(".shading .key")].map((node) => node.textContent).join("|"));
say("on", places().findIndex((place) => place.classList.contains("on")));
document.querySelector('.shading button[title^="the place before"]').click();
document.querySelector('.shading button[title^="the place before"]').click();
say("last", places().findIndex((place) => place.classList.contains("on")));
say("facts", text("#detail dl.facts"));
</script>"""


@pytest.fixture(scope="module")
def taught_run(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """Group 0 is scored by a teacher of the same tokenizer, group 1 by one of another; every text carries markup."""
    shape = fake.Shape(steps=1, groups=3, teachers=("big", "other"), hostile=True)
    made: Path = fake.make_run(tmp_path_factory.mktemp("runs") / "taught", shape)
    return made


def used(run: Path, name: str, dump_dom: Dump) -> dict[str, str]:
    """What the page of a trajectory says once it was used."""
    write_report([run], run / "report.html")
    page = re.sub(r"<meta http-equiv[^>]*>", "", (run / "report.html").read_text(encoding="utf-8"))
    (run / "used.html").write_text(page.replace("</body>", USE + "</body>"), encoding="utf-8")
    dom = dump_dom((run / "used.html").as_uri() + f"#t/0/{name}")
    body = re.search(r"<body([^>]*)>", dom)
    assert body is not None
    assert "<title>owned" not in dom
    return {key: html.unescape(value) for key, value in re.findall(r'data-(\w+)="([^"]*)"', body[1])}


def truth(run: Path, name: str) -> tuple[Trajectory, list[float]]:
    """A trajectory and its gaps (teacher minus student, summed over spans), the largest first."""
    trajectory = next(t for t, _ in read_trajectories((run / "trajectories").iterdir()) if t.trajectory_id == name)
    gaps: list[float] = []
    for segment, scores in zip(trajectory.segments, trajectory.scores, strict=True):
        difference = (scores.logprobs - segment.logprobs)[scores.mask]
        numbers = np.arange(difference.size) if scores.spans is None else scores.spans[scores.mask]
        gaps += [float(difference[numbers == number].sum()) for number in np.unique(numbers)]
    return trajectory, sorted(gaps, key=abs, reverse=True)


@pytest.mark.parametrize(("name", "teacher"), [("s0001-g00-r1", "big"), ("s0001-g01-r1", "other")])
def test_places_are_listed_by_size_and_jumped_to(taught_run: Path, name: str, teacher: str, dump_dom: Dump) -> None:
    said = used(taught_run, name, dump_dom)
    trajectory, gaps = truth(taught_run, name)
    assert len(trajectory.segments) == 2, "K38: places of every segment are among them"
    assert said["first"] == "8"
    shown = [float(text.replace("−", "-")) for text in said["gaps"].split()]
    assert len(shown) == 32
    assert shown == pytest.approx(gaps[:32], abs=0.01)
    assert said["here"] == said["mark"] != ""
    assert said["mode"] == "teacher"
    assert int(said["minus"]) > 50
    assert re.search(r"turn \d, (act|summarise) · student .* %, teacher .* %", said["told"])
    assert f"{gaps[0]:.3f}"[:-1] in said["tip"]
    assert re.search(rf"2 of {len(gaps)}", said["second"])
    assert (said["on"], said["last"]) == ("1", str(len(gaps) - 1))
    assert f"teacher{teacher}" in said["facts"]
    assert ("its first choice" in said["facts"]) == (teacher == "big")
    assert ("teacher prefers" in said["told"]) == (teacher == "big")


SORT = """<script>
const head = [...document.querySelectorAll("th button")].find((button) => button.textContent === "teacher kl");
head.click();
document.body.dataset.top = [...document.querySelectorAll("tbody tr")].map((row) => row.title).slice(0, 3).join(" ");
</script>"""


def test_the_table_sorts_by_distance(taught_run: Path, dump_dom: Dump) -> None:
    write_report([taught_run], taught_run / "report.html")
    page = re.sub(r"<meta http-equiv[^>]*>", "", (taught_run / "report.html").read_text(encoding="utf-8"))
    (taught_run / "sorted.html").write_text(page.replace("</body>", SORT + "</body>"), encoding="utf-8")
    found = re.search(r'data-top="([^"]*)"', dump_dom((taught_run / "sorted.html").as_uri()))
    summaries = [s for s in TrajectoryStore(taught_run).summaries() if s.teacher_kl is not None]
    farthest = sorted(summaries, key=lambda s: -(s.teacher_kl or 0.0))
    assert found is not None
    assert found[1].split() == [s.trajectory_id for s in farthest[:3]]


def test_without_a_teacher_there_is_no_list(tmp_path: Path, fake: ModuleType, dump_dom: Dump) -> None:
    run = fake.make_run(tmp_path / "plain", fake.Shape(steps=1))
    write_report([run], run / "report.html")
    dom = dump_dom((run / "report.html").as_uri() + "#t/0/s0001-g00-r1")
    assert 'class="segment"' in dom
    assert "disagreements" not in dom.split("<body")[1].split('type="application/json"')[0]
    assert 'id="chart-teacher' not in dom
