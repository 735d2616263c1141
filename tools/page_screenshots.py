"""Takes the screenshots of the page that docs/serving.md shows.

    python tools/page_screenshots.py [--url http://127.0.0.1:8000] [--out docs/images]

Without --url it serves the embedded model itself. Needs Chromium with its driver (Debian: chromium, chromium-driver)
and `pip install selenium pillow`. While the page chats, requests with a common beginning run beside it, so that the
pool has shared blocks, blocks of several owners, and blocks that are kept for prefix hits.

    page-light.png, page-dark.png    a wide window
    page-phone.png                   the engine on a narrow one
"""

import argparse
import contextlib
import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    import httpx
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install 'jpaged[dev,browser]'")

from tests.support.served import serving

CHROMIUM_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
SHOTS = {"page-light": ("light", 1280, 800), "page-dark": ("dark", 1280, 800), "page-phone": ("light", 400, 1100)}
BEGINNING = "Once upon a time a snail and a heron lived beside a quiet river. Every morning they walked to the mill. "
NUM_COMPANIONS = 5
MAX_BYTES = 200_000


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    """A server's address; of one started here if none is given."""
    if url is not None:
        yield url.rstrip("/")
        return
    with serving(("--max-num-seqs", "16", "--num-gpu-blocks-override", "600")) as server:
        yield server.url


def browser(scheme: str, width: int, height: int) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for flag in (*CHROMIUM_FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    return driver


def keep_company(url: str, ended: threading.Event) -> list[threading.Thread]:
    """Requests that run until `ended`: all begin alike."""

    def run(seed: int) -> None:
        body = {
            "prompt": BEGINNING * 2 + "x" * seed,
            "max_tokens": 600,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
        }
        while not ended.is_set():
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60, trust_env=False) as response:
                for _ in response.iter_lines():
                    time.sleep(0.01)  # they stay long enough to be seen
                    if ended.is_set():
                        return

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(NUM_COMPANIONS)]
    for thread in threads:
        thread.start()
    return threads


def shoot(url: str, name: str, out: Path) -> Path:
    """One screenshot, as a PNG with a palette."""
    scheme, width, height = SHOTS[name]
    driver, ended = browser(scheme, width, height), threading.Event()
    companions: list[threading.Thread] = []
    try:
        driver.get(url + "/")
        box = driver.find_element(By.ID, "message")
        wait = WebDriverWait(driver, 60)
        for words in ("Tell me a story about a snail.", "And what did the heron say?"):
            box.send_keys(words, Keys.ENTER)
            wait.until(lambda d: not d.find_element(By.ID, "send").is_enabled())
            wait.until(lambda d: d.find_element(By.ID, "send").is_enabled())
        companions = keep_company(url, ended)
        wait.until(lambda d: int(d.find_element(By.ID, "running").text or 0) >= NUM_COMPANIONS)
        time.sleep(2)
        if width < 600:
            driver.execute_script("document.querySelector('.engine').scrollIntoView()")
        image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    finally:
        ended.set()
        for thread in companions:
            thread.join()
        driver.quit()
    path = out / f"{name}.png"
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server without a key (default: one is started)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "images")
    parser.add_argument("--only", choices=SHOTS, action="append", help="take this one only; may be repeated")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with served(args.url) as url:
        for name in args.only or SHOTS:
            path = shoot(url, name, args.out)
            size = path.stat().st_size
            print(f"{path}: {size} bytes")
            if size > MAX_BYTES:
                raise SystemExit(f"{path} is larger than {MAX_BYTES} bytes.")


if __name__ == "__main__":
    main()
