"""The page's Markdown, parsed by Node where it is installed."""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")

RENDER = """
const source = %s;
const { parse, render } = await import("data:text/javascript;base64," + Buffer.from(source).toString("base64"));
class Element {
  constructor(name) { this.name = name; this.children = []; }
  append(...children) { this.children.push(...children); }
  get shown() {
    const inside = this.children.map((c) => (typeof c === "string" ? c.replaceAll("<", "&lt;") : c.shown)).join("");
    return this.name ? `<${this.name}>${inside}</${this.name}>` : inside;
  }
}
const document = { createElement: (name) => new Element(name), createDocumentFragment: () => new Element("") };
console.log(JSON.stringify(render(%s, document).shown));
"""


def shown(text):
    source = files("jpaged.serving").joinpath("assets", "markdown.js").read_text()
    code = RENDER % (json.dumps(source), json.dumps(text))
    done = subprocess.run(["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A\n### B", "<h3>A</h3><h5>B</h5>"),
        ("a **b** and *c*, `d *e*`", "<p>a <strong>b</strong> and <em>c</em>, <code>d *e*</code></p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("- a\n- b\n  more\n\nend", "<ul><li>a</li><li>b\nmore</li></ul><p>end</p>"),
        ("1. a\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("```python\nx = '**1**'\n\n```\nafter", "<pre><code>x = '**1**'\n</code></pre><p>after</p>"),
        ("```\nnever closed", "<pre><code>never closed</code></pre>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)></p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("", ""),
    ],
)
def test_what_models_write(text, expected):
    assert shown(text) == expected


def test_no_text_takes_long():
    for text in ("*" * 20_000, "_a" * 10_000, "`" * 20_000, "> " * 500, "- " * 5_000, "**a" * 5_000):
        shown(text)
