"""The server of live pages: what it answers, what it refuses, and that it lives through what runs do meanwhile."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import STEPS, make_run, metric_rows, training_row, write_lines

from unified_trainer.__main__ import main
from unified_trainer.tools.report.live import LivePages
from unified_trainer.tools.report.metrics_reader import MetricsReader
from unified_trainer.tools.report.run_list import means
from unified_trainer.tools.report.run_watch import RunWatch
from unified_trainer.tools.serve.page_server import Pages
from unified_trainer.tools.serve.web_server import open_port, serving

pytestmark = pytest.mark.slow


class Site:
    """A server of a folder with the runs `one` and `sub/two`, and requests to it."""

    def __init__(self, root: Path, address: str) -> None:
        self.root, self.place = root, address.removeprefix("http://")

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection(self.place, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content.decode(errors="replace")

    def get(self, path: str) -> str:
        answer, text = self.request(path)
        assert answer.status == 200, text
        return text


def served(root: Path) -> Iterator[Site]:
    with open_port("127.0.0.1", 0) as listener, serving(Pages(LivePages(root, 1.0)), listener) as address:
        yield Site(root, address)


@pytest.fixture(scope="module")
def still(tmp_path_factory) -> Iterator[Site]:
    """Runs that do not change."""
    root = tmp_path_factory.mktemp("still") / "runs"
    make_run(root / "one")
    make_run(root / "sub" / "<b>two&", "--hacking-monitor.action", "stop", videos=0)
    (root.parent / "secret.mp4").write_text("secret")
    (root / "one" / "validation" / "step_0" / "out.mp4").symlink_to(root.parent / "secret.mp4")
    yield from served(root)


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    """Runs that the test changes."""
    make_run(tmp_path / "runs" / "one", "--steps", "20", videos=0)
    make_run(tmp_path / "runs" / "other", videos=0)
    yield from served(tmp_path / "runs")


def row_of(site: Site, name: str) -> str:
    (row,) = re.findall(rf"<tr>\s*<td><input[^>]*value=\"{name}\".*?</tr>", site.get("/"), re.S)
    return row


def test_the_list_has_state_step_and_last_values(still):
    row = row_of(still, "one")
    assert '<span class="state finished">' in row and "10 / 10" in row and '<a href="/run?name=one">' in row
    assert [float(value) for value in re.findall(r"<b>(.*?)</b>", row)] == pytest.approx([3, 3, 0.9, 40])
    points = re.findall(r'points="(.*?)"', row)[0].split()
    assert len(points) == STEPS and (points[0], points[-1]) == ("0.0,24.0", "100.0,2.0")


def test_text_of_users_is_text(still):
    page = still.get("/")
    assert "<b>two" not in page and "sub/&lt;b&gt;two&amp;" in page
    assert "<b>two" not in still.get("/run?name=sub%2F%3Cb%3Etwo%26") and "document.title='broken'" not in page


def test_the_page_of_a_run_holds_its_data_and_names_its_videos(still):
    page = still.get("/run?name=one")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert (
        data["runs"] == ["one"]
        and len(data["videos"]) == 4
        and not any(one.startswith("data:") for one in data["videos"])
    )
    file = still.root / "one" / "validation" / "step_0" / "0.mp4"
    answer, _ = still.request(data["videos"][0])
    assert (answer.status, answer.headers["Content-Type"]) == (200, "video/mp4")
    assert int(answer.headers["Content-Length"]) == file.stat().st_size
    for source in re.findall(r'src="(.*?)"', page):
        assert still.request(source)[0].status == 200
    both = still.get("/run?name=one&name=sub%2F%3Cb%3Etwo%26")
    assert 'id="differing"' in both and "hacking_monitor.action" in both


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.mp4",
        "/%2e%2e/secret.mp4",
        "/page/../report.css",
        "/page/report.html",
        "/run?name=..",
        "/run?name=..%2Fruns%2Fone",
        "/run?name=%2Fetc",
        "/video?name=one&step=0&file=..%2f..%2f..%2f..%2fsecret.mp4",
        "/video?name=one&step=0%2F..%2F..%2F..%2F..&file=secret.mp4",
        "/video?name=..&step=0&file=secret.mp4",
        "/video?name=one&step=0&file=out.mp4",
        "/video?name=one&step=0&file=samples.jsonl",
        "/video?name=one&step=0&file=%00.mp4",
        f"/video?name=one&step=0&file={'a' * 5000}.mp4",
        "//secret.mp4",
    ],
)
def test_nothing_outside_is_served(still, path):
    answer, text = still.request(path)
    assert answer.status == 404 and "secret" not in text.replace(path, "")


def test_only_get_and_head_are_answered(still):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        answer, _ = still.request("/", method)
        assert answer.status == 405 and {*answer.headers["Allow"].split(", ")} == {"GET", "HEAD"}
    answer, text = still.request("/run?name=one", "HEAD")
    assert (answer.status, text) == (200, "") and int(answer.headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("[", 400),
        ("", 400),
    ],
)
def test_a_name_that_was_rebound_is_refused(still, host, status):
    answer, text = still.request("/", Host=host)
    assert answer.status == status and ("sub/" in text) == (status == 200)


def test_a_page_that_did_not_change_is_not_sent_again(still):
    for path in ("/", "/run?name=one", "/page/plotly.js"):
        tag = still.request(path)[0].headers["ETag"]
        answer, text = still.request(path, **{"If-None-Match": tag})
        assert (answer.status, text) == (304, "")
    assert "frame-ancestors 'none'" in still.request("/run?name=one")[0].headers["Content-Security-Policy"]


def test_a_run_that_goes_on_has_new_values_and_is_read_from_where_it_grew(site):
    before = site.request("/run?name=one")[0].headers["ETag"]
    assert '<span class="state stopped">' in row_of(site, "one")
    with (site.root / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(training_row(STEPS + 1, reward=7.0)) + '\n{"step": 12, "train/rew')
    answer, page = site.request("/run?name=one")
    assert answer.headers["ETag"] != before and f"step {STEPS + 1} of" in page
    row = row_of(site, "one")
    assert "11 / 20" in row and '<span class="state failed">' in row  # a step after the last checkpoint is lost
    traces = {t["label"]: t for g in json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["groups"]
              for chart in g["charts"] for t in chart["traces"]}  # fmt: skip
    assert traces["reward"]["values"][-1] == 7.0 and traces["reward"]["steps"][-1] == STEPS + 1


def test_a_run_that_breaks_or_goes_is_said_and_the_others_stay(site):
    site.get("/run?name=one")
    (site.root / "one" / "metrics.jsonl").write_text("{\n")
    answer, text = site.request("/run?name=one")
    assert answer.status == 503 and "damaged in line 1" in text and "unreadable" in row_of(site, "one")
    write_lines(site.root / "one" / "metrics.jsonl", metric_rows())
    site.get("/run?name=one")
    (site.root / "one" / "config.yaml").unlink()
    (site.root / "one" / "config.yaml").symlink_to("/etc/passwd")
    answer, text = site.request("/run?name=one")
    assert answer.status == 503 and "leads out of" in text and "root:" not in text
    shutil.rmtree(site.root / "one")
    assert site.request("/run?name=one")[0].status == 404
    assert 'value="one"' not in site.get("/") and 'value="other"' in site.get("/")
    shutil.rmtree(site.root)
    assert "No run is in this folder now" in site.get("/")


def test_pages_are_whole_while_a_run_is_written_and_removed(site):
    """A thread writes a run line by line, half lines too, and removes it, while pages of it are asked for."""
    asked = threading.Semaphore(0)
    lines = [json.dumps(row) + "\n" for row in metric_rows()]

    def write() -> None:
        for _ in range(3):
            folder = make_run(site.root / "new", videos=0, rows=[])
            with (folder / "metrics.jsonl").open("a", buffering=1) as file:
                for line in lines:
                    file.write(line[:20])
                    file.flush()
                    asked.acquire()
                    file.write(line[20:])
            shutil.rmtree(folder)

    writer = threading.Thread(target=write)
    writer.start()
    found = []
    while writer.is_alive():
        found += [site.request("/")[0].status, site.request("/run?name=new")[0].status]
        asked.release()
    writer.join()
    assert set(found[::2]) == {200} and {*found[1::2]} <= {200, 404, 503} and 200 in found[1::2]


def test_metrics_are_read_once(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [training_row(1), training_row(2)])
    reader, parsed = MetricsReader(file), []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    for _ in range(2):
        reader.update()
    assert len(parsed) == 2
    with file.open("a") as opened:
        opened.write(json.dumps(training_row(3)) + "\n" + json.dumps(training_row(4)))
    reader.update()
    assert len(parsed) == 3 and reader.curves()["reward"].steps == (1, 2, 3) and reader.step == 3
    write_lines(file, [training_row(5, reward=0.5), *(training_row(step) for step in range(6, 12))])  # in its place
    reader.update()
    assert reader.curves()["reward"].steps == tuple(range(5, 12)) and reader.curves()["reward"].values[0] == 0.5
    file.unlink()
    reader.update()
    assert reader.curves() == {}


def test_an_unchanged_run_is_not_read_again(tmp_path):
    make_run(tmp_path / "one", videos=0)
    watch = RunWatch(tmp_path)
    (folder,) = watch.runs().values()
    assert watch.record(folder) is watch.record(folder)
    os.utime(folder / "metrics.jsonl", (1, 1))
    assert watch.record(folder).step == STEPS


def test_a_small_curve_has_the_means_of_equal_parts():
    assert means([float(i) for i in range(120)], 60) == [2 * i + 0.5 for i in range(60)]
    assert means([3.0], 60) == [3.0] and means([], 60) == []


def test_what_cannot_be_watched_is_one_line(tmp_path, capsys):
    make_run(tmp_path / "runs" / "one", videos=0)
    (tmp_path / "empty").mkdir()
    with open_port("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["watch", str(tmp_path / "runs"), "--port", port]) == 2
    assert main(["watch", str(tmp_path / "empty")]) == 2 and main(["watch", str(tmp_path / "no")]) == 2
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    assert main(["serve", str(tmp_path / "runs")]) == 2
    lines = capsys.readouterr().err.splitlines()
    words = ("in use", "no run directory below it", "no such folder", "every", "watch")
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))


def test_ctrl_c_ends_the_server_with_0(tmp_path):
    make_run(tmp_path / "one", videos=0)
    words = [sys.executable, "-m", "unified_trainer", "watch", str(tmp_path), "--port", "0"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    said = child.stdout.readline()
    assert re.fullmatch(r"1 run at http://127\.0\.0\.1:\d+, until Ctrl-C\n", said), said
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "stopped\n", "")
