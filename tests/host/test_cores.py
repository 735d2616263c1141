"""How many cores there are: those the process is bound to, or what a container's CPU limit leaves of them."""

import pytest

from jpaged.host import cores


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes what the kernel would show: this process's groups, and files below the mount."""
    monkeypatch.setattr(cores, "_CONTROL_GROUPS", tmp_path / "mount")
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def _version_1(group, quota):
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/pods/one\n", {"cpu.max": "800000 100000\n", "pods/one/cpu.max": "max 100000\n"}, 8),
        ("0::/pods/one\n", {"pods/cpu.max": "200000 100000\n", "pods/one/cpu.max": "400000 100000\n"}, 2),
        ("0::/where/the/host/has/it\n", {"cpu.max": "600000 100000\n"}, 6),
        ("0::/\n", {"cpu.max": "3200000 100000\n"}, 16),
        ("0::/\n", {}, 16),
        (
            "3:cpu,cpuacct:/one\n1:name=systemd:/\n0::/\n",
            _version_1("cpu/one", 400_000),
            4,
        ),
        ("2:cpuacct:/\n1:cpu:/\n", _version_1("cpu", -1), 16),
    ],
)
def test_cores_are_those_bound_to_or_what_the_quota_is_worth(groups, own, files, usable):
    groups(own, **files)
    assert cores.usable_cores() == usable


def test_without_control_groups_all_cores_that_the_process_is_bound_to_count(groups):
    assert cores.usable_cores() == 16
