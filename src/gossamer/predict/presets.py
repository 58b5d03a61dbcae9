"""The clusters of "From Promise to Practice" (ICLR 2025), fitted to its iteration times of transformer-base training.

Each is fitted to the nine iteration times (all-reduce, exp, AER at three sizes) that the paper's strong-scaling figure
gives for it: the compute time and its part that does not shrink with more workers, and what one all-reduce connection
reaches (`flow_gbps`). Given: 260 MB of fp32 parameters. Chosen by hand so that the fits came out well: 10 % jitter (of
0, 5 and 10 %), the same for all, NCCL's tree on two nodes, and interfaces: the paper's 100 Gb/s for T4, but twice its
25 and 100 Gb/s for A40 and A100, because the exp times there move more bytes a second than one interface carries.
So a preset describes the figure; it is no independent check of the model. `benchmarks/paper_prediction.py` is one, as
far as it goes.
"""

from __future__ import annotations

from gossamer.predict.cluster import Cluster, Compute, Ddp, Link, Links, Model


def _preset(
    name: str, per_node: int, seconds: float, fixed: float, gbps: float, flow_gbps: float | None, intra_gbps: float
) -> Cluster:
    return Cluster(
        name=name,
        nodes=4,
        per_node=per_node,
        links=Links(
            inter=Link(bandwidth_gbps=gbps, latency_us=20, flow_gbps=flow_gbps),
            intra=Link(bandwidth_gbps=intra_gbps, latency_us=5),
        ),
        compute=Compute(seconds=seconds, fixed_seconds=fixed, reference_workers=2 * per_node, jitter="gaussian:0.1"),
        model=Model(mb=260),
        ddp=Ddp(allreduce="best"),
    )


PRESETS: dict[str, Cluster] = {
    "a40": _preset("a40", 4, 0.104, 0.0, 50, 23.4, 100),
    "a100": _preset("a100", 4, 0.0611, 0.0341, 200, None, 1200),
    "t4": _preset("t4", 8, 0.309, 0.043, 100, 36.9, 100),
}
