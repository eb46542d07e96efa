"""Notices by e-mail: which ones the signed-in person gets, and the links that end all of them, or invitations."""

from typing import NamedTuple

from litestar import MediaType, Response, get, post, put, route
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, JSONBody
from litestar.types import ControllerRouterHandler, Method

from gateway.accounts.access import Access
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.api.authentication import account_router
from gateway.api.resources import CallerAccess
from gateway.errors import BackboneUnavailable, NotFound, NotPermitted, RequestMalformed
from gateway.events.notices import UNINVITED_DAYS, EndLink, NoticeChoices, Notices, Purpose, open_link
from gateway.pages.error_pages import render_page
from gateway.services import Injected
from gateway.settings import Settings

HTML = MediaType.HTML
READ: list[Method] = ["GET", "HEAD"]


def require_address(access: Access, settings: Settings) -> str:
    """Returns the e-mail address of who is signed in.

    Raises NotPermitted for an API key and the sessions that it opened, and NotFound if the service sends no e-mail.
    """
    if not settings.sends_notices:
        raise NotFound("This service sends no notices by e-mail.")
    if not access.email:
        raise NotPermitted("Notices are for people who sign in with their e-mail address, and an API key has none.")
    return access.email


@get("/notices", errors=[NotFound])
async def show_notices(access: CallerAccess, settings: Injected[Settings], notices: Injected[Notices]) -> NoticeChoices:
    """Show which notices you get by e-mail."""
    return await notices.read_choices(access.account.id, require_address(access, settings))


@put("/notices", errors=[RequestMalformed, NotFound])
async def choose_notices(
    access: CallerAccess, data: JSONBody[NoticeChoices], settings: Injected[Settings], notices: Injected[Notices]
) -> NoticeChoices:
    """Choose which notices you get by e-mail.

    Each person chooses for themselves. A kind that is left out is off. `budget`: 80% and 100% of a daily cap, of the
    account or an app, each once per day. `deployFailed`: a failed deploy. `appDown`: an app does not answer, and
    answers again. `certificate`: the certificate of a custom domain ends. `finding`: a red security finding. An address
    gets at most 20 notices per day, and 10 of one account.
    """
    await notices.choose(access.account.id, require_address(access, settings), data)
    return data


# -- the links in notices and invitations ----------------------------------------------------------------------


class EndPages(NamedTuple):
    """The page that asks, and the one that confirms: their titles and texts."""

    question: str
    means: str
    button: str
    done: str
    result: str


WAITING = f"for {UNINVITED_DAYS} days. They still wait in the dashboard."
PAGES: dict[Purpose, EndPages] = {
    "notices": EndPages(
        "End all notices?",
        "Your address will get no more notices by e-mail, whichever account they are about, and no invitations by "
        f"e-mail {WAITING}",
        "End all notices",
        "Your notices have ended",
        "Your address gets no more notices by e-mail, until you choose notices again in the dashboard. It gets no "
        f"invitations by e-mail {WAITING}",
    ),
    "invitations": EndPages(
        "End invitations by e-mail?",
        f"Your address will get no invitations by e-mail {WAITING} Notices that you chose stay as they are.",
        "End invitations by e-mail",
        "Invitations by e-mail have ended",
        f"Your address gets no invitations by e-mail {WAITING} Notices that you chose stay as they are.",
    ),
}
QUESTION = '<form method="post"><button>{}</button></form>'
DASHBOARD = '<p><a href="/dashboard#/account">Open the dashboard</a></p>'


@route("/unsubscribe/{link:str}", http_method=READ, media_type=HTML, tags=["Pages"])
async def ask_to_end_notices(link: FromPath[str], vault: Injected[Vault]) -> Response[bytes]:
    """A page that asks whether to end all notices, or only invitations by e-mail. It changes nothing."""
    pages = PAGES[read_link(vault, link).purpose]
    return _page(pages.question, pages.means, QUESTION.format(pages.button))


@post(
    "/unsubscribe/{link:str}",
    status_code=200,
    media_type=HTML,
    tags=["Pages"],
    errors=[BackboneUnavailable],
)
async def end_notices(
    link: FromPath[str], vault: Injected[Vault], notices: Injected[Notices], registry: Injected[Registry]
) -> Response[bytes]:
    """End all notices to the address that got this link, and invitations by e-mail.

    The link in an invitation ends only invitations by e-mail. Needs no sign-in, because mail programs call it too
    (RFC 8058).
    """
    address, purpose = read_link(vault, link)
    if purpose == "notices":
        for membership in await registry.members.list_accounts(address):
            await notices.end(membership.account.id, address)
    await notices.end_invitations(address)
    return _page(PAGES[purpose].done, PAGES[purpose].result, DASHBOARD)


def read_link(vault: Vault, link: str) -> EndLink:
    """Returns whose link it is and what it ends. Raises NotFoundException, for which browsers get a page."""
    opened = open_link(vault, link)
    if opened is None:
        raise NotFoundException
    return opened


def _page(title: str, text: str, link: str) -> Response[bytes]:
    page, headers = render_page(title, text, link, form_action="'self'")
    return Response(page, media_type=HTML, headers=headers)


ROUTES: list[ControllerRouterHandler] = [
    account_router(show_notices, choose_notices),
    ask_to_end_notices,
    end_notices,
]
