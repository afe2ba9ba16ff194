"""The server of the page: who may ask, what is answered, and what a report contains."""

from __future__ import annotations

import contextlib
import errno
import gc
import http.client
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from made_jobs import MIB, Job
from waiting import wait_until

from vram.analysis import Memories, explain, memory_at
from vram.analysis.layout import lay_out
from vram.analysis.moments import peak_event
from vram.analysis.places import redacted
from vram.analysis.timeline import Timeline
from vram.errors import ConfigError, TraceError
from vram.trace import Annotation, Frame, open_trace
from vram.web import assets, connections
from vram.web.files import Recordings
from vram.web.recordings import Recording

if sys.platform != "win32":
    import resource

TRACES = Path(__file__).parents[2] / "traces"
PAGE = (
    b'<html><head><title>vram</title><script type="module" src="./page.js"></script>'
    b'<link rel="stylesheet" href="./page.css"></head><body></body></html>'
)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was built, wherever these tests run."""
    made = {
        "index.html": assets.Asset(PAGE, "text/html"),
        "page.js": assets.Asset(b"draw('</script>')", "text/javascript"),
        "page.css": assets.Asset(b"body{}", "text/css"),
    }
    for module in ("vram.web.assets", "vram.web.server"):
        monkeypatch.setattr(f"{module}.built_page", lambda: made)


def small_job() -> Job:
    job = Job()
    job.mark("step#1")
    one, two = job.alloc(3 * MIB, line=1), job.alloc(5 * MIB, line=2)
    job.free(one, pending=True)
    job.alloc(300, line=3)
    job.complete(one)
    job.mark("step#2")
    job.free(two)
    job.out_of_memory(64 * MIB, device_free=MIB)
    return job


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return small_job().save(tmp_path / "job.pickle")


class Asker:
    """Asks a page, as rudely as a test wants to."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str | None
    ) -> tuple[int, Any]:
        given = {"host": f"127.0.0.1:{self.page.port}", "x_vram_token": self.page.token}
        given = {name: value for name, value in {**given, **headers}.items() if value is not None}
        link = http.client.HTTPConnection("127.0.0.1", self.page.port, timeout=120)
        link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            link.putheader(name.replace("_", "-"), value)
        link.putheader("content-length", str(len(body)))
        link.endheaders(body)
        response = link.getresponse()
        self.headers = dict(response.getheaders())
        content = response.read()
        link.close()
        kind = self.headers.get("content-type", "")
        return response.status, json.loads(content) if kind == "application/json" else content


@pytest.fixture
def asker(job_file: Path, built: None) -> Iterator[Asker]:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from vram.web import Page

    with Page([job_file], live=lambda: {"pid": 7}, interval=0.05) as page:
        yield Asker(page)


# ---- who may ask -------------------------------------------------------------------------------------------


def test_the_page_and_its_parts_are_served_safely(asker: Asker) -> None:
    status, content = asker.ask("/", x_vram_token=None)
    assert (status, content) == (200, PAGE)
    policy = asker.headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "script-src 'self'" in policy
        and "frame-ancestors 'none'" in policy
    )
    assert "http" not in policy and "unsafe" not in policy
    assert asker.headers["x-content-type-options"] == "nosniff"
    assert asker.headers["cache-control"] == "no-store"
    assert asker.ask("/page.js")[0] == 200


@pytest.mark.parametrize("token", [None, "", "wrong", "wrong" * 1000])
@pytest.mark.parametrize(
    "path", ["/api/start", "/api/about?file=0", "/api/live", "/api/sweep/state", "/api/x"]
)
def test_without_the_token_nothing_is_told(asker: Asker, token: str | None, path: str) -> None:
    status, answer = asker.ask(path, x_vram_token=token)
    assert status == 403
    assert "token" in answer["error"]


def test_a_token_that_is_cut_or_padded_is_wrong(asker: Asker) -> None:
    token = asker.page.token
    for wrong in (token[:-1], token + "A", token.swapcase()):
        assert asker.ask("/api/start", x_vram_token=wrong)[0] == 403
    assert len(token) >= 32


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost",
        "evil.example:{port}",
        "127.0.0.1:{port}.evil",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/start"])
def test_another_host_is_refused(asker: Asker, host: str, path: str) -> None:
    status, _ = asker.ask(path, host=host.format(port=asker.page.port))
    assert status in (400, 403)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"]
)
def test_another_origin_is_refused(asker: Asker, origin: str) -> None:
    status, answer = asker.ask("/api/start", origin=origin.format(port=asker.page.port))
    assert (status, "other sites" in answer["error"]) == (403, True)


def test_our_own_origin_may_ask(asker: Asker) -> None:
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{asker.page.port}"
        assert asker.ask("/api/start", host=host, origin=f"http://{host}")[0] == 200


def test_a_page_elsewhere_cannot_embed_or_fetch(asker: Asker) -> None:
    assert asker.ask("/api/start", sec_fetch_site="cross-site")[0] == 403
    assert asker.ask("/", sec_fetch_site="cross-site")[0] == 403
    assert asker.ask("/", sec_fetch_site="none")[0] == 200


def test_the_page_may_be_visited_from_a_link_but_nothing_more(asker: Asker) -> None:
    visit = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert asker.ask("/", **visit)[0] == 200
    assert asker.ask("/page.js", **visit)[0] == 403
    assert asker.ask("/api/start", **visit)[0] == 403
    assert asker.ask("/", **{**visit, "sec_fetch_dest": "iframe"})[0] == 403


def test_the_browser_is_given_the_token_in_a_file_of_the_user(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    asker.page.open_browser()
    (address,) = opened
    assert asker.page.token not in address
    file = Path(url2pathname(urlsplit(address).path))
    assert f"url={asker.page.url}" in file.read_text()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    asker.page.close()
    assert not file.parent.exists()


@pytest.mark.fork
def test_a_forked_child_keeps_neither_the_port_nor_a_connection(asker: Asker) -> None:
    with socket.create_connection(("127.0.0.1", asker.page.port), timeout=30) as link:
        link.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % asker.page.port)
        assert link.recv(1)
        here, there = socket.socketpair()
        with here, there:
            child = os.fork()
            if child == 0:
                there.send(b"forked")  # by now the child has closed what it inherited
                there.recv(1)
                os._exit(0)
            try:
                here.settimeout(60)
                assert here.recv(6) == b"forked"
                asker.page.close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", asker.page.port), timeout=30).close()
                while link.recv(4096):  # ends where the connection does
                    pass
            finally:
                here.send(b"x")
                assert os.waitpid(child, 0)[1] == 0


# ---- connections of anybody --------------------------------------------------------------------------------

IDLE = b""
HALF_A_HEADER = b"GET / HTTP/1.1\r\nx: " + b"x" * 10_000
HALF_AN_UPLOAD = b"POST /api/open HTTP/1.1\r\ncontent-length: 999999999\r\n\r\n" + b"x" * 60_000
BEGINNINGS = (IDLE, HALF_A_HEADER, HALF_AN_UPLOAD)


def connect(page: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", page.port), timeout=120)


def get(page: Any, path: str = "/") -> bytes:
    return b"GET %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n\r\n" % (path.encode(), page.port)


@contextlib.contextmanager
def crowd(page: Any, count: int) -> Iterator[None]:
    """Another process that has made so many connections, none with a complete request, and keeps them."""
    here, there = socket.socketpair()
    with here, there:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                kept = [connect(page) for _ in range(count)]
                for link, beginning in zip(kept, itertools.cycle(BEGINNINGS), strict=False):
                    with contextlib.suppress(OSError):  # it made room for another one
                        link.sendall(beginning)
                there.send(b"x")
                there.recv(1)
                status = 0
            finally:
                os._exit(status)
        there.close()
        try:
            assert here.recv(1) == b"x"
            yield
        finally:
            with contextlib.suppress(OSError):
                here.send(b"x")
            assert os.waitpid(child, 0)[1] == 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.fork
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted as on Linux")
def test_a_crowd_takes_neither_descriptors_nor_memory_of_the_program(
    asker: Asker, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2100:
        pytest.skip("no process here may have 2 000 connections")
    before, most = descriptors(), connections.MOST_CONNECTIONS
    with crowd(asker.page, 2000):
        assert descriptors() <= before + most + 2
        (tmp_path / "own").write_text("the program opens its files")
        assert asker.ask("/")[0] == 200 and asker.ask("/api/start")[0] == 200
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each).__name__ == "H11Protocol"]
        assert 0 < len(kept) <= most + 2  # each has what its connection sent
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.02)


def is_closed(link: socket.socket) -> bool:
    """Wait until the other end closes; what it sent before is read."""
    try:
        while link.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sends", BEGINNINGS, ids=["idle", "header", "upload"])
def test_a_request_that_does_not_become_complete_is_dropped(asker: Asker, sends: bytes) -> None:
    with connect(asker.page) as link:
        link.sendall(sends)
        assert is_closed(link)
    with connect(asker.page) as link:  # also after one that was answered
        link.sendall(get(asker.page) + sends)
        assert is_closed(link)


@pytest.mark.usefixtures("impatient")
def test_who_does_not_read_the_answers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from vram.web import Page

    large = {"index.html": assets.Asset(b" " * (8 << 20), "text/html")}
    monkeypatch.setattr("vram.web.server.built_page", lambda: large)
    with Page([]) as page, connect(page) as link, pytest.raises(ConnectionError):
        while True:
            link.sendall(get(page))


@pytest.mark.fork
@pytest.mark.usefixtures("impatient")
def test_who_has_the_token_is_not_dropped_while_it_is_answered(asker: Asker) -> None:
    headers = f"host: 127.0.0.1:{asker.page.port}\r\nx-vram-token: {asker.page.token}\r\n"
    with connect(asker.page) as link:
        link.sendall(f"GET /api/live HTTP/1.1\r\n{headers}\r\n".encode())
        assert link.recv(1)
        with crowd(asker.page, 200):
            told = b""
            while told.count(b"data: ") < 20:  # one in 0.05 s
                received = link.recv(4096)
                assert received
                told += received


@pytest.mark.fork
def test_without_a_descriptor_the_page_waits_and_says_so_once(
    job_file: Path, built: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vram.web import Page, server

    refusals = iter(range(20))

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            if next(refusals, None) is not None:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.001)
    with monkeypatch.context() as patch:
        patch.setattr(server.socket, "socket", Exhausted)
        page = Page([job_file])
    with page:
        assert Asker(page).ask("/api/start")[0] == 200
    assert next(refusals, None) is None
    assert [each.getMessage() for each in caplog.records] == [
        "the page accepts no connections for 0.001 s, and fewer than 64 from now on: Too many open files"
    ]


def test_an_upload_that_is_aborted_leaves_no_file(asker: Asker) -> None:
    folder = asker.page._folder_of_dropped()
    headers = (
        f"host: 127.0.0.1:{asker.page.port}\r\nx-vram-token: {asker.page.token}\r\ncontent-length: 99999\r\n"
    )
    with connect(asker.page) as link:
        link.sendall(f"POST /api/open HTTP/1.1\r\n{headers}\r\nbegun".encode())
        wait_until(lambda: list(folder.iterdir()) != [])
    wait_until(lambda: list(folder.iterdir()) == [])
    assert asker.ask("/api/start")[0] == 200


# ---- what is served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/server.py",
        "/static/index.html",
        "//etc/passwd",
        "/server.py",
        "/page.js/..",
        "/page.js%00.html",
        "/index.html/../../recordings.py",
        "/~root",
    ],
)
def test_only_the_files_of_the_table_are_served(asker: Asker, path: str) -> None:
    status, content = asker.ask(path)
    assert status == 404
    assert b"root:" not in content and b"import" not in content


@pytest.mark.parametrize("file", ["1", "-1", "../job.pickle", "/etc/passwd", "", "9" * 30, "0x0", "1e3"])
def test_a_recording_is_a_number_of_the_table(asker: Asker, file: str) -> None:
    status, answer = asker.ask(f"/api/about?file={file}")
    assert status == 400
    assert "recording" in answer["error"] or "integer" in answer["error"]


@pytest.mark.parametrize(
    "question",
    [
        "level?file=0&axis=time&low=nan&high=1",
        "level?file=0&axis=time&low=0&high=inf",
        "level?file=0&axis=x&low=0&high=1",
        "level?file=0&axis=time&low=0&high=1&by=colour",
        "moment?file=0&event=99999",
        "moment?file=0&event=-2",
        "moment?file=0&event=-1",
        "moment?file=0&event=1_0",
        "moment?file=0&event=%20%D9%A1",
        "why?file=0&event=-1",
        "holders?file=0&event=-1",
        "holders?file=0&event=0&against=-1",
        "holders?file=0&event=0&against=0&against_file=-1",
        "level?file=0&axis=time&low=0&high=1&columns=many",
        "bands?file=0&low=0&high=1&most=1e3",
        "events?file=0&first=0&count=",
        "nothing?file=0",
        "holders?file=0&event=0&by=weekday",
        "bands?file=0",
        "why?file=0&event=zero",
        "holders?file=0&event=0&against=-9",
    ],
)
def test_questions_without_sense_are_refused_with_a_reason(asker: Asker, question: str) -> None:
    status, answer = asker.ask(f"/api/{question}")
    assert status == 400
    assert len(answer["error"]) > 10


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"file": "0"}', b'{"file": 0, "policies": ["x"]}', b"[" * 100_000]
)
def test_a_sweep_that_is_asked_badly_is_refused(asker: Asker, body: bytes) -> None:
    status, answer = asker.ask("/api/sweep", "POST", body)
    assert (status, "error" in answer) == (400, True)


def test_other_methods_do_nothing(asker: Asker) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert asker.ask("/api/about?file=0", method)[0] == 405


def test_the_address_has_the_token_where_no_server_sees_it(asker: Asker) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{32,}", asker.page.url)
    assert asker.page.token not in repr(asker.page)


def test_a_taken_port_is_said_to_be(asker: Asker, built: None) -> None:
    from vram.web import Page

    with pytest.raises(ConfigError, match="--port 0"):
        Page(port=asker.page.port)


# ---- what is answered --------------------------------------------------------------------------------------


def test_a_recording_is_described(asker: Asker) -> None:
    assert asker.ask("/api/start")[1] == {
        "files": [{"file": 0, "name": "job.pickle", "bytes": asker.page.recordings.names()[0]["bytes"]}],
        "folder": "",
        "live": True,
    }
    about = asker.ask("/api/about?file=0")[1]
    trace = small_job().trace()
    assert about["events"] == trace.events
    assert [step[0] for step in about["steps"]] == [1, 2]
    assert about["failures"][0]["event"] == about["start"] == trace.events - 1
    assert about["peak"] == peak_event(trace)


def test_a_moment_sums_to_what_is_reserved(asker: Asker) -> None:
    trace = small_job().trace()
    for event in range(trace.events):
        moment = asker.ask(f"/api/moment?file=0&event={event}")[1]
        memory = memory_at(trace, event)
        held = sum(piece[2] for segment in moment["segments"] for piece in segment["pieces"])
        assert held == memory.allocated + memory.pending
        assert moment["reserved"] == memory.reserved == sum(each["size"] for each in moment["segments"])
        parts = moment["parts"]
        inner = ("true-demand", "rounding", "pending", "fragmentation", "cached")
        assert sum(parts[name] for name in inner) == memory.reserved


def test_why_is_what_explain_says(asker: Asker) -> None:
    trace = small_job().trace()
    why = asker.ask(f"/api/why?file=0&event={trace.events - 1}")[1]
    assert why["verdict"] == explain(trace).verdict
    peak = asker.ask(f"/api/why?file=0&event={peak_event(trace)}")[1]
    assert peak["text"] == explain(trace, "peak").text


def test_holders_of_two_moments_are_compared(asker: Asker) -> None:
    tree = asker.ask("/api/holders?file=0&event=4&by=stack&against=1")[1]
    assert tree["compared"]
    assert (tree["tree"]["before"], tree["tree"]["bytes"]) == tuple(
        memory_at(small_job().trace(), event).allocated for event in (1, 4)
    )


def test_events_are_listed_with_their_places(asker: Asker) -> None:
    trace = small_job().trace()
    listed = asker.ask("/api/events?file=0&first=1&count=3")[1]["events"]
    assert [each["event"] for each in listed] == [1, 2, 3]
    assert [each["size"] for each in listed] == list(trace.size[1:4])
    assert all(each["label"] for each in listed)
    assert len(asker.ask("/api/events?file=0&first=-5&count=900")[1]["events"]) == trace.events


def test_a_failed_request_has_no_address(asker: Asker) -> None:
    trace = small_job().trace()
    listed = asker.ask("/api/events?file=0&first=0&count=500")[1]["events"]
    failed = [each for each in listed if each["action"] == "oom"]
    assert failed
    for each in failed:
        assert (each["address"], each["device_free"]) == ("", trace.address[each["event"]])
    assert all(each["address"].startswith("0x") for each in listed if each not in failed)


def test_an_index_has_a_line_for_each_recording(asker: Asker) -> None:
    found = asker.ask("/api/summary?file=0")[1]
    about = asker.ask("/api/about?file=0")[1]
    assert found["most"] == about["most"]
    assert found["failed"] == 64 * MIB
    assert found["verdict"] == explain(small_job().trace()).verdict


def test_the_peak_is_the_same_number_everywhere(asker: Asker) -> None:
    about = asker.ask("/api/about?file=0")[1]
    moment = asker.ask(f"/api/moment?file=0&event={about['peak']}")[1]
    why = asker.ask(f"/api/why?file=0&event={about['peak']}")[1]
    assert about["most"]["allocated"] == moment["allocated"] == why["allocated"]


def test_a_plain_peak_has_advice(asker: Asker) -> None:
    about = asker.ask("/api/about?file=0")[1]
    assert asker.ask(f"/api/why?file=0&event={about['peak']}")[1]["remedies"]


def test_reading_is_reported_up_to_the_whole_file(asker: Asker, job_file: Path) -> None:
    before = asker.ask("/api/reading?file=0")[1]
    asker.ask("/api/about?file=0")
    after = asker.ask("/api/reading?file=0")[1]
    assert (before["open"], after["open"]) == (False, True)
    assert after["done"] == after["bytes"] == job_file.stat().st_size


def test_a_dropped_file_is_opened_and_compared(asker: Asker, tmp_path: Path) -> None:
    job = small_job()
    job.alloc(20 * MIB, line=9)
    body = job.save(tmp_path / "other.pickle").read_bytes()
    status, answer = asker.ask("/api/open", "POST", body, x_vram_name="..%2F..%2Fevil%2Fother.pickle")
    assert (status, answer["file"]) == (200, 1)
    assert [each["name"] for each in answer["files"]] == ["job.pickle", "other.pickle"]
    assert asker.ask("/api/about?file=1")[1]["events"] == job.trace().events
    found = asker.ask("/api/difference?file=1&against_file=0&by=line")[1]
    assert found["gap"] == sum(each["gap"] for each in found["groups"]) > 0
    kept = asker.page._dropped
    assert [each.name for each in kept.rglob("*.pickle")] == ["other.pickle"]
    asker.page.close()
    assert not kept.exists()


@pytest.mark.parametrize("headers", [{"x_vram_token": None}, {"origin": "http://evil.example"}])
def test_a_stranger_cannot_drop_a_file(asker: Asker, headers: dict[str, str | None]) -> None:
    assert asker.ask("/api/open", "POST", b"data", **headers)[0] == 403
    assert len(asker.page.recordings) == 1


def test_an_empty_file_is_not_taken(asker: Asker) -> None:
    assert asker.ask("/api/open", "POST", b"", x_vram_name="empty.pickle")[0] == 400
    assert len(asker.page.recordings) == 1


def test_a_sweep_of_a_failed_job_includes_the_failed_request() -> None:
    pytest.importorskip("vram._native")
    from vram.web.sweeps import sweep_answer

    assert sweep_answer(small_job().trace(), ("vram",))["peak_allocated"] >= 64 * MIB


def test_a_sweep_runs_and_tells_how_far_it_is(asker: Asker) -> None:
    pytest.importorskip("vram._native")
    status, started = asker.ask("/api/sweep", "POST", b'{"file": 0, "policies": ["vram", "cuda-async"]}')
    assert status == 200
    status, content = asker.ask(f"/api/sweep/state?sweep={started['sweep']}")
    told = [json.loads(line[6:]) for line in content.decode().split("\n\n") if line]
    assert told[-1]["done"] == told[-1]["count"] == len(told[-1]["answer"]["ranked"])
    assert [each["rank"] for each in told[-1]["answer"]["ranked"]] == list(range(1, told[-1]["count"] + 1))
    assert asker.ask("/api/sweep/state?sweep=other")[0] == 404


def test_a_running_process_is_told_again_and_again(asker: Asker) -> None:
    link = http.client.HTTPConnection("127.0.0.1", asker.page.port, timeout=120)
    link.request("GET", "/api/live", headers={"x-vram-token": asker.page.token})
    response = link.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    for _ in range(3):
        assert json.loads(response.readline()[6:]) == {"status": {"pid": 7}}
        response.readline()
    link.close()


def test_a_process_is_looked_at_once_however_many_watch(job_file: Path, built: None) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from vram.web import Page

    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(1)
        return {"look": len(looks)}

    with Page(live=look, interval=0.2) as page:
        links = []
        for _ in range(3):
            link = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
            link.request("GET", "/api/live", headers={"x-vram-token": page.token})
            links.append((link, link.getresponse()))
        seen = [json.loads(response.readline()[6:])["status"]["look"] for _, response in links]
        assert len(looks) <= max(seen) + 1
        for link, _ in links:
            link.close()


def test_what_a_process_says_last_is_shown(built: None) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from vram.web import Page

    def gone() -> dict[str, Any]:
        raise OSError("the process has ended")

    with Page(live=gone, interval=0.05) as page:
        link = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
        link.request("GET", "/api/live", headers={"x-vram-token": page.token})
        assert json.loads(link.getresponse().readline()[6:]) == {"error": "the process has ended"}
        link.close()


def test_a_folder_is_a_list_of_its_files(tmp_path: Path) -> None:
    for name in ("b.pickle", "a.pickle", ".hidden"):
        small_job().save(tmp_path / name)
    (tmp_path / "inner").mkdir()
    recordings = Recordings([tmp_path])
    assert [each["name"] for each in recordings.names()] == ["a.pickle", "b.pickle"]
    assert json.loads(recordings.answer("about", {"file": "1"}))["events"] == small_job().trace().events
    recordings.close()
    with pytest.raises(TraceError, match="no such file"):
        Recordings([tmp_path / "missing"])


@pytest.mark.parametrize(
    "name", ["gpt2_train", "multistream_prefetch", "oom_gpt2_train_9000", "resnet_multiscale"]
)
def test_recorded_jobs_are_answered(name: str) -> None:
    trace = open_trace(TRACES / f"{name}.pickle.xz", trusted=True)
    recording = Recording(trace)
    about = recording.about()
    assert about["peak"] == peak_event(trace) == Timeline(trace).peak
    memories = Memories(trace)
    for event in (0, about["peak"], trace.events - 1):
        moment = recording.moment(event)
        assert moment["reserved"] == memories.at(event).reserved
        assert recording.timeline.series["reserved"].at(event) == moment["reserved"]
        assert json.dumps(moment, allow_nan=False)
    assert recording.bands("time", 0, trace.span_us, 500)["bands"]


def test_more_pieces_than_can_be_drawn_are_joined() -> None:
    job = Job()
    for _ in range(600):
        job.alloc(512)
    memory = memory_at(job.trace(), len(job.events) - 1)
    whole, joined = lay_out(memory), lay_out(memory, most=40)
    assert sum(len(each.pieces) for each in whole) == 600
    pieces = [piece for each in joined for piece in each.pieces]
    assert 0 < len(pieces) <= 40
    assert sum(piece.held for piece in pieces) == memory.allocated
    assert sum(piece.blocks for piece in pieces) == 600


def test_closing_while_somebody_asks_is_quiet(built: None, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from vram.web import Page

    def slow() -> dict[str, Any]:
        time.sleep(0.3)
        return {}

    with Page(live=slow, interval=0.05) as page:
        link = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
        link.request("GET", "/api/live", headers={"x-vram-token": page.token})
        link.getresponse().readline()
    link.close()
    assert capfd.readouterr().err == ""


def test_what_goes_wrong_inside_is_told_and_logged(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*asked: Any) -> bytes:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(asker.page.recordings, "answer", broken)
    status, answer = asker.ask("/api/about?file=0")
    assert (status, answer) == (500, {"error": "ZeroDivisionError: no such luck"})
    assert "the query about failed" in caplog.text


# ---- where things are missing ------------------------------------------------------------------------------


def test_a_page_that_was_not_built_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(assets.resources, "files", lambda package: tmp_path)
    assets.built_page.cache_clear()
    with pytest.raises(ConfigError, match="make web"):
        assets.built_page()
    assets.built_page.cache_clear()


def test_missing_libraries_are_named(
    monkeypatch: pytest.MonkeyPatch, job_file: Path, built: None, vram_command: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    code, _, error = vram_command("serve", str(job_file))
    assert code == 2
    assert 'pip install "vram[web]"' in error


def test_serve_of_a_bad_file_fails_at_once(tmp_path: Path, built: None, vram_command: Any) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    code, out, error = vram_command("serve", str(image))
    assert (code, out) == (2, "") and error == vram_command("explain", str(image))[2]


def test_over_ssh_serve_says_how_to_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from vram.cli import serve

    monkeypatch.setattr(serve, "_user", lambda: "ada")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 2222")
    assert not serve._has_desktop()
    assert serve._tunnel(8080).endswith("\n  ssh -N -L 8080:127.0.0.1:8080 -p 2222 ada@10.0.0.2")
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert serve._has_desktop()
    assert serve._tunnel(8080).endswith("\n  ssh -N -L 8080:127.0.0.1:8080 ada@node7")


@pytest.mark.parametrize("option", [None, "--no-open"])
def test_serve_prints_the_tunnel_unless_told_about_the_browser(
    option: str | None, monkeypatch: pytest.MonkeyPatch, job_file: Path, built: None, vram_command: Any
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    monkeypatch.setattr("vram.web.Page.run", lambda self: None)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    code, out, err = vram_command("serve", str(job_file), *filter(None, [option]))
    assert code == 0 and out.startswith("http://127.0.0.1:")
    assert ("ssh -N -L" in err) == (option is None)


def test_serve_wants_something_to_show(vram_command: Any) -> None:
    code, _, error = vram_command("serve")
    assert code == 2
    assert "--pid" in error


# ---- reports -----------------------------------------------------------------------------------------------


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="vram-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_report_is_one_file_that_asks_nobody(job_file: Path, built: None, vram_command: Any) -> None:
    pytest.importorskip("vram._native")
    output = job_file.parent / "report.html"
    code, said, _ = vram_command("report", str(job_file), "-o", str(output))
    assert code == 0 and "report.html" in said
    page = output.read_text()
    assert "src=" not in page and 'href="./' not in page and "http://" not in page and "https://" not in page
    assert "default-src 'none'" in page and "unsafe" not in page
    data = embedded(page)
    assert data["about"]["source"] == "job.pickle"
    assert str(data["about"]["peak"]) in data["moments"] and str(data["about"]["start"]) in data["why"]
    assert {"time/", "event/", "time/stream", "event/line"} <= set(data["levels"])
    assert data["sweep"]["ranked"][0]["rank"] == 1
    assert set(data["bands"]) == {"time", "event"}


def test_a_script_cannot_end_early_and_is_known_by_its_hash(job_file: Path, built: None) -> None:
    from vram.web.report import render_report

    page = render_report(open_trace(job_file, trusted=True), sweep=False)
    assert page.count("</script>") == 2
    assert "draw('<\\/script>')" in page
    assert re.search(r"script-src 'sha256-[\w+/]+=*'", page)


def hostile_job(tmp_path: Path) -> Path:
    job = Job()
    job.alloc(3 * MIB)
    document = job.snapshot()
    for event in document["device_traces"][0]:
        for frame in event["frames"]:
            frame["filename"] = "/home/mallory/secret/</script><script>alert(1)</script>.py"
            frame["name"] = "<img src=x onerror=alert(1)>"
    import pickle

    path = tmp_path / "hostile<b>.pickle"
    path.write_bytes(pickle.dumps(document))
    return path


def test_names_of_a_stranger_stay_data(tmp_path: Path, built: None) -> None:
    from vram.web.report import render_report

    page = render_report(open_trace(hostile_job(tmp_path), trusted=True), sweep=False)
    assert "<img" not in page and "<script>alert" not in page and "hostile<b>" not in page
    frames = [frame for stack in embedded(page)["stacks"].values() for frame in stack["frames"]]
    assert any("<img src=x onerror=alert(1)>" in frame for frame in frames)


def test_a_redacted_report_has_no_folder(tmp_path: Path, built: None, vram_command: Any) -> None:
    source = hostile_job(tmp_path)
    output = tmp_path / "report.html"
    assert vram_command("report", str(source), "-o", str(output), "--redact", "--no-sweep")[0] == 0
    page = output.read_text()
    assert "mallory" not in page and "secret" not in page and str(tmp_path) not in page
    assert embedded(page)["sweep"] is None


def test_redaction_keeps_what_is_public() -> None:
    trace = small_job().trace()
    frames = (
        Frame("/home/me/env/lib/python3.12/site-packages/torch/nn/linear.py", 9, "forward"),
        Frame("/home/me/project/train.py", 3, "main"),
        Frame(r"C:\Users\me\run.py", 3, "main"),
        Frame("relative/own.py", 3, "main"),
    )
    from dataclasses import replace

    shown = redacted(
        replace(
            trace,
            source="/home/me/job.pickle",
            frames=frames,
            stacks=((), (0, 1), (2, 3), (0,), (0,)),
            tags=("", "loads /home/me/data.bin, twice", "1/2 done"),
            annotations=(Annotation("START", "C:\\Users\\me\\x.ckpt", 0),),
        )
    )
    names = ["torch/nn/linear.py", "train.py", "run.py", "own.py"]
    assert [frame.filename for frame in shown.frames] == names
    assert shown.tags == ("", "loads data.bin, twice", "1/2 done")
    assert shown.source == "job.pickle"
    assert shown.annotations[0].name == "x.ckpt"


def test_a_report_that_cannot_be_written_says_so(job_file: Path, built: None, vram_command: Any) -> None:
    code, _, error = vram_command("report", str(job_file), "-o", "/no/such/folder/x.html", "--no-sweep")
    assert code == 2
    assert "/no/such/folder/x.html" in error
