"""The clusters of "From Promise to Practice" (ICLR 2025), fitted to its iteration times of transformer-base training.

Each is fitted to the nine iteration times (all-reduce, exp, AER at three sizes) that the paper's strong-scaling figure
gives for it: the compute time, the part of it that does not shrink with more workers, and the bandwidth of one
all-reduce connection (`flow_gbps`). The model has 260 MB of fp32 parameters. Chosen by hand for good fits: 10 % jitter
for all (out of 0, 5 and 10 %), NCCL's tree on two nodes, and the interfaces, which are the paper's 100 Gb/s for T4 but
twice its 25 and 100 Gb/s for A40 and A100, because the exp times move more bytes per second than one interface carries.
So a preset describes the figure and is not an independent check of the model; `benchmarks/paper_prediction.py` is a
limited one.

What a GPU does in an exchange was not published. It is assumed to run at half of the GPU's published memory bandwidth,
with so many bytes read and written per byte of parameters; the optimizer's step is a part of the fitted compute time.
Advice shows these assumptions.
"""

from __future__ import annotations

from gossamer.predict.cluster import ClusterLinks, ClusterSpec, ComputeSpec, CostSpec, DdpSpec, LinkSpec, ModelSpec

SHARE = 0.5  # of the memory bandwidth that simple kernels reach
# Bytes read and written per byte of fp32 parameters.
MIX, REDUCE = 3.0, 3.0
ENCODE = {"bf16": 1.5, "fp16": 1.5, "int8": 2.25, "int4": 2.125}
MERGE = {"fp32": 3.0, "bf16": 6.0, "fp16": 6.0, "int8": 8.0, "int4": 7.5}


def _costs(memory_gb_per_s: float) -> CostSpec:
    rate = SHARE * memory_gb_per_s
    return CostSpec(
        encode_gb_per_s={w: rate / passes for w, passes in ENCODE.items()},
        merge_gb_per_s={w: rate / passes for w, passes in MERGE.items()},
        reduce_gb_per_s=rate / REDUCE,
        mix_gb_per_s=rate / MIX,
        assumed=(
            f"exchanges encode and mix at half of the GPU's memory bandwidth ({memory_gb_per_s:g} GB/s); the "
            "optimizer's step is a part of the compute time, which is fitted to the paper's figure, as are links and "
            "10 % jitter"
        ),
    )


def _preset(
    name: str,
    per_node: int,
    seconds: float,
    fixed: float,
    gbps: float,
    flow_gbps: float | None,
    intra_gbps: float,
    memory_gb_per_s: float,
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
        costs=_costs(memory_gb_per_s),
    )


PRESETS: dict[str, ClusterSpec] = {
    "a40": _preset("a40", 4, 0.104, 0.0, 50, 23.4, 100, 696),
    "a100": _preset("a100", 4, 0.0611, 0.0341, 200, None, 1200, 1555),
    "t4": _preset("t4", 8, 0.309, 0.043, 100, 36.9, 100, 320),
}
