"""GossipAdam and GossipAdamW: Adam whose second moment is that of all replicas together."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.errors import InputError
from gossamer.optim._base import AdamBase, Group, Members, State, slot
from gossamer.optim._update import Corrected, for_fused_adam, fused_adam, gossip_adam

_MEMORY = 0.1  # the share of its memory that q must hold before it corrects anything
_ULPS = 3  # units in the last place that two roundings cost at most
_MOSTLY_NOISE = 0.5  # the share of noise in q above which it does not tell the signal


class GossipAdam(AdamBase):
    """Adam with a noise-corrected second moment, for workers that average parameters instead of gradients.

    A replica's squared gradient is signal and noise, μ² + σ². All-reduce over κ replicas averages the gradients
    first, so that Adam sees μ² + σ²/κ there, and takes larger steps where the noise is large. GossipAdam tells
    signal from noise, and takes the steps that all-reduce would take, at the same learning rate:

        m ← β1 m + (1 − β1) g        v ← β2 v + (1 − β2) g²        m̂ = m / (1 − β1^t)        V = v / (1 − β2^t)
        x ← x − α m̂ / (sqrt(V − (1 − 1/κ) σ²) + ε)

    `decentralize` measures the share s of the signal between the workers, for every parameter, and calls
    `set_signal_shares`; then σ² = (1 − s) V, and the first steps, before a measurement, have σ² = 0. There β2 is
    1 − (1 − β2)/√κ: see Note [Why the second moment remembers longer]. Where nothing is
    measured (elastic and asynchronous jobs, a single process) the replica's own gradients tell:

        q ← β2 q + (1 − β2) m̂²       Q = q / (1 − β2^t)            σ² = clamp((V − Q) / (1 − c), 0, V)

    c = (1 − β1) / (1 + β1) is the share of the noise that is left in m̂ after many steps, so Q estimates μ² + c σ². See
    Note [Why c is constant].

    κ = `replicas` × `discount`. `decentralize` calls `set_replicas` with the number of replicas, which are workers,
    or nodes if gradients are averaged exactly inside a node; without `decentralize` there is 1 replica. Pass
    `replicas` to fix the number instead. `discount` > 1 discounts the noise further than all-reduce does, which makes
    a different optimizer than Adam, under all-reduce and in a single process too. Both can be set per group.

    κ = 1 is `torch.optim.Adam`, by torch's own functions and bit by bit. Where nothing is measured, so is
    `betas[0] = 0`, which leaves no momentum to tell signal from noise by. `foreach` and `fused` choose the
    implementation as in torch while κ = 1. Where the signal is measured they do as well, and tensors on CPU that are
    dense in memory take torch's fused kernel by default. Otherwise see Note [When native kernels run].

    amsgrad is refused.

    State of a parameter: `exp_avg`, `exp_avg_sq` and `step` as in torch's Adam, so checkpoints load in both
    directions, see Note [With which β2 v is normalized]; where nothing is measured also `signal_sq` (q), and
    `signal_since` (the value of `step` when q began).
    After a checkpoint of Adam was loaded, or κ was 1, q starts anew: the steps are Adam's until q holds a tenth of its
    memory, and then the correction grows with it (σ² times (1 − β2^t') / (1 − β2^t), t' being q's own count of steps).
    """

    # Note [Why c is constant]
    #     After t steps the share of noise in m̂ is not c but c_t = (1 − β1)(1 + β1^t) / ((1 + β1)(1 − β1^t)), which
    #     is 1 at the first step. So Q holds more noise than c says, and σ² is underestimated for about 1 / (1 − β2)
    #     steps. Dividing by 1 − (the running mean of c_t) removes that bias, needs one more number per parameter and a
    #     threshold for the first steps, and trains no better: benchmarks/records/optim/forms.md. With the constant,
    #     the first step is Adam's (Q = V) and the early steps err on the small side.

    # Note [Why the second moment remembers longer]
    #     Under all-reduce a parameter that few samples use, such as the embedding of a rare token, has a gradient in κ
    #     times as many steps as in one replica. The replica's v forgets the last such gradient before the next one
    #     comes, grows anew with every one, and so makes the step too small. The same number of gradients would need κ
    #     times the memory; √κ follows training faster. benchmarks/quality_causes.py compares it with Adam's memory.
    #     A v of less than 4 bytes per number keeps the group's β2: in bfloat16, increments below a part in 2^9 are
    #     rounded away, so with (1 − β2)/√κ = 2.5e-4 and gradients of one size v stops growing at a tenth of g².

    # Note [With which β2 v is normalized]
    #     V = v / (1 − β^t) needs the β that v was built with, and that changes: where the signal is measured it depends
    #     on κ, elsewhere it is the group's own β2. `_built_with` remembers it, and v is multiplied by
    #     (1 − new^t) / (1 − old^t) in the first step with another β, so that V is continuous. `state_dict()` holds v as
    #     torch's Adam has it, normalized with the group's β2, and beside the states what gives back the live v without
    #     a rounding: β and, for each number, by how many units in the last place the product divided again differs.

    _shares: Mapping[Tensor, float | None] = MappingProxyType({})  # of the signal, where it is measured
    _local: frozenset[Tensor] = frozenset()  # parameters that are not mixed

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        replicas: float | None = None,
        discount: float = 1.0,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "replicas": replicas,
            "discount": discount,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        self._replicas = 1.0
        self._built_with: dict[Tensor, float] = {}  # β of a parameter's v, where it is not the group's β2
        super().__init__(params, defaults)

    @property
    def replicas(self) -> float:
        """The number of replicas in the job, for the groups that do not fix their own."""
        return self._replicas

    def set_replicas(self, replicas: float) -> None:
        """Set the number of replicas in the job; `decentralize` and elastic jobs call this.

        Groups with a `replicas` of their own keep it. The number is not a part of `state_dict()`: a run that is
        resumed with another number of workers has another one.
        """
        _check_replicas(replicas)
        self._replicas = float(replicas)

    def set_local_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Set the parameters that are not mixed, which have 1 replica; `decentralize` calls this.

        Groups with a `replicas` of their own keep it. Like the number of replicas, this is not a part of
        `state_dict()`.
        """
        self._local = frozenset(parameters)

    def set_signal_shares(self, shares: Mapping[Tensor, float | None]) -> None:
        """Set, by parameter, the share of the squared gradient that is signal; `decentralize` calls this.

        None says that the share will be measured: until then σ² is 0. The shares describe the job, like
        the number of replicas, and are not a part of `state_dict()`.
        """
        for share in shares.values():
            if share is not None and not 0 <= share <= 1:
                raise InputError(f"a share of the signal is {share!r}, but it is a part of the whole: pass 0 to 1.")
        self._shares = dict(shares)

    def coupled_decay(self) -> dict[Tensor, float]:
        """By parameter, the λ of the g + λ x that the moments see; only where it is not 0.

        With `maximize` it is negative, so that g + λ x is what the moments see up to its sign.
        """
        decays: dict[Tensor, float] = {}
        for group in () if self.decoupled else self.param_groups:
            if group["weight_decay"] != 0:
                decay = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
                decays |= dict.fromkeys(group["params"], float(decay))
        return decays

    def kappa(self, group: Group, parameter: Tensor | None = None) -> float:
        """κ of a parameter group: the number of gradients whose mean the group's second moment describes.

        `parameter` is one of the group's, which has another κ if it is not mixed.
        """
        replicas = group["replicas"]
        if replicas is None:
            replicas = 1.0 if parameter in self._local else self._replicas
        return float(replicas * group["discount"])

    def noise_to_signal(self) -> float | None:
        """Estimate Σσ² / Σμ² over the parameters whose signal is measured or that have a q; None if there is none.

        σ² is the noise of one replica's gradient, so this ratio times the samples in it is the noise scale of the
        task: the number of samples whose mean gradient holds as much signal as noise. Unlike the update, this
        estimate corrects for the noise in the first values of m̂, see Note [Why c is constant]; q is too young while
        that noise is most of it.
        """
        total = noise = 0.0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state.get(param, {})
                share = self._shares.get(param)
                if share is not None and "exp_avg_sq" in state:
                    mean_sq = _total(state["exp_avg_sq"]) / (1 - self._beta2(param, group) ** int(state["step"]))
                    total += mean_sq
                    noise += (1 - share) * mean_sq
                    continue
                if "signal_sq" not in state or beta1 == 0:
                    continue
                step, since = int(state["step"]), int(state["signal_since"])
                unbias, unbias_q = 1 / (1 - beta2**step), 1 / (1 - beta2 ** (step - since))
                left = _noise_left_since(beta1, beta2, since, step)
                if unbias / unbias_q < _MEMORY or left > _MOSTLY_NOISE:
                    continue
                mean_sq = unbias * _total(state["exp_avg_sq"])
                total += mean_sq
                noise += (mean_sq - unbias_q * _total(state["signal_sq"])) / (1 - left)
        if total == 0:
            return None
        noise = min(max(noise, 0.0), total)
        return math.inf if noise == total else noise / (total - noise)

    def state_dict(self) -> State:
        """The state as torch's Adam would have it, and what a bit-exact continuation needs; changes nothing.

        Where the signal is measured, `exp_avg_sq` is a copy, and `normalized` beside `state` says how to undo it: see
        Note [With which β2 v is normalized].
        """
        saved = super().state_dict()
        states, normalized = dict(saved["state"]), {}
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, index in zip(group["params"], packed["params"], strict=True):
                if param not in self._built_with or "exp_avg_sq" not in states.get(index, {}):
                    continue
                beta2, v, step = self._built_with[param], states[index]["exp_avg_sq"], int(states[index]["step"])
                factor = _factor(beta2, group["betas"][1], step)
                if factor != 1:
                    scaled = v * factor
                    ulps = (_bits(v) - _bits(scaled / factor)).clamp(-_ULPS, _ULPS).to(torch.int8)
                    states[index] = {**states[index], "exp_avg_sq": scaled}
                    normalized[index] = {"beta2": beta2, "step": step, "factor": factor, "ulps": ulps}
        saved["state"] = states
        return {**saved, "normalized": normalized} if normalized else saved

    def load_state_dict(self, state_dict: State) -> None:
        """Load a checkpoint of GossipAdam, or one of torch's Adam or AdamW.

        The numbers of replicas stay as they are: they describe the present job.
        """
        own = [group["replicas"] for group in self.param_groups]
        states, built_with = dict(state_dict["state"]), {}
        for index, done in state_dict.get("normalized", {}).items():
            v = states.get(index, {}).get("exp_avg_sq")
            if v is not None and int(states[index]["step"]) == done["step"]:
                states[index] = {**states[index], "exp_avg_sq": _divided(v, done["factor"], done["ulps"])}
                built_with[index] = done["beta2"]
        super().load_state_dict({**state_dict, "state": states})
        for group, replicas in zip(self.param_groups, own, strict=True):
            group["replicas"] = replicas
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        self._built_with = {p: built_with[i] for i, p in zip(indices, params, strict=True) if i in built_with}

    def __getstate__(self) -> dict[str, Any]:
        own = {"_replicas": self._replicas, "_built_with": self._built_with, "_local": self._local}
        return {**super().__getstate__(), **own, "_shares": dict(self._shares)}

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["replicas"] is not None:
            _check_replicas(group["replicas"])
        if not _at_least_one(group["discount"]):
            raise InputError(
                f"discount is {group['discount']!r}, but it multiplies the number of replicas: pass a finite number "
                "of at least 1."
            )

    def _step_group(self, group: Group) -> None:
        members: Members = [(p, self._moments(p, group)) for p in group["params"] if p.grad is not None]
        local = [(p, s) for p, s in members if p in self._local]
        mixed = [(p, s) for p, s in members if p not in self._local] if local else members
        for part in (mixed, local):
            if part:
                self._step_members(part, group, self.kappa(group, part[0][0]))

    def _step_members(self, members: Members, group: Group, kappa: float) -> None:
        measured = [(p, s) for p, s in members if p in self._shares] if kappa > 1 else []
        others = [(p, s) for p, s in members if p not in self._shares] if measured else members
        plain = others if kappa == 1 or group["betas"][0] == 0 else []
        for _, state in measured + plain:  # a q that misses steps would be wrong when it is used again
            state.pop("signal_sq", None)
            state.pop("signal_since", None)
        self._normalize(others, group, None)
        if measured:
            self._measured_step(measured, group, kappa)
        if plain:
            self._adam_step(plain, group)
            return
        members = others
        phases: dict[tuple[float, int], Members] = {}
        for param, state in members:
            if "signal_sq" not in state:
                state["signal_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["signal_since"] = int(state["step"])
            phases.setdefault((state["step"].item(), state["signal_since"]), []).append((param, state))
        for (done, since), together in phases.items():
            slots = [(slot(param, state, "signal_sq"), state["step"]) for param, state in together]
            corrected = self._corrected(group, done + 1, since, kappa)
            gossip_adam(slots, corrected, self._hyper(group, group["betas"]))
        if members:
            torch._foreach_add_([state["step"] for _, state in members], 1)

    def _beta2(self, param: Tensor, group: Group) -> float:
        """The β with which v of a parameter is normalized now."""
        return self._built_with.get(param, float(group["betas"][1]))

    def _normalize(self, members: Members, group: Group, beta2: float | None) -> None:
        """Scale each v that is normalized with another β than `beta2`; None is the group's β2, whatever it is."""
        for param, state in members if beta2 is not None or self._built_with else ():
            if self._built_with.get(param) == beta2:
                continue
            after = group["betas"][1] if beta2 is None else beta2
            factor = _factor(self._beta2(param, group), after, int(state["step"]))
            if factor != 1:
                state["exp_avg_sq"].mul_(factor)
            if beta2 is None:
                del self._built_with[param]
            else:
                self._built_with[param] = beta2

    def _measured_step(self, members: Members, group: Group, kappa: float) -> None:
        """Adam's step with s + (1 − s)/κ times the second moment, by torch's own functions.

        The factor is rounded to eighths of an octave, so that many parameters take a step together; that changes a
        step by at most 2.2 %.
        """
        together: dict[tuple[torch.dtype, int], Members] = {}
        for param, state in members:
            share = self._shares[param]
            factor = 1.0 if share is None else share + (1 - share) / kappa
            key = (state["exp_avg_sq"].dtype, round(8 * math.log2(factor)))
            together.setdefault(key, []).append((param, state))
        for (dtype, eighths), part in together.items():
            short = dtype.itemsize < (8 if dtype.is_complex else 4)
            betas = group["betas"] if short else _longer(group["betas"], kappa)
            self._normalize(part, group, None if short else betas[1])
            root = 2 ** (eighths / 16)
            scaled = {**group, "betas": betas, "lr": group["lr"] / root, "eps": group["eps"] / root}
            if self.decoupled:
                scaled["weight_decay"] = group["weight_decay"] * root  # the parameters shrink at the learning rate
            self._adam_step_fused_by_default(part, scaled)

    def _adam_step_fused_by_default(self, members: Members, group: Group) -> None:
        """Adam's own step, by torch's fused kernel where it runs on CPU and the group does not choose another one."""
        hyper = self._hyper(group, group["betas"])
        fused: list[tuple[list[Tensor], Tensor]] = []
        rest: Members = []
        for param, state in members:
            tensors = for_fused_adam(slot(param, state)) if hyper.may_be_native else None
            if tensors is None:
                rest.append((param, state))
            else:
                fused.append((tensors, state["step"]))
        if fused:
            fused_adam(fused, hyper)
        if rest:  # on CPU the fused kernel is not for them, also if the group asks for it
            self._adam_step(rest, {**group, "fused": None} if rest[0][0].is_cpu else group)

    def _corrected(self, group: Group, step: float, since: int, kappa: float) -> Corrected:
        beta1, beta2 = group["betas"]
        unbias, unbias_q = 1 / (1 - beta2**step), 1 / (1 - beta2 ** (step - since))
        memory = unbias / unbias_q
        strength = (1 - 1 / kappa) * memory / (1 - _noise_left(beta1)) if memory >= _MEMORY else 0.0
        return Corrected(
            step=step,
            a=(1 - strength) * unbias,
            b=strength * unbias_q,
            low=unbias / kappa,
            high=unbias,
            square_rate=(1 - beta2) / (1 - beta1**step) ** 2,
        )


class GossipAdamW(GossipAdam):
    """GossipAdam whose weight decay shrinks the parameters and stays out of the moments.

    Every step x ← (1 − α λ) x comes before GossipAdam's update (Loshchilov and Hutter, ICLR 2019). κ = 1 is
    `torch.optim.AdamW`, bit by bit.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        replicas: float | None = None,
        discount: float = 1.0,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            replicas=replicas,
            discount=discount,
            foreach=foreach,
            fused=fused,
            maximize=maximize,
            amsgrad=amsgrad,
        )


def _longer(betas: tuple[float, float], kappa: float) -> tuple[float, float]:
    """The betas where the signal is measured: see Note [Why the second moment remembers longer]."""
    return betas[0], 1 - (1 - betas[1]) / math.sqrt(kappa)


def _factor(before: float, after: float, step: int) -> float:
    """By what v is multiplied after `step` steps so that V is the same with β `after` as it was with `before`."""
    return (1 - after**step) / (1 - before**step) if step else 1.0


def _divided(v: Tensor, factor: float, ulps: Tensor) -> Tensor:
    """The tensor whose product with `factor` is `v`, exactly if `ulps` are those of `state_dict()`."""
    divided = v / factor
    bits = _bits(divided)
    if bits.shape == ulps.shape:
        bits.add_(ulps.to(bits.device) * (bits > _ULPS))  # neither below 0 nor from NaN to a number
    return divided


def _bits(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, or of this worker's shard, as integers that count units in the last place."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    real = torch.view_as_real(local) if local.is_complex() else local
    return real.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()])


def _noise_left(beta1: float) -> float:
    """c: the share of a gradient's noise that is left in its running mean."""
    return (1 - beta1) / (1 + beta1)


@lru_cache(maxsize=64)
def _noise_left_since(beta1: float, beta2: float, since: int, step: int) -> float:
    """The share of noise in q after `step` steps if it began after step `since`: the mean of c_t that q weighs."""
    left = _noise_left(beta1)
    many = min(step, math.ceil(math.log(1e-9) / math.log(beta1)))  # from there on c_t is c
    early = sum(beta2 ** (step - t) * 2 * beta1**t / (1 - beta1**t) for t in range(since + 1, many + 1))
    return left * (1 + (1 - beta2) / (1 - beta2 ** (step - since)) * early)


def _total(tensor: Tensor) -> float:
    """The sum of all elements, real and imaginary parts; of a sharded tensor, those of this worker."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    real = torch.view_as_real(local) if local.is_complex() else local
    return float(real.sum(dtype=torch.float64))


def _at_least_one(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf


def _check_replicas(value: object) -> None:
    if not _at_least_one(value):
        raise InputError(f"replicas is {value!r}, but it counts replicas: pass a finite number of at least 1.")
