"""Puts a server together: engine, service, audit, page and socket."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from progresvit.engine import Engine
from progresvit.engine.export.manifest import is_export
from progresvit.engine.options import EngineKeywords, EngineOptions
from progresvit.engine.thresholds import ThresholdLike
from progresvit.io.model_folder import DEFAULT_MODEL
from progresvit.serving.audit import RATE, Audit, EntropyDrift, limit_of
from progresvit.serving.front.app import make_app
from progresvit.serving.front.server import Server, open_socket
from progresvit.serving.metrics import ServerMetrics
from progresvit.serving.page.router import page_router
from progresvit.serving.service import Limits, Service

TOKEN = "PROGRESVIT_TOKEN"
"""Environment variable with the token that clients must send."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names by which a machine calls itself."""
MOST_PIXELS = 25_000_000
"""Default limit of the pixels of an image: a few bytes can have millions of them."""
CPU_BATCH = 8
"""Default largest batch on a CPU. Larger batches are no faster there, and all images of a batch wait for its end."""


def make_server(
    model: str | os.PathLike[str] | None = None,
    threshold: ThresholdLike | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allow_anyone: bool = False,
    hosts: Sequence[str] | None = None,
    limits: Limits | None = None,
    audit_rate: float = RATE,
    options: EngineOptions | None = None,
    **keywords: Unpack[EngineKeywords],
) -> Server:
    """A server that is ready to run.

    Args:
        model: A model folder, bundled name, hub id or export; None is the default model.
        threshold: As for :class:`Engine`.
        host, port: Address to listen on.
        token: Clients must send it, and there is no page; None for no token.
        allow_anyone: Listen at an address that other machines reach, without a token.
        hosts: Names by which clients may call the server. By default any name, and the names of this machine for
            itself if it listens there.
        limits: What the server accepts.
        audit_rate: Share of the images to audit; 0 for none. A learned router cannot be audited.
        options, keywords: Options of the engine, as for :class:`Engine`; the page keeps to ``max_pixels`` too, by
            default ``MOST_PIXELS``.
    """
    if token is None and not is_loopback(host) and not allow_anyone:
        raise ValueError(
            f"other machines reach {host}, and anyone could use the server: pass a token, for the command in the "
            f"variable {TOKEN}, or allow_anyone=True."
        )
    if hosts is None and is_loopback(host):
        hosts = (*LOOPBACK, host)
    with ExitStack() as stack:
        listening = stack.enter_context(open_socket(host, port))  # before the model is loaded: it may be in use
        options = EngineOptions.merge(options, keywords)
        on_cpu = is_export(model) or options.backend not in (None, "torch")
        if not on_cpu:
            from progresvit.distributed import choose_device  # with torch, which exports do without

            on_cpu = choose_device(options.device).type == "cpu"
        if options.batch is None and on_cpu:
            options = replace(options, batch=CPU_BATCH)
        options = replace(options, max_pixels=options.max_pixels or MOST_PIXELS)
        engine = Engine(model, threshold, options=options)
        engine.warm_up()  # before it is ready, and before times are measured
        name = Path(model).expanduser().resolve().name if model is not None else DEFAULT_MODEL
        quantiles = None if engine.setting is None else engine.setting.entropy_quantiles
        metrics = ServerMetrics(len(engine.gmacs), None if quantiles is None else EntropyDrift(quantiles))
        engine.observe(metrics)
        is_routed = not engine.policy.routers and len(engine.gmacs) > 1  # by thresholds
        audit = Audit(limit=limit_of(engine.setting), rate=audit_rate) if is_routed and audit_rate > 0 else None
        service = Service(engine, name, metrics, limits=limits, audit=audit)
        stack.callback(service.close)
        page = None
        if token is None and not is_export(model):  # browsers send no token, and exports have no attention
            from progresvit.api import as_progresvit, load_with_folder

            loaded, folder = load_with_folder(model)
            page = page_router(
                as_progresvit(loaded, "the page").eval(),
                name=name,
                folder=folder,
                threshold=engine.policy.thresholds[0] if is_routed else None,
                limits=service.limits,
                max_pixels=options.max_pixels,
                accepted=service.accepted,
                prepare=service.prepare,
            )
        app = make_app(service, token=token, page=page, hosts=hosts, reset_audit=service.reset_audit)
        server = Server(app, service, listening)
        stack.pop_all()  # the server closes them
        return server


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
