"""Who may use one of a few workers next: owners take turns, so that none waits for all that another has asked.

`completions/planning.py` asks. Knows neither workers nor what they do.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

Owner = str | None


class Turns:
    """At most num_slots calls at once, of one owner at most `share()`. Those of an owner come in their order.

    A free slot goes to the owner that holds the fewest, among these to the one whose last turn is longest ago.
    Invariant: no slot is free while an owner waits that holds less than its share.
    """

    def __init__(self, num_slots: int, share: Callable[[], int]) -> None:
        self._num_free = num_slots
        self._share = share
        self._num_held = Counter[Owner]()
        self._waiting: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, owner: Owner) -> None:
        """Return when it is the turn of this call. A task that is cancelled waits no more and holds nothing."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was granted in the same moment
                self.give_back(owner)
            else:
                self._forget_cancelled(owner)
            raise

    def give_back(self, owner: Owner) -> None:
        """Give back what `take` got."""
        self._num_free += 1
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        self._grant()

    def _grant(self) -> None:
        share = self._share()
        for owner in list(self._waiting):  # of those cancelled just now the tasks have not run yet
            self._forget_cancelled(owner)
        while self._num_free:
            entitled = [owner for owner in self._waiting if self._num_held[owner] < share]
            if not entitled:
                return
            owner = min(entitled, key=self._num_held.__getitem__)
            self._waiting[owner].popleft().set_result(None)
            self._waiting.move_to_end(owner)
            self._forget_cancelled(owner)
            self._num_held[owner] += 1
            self._num_free -= 1

    def _forget_cancelled(self, owner: Owner) -> None:
        """Forget cancelled turns of an owner, and the owner itself if no other waits."""
        waiting = [turn for turn in self._waiting.get(owner, ()) if not turn.cancelled()]
        if waiting:
            self._waiting[owner] = deque(waiting)
        else:
            self._waiting.pop(owner, None)
