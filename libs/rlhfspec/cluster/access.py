"""How to reach the API server: as the pod's service account, or as KUBECONFIG says.

The token of a service account is read again as it is renewed.
"""

from __future__ import annotations

import os
import ssl

from kubernetes import client, config

from rlhfspec.errors import InvalidRequest


class Access:
    def __init__(self) -> None:
        self._configuration = client.Configuration()
        try:
            file = os.environ.get("KUBECONFIG")
            if file is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=self._configuration)  # type: ignore[no-untyped-call]
            else:
                config.load_kube_config(config_file=file, client_configuration=self._configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            problem = f"no cluster: {error}; run in a pod with a service account, or set KUBECONFIG"
            raise InvalidRequest("KUBECONFIG", None, problem) from None
        self.server = str(self._configuration.host).rstrip("/")

    def headers(self) -> dict[str, str]:
        bearer = self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": bearer} if bearer else {}

    def tls(self) -> ssl.SSLContext:
        asked = self._configuration
        context = ssl.create_default_context(cafile=asked.ssl_ca_cert)
        if not asked.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if asked.cert_file:
            context.load_cert_chain(asked.cert_file, asked.key_file)
        return context
