"""An app of the template, from its source to an answer in the browser: built, served and asked at its own address."""

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.browser.site import TEMPLATE
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import COMPLETIONS
from tests.support.deployment import hosting

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What Vite does with the module; the sign-in is the app's own business.
BUILD = """
mkdir dist && cp -r index.html demo lib dist
if [ -n "$VITE_SERVICE_AI_URL" ]; then env="{ \\"VITE_SERVICE_AI_URL\\": \\"$VITE_SERVICE_AI_URL\\" }"; fi
{ echo "import.meta.env = ${env:-{\\}};"; cat lib/ai.js; } > dist/lib/ai.js
"""


def source(token: str) -> dict[str, str]:
    files = {str(path.relative_to(TEMPLATE)): path.read_text() for path in TEMPLATE.rglob("*.*") if path.is_file()}
    return {**files, "build.sh": BUILD, "lib/auth.js": f"export const getToken = async () => '{token}';"}


async def test_a_capsule_app_from_source_to_answer(
    browser: Browser, provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    async with hosting(provider, tmp_path) as host:
        app = await host.account.app(backend, build={"command": "sh build.sh", "output": "dist"})
        await host.worker("deploys")
        deploy = await host.over(await host.publish(app.name, source(app.token())))
        assert deploy["state"] == "live", f"{deploy}"
        hook = await host.hook(app.name)

        before = len(provider.asked("What is a capsule?"))
        context = await browser.new_context()
        page = await context.new_page()
        try:
            await page.goto(f"http://{app.name}.apps.localhost:{host.apps_port}/")
            await page.get_by_role("button", name="What is a capsule?").click()
            await expect(page.locator("#answer")).to_have_text("".join(COMPLETIONS))

            # The next build has no address, and the page says so.
            await host.gateway.switch(enabled=False)
            assert (await host.over(await host.trigger(hook)))["state"] == "live"
            await page.reload()
            await page.get_by_role("button", name="What is a capsule?").click()
            await expect(page.locator("#trouble h2")).to_be_visible()
            assert len(provider.asked("What is a capsule?")) == before + 1
        finally:
            await context.close()
