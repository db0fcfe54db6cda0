"""A live request as whoever can submit it again keeps it: Supervisor for the next engine, FleetClient for another one.

The rule: a completion is a function of its request, so it goes on as its prompt and its tokens so far, with its part in
the deaths until now (engine/blame.py). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptserve.engine.blame import NO_BLAME, Blame
from gptserve.engine.pooling import AnyRequest
from gptserve.engine.process.client import OutputSink
from gptserve.engine.request import TokenOutput


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended, and what is needed to submit it again."""

    request: AnyRequest
    stream: OutputSink
    token_ids: list[int] = field(default_factory=list)
    num_scored_tokens: int = 0
    blame: Blame = NO_BLAME

    def take(self, output: TokenOutput) -> bool:
        """Note an output; return whether it shows that the engine computes."""
        self.token_ids += output.token_ids
        self.num_scored_tokens += len(output.prompt_logprobs or ())
        computes = bool(output.token_ids) or output.vector is not None
        if computes:
            self.blame = self.blame.step_gave_token()
        return computes

    def resumed(self) -> AnyRequest:
        """Return the request that goes on after the tokens so far."""
        return self.request.resumed(self.token_ids, self.num_scored_tokens, self.blame)
