"""The connections to the page, which any local user can open: how many there may be, and how long they wait.

A connection that carries the token may take its time. Every other must send a complete request, and read the
answer, within a few seconds; the one that has waited longest makes room if there are too many. The program
that shows the page so keeps its file descriptors and its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Connections", "limited_server"]

MOST_CONNECTIONS = 64
FEWEST_CONNECTIONS = 8
"""The number to which `MOST_CONNECTIONS` may drop in a process that runs out of descriptors."""
WAIT_SECONDS = 5.0
"""From the beginning, or the last answer, until a request is complete and answered."""
LOOK_SECONDS = 0.5
"""How often connections that waited too long are closed."""
PAUSE_SECONDS = 1.0
"""How long no connection is accepted after the system had no descriptor for one."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("vram")

Peer: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Connection:
    link: socket.socket
    transport: asyncio.Transport
    until: float | None
    """When it has waited too long; None while a request with the token is answered."""


class Connections:
    """The open connections of a server. Only the thread of its event loop may use it."""

    def __init__(self) -> None:
        self._open: dict[Peer, _Connection] = {}
        self._most = MOST_CONNECTIONS

    @contextlib.contextmanager
    def answering(self, peer: Peer, *, authorized: bool) -> Iterator[None]:
        """While a request is answered: one with the token may take as long as it needs."""
        connection = self._open.get(peer)
        if connection is not None and authorized:
            connection.until = None
        try:
            yield
        finally:
            if connection is not None:
                connection.until = _now() + WAIT_SECONDS

    async def accept(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections, as many as there may be, until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        closing = loop.create_task(self._close_late_ones())
        try:
            while True:
                await self._make_room()
                try:
                    link, peer = await loop.sock_accept(listener)
                    transport, _ = await loop.connect_accepted_socket(protocol, link)
                except OSError as error:
                    await self._pause(error)
                else:
                    self._open[peer] = _Connection(link, transport, _now() + WAIT_SECONDS)
        finally:
            closing.cancel()

    async def _make_room(self) -> None:
        while True:
            self._open = {peer: each for peer, each in self._open.items() if each.link.fileno() >= 0}
            if len(self._open) < self._most:
                return
            waiting = [(each.until, each.transport) for each in self._open.values() if each.until is not None]
            if waiting:
                min(waiting, key=lambda each: each[0])[1].abort()
            await asyncio.sleep(0 if waiting else LOOK_SECONDS)

    async def _close_late_ones(self) -> None:
        while True:
            now = _now()
            for each in self._open.values():
                if each.until is not None and each.until < now:
                    each.transport.abort()
            await asyncio.sleep(LOOK_SECONDS)

    async def _pause(self, error: OSError) -> None:
        """Wait before the next attempt, and leave descriptors to the program from now on.

        The log gets one line, however often this happens.
        """
        if error.errno in EXHAUSTED:
            if self._most == MOST_CONNECTIONS:
                _log.warning(
                    "the page accepts no connections for %g s, and fewer than %d from now on: %s",
                    PAUSE_SECONDS,
                    MOST_CONNECTIONS,
                    error.strerror,
                )
            self._most = max(FEWEST_CONNECTIONS, self._most // 2)
            await self._make_room()
        await asyncio.sleep(PAUSE_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()


def limited_server(uvicorn: Any, app: Any, connections: Connections) -> Any:
    """Return a server of `app` that is run with one socket, from which `connections` accepts.

    h11 limits the size of a header; uvicorn's other parser does not.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        server_header=False,
    )

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: list[socket.socket]) -> None:
            await super().startup(sockets=[])
            self.accepting = asyncio.create_task(connections.accept(sockets[0], self.new_protocol))

        async def shutdown(self, sockets: list[socket.socket]) -> None:
            self.accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.accepting
            await super().shutdown(sockets=sockets)

        def new_protocol(self) -> Any:
            return config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

    return Server(config)
