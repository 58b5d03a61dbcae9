"""Beam search over a decoder that gives the log-probabilities of the next token."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class NextToken(Protocol):
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token per row; returns rows × vocabulary log-probabilities of the next token."""

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""


@dataclass
class _Best:
    score: float = -float("inf")
    tokens: list[int] = field(default_factory=list)
    ended: int = 0


def beam_search(
    decoder: NextToken,
    sentences: int,
    *,
    start: int,
    end: int,
    beams: int,
    longest: int,
    length_penalty: float = 0.6,
) -> list[list[int]]:
    """Return for each sentence the sequence with the best log P(y) / lp(y), lp(y) = ((5 + |y|) / 6)^length_penalty.

    The penalty is that of Wu et al. 2016 ("Google's neural machine translation system", equation 14) and |y| counts
    the end token, which the result leaves out. The decoder starts with `sentences` × `beams` rows. A hypothesis may end
    only where the end token is among the `beams` best continuations of its sentence; otherwise a short, unlikely
    sentence could beat every good long one. A sentence is done after `beams` ends, or when no open hypothesis can still
    win: log P only falls and lp only grows, up to lp(longest). A sentence without an end within `longest` tokens gives
    its best open hypothesis. One beam is greedy search.
    """
    best = [_Best() for _ in range(sentences)]
    alive = list(range(sentences))
    tokens = torch.full((sentences * beams, 1), start)
    # All hypotheses of a sentence are equal at the start: only the first may be extended.
    scores = torch.full((sentences, beams), -float("inf"))
    scores[:, 0] = 0.0
    bound = ((5 + longest) / 6) ** length_penalty
    for length in range(1, longest + 1):
        next_scores = decoder.step(tokens[:, -1]).view(len(alive), beams, -1)
        vocabulary = next_scores.shape[-1]
        totals = scores[:, :, None] + next_scores
        penalty = ((5 + length) / 6) ** length_penalty
        top, places = totals.flatten(1).topk(min(2 * beams, beams * vocabulary), dim=1)
        ends = places % vocabulary == end
        for at, rank in ends[:, :beams].nonzero().tolist():
            hypothesis = best[alive[at]]
            hypothesis.ended += 1
            score = top[at, rank].item() / penalty
            if score > hypothesis.score:
                row = at * beams + int(places[at, rank]) // vocabulary
                hypothesis.score, hypothesis.tokens = score, tokens[row, 1:].tolist()
        # At most one candidate per hypothesis ends, so twice as many candidates leave enough that continue.
        going_on = ends.int().argsort(dim=1, stable=True)[:, :beams]
        scores, places = top.gather(1, going_on), places.gather(1, going_on)
        first = torch.arange(len(alive))[:, None] * beams
        rows = (first + places // vocabulary).flatten()
        tokens = torch.cat((tokens[rows], (places % vocabulary).view(-1, 1)), dim=1)
        hopes = (scores[:, 0] / bound).tolist()
        still = [at for at, s in enumerate(alive) if best[s].ended < beams and hopes[at] > best[s].score]
        if length == longest:
            for at in still:
                if not math.isfinite(best[alive[at]].score):
                    best[alive[at]].tokens = tokens[at * beams, 1:].tolist()
            break
        if not still:
            break
        kept = (torch.tensor(still)[:, None] * beams + torch.arange(beams)).flatten()
        decoder.keep(rows[kept])
        tokens, scores = tokens[kept], scores[still]
        alive = [alive[at] for at in still]
    return [found.tokens for found in best]
