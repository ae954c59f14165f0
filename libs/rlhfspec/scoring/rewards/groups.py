"""Collects samples until a prompt's group is complete, for sources that want all of it."""

from __future__ import annotations

from rlhfspec.records import Sample


class Groups:
    """Keeps the groups of two steps: a sample that is delivered again finds its group still there.

    Example:
        >>> groups = Groups(samples_per_prompt=2)
        >>> groups.add(sample("sums/1/0/1"))                                  # doctest: +SKIP
        []
        >>> [member.id for member in groups.add(sample("sums/1/0/0"))]        # doctest: +SKIP
        ['sums/1/0/0', 'sums/1/0/1']
    """

    def __init__(self, samples_per_prompt: int) -> None:
        self._samples_per_prompt = samples_per_prompt
        self._groups: dict[str, dict[str, Sample]] = {}
        self._oldest_step = 0

    def add(self, sample: Sample) -> list[Sample]:
        """The whole group, sorted, when it is complete with this sample (or was before); else nothing yet."""
        self._forget_before(sample.step - 1)
        group = self._groups.setdefault(sample.group_id, {})
        group[sample.id] = sample
        if len(group) < self._samples_per_prompt:
            return []
        return sorted(group.values(), key=lambda member: member.sort_key)

    def waiting(self) -> list[str]:
        """Groups that are not complete: what a stalled stage waits for."""
        return sorted(name for name, group in self._groups.items() if len(group) < self._samples_per_prompt)

    def _forget_before(self, step: int) -> None:
        if step > self._oldest_step:
            self._oldest_step = step
            old = [name for name, group in self._groups.items() if next(iter(group.values())).step < step]
            for name in old:
                del self._groups[name]
