"""Figures out of a profiler's trace, on traces written by hand."""

import pytest
from jax.profiler import ProfileData

from jpaged.bench.device_trace import idle_share, kernel_times, read_trace


def plane(name: str, **lines: list[tuple[int, int]]) -> str:
    """(start, end) in microseconds of the events of each line; event i of a line is called k<i>."""
    text = f'planes {{ name: "{name}"\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line.replace("_", " #")}" timestamp_ns: 5000\n'
        for i, (start, end) in enumerate(events):
            text += f"events {{ metadata_id: {i} offset_ps: {start}000000 duration_ps: {end - start}000000 }}\n"
        text += "}\n"
    most = max(map(len, lines.values()))
    return (
        text + "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "k{i}" }} }}\n' for i in range(most)) + "}\n"
    )


def profile(*planes: str) -> ProfileData:
    return ProfileData.from_text_proto("".join(planes))


def test_a_device_is_idle_while_none_of_its_streams_runs_anything():
    gpu = plane("/device:GPU:0", Stream_1=[(0, 10), (30, 40), (90, 100)], Stream_2=[(5, 20), (32, 36)])
    host = plane("/host:CPU", Stream_1=[(0, 1000)])
    assert idle_share([profile(gpu, host)]) == pytest.approx((10 + 50) / 100)


def test_a_long_event_hides_the_gaps_between_shorter_ones():
    gpu = plane("/device:GPU:0", Stream_1=[(0, 80), (90, 100)], Stream_2=[(10, 20), (50, 60)])
    assert idle_share([profile(gpu)]) == pytest.approx(10 / 100)


def test_other_lines_of_a_device_do_not_count_as_work():
    gpu = plane("/device:GPU:0", Stream_1=[(0, 10), (30, 40)], Steps_1=[(0, 40)])
    assert idle_share([profile(gpu)]) == pytest.approx(20 / 40)
    assert kernel_times([profile(gpu)]) == {"k0": (pytest.approx(0.01), 1), "k1": (pytest.approx(0.01), 1)}


def test_several_devices_are_averaged():
    busy = plane("/device:GPU:0", Stream_1=[(0, 50), (50, 100)])
    idle = plane("/device:GPU:1", Stream_1=[(0, 10), (90, 100)])
    assert idle_share([profile(busy, idle)]) == pytest.approx(0.4)
    assert idle_share([profile(busy), profile(idle)]) == pytest.approx(0.4)


def test_without_a_gpu_there_is_no_figure():
    assert idle_share([profile(plane("/host:CPU", Stream_1=[(0, 10)]))]) is None
    assert idle_share([]) is None


def test_a_trace_is_found_where_the_profiler_left_it(tmp_path):
    text = plane("/device:GPU:0", Stream_1=[(0, 10), (30, 40)])
    directory = tmp_path / "plugins" / "profile" / "2026_01_01"
    directory.mkdir(parents=True)
    (directory / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    assert idle_share(read_trace(tmp_path)) == pytest.approx(0.5)
