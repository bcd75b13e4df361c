"""The chat page: it stands alone, and in a browser it does what it is for.

The tests marked `slow` drive headless Chromium (Debian's chromium and chromium-driver, and selenium
from the extra `oracle`): pytest -m slow tests/test_serving_page.py
"""

import contextlib
import html.parser
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import byte_level, write_folder
from dflash_jax.serving.page import chat_page, content_security_policy
from dflash_jax.serving.service import Service
from dflash_jax.serving.text import Tokenizer
from fake_llm import WIDTH, FakeLLM, answer_ids
from serving_http import SOON, Site, running
from tiny_text import SPECIALS, TEMPLATE

CONVERSATION = [256, *b"hi", 259, 257]  # "hi" as the template lays it out


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    folder = tmp_path_factory.mktemp("page")
    write_folder(folder, byte_level(SPECIALS), tokenizer_config=settings)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def llm(tokenizer: Tokenizer) -> FakeLLM:
    return FakeLLM(tokenizer=tokenizer)


@pytest.fixture
def site(llm: FakeLLM) -> Iterator[Site]:
    with Service(llm) as service, running(service) as site:
        yield site


class Elements(html.parser.HTMLParser):
    """Every start tag of a page with its attributes; fails where tags do not close in order."""

    EMPTY = ("meta", "link", "input", "br")

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_served_with_a_policy_that_names_what_is_in_it(site: Site):
    answer = site.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.decode() == chat_page()
    policy = answer.headers["content-security-policy"]
    assert policy == content_security_policy(chat_page())
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert len(re.findall("sha256-", policy)) == 2
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_anywhere():
    page = chat_page()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.replace("// ", ""))
    for tag, attributes in Elements(page).found:
        assert "src" not in attributes and "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)  # the policy forbids it
        assert attributes.get("href", "data:,") == "data:,", tag


def test_every_control_of_the_page_has_a_label():
    page = chat_page()
    elements = Elements(page).found
    labelled = {attributes["for"] for tag, attributes in elements if "for" in attributes}
    inside = re.findall(r"<label[^>]*>[^<]*<input[^>]*id=\"([\w-]+)\"", page)
    for tag, attributes in elements:
        if tag in ("textarea", "input"):
            assert attributes["id"] in {*labelled, *inside}, attributes
    assert ("html", {"lang": "en"}) in elements
    assert any(attributes.get("aria-live") == "polite" for _, attributes in elements)


def test_every_element_that_the_script_asks_for_is_there():
    page = chat_page()
    ids = {attributes.get("id") for _, attributes in Elements(page).found}
    asked = set(re.findall(r'element\("([\w-]+)"\)', page))
    assert asked and asked <= ids


# In a browser from here on.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    folder = tmp_path_factory.mktemp("chromium")
    for word in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={folder}",
        "window-size=900,1000",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.timeouts = {name: int(SOON * 1000) for name in ("pageLoad", "script")}
    with contextlib.closing(_Quitting(webdriver.Chrome(options, _service(driver)))) as held:
        yield held.driver


def _service(driver: str) -> Any:
    from selenium.webdriver.chrome.service import Service

    return Service(driver)


class _Quitting:
    def __init__(self, driver: Any):
        self.driver = driver

    def close(self) -> None:
        self.driver.quit()


class Page:
    """The page in the browser."""

    def __init__(self, browser: Any, site: Site):
        self.browser = browser
        browser.get(f"http://127.0.0.1:{site.port}/")
        self.until(lambda: "drafts" in self("mode").text)

    def __call__(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < end, self.browser.page_source
            time.sleep(0.02)

    def ask(self, text: str) -> None:
        self("message").send_keys(text, "\n")

    def answered(self) -> bool:
        return bool(self.all(".assistant .said")) and not self("stop").is_enabled()

    def complaints(self) -> list[str]:
        """What the console holds: errors of the script, and what the policy kept from running."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def page(browser: Any, site: Site) -> Page:
    return Page(browser, site)


@pytest.mark.slow
def test_a_chat_is_streamed_with_each_round_in_its_colour(page: Page, llm: FakeLLM):
    llm.config.max_seq_len = len(CONVERSATION) + 21
    page.ask("hi")
    page.until(page.answered)
    (said,) = page.all(".assistant .said")
    assert said.text == bytes(answer_ids(CONVERSATION, 21)).decode()
    runs = page.all(".assistant .run")
    accepted = [run.get_attribute("data-accepted") for run in runs]
    assert accepted[:5] == [None, "0", "1", "2", "3"]
    colours = [run.value_of_css_property("background-color") for run in runs[1:5]]
    assert len(set(colours)) == WIDTH + 1
    assert runs[4].get_attribute("title") == "drafts accepted: 3"
    figures = page("figures").text
    assert re.match(r"21 tokens, [\d.]+ tokens per second, 8 rounds, acceptance length", figures)
    assert page.complaints() == []


@pytest.mark.slow
def test_the_stop_button_and_escape_end_an_answer_and_the_server_hears(page: Page, llm: FakeLLM):
    llm.config.max_seq_len, llm.pace = 1_000_000, 0.02
    for stop in (lambda: page("stop").click(), lambda: page("message").send_keys("\ue00c")):
        page.ask("hi")
        page.until(lambda: len(page.all(".assistant .run")) > 3 and page("stop").is_enabled())
        stop()
        page.until(lambda: not llm.running and not llm.waiting)
        page.until(page.answered)
        assert "stopped" in page("figures").text
        page("reset").click()
        assert page.all(".turn") == []


@pytest.mark.slow
def test_the_conversation_goes_on_and_a_new_chat_forgets_it(page: Page, llm: FakeLLM):
    llm.config.max_seq_len = 1000
    page("message").send_keys("one")
    page.browser.execute_script("document.querySelector('details').open = true")
    page("max-tokens").send_keys("5")
    page("send").click()
    page.until(page.answered)
    page.ask("two")
    page.until(lambda: len(page.all(".assistant .said")) == 2 and page.answered())
    first = bytes(answer_ids([256, *b"one", 259, 257], 5)).decode()
    history = [256, *b"one", 259, 257, *first.encode(), 259, 256, *b"two", 259, 257]
    second = bytes(answer_ids(history, 5)).decode()
    assert [one.text for one in page.all(".assistant .said")] == [first, second]
    assert [one.text for one in page.all(".user .said")] == ["one", "two"]


@pytest.mark.slow
def test_markup_in_an_answer_or_a_question_is_text(page: Page):
    page("message").send_keys("<img src=x onerror=alert(1)>", "\n")
    page.until(lambda: bool(page.all(".user .said")))
    assert page.all(".user .said")[0].text == "<img src=x onerror=alert(1)>"
    assert page.all("#log img") == []


@pytest.mark.slow
def test_a_refusal_is_shown_and_leaves_no_trace(page: Page, llm: FakeLLM):
    page.ask("x" * 80)  # beyond the served length of 64
    page.until(lambda: bool(page.all(".error")))
    assert "served length of 64" in page.all(".error")[0].text
    page.ask("hi")
    page.until(page.answered)
    assert page.all(".assistant .said")[0].text


@pytest.mark.slow
def test_it_is_readable_in_light_and_dark_and_works_by_keyboard(page: Page, tmp_path: Path):
    seen = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        body = page.all("body")[0]
        ink, paper = (
            luminance(body.value_of_css_property(name)) for name in ("color", "background-color")
        )
        low, high = sorted((ink, paper))
        assert (high + 0.05) / (low + 0.05) > 7  # WCAG's contrast, level AAA
        seen.add(paper > ink)
    assert seen == {True, False}
    page.browser.execute_script("document.getElementById('message').focus()")
    order = []
    for _ in range(3):
        order.append(page.browser.switch_to.active_element.get_attribute("id"))
        page.browser.switch_to.active_element.send_keys("\ue004")  # Tab
    assert order == ["message", "send", "reset"]  # a disabled Stop is passed over


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(…)` or `rgba(…)`, as WCAG 2 defines it."""
    channels = [int(word) / 255 for word in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
