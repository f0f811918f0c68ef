import pytest

from gtrace.errors import UsageError
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule


def fits(text, steps):
    """The steps at which something that is asked at every step is due."""
    schedule, last, found = RefitSchedule.parse(text), -1, []
    for step in range(steps):
        if schedule.latest(step) > last:
            last = schedule.latest(step)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("every", list(range(30))),
        ("once", [0]),
        ("2, 5,11", [2, 5, 11]),
        ("0,4,+10", [0, 4, 14, 24]),
        ("3,+1", list(range(3, 30))),
    ],
)
def test_due_steps(text, expected):
    assert fits(text, 30) == expected


def test_the_default_fits_at_the_start_and_thins_out():
    found = fits(DEFAULT_REFIT, 4000)
    assert found[0] == 0
    assert found[-3:] == [1500, 2500, 3500]


@pytest.mark.parametrize("text", ["every", "once", "0,100,2000,+10000", "pooled", "pooled:every", "pooled: 3,+40"])
def test_text_comes_back(text):
    schedule = RefitSchedule.parse(text)
    assert RefitSchedule.parse(str(schedule)) == schedule


def test_pooled_steps():
    assert RefitSchedule.parse(DEFAULT_REFIT) == RefitSchedule((0, 10, 20, 50, 100, 200, 500), 1000, pooled=True)
    assert RefitSchedule.parse("pooled:once") == RefitSchedule((0,), pooled=True)
    schedule = RefitSchedule.parse("pooled:5,40,+100")
    watched = [step for step in range(250) if schedule.watches(step)]
    assert watched == [*range(6), *range(31, 41), *range(131, 141), *range(231, 241)]
    assert not any(RefitSchedule.parse("5,40").watches(step) for step in range(60))


@pytest.mark.parametrize(
    "text", ["", "never", "-1", "1.5", "+10", "0,+0", "0,+10,20", "0,,1", "1,0", "3,3", "pooled:", "x:0"]
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(UsageError, match="refit: "):
        RefitSchedule.parse(text)
