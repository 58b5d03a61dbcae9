"""The live page in a real browser: workers, topology, replay, and a run that grows while it is watched."""

import os
import socket

from browser import CHROMIUM, driven, needs_playwright
from gossamer.report.watch.server import serve
from watch_files import append, event, virtual_rows, worker_rows, write_config

pytestmark = needs_playwright


def wait(page, condition):
    page.wait_for_function(condition, timeout=300_000)


def elastic(folder):
    """Worker 3 dies at 2 s and is back at 4 s; worker 1 is slow."""
    write_config(folder, [2, 2], 100, on_failure="continue")
    event(folder, -1.0, "started", pid=os.getpid(), host=socket.gethostname())
    for rank in range(3):
        waiting = 0.0 if rank == 1 else 0.6
        rows = worker_rows(rank, range(1, 61), peers=[(rank + 1) % 3], waiting=waiting, members=[0, 1, 2, 3])
        for row in rows[20:40]:
            row["workers"][str(rank)]["members"] = [0, 1, 2]
        append(folder, f"metrics-{rank:05d}.jsonl", *rows)
    alive = {"waiting": 0.6, "peers": [0], "members": [0, 1, 2, 3]}
    append(folder, "metrics-00003.jsonl", *worker_rows(3, range(1, 21), **alive))
    event(folder, 2.05, "gone", worker=3, why="killed by SIGKILL")
    append(folder, "metrics-00003.jsonl", *worker_rows(3, range(41, 61), start=4.0, **alive))


def test_a_death_a_slow_worker_and_a_run_that_grows(tmp_path):
    elastic(tmp_path)
    with serve(tmp_path) as server, driven() as page:
        page.goto(server.url)
        wait(page, "frames.length > 20")
        assert "Step 60 of 100" in page.inner_text("#what")
        assert "Worker 1 is slow" in page.inner_text("#alerts")
        assert page.inner_text("#workers tbody tr:nth-child(2) .badge") == "slow"
        events = page.inner_text("#events")
        assert "worker 3 died: killed by SIGKILL" in events
        assert "worker 3 is back" in events
        page.evaluate("go(frames.findIndex((f) => f.time >= 3))")
        assert "Worker 3 died" in page.inner_text("#alerts")
        assert "gone" in page.get_attribute("#dots g:nth-child(4) .ring", "class")
        assert "among the 3 workers that are there" in page.inner_text("#topology-see")
        lit = page.eval_on_selector_all("#round line, #round polygon", "found => found.length")
        assert lit > 0
        page.click("#live")
        append(
            tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(61, 81), start=6.0, peers=[1], members=[0, 1, 2, 3])
        )
        wait(page, "document.getElementById('what').textContent.includes('Step 80 of 100')")


def test_sixty_four_virtual_workers_on_a_phone_in_the_dark(tmp_path):
    write_config(tmp_path, [8] * 8, 40, virtual=True)
    append(tmp_path, "metrics-00000.jsonl", *virtual_rows(64, 40, lambda w: {w ^ 1: 4000, (w + 8) % 64: 400}))
    with serve(tmp_path) as server, driven(390, 844, dark=True) as page:
        page.goto(server.url)
        wait(page, "document.querySelectorAll('#workers tbody tr').length === 64 && frames.length > 5")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("#dots g").count() == 64
        assert page.locator("#distance circle").count() == 4
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, background[4:-1].split(","))) < 120
        assert "of the 1 GB/s of its simulated link" in page.inner_text("#links-see")
        page.click("#workers th:nth-child(8)")  # by loss: the last worker has the largest
        assert page.inner_text("#workers tbody tr:first-child td").startswith("63")
        page.click("#workers tbody tr:first-child")
        assert page.locator("#loss path.chosen").count() == 1


def test_a_finished_run_is_replayed(tmp_path):
    write_config(tmp_path, [1, 1], 20, method="ad-psgd:ring")
    for rank in range(2):
        append(tmp_path, f"metrics-{rank:05d}.jsonl", *worker_rows(rank, range(1, 21), peers=[1 - rank]))
    event(tmp_path, 2.0, "ended")
    with serve(tmp_path) as server, driven() as page:
        page.goto(server.url)
        wait(page, "frames.length > 3")
        assert "finished all 20 steps" in page.inner_text("#status")
        assert page.locator("#round .traffic").count() == 2
        page.click("#play")  # from the end it begins again
        wait(page, "at === frames.length - 1 && document.getElementById('play').textContent === '▶'")
        page.fill("#slider", "0")
        assert float(page.inner_text("#clock").removesuffix(" s")) < 1


def test_the_page_says_that_the_job_has_ended(tmp_path):
    write_config(tmp_path, [1], 20)
    append(tmp_path, "metrics-00000.jsonl", *worker_rows(0, range(1, 6)))
    event(tmp_path, 0.0, "started", pid=os.getpid(), host=socket.gethostname())
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        with serve(tmp_path) as server:
            page.goto(server.url)
            wait(page, "frames.length > 0")
        wait(page, "document.getElementById('status-text').textContent.includes('does not answer')")
        browser.close()
