"""The server: uvicorn with a time limit for the headers of a request. It drains before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from progresvit.serving.service import Service

END = 5
"""Seconds to send the last responses after the drain."""
CONNECTIONS = 16_384
"""Open at a time."""
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def open_socket(host: str, port: int) -> socket.socket:
    """Bind a socket for the server. Port 0 is any free port."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    listening = socket.socket(family, proto=socket.IPPROTO_TCP)  # else asyncio delays short responses (Nagle)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use; choose another, or pass port=0 for any free port.") from None
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen on {host}:{port} ({reason}); check {host=} and {port=}.") from None
    return listening


class Server(uvicorn.Server):
    """Serves an application. On SIGTERM or SIGINT it refuses new requests, answers the accepted ones, and ends.

    Args:
        service: The service of the model, or of each of them, which share an intake.
        listening: A socket from :func:`open_socket`.
    """

    def __init__(self, app: FastAPI, service: Service | Sequence[Service], listening: socket.socket) -> None:
        self.services = list(service) if isinstance(service, Sequence) else [service]
        self.service, self.listening = self.services[0], listening

        class Protocol(_TimedProtocol):
            seconds = self.service.limits.receive

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=END,
            )
        )
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report: Callable[[str], None] | None = None

    def run_and_report(self, report: Callable[[str], None]) -> None:
        """Run until a signal; report the address as soon as it listens, and the end."""
        self._report = report
        _allow_connections()
        try:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C
                self.run([self.listening])
        finally:
            self.service.close()
        report("stopped")

    @property
    def address(self) -> str:
        """The URL at which the server listens."""
        host, port = self.listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and self._report is not None:
            self._report(f"{', '.join(service.name for service in self.services)} at {self.address}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or (self.service.is_draining and sig == signal.SIGINT):  # a second Ctrl-C
            super().handle_exit(sig, frame)
            return
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        async def drain() -> None:
            await self.service.drain()
            self.should_exit = True

        if self._draining is None:
            self._draining = asyncio.ensure_future(drain())


def _allow_connections() -> None:
    """Let this process open as many files as the system allows it, up to ``CONNECTIONS``."""
    import resource  # POSIX only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _TimedProtocol(H11Protocol):
    """A connection that is closed if the headers of a request take too long."""

    seconds: float

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(self.seconds, self._close_late)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):  # the next request begins
            self._timer = self.loop.call_later(self.seconds, self._close_late)
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:  # all headers have arrived
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _close_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
