"""Looks at the members all the time: who reports a version in use must hold what the learner made of it."""

from __future__ import annotations

import threading
from pathlib import Path

from broker.connect import connect
from broker.errors import SlipstreamError
from broker.messages import Member, MemberState
from tests.drills.setting import Setting
from tests.drills.sync_learner import Learner
from tests.drills.sync_setting import Digests, held_file, read_held

PAUSE_S = 0.03


class Audit:
    """A thread with a client of its own.

    Attributes:
        checked: (process, version) pairs that were compared.
        states: what each process was shown as, one after the other.
    """

    def __init__(self, setting: Setting, learner: Learner) -> None:
        self._setting, self._learner = setting, learner
        self._broker = connect(setting.config(), setting.url)
        self._held: dict[int, dict[int, Digests]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._members: dict[int, Member] = {}
        self.checked: set[tuple[int, int]] = set()
        self.states: dict[int, list[str]] = {}
        self.wrong: list[str] = []
        self.looks = 0

    def start(self) -> None:
        """From here on it looks."""
        self._thread.start()

    def close(self) -> None:
        """No look after this."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def member(self, pid: int) -> Member | None:
        """The generator that runs in process ``pid``, as it last reported; None if it is not there or given up."""
        return self._members.get(pid)

    def holds(self, pid: int, version: int) -> bool:
        """Whether this process reports ``version`` or a later one in use."""
        member = self.member(pid)
        return member is not None and member.state is MemberState.SERVING and member.policy_version >= version

    def everything(self, members: dict[int, str]) -> None:
        """After the end: every version that any process ever put into use, and the versions that tokens came from.

        ``members``: the member's id of each process.
        """
        used: dict[str, set[int]] = {}
        for path in Path(self._setting.directory, "held").glob("*.jsonl"):
            pid, held = int(path.stem), read_held(path)
            used.setdefault(members[pid], set()).update(held)
            for version, digests in held.items():
                self._compare(pid, version, digests)
        for member_id, versions in self._learner.sampled.items():
            if unknown := versions - used.get(member_id, set()):
                self.wrong.append(f"{member_id} has tokens of versions that it never had: {sorted(unknown)}")

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                state = self._broker.state()
                for member in state.members:
                    if (seen := self.states.setdefault(member.pid, []))[-1:] != [member.state.value]:
                        seen.append(member.state.value)
                there = [m for m in state.members if m.role == "generator" and m.state is not MemberState.GONE]
                for member in there:
                    self._check(member)
                self._members = {member.pid: member for member in there}
                self.looks += 1
        except SlipstreamError as error:
            self.wrong.append(f"the audit has ended: {type(error).__name__}: {error}")
        self._broker.close()

    def _check(self, member: Member) -> None:
        pid, version = member.pid, member.policy_version
        if version < 0 or (pid, version) in self.checked:
            return
        if version not in self._held.get(pid, {}):
            self._held[pid] = read_held(held_file(self._setting, pid))
        self._compare(pid, version, self._held[pid].get(version))

    def _compare(self, pid: int, version: int, held: Digests | None) -> None:
        made = self._learner.digests.get(version)
        self.checked.add((pid, version))
        if held is None or made is None:
            who = "the learner never made" if made is None else "it never held"
            self.wrong.append(f"process {pid} reports version {version}, which {who}")
        elif dict(held) != dict(made):
            names = sorted(name for name in made.keys() | held.keys() if made.get(name) != held.get(name))
            self.wrong.append(f"process {pid} holds another version {version}: {', '.join(names[:5])} differ")
