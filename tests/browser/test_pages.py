"""The web pages, as a person uses them, against the real control plane."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.conftest import watched_page
from tests.browser.live_service import IdleRay, Rubato, served

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


async def test_the_list_shows_a_job_and_what_the_cluster_has(rubato: Rubato, page: Page) -> None:
    await rubato.training(name="listed")
    await page.goto("/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="listed", exact=True))
    await expect(row).to_contain_text("running")
    await expect(row).to_contain_text("20 of 100 steps")
    await expect(row).to_contain_text("1 × 2 × 2")
    await expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "20")
    await expect(page.get_by_label("Cluster")).to_contain_text("4 of 64 CPUs in use")
    await row.get_by_role("link").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("listed")


async def test_the_list_keeps_up_without_a_reload(rubato: Rubato, page: Page) -> None:
    _, driver = await rubato.training(name="moving")
    await page.goto("/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="moving", exact=True))
    await expect(row).to_contain_text("20 of 100 steps")
    driver.train(30, data=1)
    await driver.sync("RUNNING", "training at 4 workers", data=1)
    await expect(row).to_contain_text("50 of 100 steps")


async def test_a_job_shows_its_curve_figures_and_timeline(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="shown")
    await page.goto(f"/jobs/{job['id']}")
    curves = page.get_by_role("img", name=re.compile("Loss from"))
    await expect(curves).to_have_attribute("aria-label", re.compile(r"from 5\.3800 at step 1 to 3\.6752 at step 20"))
    assert await ink(page) > 300
    await expect(page.get_by_role("log")).to_contain_text("generation 1: 1 replica from step 0")
    await expect(page.locator("#figures")).to_contain_text("1 × 2 × 2")

    driver.train(30, data=1)
    driver.event("checkpoint.saved", "checkpoint of step 50", step=50)
    await driver.sync("RUNNING", "training at 4 workers", data=1)
    await expect(curves).to_have_attribute("aria-label", re.compile("at step 50;"))
    newest = page.get_by_role("log").get_by_role("listitem")
    await expect(newest.nth(0)).to_contain_text("trains at 900 tokens/s where")  # said of what came with that call
    await expect(newest.nth(1)).to_contain_text("checkpoint of step 50")


async def test_recorded_steps_can_be_fetched_and_going_back_is_told(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="recorded")
    await page.goto(f"/jobs/{job['id']}")
    traces = page.get_by_role("region", name="Recorded steps")
    await expect(page.get_by_role("log")).to_contain_text("generation 1")
    await expect(traces).to_be_hidden()
    folder = Path(job["run_dir"]) / "profile" / "steps-2-3"
    folder.mkdir(parents=True)
    (folder / "rank-0.trace.json.gz").write_bytes(b"a trace")
    driver.event("profile.saved", "steps 2 to 3 were recorded on rank 0", files=[])
    driver.step = 10
    driver.event("spike.rolled_back", "the loss of step 21 spiked", step=21, to=10)
    driver.train(2, data=1)
    driver.metrics[-1]["metric"]["loss"] = 2.25
    await driver.sync("RUNNING", "training at 4 workers", data=1)
    await expect(traces).to_contain_text("steps-2-3/rank-0.trace.json.gz")
    async with page.expect_download() as fetched:
        await traces.get_by_role("link").click()
    assert Path(await (await fetched.value).path()).read_bytes() == b"a trace"
    told = await rubato.http.get(f"/v1/jobs/{job['id']}/metrics", params={"after": 11})
    assert told.json()["items"][0]["loss"] == 2.25
    shown = page.get_by_role("log").get_by_role("listitem").filter(has_text="spiked")
    await expect(shown).to_have_attribute("data-tone", "bad")


async def ink(page: Page) -> int:
    """Pixels of the curves' own colour on the canvases of the charts."""
    count: int = await page.evaluate(
        """() => {
          const canvases = (root) => [...root.querySelectorAll("*")].flatMap((element) => [
            ...(element.tagName === "CANVAS" ? [element] : []),
            ...(element.shadowRoot ? canvases(element.shadowRoot) : []),
          ]);
          const accent = [15, 118, 110, 255];
          let count = 0;
          for (const canvas of canvases(document.getElementById("curves"))) {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4) {
              if (accent.every((value, channel) => Math.abs(value - data[at + channel]) < 12)) count += 1;
            }
          }
          return count;
        }"""
    )
    return count


async def test_the_grid_follows_the_workers(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="growing")
    await page.goto(f"/jobs/{job['id']}")
    cells = page.locator("#workers .worker")
    await expect(cells).to_have_count(4)
    await expect(cells.nth(3)).to_have_attribute("title", re.compile("rank 3 .* pid 4103 · node 10"))
    driver.generation = 2
    await driver.sync("RUNNING", "training at 8 workers", data=2)
    await expect(cells).to_have_count(8)
    await expect(page.locator("#workers .replica")).to_have_count(2)
    await driver.sync("RECOVERING", "a worker was lost", data=2, lost=[6])
    await expect(page.locator("#workers .worker[data-state=lost]")).to_have_count(1)
    await expect(page.locator("#workers")).to_contain_text("7 training")
    await expect(page.get_by_role("heading", level=1)).to_contain_text("recovering")


async def test_scaling_from_the_page_reaches_the_driver(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="scaled")
    await page.goto(f"/jobs/{job['id']}")
    await page.get_by_role("button", name="One replica more").click()
    await expect(page.get_by_label("Workers", exact=True).first).to_have_value("8")
    await page.get_by_role("button", name="Scale").click()
    await expect(page.locator("#operation")).to_contain_text("Scale to 8 workers")
    reply = await driver.sync("RUNNING", "training at 4 workers", data=1)
    assert reply["workers"] == 8
    assert reply["operation"] is not None


async def test_an_impossible_size_is_refused_with_the_nearest(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="refused")
    await page.goto(f"/jobs/{job['id']}")
    await page.locator("#workers-wanted").fill("5")
    await page.get_by_role("button", name="Scale").click()
    problem = page.locator("#control-problem")
    await expect(problem).to_contain_text("5 workers")
    await expect(problem).to_contain_text("4")
    await expect(problem).to_contain_text("8")
    assert (await driver.sync("RUNNING", "training at 4 workers", data=1))["workers"] == 4


async def test_cancelling_asks_first(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="cancelled")
    await page.goto(f"/jobs/{job['id']}")
    await page.get_by_role("button", name="Cancel job").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Keep it running").click()
    assert (await driver.sync("RUNNING", "training", data=1))["cancel"] == "no"
    await page.get_by_role("button", name="Cancel job").click()
    await dialog.get_by_role("button", name="Cancel job").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("cancelling")
    assert (await driver.sync("RUNNING", "training", data=1))["cancel"] == "drain"
    await driver.sync("CANCELLED", "stopped after step 20", data=1)
    await expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled")
    await expect(page.locator("#controls")).to_be_hidden()


async def test_text_out_of_a_job_stays_text(rubato: Rubato, page: Page) -> None:
    job, driver = await rubato.training(name="hostile")
    rubato.log(job, HOSTILE)
    driver.event("worker.lost", HOSTILE, cause=HOSTILE)
    await driver.sync("RECOVERING", HOSTILE, data=1)
    await page.goto(f"/jobs/{job['id']}")
    await expect(page.get_by_role("log")).to_contain_text(HOSTILE)
    await expect(page.locator("#reason")).to_contain_text(HOSTILE)
    await expect(page.locator("#log")).to_contain_text(HOSTILE)
    assert await page.locator("#job :is(img, script)").count() == 0
    await page.goto("/")
    await expect(page.locator("#jobs")).to_contain_text(HOSTILE)
    assert await page.locator("#jobs :is(img, script)").count() == 0


async def test_a_job_that_is_not_there_is_explained(page: Page) -> None:
    await page.goto("/jobs/nobody")
    await expect(page.get_by_role("alert").first).to_contain_text("nobody")


async def test_a_page_outlives_the_control_plane(browser: Browser, tmp_path: Path) -> None:
    ray = IdleRay()
    async with AsyncExitStack() as open_page:
        async with served(tmp_path, ray) as first:
            job, driver = await first.training(name="survivor")
            page = await open_page.enter_async_context(watched_page(browser, first.url))
            await page.goto(f"/jobs/{job['id']}")
            await expect(page.locator("#curves")).to_have_attribute("aria-label", re.compile("at step 20;"))
        await expect(page.locator("#link")).to_have_text("reconnecting")
        async with served(tmp_path, ray, port=int(first.url.rpartition(":")[2])) as second:
            driver.http = second.http
            driver.train(10, data=1)
            driver.event("control.reachable", "the control plane answers again")
            await driver.sync("RUNNING", "training at 4 workers", data=1)
            await expect(page.locator("#link")).to_have_text("live")
            await expect(page.locator("#curves")).to_have_attribute("aria-label", re.compile("at step 30;"))
            await expect(page.get_by_role("log")).to_contain_text("the control plane answers again")


@pytest.mark.parametrize("path", ["/", "/jobs/narrow"])
async def test_a_phone_needs_no_sideways_scrolling(rubato: Rubato, page: Page, path: str) -> None:
    if not (await rubato.http.get("/v1/jobs", params={"name": "narrow"})).json()["items"]:
        await rubato.training(name="narrow")
    await page.set_viewport_size({"width": 360, "height": 740})
    await page.goto(path)
    await expect(page.get_by_text("narrow").first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
