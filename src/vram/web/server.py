"""The server of the page, on the loopback address. Requests must carry the token.

Every request must name this server as its host, must not come from another site, and must carry the token to
get data. Files are served from a fixed table. `files` has the answers; a running process is any
function that returns its status (such as that of `vram.observe.monitor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import weakref
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from vram.errors import ConfigError, VramError
from vram.system.descriptors import disown
from vram.trace import DEFAULT_MAX_BYTES

from .assets import built_page
from .connections import Connections, limited_server
from .files import Recordings
from .recordings import Answer
from .sweeps import POLICIES, Sweep

__all__ = ["LiveStatus", "Page"]

ADDRESS = "127.0.0.1"
TOKEN_BYTES = 24
TOKEN_HEADER = b"x-vram-token"
LIVE_SECONDS = 1.0
"""Seconds between two updates from a running process, regardless of the number of open pages."""
BACKLOG = 1024
"""Connections that wait until they are accepted, which takes no descriptors; see `connections`."""
MOST_BODY = 4096
"""Maximum number of bytes that the page may send, except for a dropped file."""
MOST_NAME = 100
SAFETY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_log = logging.getLogger("vram")

LiveStatus: TypeAlias = Callable[[], Answer]
"""Returns the status of a running process, as in `vram.observe.monitor`."""
Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]


def _uvicorn() -> Any:
    try:
        import starlette.applications  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f'the page needs starlette and uvicorn ({error.name} is not installed); pip install "vram[web]"'
        ) from error
    return uvicorn


class Page:
    """The served page. `url` opens it; `close()` or the end of a `with` block stops it.

    `files` are recordings or directories of recordings, `live` returns the status of a running process.
    `port` 0 uses any free port.
    """

    def __init__(
        self,
        files: Iterable[str | Path] = (),
        *,
        live: LiveStatus | None = None,
        port: int = 0,
        device: int | None = None,
        interval: float = LIVE_SECONDS,
    ) -> None:
        """Bind the address; `start` or `run` serves."""
        uvicorn = _uvicorn()
        built_page()
        self.recordings = Recordings(map(Path, files), device=device)
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self._socket = _bind(port)
        self.port: int = self._socket.getsockname()[1]
        self._dropped: Path | None = None
        app = _application(self.recordings, live, interval, self._folder_of_dropped)
        connections = Connections()
        app = _Guard(app, self.port, self.token, connections)
        self._server = limited_server(uvicorn, app, connections)
        self._thread: threading.Thread | None = None
        self._opening: Path | None = None
        _pages.add(self)

    @property
    def url(self) -> str:
        """The address with the token. The part after # stays in the browser."""
        return f"http://{ADDRESS}:{self.port}/#token={self.token}"

    def open_browser(self) -> None:
        """Open the page in the user's browser.

        Other users can read command lines, so the browser's does not contain the token. It names a file that
        only this user can read and that redirects to `url`. The file exists until `close`.
        """
        if self._opening is None:
            self._opening = Path(tempfile.mkdtemp(prefix="vram-page-"))
        path = self._opening / "open.html"
        path.touch(mode=0o600)
        path.write_text(
            f'<!doctype html><title>vram</title><meta http-equiv="refresh" content="0; url={self.url}">'
            f'<a href="{self.url}">vram</a>'
        )
        webbrowser.open(path.as_uri())

    def run(self) -> None:
        """Serve until interrupted."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def start(self) -> Page:
        """Serve from a separate thread until `close`."""
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.name = "vram-page"
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving. Calling it again has no effect."""
        self._server.should_exit = True
        self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(5.0)
        self._socket.close()
        self.recordings.close()
        for folder in (self._opening, self._dropped):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of_dropped(self) -> Path:
        """The folder of files that were dropped onto the page; only this user can read it."""
        if self._dropped is None:
            self._dropped = Path(tempfile.mkdtemp(prefix="vram-dropped-"))
        return self._dropped

    def _leave_to_parent(self) -> None:
        """In the child of a fork, do not serve: the port and the connections belong to the parent."""
        connections = [each.transport for each in self._server.server_state.connections]
        sockets = [each.get_extra_info("socket") for each in connections if each is not None]
        served = [self._socket.fileno(), *(each.fileno() for each in sockets if each is not None)]
        disown([*served, *self.recordings.descriptors()])
        self._opening = self._dropped = None

    def __enter__(self) -> Page:
        return self if self._thread is not None else self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<vram.web.Page of {len(self.recordings)} recordings at http://{ADDRESS}:{self.port}/>"


_pages: weakref.WeakSet[Page] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for page in tuple(_pages):
        page._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _bind(port: int) -> socket.socket:
    """Bind a socket now, so that no other process can answer at the address."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((ADDRESS, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"failed to bind port {port} on {ADDRESS}: {error}; --port 0 uses any free port"
        ) from error
    bound.listen(BACKLOG)
    return bound


# ---- authorization -----------------------------------------------------------------------------------------


class _Guard:
    """Checks every request: is it meant for this server, is it from our page, and does it carry the token?"""

    def __init__(self, app: Any, port: int, token: str, connections: Connections) -> None:
        self._app = app
        self._connections = connections
        self._hosts = {f"{name}:{port}".encode() for name in (ADDRESS, "localhost")}
        self._origins = {b"http://" + host for host in self._hosts}
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        authorized = not refusal and self._has_token(scope)
        with self._connections.answering(scope["client"], authorized=authorized):
            if refusal:
                await _answer(send, 403, {"error": refusal})
            else:
                await self._app(scope, receive, _safely(send))

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(dict(scope["headers"]).get(TOKEN_HEADER, b""), self._token)

    def _refusal(self, scope: Scope) -> str:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        if names.count(b"host") != 1 or headers[b"host"] not in self._hosts:
            return "this server only answers requests to its own address"
        if b"origin" in headers and headers[b"origin"] not in self._origins:
            return "requests from other sites are not allowed"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and not _is_visit(scope):
            return "requests from other sites are not allowed"
        if scope["path"].startswith("/api/") and not self._has_token(scope):
            return "the token is missing or wrong; open the address that vram serve printed"
        return ""


def _is_visit(scope: Scope) -> bool:
    """Return whether a browser opens the page, possibly from a link: the page itself contains no data."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    how = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return scope["path"] == "/" and how == (b"navigate", b"document")


def _safely(send: Send) -> Send:
    async def send_with_headers(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in SAFETY.items()]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, status: int, answer: Answer) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await _safely(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---- queries -----------------------------------------------------------------------------------------------


def _application(
    recordings: Recordings, live: LiveStatus | None, interval: float, dropped: Callable[[], Path]
) -> Any:
    """Return the table of routes."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    sweeps = _Sweeps(recordings)
    broadcast = _Broadcast(live, interval) if live is not None else None

    def in_json(answer: Answer, status: int = 200) -> Response:
        body = json.dumps(answer, separators=(",", ":"), allow_nan=False)
        return Response(body, status, media_type="application/json")

    def asset(name: str) -> Any:
        found = built_page()[name]
        return lambda request: Response(found.content, media_type=found.media_type)

    async def ask(request: Request) -> Response:
        question = request.path_params["question"]
        try:
            if question == "start":
                return in_json(
                    {"files": recordings.names(), "folder": recordings.folder, "live": live is not None}
                )
            answer = await run_in_threadpool(recordings.answer, question, dict(request.query_params))
            return Response(answer, media_type="application/json")
        except VramError as error:
            return in_json({"error": str(error)}, 400)
        except Exception as error:  # the page shows the error, the log has the traceback
            _log.exception("the query %s failed", question)
            return in_json({"error": f"{type(error).__name__}: {error}"}, 500)

    async def take_file(request: Request) -> Response:
        try:
            path = await _received(request, dropped)
            return in_json({"file": recordings.add(path), "files": recordings.names()})
        except VramError as error:
            return in_json({"error": str(error)}, 400)

    async def start_sweep(request: Request) -> Response:
        body = await _body(request)
        try:
            file, policies = _sweep_asked(body)
            return in_json({"sweep": await run_in_threadpool(sweeps.start, file, policies)})
        except VramError as error:
            return in_json({"error": str(error)}, 400)

    async def follow_sweep(request: Request) -> Response:
        found = sweeps.get(request.query_params.get("sweep", ""))
        if found is None:
            return in_json({"error": "this sweep does not exist"}, 404)
        response: Response = _events(StreamingResponse, _following(found))
        return response

    async def follow_live(request: Request) -> Response:
        if broadcast is None:
            return in_json({"error": "this page shows no running process; use vram serve --pid PID"}, 404)
        response: Response = _events(StreamingResponse, broadcast.follow())
        return response

    routes = [
        *(Route("/" + name, asset(name)) for name in built_page()),
        Route("/", asset("index.html")),
        Route("/api/open", take_file, methods=["POST"]),
        Route("/api/sweep", start_sweep, methods=["POST"]),
        Route("/api/sweep/state", follow_sweep),
        Route("/api/live", follow_live),
        Route("/api/{question:str}", ask),
    ]
    return Starlette(routes=routes)


async def _received(request: Any, dropped: Callable[[], Path]) -> Path:
    """Write a file that was dropped onto the page into a folder of this user; it is opened like any other."""
    name = unquote(request.headers.get("x-vram-name", ""))
    name = "".join(each for each in name.replace("\\", "/").rpartition("/")[2] if each.isprintable())
    folder = Path(tempfile.mkdtemp(dir=dropped()))
    path = folder / (name.lstrip(".")[:MOST_NAME] or "recording")
    received = 0
    try:
        with path.open("xb") as file:
            async for chunk in request.stream():
                received += len(chunk)
                if received > DEFAULT_MAX_BYTES:
                    break
                file.write(chunk)
        if not 0 < received <= DEFAULT_MAX_BYTES:
            raise ConfigError(f"a dropped file must have 1 to {DEFAULT_MAX_BYTES} bytes")
    except BaseException:  # also if the page disconnects
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return path


async def _body(request: Any) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            return b""
    return body


def _sweep_asked(body: bytes) -> tuple[int, tuple[str, ...]]:
    try:
        asked = json.loads(body)
        file, policies = asked["file"], asked.get("policies", POLICIES)
        if type(file) is not int or not all(isinstance(each, str) for each in policies):
            raise TypeError
        return file, tuple(policies)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            'a sweep request must have the form {"file": 0, "policies": ["torch", "vram"]}'
        ) from None


class _Sweeps:
    """The sweeps of this server: one runs at a time, and the last ones are kept."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        self._lock = threading.Lock()
        self._known: dict[str, Sweep] = {}

    def start(self, file: int, policies: tuple[str, ...]) -> str:
        """Start a sweep and return its name. A sweep that was requested before is not run again."""
        self._recordings.open(file)
        name = f"{file}-{'-'.join(policies)}"
        with self._lock:
            known = self._known.get(name)
            if known is None or "error" in known.state():
                if any(not each.ended for each in self._known.values()):
                    raise ConfigError("another sweep is running; wait until it has finished")
                self._known[name] = Sweep(partial(self._run, file), policies)
        return name

    def _run(self, file: int, policies: tuple[str, ...], progress: Callable[[int, int], None]) -> Answer:
        asked = {"file": str(file), "policies": ",".join(policies)}
        answer: Answer = json.loads(self._recordings.answer("sweep", asked, progress))
        return answer

    def get(self, name: str) -> Sweep | None:
        return self._known.get(name)


def _events(response: Any, events: AsyncIterator[Answer]) -> Any:
    """Return server-sent events, one for each answer."""

    async def lines() -> AsyncIterator[bytes]:
        async for each in events:
            yield b"data: " + json.dumps(each, separators=(",", ":")).encode() + b"\n\n"

    return response(lines(), media_type="text/event-stream")


async def _following(sweep: Sweep) -> AsyncIterator[Answer]:
    seen: Answer | None = None
    while True:
        seen = await asyncio.to_thread(sweep.state, seen, 1.0)
        yield seen
        if sweep.ended and ("answer" in seen or "error" in seen):
            return


class _Broadcast:
    """Queries a process once per interval while any page watches, and sends the status to all of them."""

    def __init__(self, live: LiveStatus, interval: float) -> None:
        self._live = live
        self._interval = interval
        self._lock = asyncio.Lock()
        self._last: Answer = {}
        self._due = 0.0
        self._number = 0

    async def follow(self) -> AsyncIterator[Answer]:
        seen = -1
        while True:
            async with self._lock:
                now = asyncio.get_running_loop().time()
                if now >= self._due:
                    self._last = await self._look()
                    self._number += 1
                    self._due = asyncio.get_running_loop().time() + self._interval
            if self._number != seen:
                seen = self._number
                yield self._last
            await asyncio.sleep(max(0.01, self._due - asyncio.get_running_loop().time()))

    async def _look(self) -> Answer:
        try:
            return {"status": await asyncio.to_thread(self._live)}
        except Exception as error:  # the process may have ended; the page shows the error
            return {"error": str(error) or type(error).__name__}
