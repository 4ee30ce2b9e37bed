"""A server for a model, put together."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from progresvit.api import as_progresvit, load_with_folder
from progresvit.distributed import choose_device
from progresvit.engine import Engine
from progresvit.engine.export.manifest import is_export
from progresvit.engine.thresholds import ThresholdLike
from progresvit.io.model_folder import DEFAULT_MODEL
from progresvit.serving.app import make_app
from progresvit.serving.audit import RATE, Audit, EntropyDrift, limit_of
from progresvit.serving.metrics import Metrics
from progresvit.serving.page import page_router
from progresvit.serving.server import Server, open_socket
from progresvit.serving.service import Limits, Service

TOKEN = "PROGRESVIT_TOKEN"
"""Variable with the token that clients must send."""
CPU_BATCH = 8
"""Largest batch on a CPU unless given: larger ones are no faster there, and all images of a batch wait for its end."""


def make_server(
    model: str | os.PathLike[str] | None = None,
    threshold: ThresholdLike | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    limits: Limits | None = None,
    audit_rate: float = RATE,
    **engine: Any,
) -> Server:
    """A server that is ready to run.

    Args:
        model: A model folder, bundled name, hub id or export; None is the default model.
        threshold: As for :class:`Engine`.
        host, port: Where to listen.
        token: Clients must send it; None for none. With a token there is no page.
        limits: What the server accepts.
        audit_rate: Share of the images that are audited; 0 for none. A learned router cannot be audited.
        engine: Further options of :class:`Engine`.
    """
    with ExitStack() as stack:
        listening = stack.enter_context(open_socket(host, port))  # before the model is loaded: it may be in use
        is_graph = is_export(model) or engine.get("backend") not in (None, "torch")  # these run on the CPU
        if engine.get("batch") is None and (is_graph or choose_device(engine.get("device")).type == "cpu"):
            engine["batch"] = CPU_BATCH
        limits = limits or Limits()
        made = Engine(model, threshold, max_pixels=limits.pixels, **engine)
        name = Path(model).expanduser().resolve().name if model is not None else DEFAULT_MODEL
        made.warm_up()  # before it is ready, and before times are measured
        quantiles = None if made.setting is None else made.setting.entropy_quantiles
        metrics = Metrics(len(made.gmacs), None if quantiles is None else EntropyDrift(quantiles))
        made.observe(metrics)
        is_audited = audit_rate > 0 and not made.policy.routers and len(made.gmacs) > 1
        audit = Audit(limit=limit_of(made.setting), rate=audit_rate) if is_audited else None
        service = Service(made, name, metrics, limits=limits, audit=audit)
        page = None
        if token is None and not is_export(model):  # browsers send no token, and exports have no attention
            loaded, folder = load_with_folder(model)
            limit = made.policy.thresholds[0] if not made.policy.routers and len(made.gmacs) > 1 else None
            page = page_router(
                as_progresvit(loaded, "the page").eval(),
                name=name,
                folder=folder,
                threshold=limit,
                limits=service.limits,
                accepted=service.accepted,
            )
        stack.pop_all()  # the server closes it
        return Server(make_app(service, token=token, page=page), service, listening)
