"""Which files browsers may keep for a year, by their names."""

from pathlib import Path

import pytest

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from workers.hosting.archives import pack, prepare, unpack
from workers.hosting.digests import BY_TOOL, has_digest

IMMUTABLE = "public, max-age=31536000, immutable"
# As Vite, Vue CLI, Create React App, webpack, Astro, SvelteKit, Nuxt and Next.js write them.
DIGESTS = """
assets/index-GpEN3EET.js assets/index-B1Af3HRg.css assets/urlMatch-Cgl6axSs.js assets/index.B_TqY17P.css
js/app.5f3a9c1b.js js/chunk-vendors.0ae3f8d3.js css/app.0f8b1e2d.css static/js/main.787d8f2e.js
logo.3f2a9c1b0d4e5f6a7b8c.png static/media/logo.6ce24c58023cc2f8fd88fe9d219db6c6.svg main.0a1b2c3d4e5f6a7b.js
_astro/hoisted.D7a2kf9Q.js _app/immutable/nodes/0.B1c2D3e4.js _app/immutable/entry/start.Bq7X2z1v.js
_nuxt/entry.a1b2c3d4.css _nuxt/D7a2kf9Q.js _next/static/chunks/0a1b2c3d4e5f6789.js
_next/static/chunks/main-0a1b2c3d4e.js _next/static/css/5f3a9c1b0a1b2c3d.css
fonts/FiraSans-Regular-0fe48ade.woff2 A1B2C3D4/logo-A1B2C3D4.png
"""
# As people write them.
NAMES = """
assets/apple-touch-icon.png assets/hero-background.jpg assets/user-guide-2024.pdf assets/logo-20240608.png
assets/en-translations.json assets/site-search-index.json static/css/bootstrap-responsive.css
static/vendor.production.js assets/safari-pinned-tab.svg assets/hero-1920x1080.jpg assets/icon-64x64Icon.png
assets/app-Version2.js assets/photo-iPhone15Pro.jpg assets/logo.MyV2Logo.png build/IMG-IMG_0042b.jpg
assets/manual-Chapter10.pdf assets/a-Windows11Pro.png assets/a-face2face.jpg assets/a-decade80.jpg
assets/a-2024cafe.png assets/a-20240608a.png assets/a-20240608Draft.pdf assets/a-README2b.md
assets/a-DSC00012a.jpg assets/a-Html5Css3.png assets/a-iOS17App.png assets/a-CV2024En.pdf assets/a-12345678.js
assets/a-abcdefgh.js assets/a-ABCDEFGH.js assets/a-5f3a9c1.js assets/a-Gp-EN3EE.js assets/a-5f3a9c1b.html
assets/5f3a9c1b.HTM assets/5f3a9c1b.js assets/x86Win64.zip assets/index-GpEN3EET.js.map assets/app.js
assets/5f3a9c1b/app.js assets/index-GpEN3EET assets/a-ünïcødé12A.js
"""


@pytest.mark.parametrize("path", DIGESTS.split())
def test_a_name_that_a_tool_has_made(path: str) -> None:
    assert has_digest(path)


@pytest.mark.parametrize("path", [*NAMES.split(), f"assets/a-{'0a1b' * 11}.js", f"assets/a-{'aB1' * 4_000}.js"])
def test_a_name_that_a_person_may_have_written(path: str) -> None:
    assert not has_digest(path)


async def test_browsers_keep_what_a_tool_has_named(tmp_path: Path) -> None:
    """Without a recognized tool, only in folders of well-known tools. Archives keep this."""
    names = [*DIGESTS.split(), "assets/app.js", "about-5f3a9c1b.html"]
    files: dict[str, str | bytes] = dict.fromkeys([*names, "404.html"], "content")
    with passable_folder() as folder:
        hosting = Hosting(folder)
        for number, kind in enumerate(("hand", "tool")):
            deploy = hosting.deploy(f"dep_{number}", kind)
            site = hosting.build(deploy, files)
            release = site.release(deploy.id)
            if kind == "tool":
                (release / BY_TOOL).touch()
            await prepare(release)
            archive = await pack(release, tmp_path / f"{kind}.tar.gz")
            fetched = site.release(f"dep_1{number}")
            fetched.mkdir(mode=0o755)
            await unpack(tmp_path / f"{kind}.tar.gz", archive, fetched)
            site.swap(fetched.name)
            hosting.releases.serve_as(f"{kind}.apps.test", site)
        async with hosting.served():
            for name in names:
                for kind in ("hand", "tool"):
                    said = await hosting.ask(f"/{name}", host=f"{kind}.apps.test")
                    anywhere = kind == "tool" or not name.startswith(
                        ("js/", "css/", "logo.", "main.", "fonts/", "A1B2")
                    )
                    kept = name in DIGESTS.split() and anywhere
                    assert (name, said.status, "etag" in said.headers) == (name, 200, True)
                    assert said.headers["x-content-type-options"] == "nosniff"
                    assert (name, kind, said.headers["cache-control"]) == (
                        name,
                        kind,
                        IMMUTABLE if kept else "no-cache",
                    )
            for path, status in (("/about-5f3a9c1b", 200), ("/assets/gone-GpEN3EET.js", 404)):
                said = await hosting.ask(path, host="tool.apps.test")
                assert (said.status, said.headers["cache-control"]) == (status, "no-cache")
