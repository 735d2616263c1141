"""What a part of jpaged says whose packages are not installed."""

import sys
from importlib import import_module

import pytest

from jpaged.api.errors import JPagedError, MissingPackageError


@pytest.mark.parametrize(
    ("module", "package"),
    [("jpaged.serving.ray", "ray"), ("jpaged.scoring.ray", "ray"), ("jpaged.scoring.ray", "pyarrow")],
)
def test_the_modules_for_ray_name_the_extra_that_they_need(monkeypatch, module, package):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(MissingPackageError, match=rf"{module} needs Ray.*pip install 'jpaged\[ray\]'.*{package}"):
        import_module(module)


def test_the_rollouts_for_tunix_name_the_extra_that_they_need(monkeypatch):
    monkeypatch.delitem(sys.modules, "jpaged.integrations.tunix", raising=False)
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(MissingPackageError, match=r"needs google-tunix: pip install 'jpaged\[tunix\]'"):
        import_module("jpaged.integrations.tunix")


def test_a_missing_package_is_an_error_of_jpaged_and_of_imports():
    assert issubclass(MissingPackageError, JPagedError)
    assert issubclass(MissingPackageError, ImportError)
