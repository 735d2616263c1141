"""The page in a browser: `make test-browser`. Needs Chromium, its driver and selenium, and is skipped without them."""

import contextlib
import importlib.util
import json
import shutil
import threading

import pytest

from tests.serving.server_process import KEY, Server

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
if importlib.util.find_spec("selenium") is None:
    MISSING.append("selenium")
pytestmark = [
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"the page's browser tests need {', '.join(MISSING)}"
        " (Debian: apt-get install chromium chromium-driver; pip install selenium)",
    ),
]
if not MISSING:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WAIT_S = 60
PREFIX = "The snail and the heron walked along the river. " * 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("browser") / "log")
    yield server
    server.close()


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, "--window-size=1100,900"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """The page, used with the keyboard alone."""

    def __init__(self, driver, url):
        self.driver = driver
        self.url = url

    def open(self, key=KEY):
        self.driver.get(self.url + "/")
        self.driver.execute_script("sessionStorage.clear(); sessionStorage['jpaged-key'] = arguments[0]", key)
        self.driver.refresh()
        return self

    def __getitem__(self, element_id):
        return self.driver.find_element(By.ID, element_id)

    def press(self, *keys):
        self.driver.switch_to.active_element.send_keys(*keys)

    def tab_back_to(self, element_id):
        for _ in range(20):
            if self.driver.switch_to.active_element.get_attribute("id") == element_id:
                return
            self.press(Keys.SHIFT, Keys.TAB)
        raise AssertionError(f"Shift+Tab does not reach #{element_id}.")

    def until(self, is_so):
        return WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: is_so())

    def turns(self, role):
        """What was said, without who said it and notes."""
        script = """return [...document.querySelectorAll(`.turn.${arguments[0]} .said`)].map((said) =>
            said.dataset.raw ?? said.textContent)"""
        return self.driver.execute_script(script, role)

    def is_idle(self):
        return self["send"].is_enabled()

    def pool(self, name):
        canvases = self.driver.find_elements(By.CSS_SELECTOR, "#pools canvas")
        return int(canvases[0].get_attribute(f"data-{name}")) if canvases else None


@pytest.fixture
def page(server, chromium):
    page = Page(chromium, server.url)
    yield page
    errors = [entry for entry in chromium.get_log("browser") if "Content Security" in entry["message"]]
    assert errors == []


def set_max_tokens(page, n):
    page.driver.execute_script("document.getElementById('max-tokens').value = arguments[0]", n)


def test_a_chat_turn_streams_into_the_log_and_the_conversation_goes_on(page, server):
    page.open()
    page.driver.execute_script("""
        window.seen = [];
        new MutationObserver(() => seen.push(document.querySelector('.turn.assistant')?.textContent.length ?? 0))
            .observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true});
        window.sent = [];
        const real = window.fetch;
        window.fetch = (path, options) => {
            if (options.body) sent.push(JSON.parse(options.body));
            return real(path, options);
        };
    """)
    page.press("A story about a brave snail", Keys.ENTER)
    page.until(lambda: page.is_idle() and page.turns("assistant"))
    (answer,) = page.turns("assistant")
    assert page.turns("user") == ["A story about a brave snail"]
    assert len(answer) > 20
    lengths = page.driver.execute_script("return seen")
    assert len(set(lengths)) > 3, "the answer came in one piece"
    page.press("And then?", Keys.ENTER)
    page.until(lambda: page.is_idle() and len(page.turns("assistant")) == 2)
    first, second = page.driver.execute_script("return sent")
    assert [m["content"] for m in second["messages"]] == ["A story about a brave snail", answer, "And then?"]
    assert "max_tokens" not in first
    said = page.turns("assistant")
    page.driver.refresh()
    page.until(lambda: page.turns("assistant") == said)


def never_ends(page):
    """Answers go on up to max tokens, so that what the reader stops is sure to be under way."""
    page.driver.execute_script("""
        const real = window.fetch;
        window.fetch = (path, options) => real(path, options.body
            ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options);
    """)


def test_stop_ends_an_answer_and_frees_its_blocks(page, server):
    page.open()
    set_max_tokens(page, 900)
    never_ends(page)
    page.press("A very long story", Keys.ENTER)
    page.until(lambda: page["stop"].is_displayed() and page.turns("assistant")[-1])
    page.press(Keys.ESCAPE)
    page.until(page.is_idle)
    assert "Stopped." in page["log"].text
    page.until(lambda: server.metric("num_requests_running") == 0)
    assert not page["stop"].is_displayed()


@contextlib.contextmanager
def kept_running(server, count):
    """So many requests of one prompt run at any time; one that ends is sent anew."""
    ended = threading.Event()
    body = {"prompt": PREFIX, "max_tokens": 900, "ignore_eos": True, "stream": True}

    def run():
        while not ended.is_set():
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                any(ended.is_set() for _ in response.iter_lines())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_the_live_view_shows_blocks_in_use_and_those_that_two_requests_share(page, server):
    page.open()
    page.until(lambda: page["live-state"].text == "Live" and page.pool("used") == 0)
    with kept_running(server, 1):
        page.until(lambda: page.pool("used") > 0)
        assert page.pool("shared") == 0
    with kept_running(server, 2):
        page.until(lambda: page.pool("shared") >= 5)
        page.until(lambda: page["running"].text == "2")
        page.until(lambda: len(page["holders"].find_elements(By.CSS_SELECTOR, "tbody tr")) == 2)
    page.until(lambda: page.pool("used") == 0)
    assert page.pool("cached") > 0


def test_a_wrong_key_is_said_and_the_right_one_helps(page):
    page.open(key="wrong")
    page.until(lambda: "key is missing or wrong" in page["alert"].text)
    page.press("Hello", Keys.ENTER)
    page.until(lambda: page.is_idle() and page["message"].get_attribute("value") == "Hello")
    assert page.turns("user") == page.turns("assistant") == []
    page.until(lambda: page.driver.switch_to.active_element.get_attribute("id") == "key")
    page.press(Keys.CONTROL, "a")
    page.press(KEY, Keys.TAB)
    page.until(lambda: page["live-state"].text == "Live")
    page.tab_back_to("message")
    page.press(Keys.ENTER)
    page.until(lambda: page.is_idle() and page.turns("assistant"))
    assert page.driver.execute_script("return localStorage.length") == 0


def test_what_is_said_is_never_html(page):
    page.open()
    page.press("<img src=x onerror=\"document.title='run'\"><b>bold</b>", Keys.ENTER)
    page.until(lambda: page.is_idle() and page.turns("assistant"))
    assert page.turns("user") == ["<img src=x onerror=\"document.title='run'\"><b>bold</b>"]
    assert page["log"].find_elements(By.CSS_SELECTOR, "img, b") == []
    answer = json.dumps({"choices": [{"delta": {"content": "<b>a</b>\u2028é"}}]})
    script = "const body = arguments[0]; window.fetch = async () => new Response(body)"
    page.driver.execute_script(script, f"data: {answer}\n\ndata: [DONE]\n\n")
    page.press("Again", Keys.ENTER)
    page.until(lambda: page.is_idle() and len(page.turns("assistant")) == 2)
    assert page.turns("assistant")[1] == "<b>a</b>\u2028é"
    assert page["log"].find_elements(By.CSS_SELECTOR, "b") == []


def test_every_control_is_reached_by_tab_in_reading_order_and_shows_its_focus(page):
    page.open()
    page.until(lambda: page["live-state"].text == "Live")
    page["settings"].find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    page.driver.execute_script("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    page.driver.execute_script("document.getElementById('new').focus()")
    order = []
    for _ in range(9):
        focused = page.driver.switch_to.active_element
        order.append(focused.get_attribute("id") or focused.tag_name)
        outline = page.driver.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
        page.press(Keys.TAB)
        if order[-1] != "new":  # focused by the script, not by a key
            assert outline == "3px", order[-1]
    assert order == ["new", "log", "message", "send", "summary", "temperature", "max-tokens", "key", "pause"]


def test_pause_stops_the_stream(page):
    page.open()
    page.until(lambda: page["live-state"].text == "Live")
    page["pause"].send_keys(Keys.ENTER)
    page.until(lambda: page["live-state"].text == "Paused")
    assert page["pause"].get_attribute("aria-pressed") == "true"
    page["pause"].send_keys(Keys.SPACE)
    page.until(lambda: page["live-state"].text == "Live")


def test_the_page_fits_a_phone(page):
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        page.open()
        page.until(lambda: page["live-state"].text == "Live")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
