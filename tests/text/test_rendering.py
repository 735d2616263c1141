"""Chat templates within bounds: whatever a template does, it ends, and the next one is rendered."""

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jpaged.api.errors import CheckpointError, InvalidParameterError, InvalidPromptError
from jpaged.text.rendering import MAX_PARSED, Renderer, Request, takes_variable
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer

USER = {"role": "user", "content": "hi"}
GOOD = "{{ messages[0].content }}!"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = {
    "product": "{{ 'x' * 10**10 }}",
    "justified": "{{ 'x'.ljust(10**10) }}",
    "doubled": "{% set n = namespace(x='x') %}{% for i in range(50) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "padded": "{{ '%10000000000d' % 1 }}",
}


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer()
    yield renderer
    renderer.close()


def request(template, timeout_s=60.0, **bounds):
    return Request(template, [USER], None, True, False, {}, timeout_s, **bounds)


@pytest.mark.parametrize("name", HUGE)
def test_a_template_cannot_take_all_memory(renderer, name):
    assert renderer.render(request(HUGE[name])).kind == "memory"
    assert renderer.render(request(GOOD)).text == "hi!"


def test_a_template_cannot_run_for_ever(renderer):
    renderer.render(request(GOOD))
    begin = time.monotonic()
    assert renderer.render(request(ENDLESS, 0.3)).kind == "time"
    assert time.monotonic() - begin < 60
    assert renderer.render(request(GOOD)).text == "hi!"


def test_a_template_cannot_make_a_prompt_of_any_length(renderer):
    assert renderer.render(request("{{ 'x' * 101 }}", max_characters=100)).kind == "long"
    assert renderer.render(request("{{ 'x' * 100 }}", max_characters=100)).text == "x" * 100


def test_a_process_that_was_killed_is_replaced(renderer):
    renderer.render(request(GOOD))
    os.kill(renderer._process.pid, signal.SIGKILL)
    assert renderer.render(request(GOOD)).kind in ("ended", "text")
    assert renderer.render(request(GOOD)).text == "hi!"


def test_the_process_ends_with_its_parent_even_while_it_renders():
    script = (
        "import sys, threading, time\n"
        "from jpaged.text.rendering import Renderer, Request\n"
        "renderer = Renderer()\n"
        f"request = Request({GOOD!r}, [{USER!r}], None, True, False, {{}}, 60.0)\n"
        "renderer.render(request)\n"
        f"request.template, request.timeout_s = {ENDLESS!r}, 1.0\n"
        "threading.Thread(target=renderer.render, args=(request,), daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print(renderer._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model():
    hf = copy.deepcopy(tokenizer("byte-level"))  # others use it, too
    hf.chat_template = GOOD
    return Tokenizer(hf, "some/model")


def test_bounds_are_named_as_the_fault_of_whoever_gave_the_template(model):
    model.render_chat([USER])
    with pytest.raises(InvalidParameterError, match=r"^chat_template cannot be rendered: it takes more than 512 MiB"):
        model.render_chat([USER], chat_template=HUGE["product"])
    with pytest.raises(InvalidParameterError, match=r"it took longer than 0\.2 s"):
        model.render_chat([USER], chat_template=ENDLESS, timeout_s=0.2)
    model.hf.chat_template = HUGE["product"]
    try:
        with pytest.raises(InvalidPromptError, match="more than 512 MiB"):
            model.render_chat([USER])
    finally:
        model.hf.chat_template = GOOD
    assert model.render_chat([USER]) == "hi!"


@pytest.mark.parametrize("broken", ["{% if %}", "{{ nothing() }}", HUGE["product"]])
def test_a_broken_template_is_named_at_start(model, broken):
    model.check_chat_template()
    model.hf.chat_template = broken
    try:
        with pytest.raises(CheckpointError, match="The chat template of some/model is broken: "):
            model.check_chat_template()
        model.hf.chat_template = "{{ raise_exception('a system message is needed') }}"
        model.check_chat_template()  # it works, for other conversations
    finally:
        model.hf.chat_template = GOOD


def test_what_a_template_gets_is_what_transformers_gives_it(model):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{{ tools | tojson }}{{ bos_token }}{{ x }}"
    template += "{% for m in messages %}{{ m.role }}{{ m.name is defined }}{% endfor %}"
    messages = [USER | {"name": None}, {"role": "assistant", "content": "a"}]
    ours = model.render_chat(messages, chat_template=template, tools=[tool], x=[1, None])
    theirs = model.hf.apply_chat_template(
        messages, chat_template=template, tools=[tool], x=[1, None], tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs


def test_arguments_of_a_call_are_a_dictionary_and_json_for_a_template_that_joins_them_to_text(model):
    call = {"function": {"name": "f", "arguments": {"a": "ü", "b": [True]}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    given = "{% set given = messages[1].tool_calls[0].function.arguments %}"
    assert model.render_chat(messages, chat_template=given + "{{ given.b }}") == "[True]"
    assert model.render_chat(messages, chat_template=given + "{{ 'x' + given }}") == 'x{"a": "ü", "b": [true]}'
    for wrong, said in (
        ("{{ 1 + given }}", "and 'dict'"),
        ("{{ 'x' + 1 }}", '"int"'),
        ("{{ given.a + 1 }}", "not .int"),
    ):
        with pytest.raises(InvalidParameterError, match=said):
            model.render_chat(messages, chat_template=given + wrong)


@pytest.mark.parametrize("value", [object(), 2**70])
def test_a_variable_that_is_no_json_value_is_refused(model, value):
    with pytest.raises(InvalidParameterError, match="JSON values"):
        model.render_chat([USER], x=value)


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% set tools = tools or [] %}{{ tools }}", True),
        ("{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}{{ tools }}", True),
        ("{% if %}{{ tools }}", True),  # which may be anything
        ("{# no tools here #}{{ messages }}", False),
        ("{{ messages[0]['tools'] }}{{ messages[0].tools }} tools", False),
        ("{% macro say(tools) %}{{ tools }}{% endmacro %}{{ say(messages) }}", False),
        ("{{ messages }}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{% for tools in messages %}{% endfor %}{{ tools }}", True),
        ("{% for m in messages if tools %}{% endfor %}", True),
        ("{% if messages %}{% set tools = messages %}{% endif %}{{ tools }}", True),
        ("{% if messages %}{% set tools = 1 %}{% elif x %}{% set tools = 2 %}{% endif %}{{ tools }}", True),
        ("{% if messages %}{% set tools = messages %}{% else %}{% set tools = 1 %}{% endif %}{{ tools }}", False),
        ("{% macro say(x=tools) %}{% endmacro %}{{ say() }}", True),
        ("{% macro say() %}{{ tools }}{% endmacro %}{{ say() }}", True),
        ("{% with tools = 1 %}{{ tools }}{% endwith %}", False),
        ("{% set x %}{{ tools }}{% endset %}", True),
        ("{% set ns.x = tools %}", True),
        ("{% filter trim %}{{ tools }}{% endfilter %}", True),
        ("{{ messages | map(attribute=tools) }}", True),
        ("{{ " + "1 + " * 5000 + "tools }}", True),
        ("{{ " + "9" * 5000 + " }}{# tools #}", True),
        ("{# tools #}" + " " * MAX_PARSED, True),  # too long to be sure
    ],
)
def test_a_template_takes_a_variable_if_it_reads_it_and_not_if_it_only_spells_it(template, takes):
    assert takes_variable(template, "tools") is takes


def test_to_look_for_what_a_template_reads_computes_nothing_of_it(monkeypatch):
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    def computed(*args, **kwargs):
        raise AssertionError("a part of the template was computed")

    monkeypatch.setattr(nodes.BinExpr, "as_const", computed)
    monkeypatch.setattr(CodeGenerator, "__init__", computed)
    assert takes_variable("{% if tools %}{{ 'a' * 30 }}{% endif %}", "tools")
    assert not takes_variable("{{ 'tools' * 30 }}", "tools")
