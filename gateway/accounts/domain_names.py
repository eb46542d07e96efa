"""The names of custom domains, and the TXT record that proves who owns one."""

import hashlib
from urllib.parse import urlsplit

import idna
import msgspec

from gateway.accounts.records import DOMAIN, App
from gateway.errors import RequestMalformed
from gateway.outbound.addresses import INTERNAL_NAME, SPECIAL_USE_NAME
from gateway.settings import Settings

RECORD_LABEL = "_capsule"
MAX_CHARACTERS = 253 - len(f"{RECORD_LABEL}.")  # of a domain, so that its record's name is a valid one
TOKEN_DIGITS = 40
ACE = "xn--"  # before a label in punycode
JOINERS = "\u200c\u200d"  # invisible, and allowed only where a script needs them


def apps_host(settings: Settings) -> str:
    """Returns the apps' domain without the port that development adds."""
    return settings.apps_domain.partition(":")[0]


def service_hosts(settings: Settings) -> set[str]:
    """Returns the host names of the service itself."""
    return {host for url in (settings.base_url, settings.api_url) if (host := urlsplit(url).hostname)}


def normalize_domain(text: str, field: str) -> str:
    """Returns a host name in lower case, in punycode, without a final dot and the spaces around it.

    Raises RequestMalformed for `field`.
    """
    try:
        written = idna.uts46_remap(text.strip(), std3_rules=True)
    except UnicodeError:
        written = ""
    domain = ".".join(map(_encode_label, written.removesuffix(".").split(".")))
    if not DOMAIN.fullmatch(domain) or not all(map(_is_label, domain.split("."))):
        raise RequestMalformed(f"{field}: a host name such as app.example.com, without scheme or port.")
    return domain


def _encode_label(label: str) -> str:
    return label if label.isascii() else ACE + label.encode("punycode").decode()


def _is_label(label: str) -> bool:
    """Returns whether a label is plain, or the punycode of one that browsers accept, which take emoji too."""
    if not label.startswith(ACE):
        return True
    try:
        decoded = label.removeprefix(ACE).encode().decode("punycode")
        usual = idna.uts46_remap(decoded, std3_rules=True)
        idna.check_initial_combiner(decoded)
        idna.check_bidi(decoded)
        joined = all(idna.valid_contextj(decoded, place) for place, char in enumerate(decoded) if char in JOINERS)
    except (ValueError, OverflowError):  # UnicodeError is a ValueError
        return False
    return joined and decoded == usual and not decoded.isascii() and _encode_label(decoded) == label


def check_domain(text: str, field: str, settings: Settings) -> str:
    """Returns the normalized domain if it is not the service's own. Raises RequestMalformed for `field`."""
    domain = normalize_domain(text, field)
    if any(f".{domain}".endswith(f".{own}") for own in (apps_host(settings), *service_hosts(settings))):
        raise RequestMalformed(f"{field}: {domain} is an address of this service; use a domain of your own.")
    return domain


def check_own_domain(text: str, settings: Settings) -> str:
    """Returns the normalized domain that an account holder wants to use. Raises RequestMalformed."""
    domain = check_domain(text, "domain", settings)
    if len(domain) > MAX_CHARACTERS:
        raise RequestMalformed(f"domain: at most {MAX_CHARACTERS} characters.")
    if INTERNAL_NAME.fullmatch(domain) or SPECIAL_USE_NAME.fullmatch(domain):
        raise RequestMalformed(f"domain: {domain} is a name for internal use; use one that the internet can reach.")
    return domain


def record_name(domain: str) -> str:
    """Returns the name of the TXT record that proves who owns the domain."""
    return f"{RECORD_LABEL}.{domain}"


def verification_token(app: App, domain: str) -> str:
    """Returns the text of the TXT record.

    It follows from the domain and from what identifies the app: its random id, that of its account, and its creation.
    So it needs no storage and no key that could be rotated, no other app has the same one, and a record that was left
    in the DNS proves nothing for a later app of the same name.
    """
    identity = msgspec.json.encode(("custom domain", domain, app.id, app.account, app.createdAt))
    return hashlib.sha256(identity).hexdigest()[:TOKEN_DIGITS]
