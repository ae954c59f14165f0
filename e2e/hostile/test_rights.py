"""Rights that she takes from the operator: her namespace alone is not served then. It takes the time of a back-off."""

from __future__ import annotations

from cluster import ControlPlane
from kubernetes import client
from operators import Operator, grant, until
from tenant import Tenant

UNWATCHED = 'rlhfspec_operator_namespace_unwatched{{job_namespace="{}"}}'


def test_a_namespace_without_the_role_of_the_operator_is_not_served(
    kubernetes: ControlPlane, tenant: Tenant, operator: Operator
) -> None:
    """She may delete it: her namespace alone is not served then."""
    rbac = client.RbacAuthorizationV1Api(tenant.api)
    rbac.delete_namespaced_role("operator-jobs", "locked")
    tenant.apply("locked", "sums")
    until(lambda: operator.metrics().get(UNWATCHED.format("locked")) == 1.0, "it is told", seconds=90)
    grant(kubernetes, ("locked",))  # others may be gone by now
    until(lambda: "sums-prepare-0" in tenant.pods("locked"), "it is served again", seconds=60)
