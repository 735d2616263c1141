"""The page's conversation, run by Node if it is installed, on the least of a document (`test_browser.py`: a browser).

Each test is a scene in JavaScript: it presses what a reader presses, and returns what was asked and shown.
"""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")

DOCUMENT = """
class Node {
  constructor(name) {
    Object.assign(this, { name, children: [], parentElement: null, listeners: {}, dataset: {}, value: "" });
    Object.assign(this, { hidden: false, disabled: false, className: "" });
    Object.assign(this, { scrollTop: 0, scrollHeight: 0, clientHeight: 0 });
  }
  put(at, nodes) {
    nodes = nodes.flatMap((node) => (node.name === "" ? node.children : [node]));
    for (const node of nodes) if (node instanceof Node) node.parentElement = this;
    this.children.splice(at, 0, ...nodes);
  }
  append(...nodes) { this.put(this.children.length, nodes); }
  beside(nodes, after) {
    const siblings = this.parentElement.children;
    this.parentElement.put(siblings.indexOf(this) + after, nodes);
  }
  before(...nodes) { this.beside(nodes, 0); }
  after(...nodes) { this.beside(nodes, 1); }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  remove() { this.parentElement.children = this.parentElement.children.filter((one) => one !== this); }
  get lastElementChild() { return this.children.at(-1); }
  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }
  set textContent(text) { this.children = [text]; }
  get valueAsNumber() { return Number(this.value); }
  addEventListener(kind, act) { this.listeners[kind] = act; }
  fire(kind, event = {}) { return this.listeners[kind]({ preventDefault() {}, ...event }); }
  setAttribute() {}
  setCustomValidity(wrong) { this.wrong = wrong; }
  reportValidity() { return !byId.schema?.wrong; }
  focus() {}
  all() { return [this, ...this.children.flatMap((one) => (one instanceof Node ? one.all() : []))]; }
}
const byId = {};
globalThis.document = Object.assign(new Node("document"), {
  getElementById: (id) => (byId[id] ??= new Node(id)),
  createElement: (name) => new Node(name),
  createDocumentFragment: () => new Node(""),
  dispatchEvent() {},
});
const store = %(store)s;
globalThis.sessionStorage = {
  getItem: (key) => store[key] ?? null,
  setItem: (key, value) => (store[key] = String(value)),
  removeItem: (key) => delete store[key],
};
const copied = [];
const clipboard = { writeText: async (text) => copied.push(text) };
Object.defineProperty(globalThis, "navigator", { value: { clipboard } });
const asked = [];
const answers = [];
globalThis.fetch = async (path, options) => {
  if (path === "v1/models") return new Response(JSON.stringify({ data: [{ id: "a-model" }] }));
  asked.push(JSON.parse(options.body));
  const answer = answers.shift();
  if (answer.error) return new Response(JSON.stringify(answer), { status: answer.status });
  const chunks = answer.map((delta) => ({ choices: [{ delta, finish_reason: null }] }));
  chunks.push({ choices: [{ delta: {}, finish_reason: "stop" }] });
  return new Response(chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\\n\\n`).join("") + "data: [DONE]\\n\\n");
};
const idle = async () => {
  do await new Promise((resolve) => setTimeout(resolve, 1));
  while (byId.send.disabled);
};
const say = async (text) => {
  byId.message.value = text;
  byId.composer.fire("submit");
  await idle();
};
const buttons = (words) => byId.log.all().filter((one) => one.name === "button" && one.textContent === words);
const said = () => byId.log.all().filter((one) => one.className === "said");
const shown = () => said().map((one) => one.dataset.raw ?? one.textContent);
await import("./chat.js");
const result = await (async () => {%(scene)s})();
console.log(JSON.stringify(result));
process.exit(0);
"""


@pytest.fixture
def play(tmp_path):
    """Runs a scene; returns what it returns. store: what the session remembers."""
    for name in ("chat.js", "http.js", "markdown.js"):
        (tmp_path / name).write_text(files("jpaged.serving").joinpath("assets", name).read_text())
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def played(scene, store=None):
        (tmp_path / "scene.js").write_text(DOCUMENT % {"scene": scene, "store": json.dumps(store or {})})
        done = subprocess.run(["node", "scene.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return played


def test_answer_again_drops_the_last_answer_and_asks_the_same_question_with_what_was_said_before(play):
    asked, shown = play("""
        answers.push([{ content: "one" }], [{ content: "tw" }, { content: "o" }], [{ content: "three" }]);
        await say("first");
        await say("second");
        buttons("Answer again").at(-1).fire("click");
        await idle();
        return [asked.map((body) => body.messages.map((message) => message.content)), shown()];
    """)
    assert asked == [["first"], ["first", "one", "second"], ["first", "one", "second"]]
    assert shown == ["first", "one", "second", "three"]


def test_copy_takes_what_the_model_wrote_not_how_it_is_shown(play):
    copied, words = play("""
        answers.push([{ content: "**bold** and `code`" }]);
        await say("hello");
        const [copy] = buttons("Copy");
        await copy.fire("click");
        return [copied, copy.textContent];
    """)
    assert copied == ["**bold** and `code`"]
    assert words == "Copied"


def test_the_system_prompt_goes_before_each_conversation_and_is_kept_for_the_session(play):
    asked, kept = play("""
        byId.system.value = "  Be brief. ";
        byId.system.fire("change");
        answers.push([{ content: "yes" }], [{ content: "no" }]);
        await say("one");
        byId.new.fire("click");
        await say("two");
        return [asked.map((body) => body.messages), store["jpaged-system"]];
    """)
    system = {"role": "system", "content": "Be brief."}
    assert asked == [[system, {"role": "user", "content": word}] for word in ("one", "two")]
    assert play("return byId.system.value;", {"jpaged-system": kept}) == kept


def test_a_conversation_outlives_a_reload_and_an_answer_can_be_made_again_after_it(play):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    store = {"jpaged-conversation": json.dumps(turns)}
    assert play("return shown();", store) == ["q", "a"]
    again = play(
        """
        answers.push([{ content: "b" }]);
        buttons("Answer again")[0].fire("click");
        await idle();
        return [asked[0].messages, shown()];
        """,
        store,
    )
    assert again == [turns[:1], ["q", "b"]]


def test_a_conversation_that_is_too_long_offers_a_new_chat_and_gives_the_message_back(play):
    alert, box, shown = play("""
        answers.push({ status: 400, error: { message: "too long", code: "context_length_exceeded" } });
        await say("very long");
        return [byId.alert.textContent, byId.message.value, shown()];
    """)
    assert "Begin a new chat" in alert
    assert (box, shown) == ("very long", [])


def test_reasoning_is_folded_before_the_answer_and_not_sent_with_the_next_question(play):
    thought, asked = play("""
        answers.push([{ reasoning_content: "hm" }, { content: "4" }], [{ content: "5" }]);
        await say("2 + 2?");
        await say("and 1?");
        return [byId.log.all().filter((one) => one.name === "details")[0].textContent, asked[1].messages];
    """)
    assert thought == "Reasoninghm"
    assert [message["content"] for message in asked] == ["2 + 2?", "4", "and 1?"]
