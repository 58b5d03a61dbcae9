"""Which process-group backends this build of torch has."""

import torch.distributed as dist


def available_backends() -> dict[str, bool]:
    """`{"gloo": True, "nccl": False, ...}`; all False where torch was built without distributed."""
    if not dist.is_available():
        return dict.fromkeys(("gloo", "nccl", "mpi"), False)
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
