"""``progresvit serve``: an HTTP server for one or more models."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from progresvit.cli import options, output
from progresvit.io.extras import not_installed
from progresvit.io.parse import parse_limit


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help=f"{options.EXPORT_HELP} imagenet-tiny by default. The first one has the page."
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="Name of a model in addresses, once for each model; by default its folder's."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of the machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any that is free.", min=0, max=65535)] = 8000,
    threshold: options.Limit = None,
    top_k: Annotated[
        int, typer.Option(help="Number of classes to report, most likely first, unless a request asks for another.")
    ] = 1,
    backend: options.Backend = None,
    device: options.Device = None,
    precision: options.Precision = "fp32",
    batch: Annotated[int | None, typer.Option(help="Largest batch; by default 512 on a GPU, else 8.")] = None,
    threads: options.Threads = None,
    audit: Annotated[
        float, typer.Option(help="Share of the images that are run to the last round to audit exits; 0 for none.")
    ] = 0.01,
    max_body: Annotated[float, typer.Option(help="Megabytes of a request.")] = 16.0,
    max_images: Annotated[int, typer.Option(help="Images of a request.", min=1)] = 64,
    max_pixels: Annotated[
        int | None,
        typer.Option(help="Most pixels to decode of a file; 25 million by default. Larger JPEGs are reduced.", min=1),
    ] = None,
    max_memory: Annotated[
        float | None,
        typer.Option(help="Megabytes of requests that are held at a time; by default 256, or four of the largest."),
    ] = None,
    batch_wait: Annotated[float, typer.Option(help="Seconds that an image may wait for a fuller batch.")] = 0.005,
    deadline: Annotated[float, typer.Option(help="Seconds until a request is given up (504).")] = 10.0,
    drain: Annotated[float, typer.Option(help="Seconds for accepted requests at the end.")] = 30.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which clients may call the server; again for more. By default any, or localhost."),
    ] = None,
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Listen for other machines although there is no token.")
    ] = False,
) -> None:
    """Serve models over HTTP: Open Inference Protocol v2, POST /classify, /metrics. Ends on Ctrl-C or SIGTERM.

    With a token in the variable PROGRESVIT_TOKEN, clients must send it as a bearer token.
    """
    try:
        from progresvit.serving.start import TOKEN, make_server
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
            raise
        raise ValueError(not_installed(str(error.name), "serve")) from error
    from progresvit.serving.service import Limits

    if not 0 <= audit <= 1:
        raise ValueError(f"--audit is a share of the images from 0 to 1 (0.01 for 1 %), not {audit:g}.")
    if max_memory is not None and not max_memory >= 4 * max_body:
        raise ValueError(f"--max-memory must be at least four times --max-body, {4 * max_body:g}, not {max_memory:g}.")
    limits = Limits(
        body=round(max_body * 1e6), images=max_images, wait=batch_wait, deadline=deadline, drain=drain,
        memory=None if max_memory is None else round(max_memory * 1e6),
    )  # fmt: skip
    with output.setting_notes():
        server = make_server(
            models or None, parse_limit(threshold), names=names or None, host=host, port=port,
            token=os.environ.get(TOKEN) or None,
            allow_anyone=allow_anyone, hosts=allow_host or None, limits=limits, audit_rate=audit, top_k=top_k,
            backend=backend, precision=precision, batch=batch, threads=threads, device=device, max_pixels=max_pixels,
        )  # fmt: skip
    server.run_and_report(output.echo)
