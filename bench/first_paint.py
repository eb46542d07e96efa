"""Measures how soon a page is painted in Chromium, and what it loads: first with an empty cache, then with a full one.

    python -m bench.first_paint http://localhost:8000/dashboard

`CHROMIUM` names the browser if it is not Playwright's own.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys

from playwright.async_api import Page, async_playwright

ROUNDS = 10

# The time of the first contentful paint in ms, the number of requests, and the bytes transferred.
FIGURES = """
() => new Promise((resolve) =>
  new PerformanceObserver((list) => {
    const files = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
    const pages = files.filter(({ initiatorType }) => initiatorType !== "fetch");
    const paint = list.getEntriesByName("first-contentful-paint")[0];
    if (paint) resolve([paint.startTime, pages.length, pages.reduce((sum, { transferSize }) => sum + transferSize, 0)]);
  }).observe({ type: "paint", buffered: true }))
"""


async def measure(page: Page, address: str) -> tuple[float, int, int]:
    await page.goto(address, wait_until="load")
    paint, requests, transferred = await page.evaluate(FIGURES)
    return paint, requests, transferred


async def main(address: str) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"))
        rounds: dict[str, list[tuple[float, int, int]]] = {"empty": [], "full": []}
        for _ in range(ROUNDS):
            context = await browser.new_context()
            page = await context.new_page()
            for figures in rounds.values():
                figures.append(await measure(page, address))
            await context.close()
        await browser.close()
    for cache, figures in rounds.items():
        paints = sorted(paint for paint, _, _ in figures)
        _, requests, transferred = figures[-1]
        print(
            f"{cache} cache: first paint after {statistics.median(paints):.0f} ms (median of {ROUNDS}; "
            f"{paints[0]:.0f} to {paints[-1]:.0f}), {requests} requests, {transferred / 1000:.1f} kB"
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
