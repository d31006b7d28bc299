"""`outfitter kubernetes pod-template`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.cli._lib.options import config as config_option
from outfitter_service.query.errors import OutfitterCliError


@click.group()
def kubernetes() -> None:
    """Request the configured amounts in a pod template."""


@kubernetes.command("pod-template")
@click.argument("file", type=click.Path())
@config_option
@click.option("--container", metavar="NAME", help="The worker's container. Default: flink-main-container.")
def pod_template(file: str, config: str | None, container: str | None) -> None:
    """Print the pod template FILE (`-` for standard input) with the configured amounts in it.

    FILE is a Pod, or an object that has a pod template within: a Deployment, a CronJob, a FlinkDeployment and the like.

    They become requests and limits of the worker's container, and replace the template's values of the same keys.
    Everything else stays unchanged.
    """
    from outfitter_service.cli._lib.configured_drivers import configured, driver_of
    from outfitter_service.requests import kubernetes_amounts, request_in_pod_template

    amounts = kubernetes_amounts(configured(config), driver_of)
    output.document(request_in_pod_template(_text(file), amounts, container=container, warn=warn))


def _text(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OutfitterCliError(f"{file}: is not UTF-8 (byte {error.start})") from error
