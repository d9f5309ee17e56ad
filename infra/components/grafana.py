"""The workspace of Amazon Managed Grafana."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
import pulumi_aws as aws

from infra.plan.watch.grafana import GrafanaPlan


class Grafana(pulumi.ComponentResource):
    """A workspace that ends with the stack, with all that people made in it. `url` is its page."""

    url: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        plan: GrafanaPlan,
        role_arn: pulumi.Input[str],
        depends_on: Sequence[pulumi.Resource],
    ) -> None:
        super().__init__("lustrain:infra:Grafana", name)
        made = aws.grafana.Workspace(
            f"{name}-grafana",
            name=plan.name,
            description=plan.description,
            account_access_type="CURRENT_ACCOUNT",
            authentication_providers=["AWS_SSO"],
            permission_type="CUSTOMER_MANAGED",
            role_arn=role_arn,
            data_sources=list(plan.data_sources),
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(depends_on)),
        )
        self.url = pulumi.Output.format("https://{0}", made.endpoint)
        self.register_outputs({"url": self.url})
