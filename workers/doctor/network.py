"""Checks what the settings name in the network: addresses, the cluster, providers, and other servers.

What listens only once the service runs is a warning: before the first start, nothing does.
"""

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from gateway.accounts.domain_names import apps_host
from gateway.accounts.openid import OpenId
from gateway.errors import SignInUnavailable
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.pool import Provider
from gateway.outbound.addresses import BlockedAddress
from gateway.outbound.client import Client
from gateway.settings import ProviderSettings, Settings
from gateway.settings.addresses import UNIX, find_kubernetes_fault
from workers.doctor.redis import open_store
from workers.doctor.row import Row, State
from workers.monitors.uptime import Network, NoNetwork
from workers.webhooks import mailer
from workers.webhooks.mailer import NotSent

CONNECT_SECONDS = 5.0
LEAST_LEFT = 0.2  # of a certificate's lifetime; it should be renewed when a third is left
LOCAL = ("localhost", "127.0.0.1", "::1")
NOT_YET = "before the first start, this is normal; otherwise"


async def check_address(settings: Settings) -> AsyncIterator[Row]:
    url = urlsplit(settings.base_url)
    host = url.hostname or ""
    if host in LOCAL:
        yield Row("tls", "warn", f"{settings.base_url} is of this machine only", "set GATEWAY_BASE_URL for other users")
        return
    if url.scheme != "https":
        yield Row("tls", "fail", f"{settings.base_url} has no TLS", "use https:// in GATEWAY_BASE_URL")
        return
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, url.port or 443, ssl=mailer.trust(settings))
        certificate = writer.get_extra_info("peercert")
        writer.close()
    except ssl.SSLCertVerificationError as error:
        yield Row("tls", "fail", f"{host}: {error.verify_message}", "give the proxy a certificate for this name")
    except (OSError, TimeoutError) as error:
        detail = f"{host} does not answer: {str(error) or type(error).__name__}"
        yield Row("tls", "warn", detail, f"{NOT_YET} check the proxy and the DNS")
    else:
        yield _judge_certificate(host, certificate)


def _judge_certificate(host: str, certificate: dict[str, Any]) -> Row:
    begins, ends = (ssl.cert_time_to_seconds(certificate[name]) for name in ("notBefore", "notAfter"))
    left = ends - time.time()
    if left < LEAST_LEFT * (ends - begins):
        detail = f"the certificate of {host} ends in {left / 86_400:.1f} days"
        return Row("tls", "warn", detail, "renew it, and see why the proxy has not")
    return Row("tls", "ok", f"{host} has a valid certificate")


async def check_apps_domain(settings: Settings) -> AsyncIterator[Row]:
    domain = apps_host(settings)
    if domain.endswith("localhost"):
        yield Row("dns", "warn", f"{domain} is of this machine only", "set GATEWAY_APPS_DOMAIN for other users")
        return
    name = f"doctor-{secrets.token_hex(4)}.{domain}"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        action = f"add an A or AAAA record for *.{domain} that leads to the hosts of the apps"
        yield Row("dns", "fail", f"names below {domain} have no address", action)
    else:
        yield Row("dns", "ok", f"*.{domain} is at {', '.join(sorted({str(each[4][0]) for each in found}))}")


async def check_upstream(settings: Settings) -> AsyncIterator[Row]:
    upstream = settings.upstream
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if upstream.startswith(UNIX):
                _, writer = await asyncio.open_unix_connection(upstream.removeprefix(UNIX))
            else:
                host, _, port = upstream.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError) as error:
        detail = f"Caddy asks {upstream}, which does not answer: {str(error) or type(error).__name__}"
        yield Row("upstream", "warn", detail, f"{NOT_YET} start the gateway there, or correct GATEWAY_UPSTREAM")
    else:
        yield Row("upstream", "ok", f"{upstream} answers")


async def check_cluster(settings: Settings) -> AsyncIterator[Row]:
    """Asks the API server whether this process has every right that the worker `sites` uses.

    The pod of that worker has them. A builder knows no cluster, and needs none.
    """
    if fault := find_kubernetes_fault():
        yield Row("cluster", "fail", fault, "install it where the worker `sites` runs")
        return
    from workers.kubernetes.cluster import (
        Cluster,
        NoCluster,
    )  # imported here, because only this engine needs its client

    try:
        cluster = Cluster(settings.kubernetes_namespace)
    except NoCluster:
        action = "run it where they do: kubectl -n capsule exec deploy/sites -- capsule doctor"
        yield Row("cluster", "warn", "the rights of the worker sites are checked where it runs", action)
        return
    try:
        async with cluster:
            missing = await cluster.find_missing_rights()
    except NoCluster as error:
        yield Row("cluster", "fail", str(error), "check KUBECONFIG, or the pod's service account, and the network")
        return
    where = f"in the namespace {cluster.namespace}"
    if missing:
        action = "apply the roles of ops/kubernetes/apps; see docs/kubernetes.md"
        yield Row("cluster", "fail", f"the worker sites lacks rights {where}: {', '.join(missing)}", action)
    else:
        yield Row("cluster", "ok", f"the worker sites has all rights that it needs {where}")


PROVIDER_ROWS: dict[ProviderSignal | None, tuple[State, str, str]] = {
    ProviderSignal.REACHED: ("ok", "answers, and takes the key", ""),
    ProviderSignal.REFUSED: ("fail", "refuses the key", "correct the key"),
    ProviderSignal.QUOTA: ("fail", "its quota is used up", "raise the quota at the provider"),
    ProviderSignal.FAILED: ("fail", "does not answer", "check its address, the network and GATEWAY_CA_FILE"),
    None: ("fail", "this machine cannot connect", "free descriptors or local ports"),
}


def name_providers(settings: Settings) -> list[tuple[str, ProviderSettings]]:
    """Returns the provider, or each of those that a file names, with the name of its check."""
    return [(f"provider {each.name}" if settings.providers_file else "provider", each) for each in settings.providers]


async def check_provider(name: str, chosen: ProviderSettings, settings: Settings) -> AsyncIterator[Row]:
    provider = Provider(settings, chosen)
    try:
        if provider.is_configured():
            yield Row(name, *PROVIDER_ROWS[await provider.probe()])
        else:
            yield Row(name, "warn", "there is no key", "give it one; without any key, inference is off")
    finally:
        provider.close()


async def check_sign_in(settings: Settings) -> AsyncIterator[Row]:
    try:
        async with (
            open_store(settings) as store,
            Client(allow_private=True, ca_file=settings.ca_file or None, own=True) as http,
        ):
            await OpenId(settings, store, http).check()
    except SignInUnavailable:
        action = "see the line above, and check GATEWAY_OIDC_ISSUER and the network"
        yield Row("sign-in", "fail", f"{settings.oidc_issuer} cannot be used, so nobody can sign in", action)
    else:
        yield Row("sign-in", "ok", f"{settings.oidc_issuer} answers")


async def check_mail_server(settings: Settings) -> AsyncIterator[Row]:
    try:
        async with mailer.connect(settings, mailer.trust(settings)):
            pass
    except NotSent as error:
        action = "correct GATEWAY_SMTP_URL, or check the mail server and the network"
        yield Row("mail server", "fail", f"takes no notices: {error}", action)
    else:
        yield Row("mail server", "ok", "answers, and takes the password if there is one")


async def check_probe_address(settings: Settings) -> AsyncIterator[Row]:
    try:
        allow_private, ca_file = settings.allow_private_addresses, settings.ca_file or None
        async with Client(allow_private=allow_private, ca_file=ca_file, own=True) as http:
            await Network(settings, http).check()
    except (NoNetwork, BlockedAddress):
        detail = f"{settings.probe_check_url} does not answer, so no app is reported as unhealthy"
        yield Row("probe check", "fail", detail, "check the network, or correct GATEWAY_PROBE_CHECK_URL")
    else:
        yield Row("probe check", "ok", f"{settings.probe_check_url} answers")
