"""Advice: the predicted time to the same loss of everything a user could choose, and a recommendation in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.predict import changes, paste
from gossamer.predict.choices import Choice, baselines, coarser, gossip, local_steps, rarer, refined
from gossamer.predict.cluster import ClusterSpec
from gossamer.predict.evidence import QualityFactor, allreduce_factor, averages_factor, quality_factor
from gossamer.predict.methods import parse
from gossamer.predict.predict import derived
from gossamer.predict.probed import unknown
from gossamer.predict.quality import Quality
from gossamer.predict.simulator import Result
from gossamer.predict.volume import averaged_bytes, gossip_bytes, rounds_to_1e3

STEPS, MANY_WORKERS = 120, 64  # with more workers than this, half the steps give a steady mean
WORTH_IT = 0.10  # a smaller gain in the time to the same loss is not worth leaving DDP for
FEWEST_EXCHANGES = 0.5  # per step; an asynchronous method with fewer is charged the time until it has them
# beyond the model, in parameter sizes
MEMORY = {"ddp": 1.0, "local": 2.0, "awc": 1.0, "atc": 1.0, "ad-psgd": 4.0, "a2cid2": 4.0}
WAITS = 0.02  # a choice that waits less than this gains nothing from other settings
REFINED = 6  # best choices whose wires, frequency, staleness and buckets are tried
RECORDED = (None, "aer", "one-peer-exponential", "complete")  # topologies with records of quality
EARNS = 0.02  # how much better other settings must be before they are preferred to the defaults
SLOW_CODE = 1.0  # GB of parameters per second: slower than encoding or decoding on one core of any recent processor
CLOSE = 0.02  # rows of which no order is claimed
ALIKE = 0.05  # scores among which the risk decides what is recommended
Predict = Callable[[Choice], Result]
Noise = dict[str, Quality]  # by kind of gradients, "worker" or "node"
Verdict = Literal["gossip", "keep DDP", "gain is jitter only"]


@dataclass(frozen=True)
class Row:
    """One choice: what it costs per step, what its model is worth, and the score, the time to the same loss.

    `saving` is against the best all-reduce, `saving_fp32` against DDP in fp32. `quality` is the number of steps to the
    loss of all-reduce, relative to all-reduce; `score` = step time x quality (x the exchanges that an asynchronous
    method lacks). `seconds_to_1e3`: until differences between workers shrink to a thousandth. `bytes_between`: what a
    node sends to other nodes per step, the mean over nodes and steps. `memory`: beyond the model, in parameter sizes.
    """

    choice: Choice
    step_time: float
    saving: float
    saving_fp32: float
    waiting: float
    exchanges_per_step: float
    quality: QualityFactor
    score: float
    seconds_to_1e3: float | None
    bytes_between: float
    memory: float

    @property
    def method(self) -> str:
        return str(self.choice.method)

    @property
    def worst_score(self) -> float:
        """The score if the quality is at the bad end of its uncertainty."""
        return self.score / self.quality.value * self.quality.high

    def to_dict(self) -> dict[str, Any]:
        c = self.choice
        return {
            "method": self.method,
            "algorithm": c.algorithm,
            "gradients": c.gradients,
            "every": c.every,
            "staleness": c.staleness,
            "fragments": c.fragments,
            "outer": c.outer,
            "options": c.options,
            "step_time": self.step_time,
            "saving": self.saving,
            "saving_fp32": self.saving_fp32,
            "waiting": self.waiting,
            "exchanges_per_step": self.exchanges_per_step,
            "quality": asdict(self.quality),
            "score": self.score,
            "seconds_to_1e3": self.seconds_to_1e3,
            "bytes_between": self.bytes_between,
            "memory": self.memory,
        }


@dataclass(frozen=True)
class Advice:
    """A recommendation, all choices by score, what would change the answer, and what is not known."""

    recommendation: dict[str, Any]
    table: list[Row]
    sensitivity: list[dict[str, Any]]
    cluster: dict[str, float]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "recommendation": self.recommendation,
            "cluster": self.cluster,
            "notes": self.notes,
            "sensitivity": self.sensitivity,
            "table": [r.to_dict() for r in self.table],
        }

    def shortest(self) -> list[Row]:
        """Return the best row of each method and kind of gradients, by score."""
        seen: set[tuple[str, str, str]] = set()
        kept = []
        for r in self.table:
            key = (r.method, r.choice.algorithm, r.choice.gradients)
            if key not in seen:
                seen.add(key)
                kept.append(r)
        return kept


def advise(
    cluster: ClusterSpec,
    *,
    steps: int | None = None,
    seed: int = 0,
    worth: float = WORTH_IT,
    noise: Noise | None = None,
) -> Advice:
    """Predict everything on this cluster and recommend one choice.

    Args:
        worth: The gain in the time to the same loss from which leaving DDP is recommended.
        noise: What the noise scale of the user's own run predicts, by kind of gradients.
    """
    layout = cluster.layout
    if layout.n == 1:
        raise InputError("the cluster has one worker, so there is nothing to average; train without decentralize()")
    length = steps if steps is not None else STEPS if layout.n <= MANY_WORKERS else STEPS // 2
    results: dict[Choice, Result] = {}

    def run(choice: Choice) -> Result:
        twin = choice
        if choice.algorithm == "a2cid2":  # it sends at the same times as AD-PSGD
            twin = replace(choice, method=parse(str(choice.method).replace("a2cid2", "ad-psgd")), algorithm="ad-psgd")
        if twin not in results:
            results[twin] = twin.predict(cluster, length, seed)
        return results[twin]

    rows = _ranked(cluster, run, noise or {})
    facts = derived(cluster)
    best = _best(cluster, rows, worth)
    recommendation = _recommend(cluster, rows, best, facts, worth, length, seed)
    rivals = [r.choice for r in rows if r.choice.gossips][:2]
    rivals += [] if best.choice in rivals else [best.choice]

    def judge(changed: ClusterSpec, choice: Choice) -> tuple[float, float]:
        made = row_of(changed, choice, choice.predict(changed, length, seed), 1.0, 1.0, noise or {})
        return made.step_time, made.score

    sensitivity = changes.cases(cluster, rivals, judge, worth)
    return Advice(
        recommendation, rows, sensitivity, facts, unknown(cluster) + _elsewhere(rows, recommendation["score"])
    )


def _ranked(cluster: ClusterSpec, run: Predict, noise: Noise) -> list[Row]:
    """Predict every choice, then the variants of the best ones, and sort all by score."""
    ddp = [(c, run(c)) for c in baselines(cluster)]
    fastest = min(r.step_time for _, r in ddp)
    plain = min(r.step_time for c, r in ddp if c.method.wire == "fp32")

    def row(choice: Choice) -> Row:
        return row_of(cluster, choice, run(choice), fastest, plain, noise)

    rows = sorted((row(c) for c in gossip(cluster)), key=rank)
    for gradients in ("worker", "node"):
        same = [r for r in rows if r.choice.gradients == gradients and r.choice.algorithm == "awc"]
        rows += [row(c) for r in same[:REFINED] for c in coarser(r.choice)]
    for variants in (partial(refined, cluster), rarer):
        for r in sorted(rows, key=rank)[:REFINED]:
            if run(r.choice).waiting > WAITS:
                rows += [row(c) for c in variants(r.choice)]
    others = [c for c, _ in ddp] + local_steps()
    return sorted([*rows, *map(row, others)], key=rank)


def rank(row: Row) -> float:
    """The score; settings other than the defaults, and what no record covers, have to earn their place."""
    extra = {k: v for k, v in row.choice.options.items() if k != "gradients"}
    method = row.choice.method
    unseen = (method.topology not in RECORDED) * EARNS / 4 + (method.wire != "fp32" or method.asynchronous) * EARNS
    return row.score * (1 + EARNS * bool(extra) + unseen)


def row_of(cluster: ClusterSpec, choice: Choice, result: Result, fastest: float, plain: float, noise: Noise) -> Row:
    seconds, starved = None, 1.0
    method = choice.method
    if choice.ddp:
        quality = allreduce_factor(method.wire)
        between = averaged_bytes(cluster, method.wire)
    elif choice.local:
        quality = averages_factor(method.name, choice.every, cluster.layout.n)
        between = averaged_bytes(cluster) / choice.every
    else:
        topology = choice.topology(cluster)
        rounds = rounds_to_1e3(method.topology or "", topology.layout)
        between = gossip_bytes(cluster, method, topology.layout, result.exchange_rate / choice.fragments)
        between += averaged_bytes(cluster) / choice.average_every if choice.average_every else 0.0
        # nodes must exchange with each other: exchanges inside them do not make up for those that slow links delay
        heard = max(min(result.exchange_rate, result.crossing), 1e-9)
        starved = max(1.0, FEWEST_EXCHANGES / heard) if method.asynchronous else 1.0
        apart = choice.fragments / max(1e-9, result.exchange_rate)
        quality = quality_factor(
            replicas=topology.n,
            rounds=rounds,
            topology=method.topology or "",
            algorithm=choice.algorithm,
            wire=method.wire,
            apart=apart,
            settings=choice.unusual,
            noise=noise.get(choice.gradients),
        )
        if choice.synchronous and rounds:
            seconds = rounds * apart * result.step_time
    return Row(
        choice,
        result.step_time,
        1 - result.step_time / fastest,
        1 - result.step_time / plain,
        result.waiting,
        result.exchange_rate,
        quality,
        result.step_time * quality.value * starved,
        seconds,
        between,
        MEMORY[choice.algorithm] + bool(choice.average_every) + bool(choice.staleness) + 3 * choice.outer,
    )


def _best(cluster: ClusterSpec, rows: list[Row], worth: float) -> Row:
    """The gossip to recommend if any: it gains also at the bad end of its quality, and of those whose scores are alike
    it is the one that loses least there."""
    known = _recommendable(cluster, rows)
    rival = min(r.score for r in known if r.choice.ddp)
    own = [r for r in known if r.choice.gossips]
    safe = [r for r in own if r.worst_score < rival and r.score <= (1 - worth) * rival]
    alike = [r for r in safe if r.score <= (1 + ALIKE) * safe[0].score]
    return min(alike, key=lambda r: rank(r) * r.worst_score / r.score, default=own[0])


def _recommendable(cluster: ClusterSpec, rows: list[Row]) -> list[Row]:
    """The rows that may be recommended. Without costs, a coarser wire must gain even if encoding and decoding run at
    SLOW_CODE and overlap with nothing."""
    if cluster.costs is not None:
        return rows
    coding = 2 * cluster.model.bytes / 1e9 / SLOW_CODE
    plain = {ddp: min(r.score for r in rows if r.choice.ddp == ddp and _is_plain(r)) for ddp in (True, False)}

    def gains(row: Row) -> bool:
        each = coding / (row.choice.every * row.choice.fragments)
        return row.score * (1 + each / row.step_time) < plain[row.choice.ddp]

    return [r for r in rows if _is_plain(r) or gains(r)]


def _is_plain(row: Row) -> bool:
    return row.choice.method.wire == "fp32" and not row.choice.local


def _recommend(
    cluster: ClusterSpec, rows: list[Row], best: Row, facts: dict[str, float], worth: float, steps: int, seed: int
) -> dict[str, Any]:
    known = [r for r in _recommendable(cluster, rows) if r.choice.ddp]
    rival = min(known, key=rank)
    plain = min((r for r in known if r.choice.method.wire == "fp32"), key=rank)
    gain, sure = 1 - best.score / rival.score, 1 - best.worst_score / rival.score
    exposed = max(0.0, 1 - facts["compute_seconds"] / rival.step_time)
    where = (
        f"an all-reduce takes {facts['gamma']:.2g} times the compute, and of the {rival.step_time * 1e3:.3g} ms per "
        f"step of {rival.method} {exposed:.0%} are not compute"
    )
    verdict: Verdict = "gossip"
    calm = 1.0
    if gain >= worth and cluster.compute.relative_variance > 0:
        still = cluster.changed(compute={"jitter": "none", "samples": None, "per_worker": None})
        time = best.choice.predict(still, steps, seed).step_time * best.score / best.step_time
        calm = 1 - time / rival.choice.predict(still, steps, seed).step_time
        verdict = "gain is jitter only" if calm < worth else "gossip"
    if gain < worth or sure <= 0:
        verdict = "keep DDP"
    compared = (
        f"{best.method}{_options(best)} takes {best.step_time * 1e3:.3g} ms per step, {_less(best.saving_fp32)} than "
        f"DDP in fp32 and {_less(1 - best.step_time / rival.step_time)} than {rival.method}; it {best.quality.words}"
    )
    if verdict == "gossip":
        why = f"{where}; {compared}"
    elif verdict == "gain is jitter only":
        measured = cluster.compute.source == "measured"
        kind = "measured" if measured else "described, not measured"
        why = (
            f"gain is jitter only: without the {kind} jitter of the compute times gossip would gain {calm:.0%}, with "
            f"it {gain:.0%}; {where}; {compared}"
        )
    else:
        why = f"keep DDP: {_reason(facts, gain, sure, worth, best, rival)}; {where}; {compared}"
    # bf16 gradients have to be worth it, too
    kept = rival if rival.step_time <= (1 - worth) * plain.step_time else plain
    chosen = best if verdict == "gossip" or (verdict != "keep DDP" and cluster.compute.source == "measured") else kept
    ties = [r.method + _options(r) for r in rows if r is not chosen and abs(r.score / chosen.score - 1) < CLOSE]
    return {
        "verdict": verdict,
        "method": chosen.method,
        "options": chosen.choice.options,
        "saving": 1 - chosen.step_time / plain.step_time,
        "gain": 1 - chosen.score / rival.score,
        "gain_range": [1 - chosen.worst_score / rival.score, 1 - chosen.score / chosen.quality.value / rival.score],
        "score": chosen.score,
        "best_gossip": best.method,
        "best_gossip_gain": gain,
        "best_allreduce": rival.method,
        "why": why,
        "lines": paste.lines(chosen.choice),
        "rate": paste.advice_on_rate(chosen.choice),
        "quality": chosen.quality.words,
        "as_good_within_2_percent": ties[:4],
    }


def _elsewhere(rows: list[Row], score: float) -> list[str]:
    """Say that LocalSGD or DiLoCo, which are not recommended, has a better score than the recommended choice."""
    best = min((r for r in rows if r.choice.local), key=lambda r: r.score)
    if best.score >= score:
        return []
    return [
        f"{best.method}{_options(best)} of torchft, which is not recommended here, is predicted to take "
        f"{1 - best.score / score:.0%} less time to the same loss ({best.quality.evidence}); compare it with gossamer "
        "compare before you choose"
    ]


def _reason(facts: dict[str, float], gain: float, sure: float, worth: float, best: Row, rival: Row) -> str:
    if gain >= worth:
        return (
            f"gossip may gain {gain:.0%} in the time to the same loss, but with the quality at the bad end of the "
            f"records it would lose {-sure:.0%}"
        )
    if best.step_time < (1 - worth) * rival.step_time:
        return (
            f"the shorter step is used up by the steps that gossip needs more (gain {gain:.0%}, threshold {worth:.0%})"
        )
    if facts["gamma"] < 2 / 3:
        return f"compute hides the all-reduce, so gossip gains {gain:.0%} (threshold {worth:.0%})"
    return f"gossip has the same limit here and gains {gain:.0%} (threshold {worth:.0%})"


def _less(saving: float) -> str:
    return f"{saving:.0%} less" if saving >= 0 else f"{-saving:.0%} more"


def _options(row: Row) -> str:
    """The settings besides the method, in parentheses."""
    said = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.choice.options.items())
    return f" ({said})" if said else ""
