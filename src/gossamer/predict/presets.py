"""The clusters of "From Promise to Practice" (ICLR 2025), fitted to its iteration times of transformer-base training.

Each is fitted to the nine iteration times (all-reduce, exp, AER at three sizes) that the paper's strong-scaling figure
gives for it: the compute time, the part of it that does not shrink with more workers, and the bandwidth of one
all-reduce connection (`flow_gbps`). The model has 260 MB of fp32 parameters. Chosen by hand for good fits: 10 % jitter
for all (out of 0, 5 and 10 %), NCCL's tree on two nodes, and the interfaces, which are the paper's 100 Gb/s for T4 but
twice its 25 and 100 Gb/s for A40 and A100, because the exp times move more bytes per second than one interface carries.
So a preset describes the figure and is not an independent check of the model; `benchmarks/paper_prediction.py` is a
limited one.
"""

from __future__ import annotations

from gossamer.predict.cluster import ClusterLinks, ClusterSpec, ComputeSpec, DdpSpec, LinkSpec, ModelSpec


def _preset(
    name: str, per_node: int, seconds: float, fixed: float, gbps: float, flow_gbps: float | None, intra_gbps: float
) -> ClusterSpec:
    return ClusterSpec(
        name=name,
        nodes=4,
        per_node=per_node,
        links=ClusterLinks(
            inter=LinkSpec(bandwidth_gbps=gbps, latency_us=20, flow_gbps=flow_gbps),
            intra=LinkSpec(bandwidth_gbps=intra_gbps, latency_us=5),
        ),
        compute=ComputeSpec(
            seconds=seconds, fixed_seconds=fixed, reference_workers=2 * per_node, jitter="gaussian:0.1"
        ),
        model=ModelSpec(mb=260),
        ddp=DdpSpec(allreduce="best"),
    )


PRESETS: dict[str, ClusterSpec] = {
    "a40": _preset("a40", 4, 0.104, 0.0, 50, 23.4, 100),
    "a100": _preset("a100", 4, 0.0611, 0.0341, 200, None, 1200),
    "t4": _preset("t4", 8, 0.309, 0.043, 100, 36.9, 100),
}
