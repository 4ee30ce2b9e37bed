"""Puts a server together: engine, service, audit, page and socket."""

from __future__ import annotations

import copy
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, Unpack

from fastapi import APIRouter

from progresvit.engine import Engine
from progresvit.engine.backends import ModelSource, TorchSource, open_source
from progresvit.engine.options import EngineKeywords, EngineOptions
from progresvit.engine.thresholds import ThresholdLike
from progresvit.io.model_folder import DEFAULT_MODEL
from progresvit.routing.scores import TOP
from progresvit.serving.audit import RATE, Audit, EntropyDrift, limit_of
from progresvit.serving.front.app import make_app
from progresvit.serving.front.server import Server, open_socket
from progresvit.serving.metrics import ServerMetrics
from progresvit.serving.page.router import page_router
from progresvit.serving.service import Intake, Limits, Service

TOKEN = "PROGRESVIT_TOKEN"
"""Environment variable with the token that clients must send."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names by which a machine calls itself."""
MOST_PIXELS = 25_000_000
"""Default limit of the pixels of an image: a few bytes can have millions of them."""
CPU_BATCH = 8
"""Default largest batch on a CPU. Larger batches are no faster there, and all images of a batch wait for its end."""
_NAME = re.compile(r"[\w-][\w.-]*")

ModelPath: TypeAlias = str | os.PathLike[str]


def make_server(
    model: ModelPath | Sequence[ModelPath] | None = None,
    threshold: ThresholdLike | None = None,
    *,
    names: Sequence[str] | None = None,
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
        model: A model folder, bundled name, hub id or export, or a list of them; None is the default model. The first
            one has the page and answers requests that name no model.
        threshold: As for :class:`Engine`, for each model.
        names: Names of the models in addresses and responses; by default the names of their folders.
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
    models = [model] if model is None or isinstance(model, str | os.PathLike) else list(model)
    names = _names(models, names)
    with ExitStack() as stack:
        listening = stack.enter_context(open_socket(host, port))  # before the model is loaded: it may be in use
        options = EngineOptions.merge(options, keywords)
        options = replace(options, max_pixels=options.max_pixels or MOST_PIXELS)
        sources = [open_source(path, options.backend) for path in models]
        if options.top_k > max(source.config.num_classes for source in sources):
            raise ValueError(f"top_k={options.top_k} is more than the classes of any model; pass a smaller one.")
        engines = [_engine(source, threshold, options) for source in sources]
        intake = Intake(engines, limits)
        stack.callback(intake.decoder.close)
        services = [
            _service(engine, name, intake, audit_rate=audit_rate, top_k=options.top_k)
            for engine, name in zip(engines, names)
        ]
        page = None if token is not None else _page(sources[0], services[0])  # browsers send no token

        def reset_audits() -> None:
            for service in services:
                service.reset_audit()

        app = make_app(services, token=token, page=page, hosts=hosts, reset_audit=reset_audits)
        server = Server(app, services, listening)
        stack.pop_all()  # the server closes them
        return server


def _names(models: Sequence[ModelPath | None], names: Sequence[str] | None) -> list[str]:
    """A name for each model."""
    if not models:
        raise ValueError("a server needs a model; pass at least one.")
    if names is not None and len(names) != len(models):
        raise ValueError(f"names must be as many as models, {len(models)}, got {len(names)}.")
    for name in names or ():
        if not _NAME.fullmatch(name):
            raise ValueError(f"names must be of letters, digits, dots, - and _, got {name!r}.")
    folders = [DEFAULT_MODEL if path is None else Path(path).expanduser().resolve().name for path in models]
    result = list(names or folders)
    for name in result:
        if result.count(name) > 1:
            raise ValueError(f"two models have the name {name!r}; pass names=[…] with another name for each model.")
    return result


def _engine(source: ModelSource, threshold: ThresholdLike | None, options: EngineOptions) -> Engine:
    on_cpu = not isinstance(source, TorchSource) or options.backend not in (None, "torch")
    if not on_cpu:
        from progresvit.distributed import choose_device  # with torch, which exports do without

        on_cpu = choose_device(options.device).type == "cpu"
    if options.batch is None and on_cpu:
        options = replace(options, batch=CPU_BATCH)
    engine = Engine(source, threshold, options=with_candidates(options, source))
    engine.warm_up()  # before it is ready, and before times are measured
    return engine


def with_candidates(options: EngineOptions, source: ModelSource) -> EngineOptions:
    """The options with as many classes as a request may ask for: ``TOP``, or ``top_k`` if that is more."""
    return replace(options, top_k=min(max(options.top_k, TOP), source.config.num_classes))


def _service(engine: Engine, name: str, intake: Intake, *, audit_rate: float, top_k: int) -> Service:
    quantiles = None if engine.setting is None else engine.setting.entropy_quantiles
    metrics = ServerMetrics(len(engine.gmacs), None if quantiles is None else EntropyDrift(quantiles))
    engine.observe(metrics)
    is_routed = not engine.policy.routers and len(engine.gmacs) > 1  # by thresholds
    audit = Audit(limit=limit_of(engine.setting), rate=audit_rate) if is_routed and audit_rate > 0 else None
    return Service(engine, name, metrics, audit=audit, intake=intake, top_k=min(top_k, engine.top_k))


def _page(source: ModelSource, service: Service) -> APIRouter | None:
    """The page of a model; exports have no attention to show."""
    if not isinstance(source, TorchSource):
        return None
    policy = service.engine.policy
    return page_router(
        copy.deepcopy(source.model).eval(),  # a backend of your own may run the model
        name=service.name,
        folder=source.folder,
        threshold=policy.thresholds[0] if policy.thresholds else 0.0,
        abstain=policy.abstention.entropy,
        ood=policy.ood,
        limits=service.limits,
        max_pixels=service.engine.opener.plan.max_pixels,
        accepted=service.accepted,
        prepare=service.prepare,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
