"""The server of a live page: who may read it, what others see, and the commands that use it."""

import json
import socket
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gossamer.cli import main
from gossamer.errors import InputError
from gossamer.jobs.serving import Serving
from gossamer.report.watch import client
from gossamer.report.watch.client import WatchAddress
from gossamer.report.watch.server import serve
from watch_files import append, event, virtual_rows, worker_rows, write_config


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may stop the server for seconds."""
    monkeypatch.setattr(client, "TIMEOUT", 300.0)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    write_config(folder, [2, 2], 10)
    for rank in range(4):
        append(folder, f"metrics-{rank:05d}.jsonl", *worker_rows(rank, range(1, 11), peers=[rank ^ 1]))
    event(folder, 1.0, "ended")
    return folder


def get(url, **headers):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300).read().decode()


def status(url, **headers):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(url, **headers)
    return error.value.code


def test_the_page_is_complete_and_the_data_is_strict_json(run):
    with serve(run) as server:
        page = get(server.url)
        assert "gossipadam:aer" in page
        assert 'src="http' not in page
        assert "/*STYLE*/" not in page
        assert "/*SCRIPT*/" not in page

        def refuse(text):
            raise AssertionError(text)

        facts = json.loads(get(server.url + "api/run"), parse_constant=refuse)
        frames = json.loads(get(server.url + "api/frames"), parse_constant=refuse)
    assert facts["workers"] == 4
    assert len(facts["scene"]["workers"]) == 4
    assert frames["newest"]["step"] == 10
    assert frames["plans"][""]["period"] == 2


def test_without_a_token_only_this_machine_may_read(run):
    with serve(run) as server:
        assert server.token is None
        assert status(server.url + "api/run", Host="evil.example") == 403
        assert get(server.url + "api/run", Host=f"localhost:{server.port}")
        assert status(server.url + "api/frames?begin=x") == 400
        assert status(server.url + "etc/passwd") == 404


def test_beyond_this_machine_a_token_is_needed(run):
    with serve(run, host="0.0.0.0") as server:
        assert len(server.token) >= 16
        assert server.url == f"http://{socket.gethostname()}:{server.port}/?token={server.token}"
        base = f"http://127.0.0.1:{server.port}/"
        assert status(base) == 403
        assert status(base + "api/run?token=wrong") == 403
        assert get(f"{base}?token={server.token}")
        assert get(base + "api/run", Authorization=f"Bearer {server.token}")
        with pytest.raises(InputError, match="the token is wrong or missing"):
            WatchAddress.parse(f"127.0.0.1:{server.port}", "wrong").facts()
        assert WatchAddress.parse(f"{base}?token={server.token}").facts()["workers"] == 4


def test_a_port_that_is_taken_is_named(run):
    with (
        serve(run) as server,
        pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{server.port}"),
        serve(run, port=server.port),
    ):
        pass


def answering(what):
    """Answer one connection with these bytes; returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(what)
        listener.close()

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(("what", "sentence"), [
    (b"SSH-2.0-OpenSSH_9.2\r\n", "something else than HTTP"),
    (b"", "something else|no Gossamer job"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", "no Gossamer job"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no Gossamer job"),
    (b"HTTP/1.0 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", "no Gossamer job"),
])  # fmt: skip
def test_a_port_that_speaks_something_else(what, sentence, capsys):
    port = answering(what)
    assert main(["watch", f"127.0.0.1:{port}", "--terminal"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert any(part in error for part in sentence.split("|"))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["127.0.0.1:1"], "nobody answers at 127.0.0.1:1"),
    (["host:port"], "neither a folder nor HOST:PORT"),
    (["https://127.0.0.1:5"], "neither a folder nor HOST:PORT"),
    (["nowhere"], "does not exist"),
    (["127.0.0.1:1", "--port", "3"], "leave --host and --port out"),
])  # fmt: skip
def test_bad_input_of_watch_is_one_sentence(arguments, sentence, capsys):
    assert main(["watch", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("at", "expected"), [
    ("0.0.0.0:8474", ("0.0.0.0", 8474)), ("10.0.0.1", ("10.0.0.1", 0)), ("::1", ("::1", 0)), ("[::1]:80", ("::1", 80)),
])  # fmt: skip
def test_where_to_serve(at, expected):
    made = Serving.of(False, at)
    assert made.wanted
    assert (made.host, made.port) == expected


@pytest.mark.parametrize("at", ["", ":80", "here:99999", "here:x"])
def test_bad_places_to_serve(at):
    with pytest.raises(InputError, match="--watch-at"):
        Serving.of(True, at)


def test_the_terminal_view_and_json(run, capsys):
    assert main(["watch", str(run), "--terminal"]) == 0
    text = capsys.readouterr().out
    assert "finished all 10 steps" in text
    assert text.count("done") == 4
    assert "training loss" in text
    assert main(["watch", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["frame"]["step"] == 10
    assert found["status"]["state"] == "ended"


def test_the_terminal_view_of_many_workers_shows_the_unusual_ones(tmp_path, capsys):
    write_config(tmp_path, [8] * 8, 10, virtual=True)
    append(tmp_path, "metrics-00000.jsonl", *virtual_rows(64, 5, lambda w: {w ^ 1: 4}))
    assert main(["watch", str(tmp_path), "--terminal"]) == 0
    assert "more workers" in capsys.readouterr().out


def test_a_job_serves_its_own_page_while_it_trains(tmp_path, capsys, monkeypatch):
    """The page is asked in the middle of the run, by the row of a step."""
    from gossamer.jobs import progress

    seen = []
    show = progress.Display.__call__

    def ask(self, row):
        show(self, row)
        if row["step"] == 3 and "loss" in row:
            url = capsys.readouterr().err.split("watch this run at ")[1].split()[0]
            seen.append(json.loads(get(url + "api/frames")))

    monkeypatch.setattr(progress.Display, "__call__", ask)
    arguments = [
        "train",
        "vision",
        "--virtual",
        "4",
        "--steps",
        "5",
        "--batch",
        "8",
        "--watch",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(arguments) == 0
    assert seen[0]["newest"]["step"] == 3
    assert seen[0]["status"]["state"] == "running"
    assert main(["watch", str(tmp_path / "r"), "--json"]) == 0
    after = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert after["status"]["text"] == "finished all 5 steps"
    assert [e["event"] for e in after["events"]] == ["started", "ended"]


def test_a_stranger_who_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr("gossamer.report.watch.client.TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match="nobody answers"):
        WatchAddress("127.0.0.1", silent.getsockname()[1]).facts()


def test_a_server_of_other_pages_is_told_apart():
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403, "no")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with pytest.raises(InputError, match="no Gossamer job"):
            WatchAddress("127.0.0.1", server.server_address[1]).facts()
    finally:
        server.shutdown()
        server.server_close()
