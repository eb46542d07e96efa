"""The account API: a token with which the account holder tries an app of their own."""

from __future__ import annotations

import msgspec
from litestar import post
from litestar.params import FromPath

from gateway.accounts.vault import NoEncryptionKey
from gateway.deploys.routes import require_own_app
from gateway.errors import NotFound, RequestMalformed
from gateway.http.authentication import Caller, account_router
from gateway.ids import Time, now_iso
from gateway.inference.auth.test_tokens import sign_test_token
from gateway.process import Injected


class IssuedToken(msgspec.Struct):
    token: str
    expiresAt: Time


@post("/apps/{app:str}/test-token", status_code=200, errors=[RequestMalformed, NotFound])
async def create_test_token(account: Caller, app: FromPath[str], gateway: Injected) -> IssuedToken:
    """Create a test token.

    The app's inference accepts it for 10 minutes as a token of the user `owner`, without asking the app's backend. Its
    requests are limited and charged like those of any user.
    """
    found = await require_own_app(app, account, gateway)
    try:
        created = sign_test_token(gateway.vault, found)
    except NoEncryptionKey as error:
        raise RequestMalformed(f"The operator of this service must {error}.") from None
    return IssuedToken(created.token, now_iso(created.expires_at))


ROUTES = [account_router(create_test_token)]
