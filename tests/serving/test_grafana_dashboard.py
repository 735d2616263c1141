"""The Grafana dashboard asks for what the server exposes, under whatever prefix."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from jpaged.engine.expert_load import ExpertLoad
from jpaged.engine.stats import STEP_TOKENS_BOUNDS, EngineStats
from jpaged.processes.request_metrics import NUM_COLUMNS, RequestMetrics
from jpaged.serving.metrics import exposition

ROOT = Path(__file__).parent.parent.parent
DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
NAME = r"([a-z][a-z0-9_]*)"


def exposed(prefix):
    """Names and labels of every sample in /metrics."""
    cells = np.zeros((1, 1, NUM_COLUMNS))
    counts = {field.name: i for i, field in enumerate(fields(EngineStats), start=1)}
    load = ExpertLoad((0,), ((1, 2),), ((1, 2),))
    stats = EngineStats(**counts | {"step_tokens": (1,) * (1 + len(STEP_TOKENS_BOUNDS)), "expert_load": load})
    text = exposition(RequestMetrics(cells, 0), prefix, "model", {0: stats})
    samples = re.findall(rf"^{prefix}:{NAME}{{(.*)}} ", text, re.MULTILINE)
    assert len(samples) > 100
    labels = {}
    for name, found in samples:
        labels.setdefault(name, set()).update(re.findall(rf'{NAME}="', found))
    return labels


@pytest.mark.parametrize("prefix", ["jpaged", "vllm"])
def test_every_metric_and_label_that_it_asks_for_is_exposed(prefix):
    labels = exposed(prefix)
    for expression in EXPRESSIONS:
        found = re.findall(rf"{prefix}:{NAME}", expression.replace("${prefix}", prefix))
        assert found, expression
        for name in found:
            assert name in labels, expression
            grouped = re.findall(r"by \((\w+)\)", expression)
            selected = re.findall(r"(\w+)=~", expression)
            assert {*grouped, *selected} <= labels[name], expression
            assert {"model_name", "engine"} <= set(selected)


def test_every_metric_that_the_server_exposes_is_in_a_panel():
    asked = {name for expression in EXPRESSIONS for name in re.findall(rf"prefix}}:{NAME}", expression)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed("jpaged")}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}


def test_names_have_the_prefix_of_the_variable_and_variables_are_defined():
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]])
    used = set(re.findall(r"\$\{(\w+)\}|\"?\$(\w+)", text))
    names = {first or second for first, second in used}
    assert names - {"__rate_interval", "__all"} == defined
    assert "jpaged:" not in text


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_file_is_what_its_script_writes():
    subprocess.run([sys.executable, str(ROOT / "tools" / "grafana_dashboard.py"), "--check"], check=True)
