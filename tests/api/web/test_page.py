"""The page in a real browser, before a real server."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

import pytest

from ferrule import Client
from tests.api.harness import RunningServer
from tests.api.web.serving import serving_web
from tests.tools import tool
from tools.browser import Browser, browsing

HANDLE_IDS = "[...document.querySelectorAll('#tree [data-handle-id]')].map((row) => row.dataset.handleId)"
STATE = "document.getElementById('state').textContent"
COLOURS = """(() => {
  const canvas = document.getElementById('pool');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
})()"""
CUT_OFF = """[...document.querySelectorAll('.wide, figcaption .name, #principals td')]
  .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""
PLOT_HEIGHTS = """[...document.querySelectorAll('figure')].map((each) =>
  Math.round(each.querySelector('.plot').getBoundingClientRect().top - each.getBoundingClientRect().top))"""
AHEAD = """const now = performance.now.bind(performance);
  window.ahead = 0;
  performance.now = () => now() + window.ahead;"""
"""A clock that a test puts forward."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of the module."""
    with browsing(tool("chromium"), tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def clean(browser: Browser) -> Iterator[Browser]:
    """The browser, which must have nothing to complain of afterwards, but that the server of the test has ended."""
    browser.open("about:blank")
    browser.complaints.clear()
    yield browser
    browser.evaluate("0")
    assert [each for each in browser.complaints if not each.endswith("/ui/events")] == []


def test_the_page_shows_what_the_server_holds(clean: Browser) -> None:
    """The fork tree by handle_id, the pool in numbers and colours, the principal; nothing is wrong in the console."""
    with RunningServer() as server, serving_web(server, interval_s=0.2) as listener:
        clean.open(f"http://{listener.address.target}/ui", width=1600, height=1000)
        with Client(server.address.target) as client:
            root = client.prefill(list(range(1, 50)))
            branches = root.fork(3)
            branches[0].decode([7, 8, 9])
            wanted = sorted(each.handle.handle_id for each in (root, *branches))
            clean.wait_for(
                f"JSON.stringify({HANDLE_IDS}.sort()) === {json.dumps(json.dumps(wanted, separators=(',', ':')))}"
            )
            metrics = server.store.metrics()
            shown = clean.evaluate(
                "Object.fromEntries([...document.querySelectorAll('#legend [data-count]')]"
                ".map((each) => [each.dataset.count, each.textContent]))"
            )
            assert shown["empty"] == f"{metrics.empty_blocks:,}"
            assert shown["single"] == str(metrics.used_blocks - metrics.shared_blocks)
            assert int(shown["by2"]) + int(shown["by3"]) + int(shown["many"]) == metrics.shared_blocks > 0
            assert f"{metrics.total_blocks:,} blocks" in clean.evaluate(
                "document.getElementById('pool-note').innerText"
            )
            assert clean.evaluate(COLOURS) >= 4, "empty, one owner, shared by four, and the ground"
            assert clean.evaluate("document.querySelector('#principals td').textContent") == "local"
            assert clean.evaluate(STATE) == "Ready"
            assert _num_byte_values(clean.screenshot()) > 50
            client.release([root, *branches])
            clean.wait_for(f"{HANDLE_IDS}.length === 0")


def test_the_page_can_be_used_with_the_keyboard(clean: Browser) -> None:
    """Tab leads to the pool and the tree, arrow keys within them, and each tells what is under the cursor."""
    with (
        RunningServer() as server,
        serving_web(server) as listener,
        Client(server.address.target) as client,
        client.prefill(list(range(1, 50))) as root,
    ):
        branch = root.fork(1)[0]
        clean.open(f"http://{listener.address.target}/ui")
        clean.wait_for(f"{HANDLE_IDS}.length === 2")
        clean.evaluate("document.getElementById('pool').focus()")
        clean.press("ArrowRight")
        clean.press("ArrowRight")
        assert clean.evaluate("document.getElementById('pool-cell').textContent").startswith("Block 2: shared by 2")
        clean.evaluate("document.querySelector('#tree [tabindex=\"0\"]').focus()")
        clean.press("ArrowDown")
        detail = clean.evaluate("document.getElementById('tree-detail').textContent")
        assert detail.startswith(f"{branch.handle.handle_id} of local, branch of {root.handle.handle_id}: 49 tokens")
        clean.evaluate("document.querySelector('[data-chart=rows]').focus()")
        clean.press("ArrowLeft")
        assert " s ago" in clean.evaluate("document.querySelector('[data-chart=rows] .when').textContent")
        branch.release()


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1280, "light"), (1600, "dark")])
def test_the_page_fits_its_window_by_day_and_night(clean: Browser, width: int, scheme: str) -> None:
    """Nothing sticks out, of the table neither; charts of a row are as high; the ground is light or dark as asked."""
    with RunningServer() as server, serving_web(server) as listener, Client(server.address.target) as client:
        root = client.prefill(list(range(1, 99)))
        branches = root.fork(3)
        clean.open(f"http://{listener.address.target}/ui", width=width, height=900, scheme=scheme)
        clean.wait_for(f"{HANDLE_IDS}.length === 4")
        assert clean.evaluate("document.documentElement.scrollWidth") <= width
        assert clean.evaluate(CUT_OFF) == []
        assert clean.evaluate(PLOT_HEIGHTS) == [clean.evaluate(PLOT_HEIGHTS)[0]] * 8
        ground = clean.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 60) is (scheme == "dark")
        assert _num_byte_values(clean.screenshot()) > 50
        client.release([root, *branches])


def test_many_sequences_are_grouped_and_a_group_opens(clean: Browser) -> None:
    """Siblings and prompts that stand alone become a row each kind; a click shows them one by one."""
    with RunningServer() as server, serving_web(server) as listener, Client(server.address.target) as client:
        root = client.prefill(list(range(1, 50)))
        branches = root.fork(30)
        alone = [client.prefill([index + 1, 2, 3]) for index in range(20)]
        clean.open(f"http://{listener.address.target}/ui")
        clean.wait_for("document.querySelectorAll('#tree .group').length === 2")
        names = clean.evaluate("[...document.querySelectorAll('#tree .group .name')].map((each) => each.textContent)")
        assert names[0] == "▸ 30 branches"
        assert names[1].startswith("▸ 20 prompts")
        assert clean.evaluate(f"{HANDLE_IDS}.length") == 1
        clean.evaluate(
            "document.querySelector('#tree .group .name').dispatchEvent(new Event('click', {bubbles: true}))"
        )
        assert clean.evaluate(f"{HANDLE_IDS}.length") == 31
        assert "51 sequences, 1 tree and 20 alone" in clean.evaluate("document.getElementById('tree-note').textContent")
        client.release([root, *branches, *alone])


def test_the_page_says_when_it_is_stale_and_comes_back_by_itself(browser: Browser) -> None:
    """A server that is gone leaves its last picture, dimmed; the next one on the address begins with empty charts."""
    with RunningServer() as server, serving_web(server) as listener:
        address = listener.address
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=AHEAD)
        browser.open(f"http://{address.target}/ui")
        browser.wait_for(f"{STATE} === 'Ready'")
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    browser.evaluate("window.ahead = 4000")
    browser.wait_for("document.getElementById('main').classList.contains('stale')")
    assert "trying again" in browser.evaluate(STATE)
    with RunningServer(epoch="c0ffee") as server, serving_web(server, address):
        browser.wait_for(f"{STATE} === 'Ready'")
        assert not browser.evaluate("document.getElementById('main').classList.contains('stale')")


def test_charts_are_made_of_differences_and_begin_anew_with_a_run(clean: Browser) -> None:
    """Rates over the time that has passed, quantiles of what came in between; a counter that fell is another run's."""
    with RunningServer() as server, serving_web(server) as listener:
        clean.open(f"http://{listener.address.target}/ui")
        told = json.loads(clean.evaluate(SERIES))
    assert told["first"] == {"decoded": None, "rows": None, "step_times_p50": None}
    assert told["second"] == {"decoded": 50, "rows": 4, "step_times_p50": pytest.approx(0.0015)}
    assert told["lengths"] == [1, 2, 2, 1, 1], "twice the same view, another run, a clock that went back"
    assert told["isNew"] == [True, False, False, True, True]


SERIES = """(async () => {
  const { Series } = await import('/ui/series.js');
  const view = (uptime, tokens, steps, rows, counts) => ({
    uptime: `${uptime}s`,
    status: { num_decode_tokens: String(tokens), num_steps: String(steps) },
    num_step_rows: String(rows),
    step_times: { upper_bounds_ns: ['1000000', '2000000', '4000000'], counts: counts.map(String) },
  });
  const series = new Series();
  const told = { lengths: [], isNew: [] };
  const add = (run, each) => {
    told.isNew.push(series.add(run, each));
    told.lengths.push(series.points.length);
    const { decoded, rows, step_times_p50 } = series.points.at(-1);
    return { decoded, rows, step_times_p50 };
  };
  told.first = add('1', view(10, 1000, 10, 20, [5, 5, 0, 0]));
  told.second = add('1', view(12, 1100, 20, 60, [5, 15, 0, 0]));
  add('1', view(12, 1100, 20, 60, [5, 15, 0, 0]));
  add('2', view(13, 5, 1, 1, [0, 1, 0, 0]));
  add('2', view(1, 0, 0, 0, []));
  return JSON.stringify(told);
})()"""


def _num_byte_values(png: bytes) -> int:
    """Return how many different bytes the pixels of a PNG have: few in a blank one."""
    data, at = b"", 8
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return len(set(zlib.decompress(data)))
