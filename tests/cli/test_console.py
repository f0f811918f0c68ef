"""What a terminal shows of long work."""

from gtrace.cli import console


def test_the_time_left_does_not_count_what_came_before_the_first_values(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 161.0, 222.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.work_progress("sweep", quiet=False) as progress:
        for done in (1000, 62_000, 123_000):
            progress(done, 184_000)
    first, second, third = capsys.readouterr().err.splitlines()
    # A minute and forty seconds were spent on compiling.
    assert first == "gtrace: sweep: 1 k of 184 k values"
    assert second == "gtrace: sweep: 62 k of 184 k values, 1 kvalues/s, 122 s left"
    assert third == "gtrace: sweep: 123 k of 184 k values, 1 kvalues/s, 61 s left"
