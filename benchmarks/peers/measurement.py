"""The rounds: every system in turn, one alive at a time, the order turned round from one round to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.machine import BUSY_SHARE, busy_share
from benchmarks.peers.figures import Cell, is_hopeless, near_the_best, tokens_per_second
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import LORAMUX, Running, System, SystemFailed
from benchmarks.peers.workload import Load, draw_work

WARM_LOAD = Load(8, 2)
TRIAL_SHARE = 4
"""A trial is this much shorter than the first load, in prompt and answer."""

OWN_TURNS = 2
"""How often loramux does the work of a session, there and back. What adapters add to its base is less than a machine
drifts in the minutes between two cells; over there and back together, a steady drift meets all cells alike."""

PATIENCE_S = 120.0
"""How long a machine that has become busy is waited for."""


class MachineBusy(Exception):
    """Other processes run, so that a figure would be theirs as much as ours."""


@dataclass
class Measurement:
    """Seconds by cell, and what went wrong; filled by `run`.

    `samples` has what every system does once a session, and is what loramux is compared with peers by; `way_back` has
    its later turns.
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
    """By a system's label; it is left alone from then on."""
    busy_shares: list[float] = field(default_factory=list)
    """Of the machine before each session, when no system of ours ran."""

    @property
    def own_samples(self) -> dict[Cell, list[float]]:
        """All turns of loramux: what it is compared with itself by."""
        own = {cell: seconds for cell, seconds in self.samples.items() if cell.system.name == LORAMUX}
        return {cell: [*seconds, *self.way_back.get(cell, ())] for cell, seconds in own.items()}

    def run(self, save: Callable[[], None]) -> None:
        """Raises SystemFailed when loramux fails, and MachineBusy; `save` is called after each session."""
        with Progress(console=self.console, transient=True, refresh_per_second=2) as progress:
            cells = self._after_trials(progress)
            for number in range(self.repeats):
                self._round(number, cells if number == 0 else self._still_open(cells), progress, save)

    def _after_trials(self, progress: Progress) -> list[Cell]:
        """All cells, without the dtypes in which a peer is far behind itself."""
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
        """Those of loramux, and of the peers those that may yet be the best: running the rest again decides nothing."""
        speeds = tokens_per_second(self.samples, self.files.num_adapters)
        near = near_the_best({cell: speed for cell, speed in speeds.items() if cell.system.name != LORAMUX})
        return [cell for cell in cells if cell.system.name == LORAMUX or cell in near]

    def _round(self, number: int, cells: Sequence[Cell], progress: Progress, save: Callable[[], None]) -> None:
        # A drift of the machine meets those first that it met last before.
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
        """Open the one system of these cells, warm it up, time each cell once a turn, and close it."""
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
                        # No turn repeats the prompts of another.
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
                raise MachineBusy(f"the machine is {share:.0%} busy with something else: the run ends here")
