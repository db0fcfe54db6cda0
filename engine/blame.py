"""Decides which request is to blame when a step raises or an engine dies.

Scheduler uses it for the sequences of a step, Supervisor for the requests of an engine. It knows neither. Torch-free.

| state     | which request is in it             | a step with it raises | the engine dies with it   | CLEARING_STEPS |
|-----------|------------------------------------|-----------------------|---------------------------|----------------|
| clean     | was in fewer than 2 failures       | one failure more;     | one failure more;         | clean, with 0  |
|           |                                    | suspect from 2 on     | suspect from 2 on         | failures       |
| suspect   | was in 2 failures; waits meanwhile | -                     | -                         | -              |
| on trial  | the first suspect in order of      | convicted             | stays on trial; convicted | clean, with 0  |
|           | service, computed alone            |                       | the second time           | failures       |
| convicted | ends with FinishReason.ERROR       | -                     | -                         | -              |

A dash: the request is not computed in that state. A failure is a step that raised or an engine that died, by a signal,
an exception or a hang. When an engine dies, nobody knows which requests held its running slots. Supervisor counts the
first max_num_seqs in order of service. While there is a suspect, only the one on trial is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SUSPICIOUS_FAILURES = 2  # the first failure is probably no request's fault; the second may be
CLEARING_STEPS = 2  # steps that give a request a token and clear it: one computes its known tokens, one decodes
DEATHS_ON_TRIAL = 2  # tolerate one more death, so that an external kill is not blamed on a request
MAX_CONVICTIONS_IN_A_ROW = 5
"""After this many convictions without a token between them, the engine itself is at fault, and Supervisor gives up.

Fewer would not do: a client that retries sends the same fatal request three times. By then 12 engines have died: 4 for
the first conviction, 2 for each other.
"""


@dataclass(frozen=True, slots=True)
class Blame:
    """One request's part in failures since it was last cleared. num_clean_steps counts only steps of one engine."""

    num_failures: int = 0
    num_deaths_on_trial: int = 0
    num_clean_steps: int = 0
    is_convicted: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether the request must be computed alone."""
        return self.num_failures >= SUSPICIOUS_FAILURES

    def step_raised(self, *, alone: bool) -> Blame:
        """Return the blame after a step with this request raised; `alone`: it was the only one."""
        is_convicted = alone and self.is_suspect
        return Blame(self.num_failures + 1, self.num_deaths_on_trial, is_convicted=is_convicted)

    def engine_died(self, *, on_trial: bool) -> Blame:
        """Return the blame after an engine died that may have computed this request."""
        num_deaths = self.num_deaths_on_trial + on_trial
        return Blame(self.num_failures + 1, num_deaths, is_convicted=num_deaths >= DEATHS_ON_TRIAL)

    def engine_died_elsewhere(self) -> Blame:
        """Return the blame after an engine died that did not compute this request."""
        return replace(self, num_clean_steps=0)

    def step_gave_token(self) -> Blame:
        """Return the blame after a step that gave this request a token."""
        if self.num_failures == 0:
            return self
        num_clean_steps = self.num_clean_steps + 1
        return Blame() if num_clean_steps >= CLEARING_STEPS else replace(self, num_clean_steps=num_clean_steps)


NO_BLAME = Blame()
