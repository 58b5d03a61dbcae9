"""Beam search over anything that gives the next token's log-probabilities."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class NextToken(Protocol):
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a row; rows × vocabulary log-probabilities of the next."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order."""


@dataclass
class _Best:
    score: float = -float("inf")
    tokens: list[int] = field(default_factory=list)


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
    """For each sentence the sequence with the best log P(y) / lp(y), lp(y) = ((5 + |y|) / 6)^length_penalty.

    The penalty is that of Wu et al. 2016 ("Google's neural machine translation system", equation 14) and |y| counts
    the end mark, which the result leaves out. The decoder starts with `sentences` × `beams` rows. A sentence is done
    when no unfinished hypothesis can still win: log P only falls and lp only grows, up to lp(longest). A sentence
    that finds no end within `longest` tokens gives its best unfinished hypothesis.
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
        ended, ended_in = totals[:, :, end].max(dim=1)
        for at, (score, beam) in enumerate(zip((ended / penalty).tolist(), ended_in.tolist(), strict=True)):
            if score > best[alive[at]].score:
                best[alive[at]] = _Best(score, tokens[at * beams + beam, 1:].tolist())
        totals[:, :, end] = -float("inf")
        scores, places = totals.flatten(1).topk(beams, dim=1)
        first = torch.arange(len(alive))[:, None] * beams
        rows = (first + places // vocabulary).flatten()
        tokens = torch.cat((tokens[rows], (places % vocabulary).view(-1, 1)), dim=1)
        hopes = (scores[:, 0] / bound).tolist()
        still = [at for at, sentence in enumerate(alive) if hopes[at] > best[sentence].score]
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
