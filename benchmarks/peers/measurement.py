"""Runs the rounds: one system at a time, in an order that is reversed from one round to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.answers import RunFailed
from benchmarks.machine import BUSY_SHARE, busy_share
from benchmarks.peers.figures import Cell, is_hopeless, near_the_best, tokens_per_second
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import LORAMUX, Running, System, SystemFailed
from benchmarks.peers.workload import Load, draw_work

WARM_LOAD = Load(8, 2)
TRIAL_SHARE = 4
"""Factor by which a trial's prompts and answers are shorter than the first load's."""

OWN_TURNS = 2
"""Number of times that loramux runs the cells of a session: forwards, then backwards.

The adapters' overhead is smaller than the drift in a machine's speed during the minutes between two cells. Over both
directions, a steady drift cancels out.
"""

PATIENCE_S = 120.0
"""Longest wait for a busy machine to become idle, in seconds."""


class MachineBusy(RunFailed):
    """Other processes keep the machine busy, so figures would be distorted."""


@dataclass
class Measurement:
    """Seconds by cell, and failures. `run` fills both.

    `samples` contains every system's first turn in each session, for comparing loramux with its peers. `way_back`
    contains loramux's later turns.
    """

    files: ModelFiles
    systems: Sequence[System]
    loads: Sequence[Load]
    repeats: int
    is_busy_allowed: bool
    console: Console
    look: Callable[[float], float] = busy_share
    samples: dict[Cell, list[float]] = field(default_factory=dict)
    way_back: dict[Cell, list[float]] = field(default_factory=dict)
    trials: dict[Cell, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons for failures, by system label, or by peer if its check failed. Failed systems are not run again."""
    busy_shares: list[float] = field(default_factory=list)
    """Busy share of the machine before each session, while no system was running."""

    @property
    def own_samples(self) -> dict[Cell, list[float]]:
        """All of loramux's turns, for computing overheads."""
        own = {cell: seconds for cell, seconds in self.samples.items() if cell.system.name == LORAMUX}
        return {cell: [*seconds, *self.way_back.get(cell, ())] for cell, seconds in own.items()}

    def run(self, save: Callable[[], None]) -> None:
        """Run all rounds, and call `save` after each session. Raises MachineBusy, or SystemFailed if loramux fails."""
        with Progress(console=self.console, transient=True, refresh_per_second=2) as progress:
            cells = self._after_trials(progress)
            for number in range(self.repeats):
                self._round(number, cells if number == 0 else self._still_open(cells), progress, save)

    def _after_trials(self, progress: Progress) -> list[Cell]:
        """Run the trials, and return the cells to measure. These exclude settings that reached less than NEAR of the
        peer's best speed.
        """
        cells = [Cell(system, load, kind) for system in self.systems for load in self.loads for kind in system.kinds]
        names = [system.name for system in self.systems]
        tried = [system for system in self.systems if names.count(system.name) > 1]
        load = Load(max(1, self.loads[0].num_prompt // TRIAL_SHARE), max(1, self.loads[0].num_output // TRIAL_SHARE))
        task = progress.add_task("trials", total=sum(len(system.kinds) for system in tried))
        for system in tried:
            trials = [Cell(system, load, kind) for kind in system.kinds]
            self._session(trials, "trial", self.trials, progress, task)
        progress.remove_task(task)
        speeds = tokens_per_second(self.trials, self.files.num_adapters)
        worth: set[tuple[System, str]] = set()
        for name in set(names):
            own = {cell: speed for cell, speed in speeds.items() if cell.system.name == name}
            worth |= {(cell.system, cell.kind) for cell in near_the_best(own)}
        return [cell for cell in cells if cell.system not in tried or (cell.system, cell.kind) in worth]

    def _still_open(self, cells: Sequence[Cell]) -> list[Cell]:
        """All cells of loramux, and the cells of peers that could still be the best. The other cells cannot change any
        ratio.
        """
        speeds = tokens_per_second(self.samples, self.files.num_adapters)
        near = near_the_best({cell: speed for cell, speed in speeds.items() if cell.system.name != LORAMUX})
        return [cell for cell in cells if cell.system.name == LORAMUX or cell in near]

    def _round(self, number: int, cells: Sequence[Cell], progress: Progress, save: Callable[[], None]) -> None:
        # Reverse every second round, so that drift in the machine's speed evens out.
        ordered = list(cells) if number % 2 == 0 else list(reversed(cells))
        turns = {cell: OWN_TURNS if cell.system.name == LORAMUX else 1 for cell in ordered}
        task = progress.add_task(f"round {number + 1} of {self.repeats}", total=sum(turns.values()))
        for system in dict.fromkeys(cell.system for cell in ordered):
            own = [cell for cell in ordered if cell.system == system]
            self._session(own, f"round {number}", self.samples, progress, task, turns[own[0]])
            save()
        progress.remove_task(task)

    def _session(
        self,
        cells: Sequence[Cell],
        seed: str,
        into: dict[Cell, list[float]],
        progress: Progress,
        task: TaskID,
        num_turns: int = 1,
    ) -> None:
        """Open the system that all these cells share, warm it up, time each cell once per turn, and close it."""
        system = cells[0].system
        if system.label in self.failures:
            return
        self._require_idle()
        try:
            with system.open(self.files, False) as running:
                warm: set[str] = set()
                for turn in range(num_turns):
                    for cell in cells if turn % 2 == 0 else reversed(cells):
                        if cell.kind not in warm:
                            self._ask(running, Cell(system, WARM_LOAD, cell.kind), f"{seed} warm")
                            warm.add(cell.kind)
                        # Each turn has its own prompts.
                        seconds = self._ask(running, cell, seed if turn == 0 else f"{seed}, turn {turn + 1}")
                        (into if turn == 0 else self.way_back).setdefault(cell, []).append(seconds)
                        speed = self.files.num_adapters * cell.load.num_output / seconds
                        self.console.print(f"  {seed}: {system.label}, {cell.load}, {cell.kind}: {speed:.1f} tokens/s")
                        progress.advance(task)
                        if into is self.trials and is_hopeless(cell, into):
                            return
        except SystemFailed as error:
            if system.name == LORAMUX:
                raise
            self.failures[system.label] = str(error)
            self.console.print(f"[yellow]{error}[/yellow]", highlight=False)

    def _ask(self, running: Running, cell: Cell, seed: str) -> float:
        work = draw_work(cell.kind, cell.load, self.files.num_adapters, self.files.shape.vocab_size, seed)
        return running.answer(work, needs_token_ids=False).seconds

    def _require_idle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            share = self.look(1.0)
            if share <= BUSY_SHARE or self.is_busy_allowed:
                self.busy_shares.append(round(share, 3))
                return
            if time.monotonic() > deadline:
                raise MachineBusy(f"the machine is {share:.0%} busy with other programs: the run ends here")
