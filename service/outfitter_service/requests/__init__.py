"""Request fields of Kubernetes and YARN for the configured amounts.

Pure functions of configuration, templates and annotations, without connections to Kubernetes or YARN.
"""

from outfitter_service.requests.amounts import RequestError, kubernetes_amounts, yarn_amounts
from outfitter_service.requests.annotation import annotated_amounts
from outfitter_service.requests.pod_template import MAIN_CONTAINER, request_in_pod_template

__all__ = [
    "MAIN_CONTAINER",
    "RequestError",
    "annotated_amounts",
    "kubernetes_amounts",
    "request_in_pod_template",
    "yarn_amounts",
]
