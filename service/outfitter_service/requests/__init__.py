"""What is asked of the resource manager underneath: Kubernetes and YARN request fields for the configured amounts.

Pure functions over configuration and templates; nothing here talks to Kubernetes or YARN.
"""

from outfitter_service.requests.amounts import RequestError, kubernetes_amounts, yarn_amounts
from outfitter_service.requests.pod_template import MAIN_CONTAINER, request_in_pod_template

__all__ = [
    "MAIN_CONTAINER",
    "RequestError",
    "kubernetes_amounts",
    "request_in_pod_template",
    "yarn_amounts",
]
