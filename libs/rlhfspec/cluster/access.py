"""Access to the API server by a kubeconfig or a pod's service account."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.client.rest import should_bypass_proxies

from rlhfspec.errors import InvalidRequest

POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeAccess:
    """The API server's address and credentials, from KUBECONFIG, ~/.kube/config or the pod's account."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        self._configuration = client.Configuration()
        try:
            if kubeconfig is None and context is None and _is_only_a_pod():
                config.load_incluster_config(client_configuration=self._configuration)  # type: ignore[no-untyped-call]
                self.namespace = POD_NAMESPACE.read_text().strip()
            else:
                self.namespace = self._load(kubeconfig or os.environ.get("KUBECONFIG"), context)
        except (config.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            problem = f"cannot be used: {reason}; set KUBECONFIG, or run in a pod with a ServiceAccount"
            raise InvalidRequest("kubeconfig", context or kubeconfig, problem) from None
        self.server = str(self._configuration.host).rstrip("/")

    def _load(self, file: str | None, context: str | None) -> str:
        contexts, active = config.list_kube_config_contexts(config_file=file)  # type: ignore[no-untyped-call]
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=file, context=context, client_configuration=self._configuration, persist_config=False
        )
        chosen = next((each for each in contexts if each["name"] == context), active)
        return str(chosen["context"].get("namespace") or "default")

    def headers(self) -> dict[str, str]:
        bearer = self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": bearer} if bearer else {}

    def tls(self) -> ssl.SSLContext:
        asked = self._configuration
        try:
            context = ssl.create_default_context(cafile=asked.ssl_ca_cert)
            if asked.cert_file:
                context.load_cert_chain(asked.cert_file, asked.key_file)
        except OSError as error:
            raise InvalidRequest("kubeconfig", None, f"its certificates cannot be used: {error}") from None
        if not asked.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def options(self) -> dict[str, Any]:
        """Return the aiohttp request options for a proxy and a TLS server name."""
        asked, found = self._configuration, {}
        if asked.proxy and not should_bypass_proxies(self.server, asked.no_proxy or ""):
            found = {"proxy": asked.proxy, "proxy_headers": asked.proxy_headers}
        return found | ({"server_hostname": asked.tls_server_name} if asked.tls_server_name else {})


def _is_only_a_pod() -> bool:
    has_file = "KUBECONFIG" in os.environ or os.path.exists(os.path.expanduser("~/.kube/config"))
    return "KUBERNETES_SERVICE_HOST" in os.environ and not has_file
