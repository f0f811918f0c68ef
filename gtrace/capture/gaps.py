"""Steps that a capture was to record and did not."""

from __future__ import annotations


class Gaps:
    """Steps by optimizer, in runs of consecutive ones. One thread adds."""

    def __init__(self) -> None:
        self._runs: dict[int, list[list[int]]] = {}
        #: Steps so far, of all optimizers.
        self.count = 0

    def add(self, stream: int, step: int) -> None:
        """Note a step; those of one optimizer rise. The second time, for another kind of gradient, changes nothing."""
        runs = self._runs.setdefault(stream, [])
        if runs and runs[-1][1] == step:
            return
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
        self.count += 1

    def describe(self) -> dict[str, str]:
        """optimizer -> its steps, written like the option ``--steps``.

        >>> gaps = Gaps()
        >>> for step in (3, 4, 5, 9):
        ...     gaps.add(0, step)
        >>> gaps.describe()
        {'0': '3-5,9'}
        """
        return {
            str(stream): ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
            for stream, runs in sorted(self._runs.items())
        }
