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


CORE = "processor\t: {}\nmodel name\t: {}\ncpu MHz\t\t: {}\nflags\t\t: {}\nbogomips\t: 5192.25\n\n"


def test_a_cpu_s_features_are_its_models_and_instructions_not_its_speed_or_the_number_of_its_cores():
    one = CORE.format(0, "Large", 2596.126, "fpu avx2")
    found = cores.features_in(one)
    assert found == ("flags: fpu avx2", "model name: Large")
    assert cores.features_in(one + CORE.format(1, "Large", 1200.0, "fpu avx2")) == found
    assert cores.features_in(CORE.format(0, "Large", 2596.126, "fpu avx2 avx512f")) != found
    assert set(cores.features_in(one + CORE.format(1, "Small", 1200.0, "fpu"))) > set(found)
    arm = "processor\t: 0\nBogoMIPS\t: 2100.0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40\n"
    assert cores.features_in(arm) == ("CPU part: 0xd40", "Features: fp asimd sve")
    assert cores.features_in("processor : 0\n") is None


def test_features_of_a_cpu_are_unknown_where_the_system_does_not_tell_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_CPU_INFO", tmp_path / "none")
    assert cores.cpu_features.__wrapped__() is None
