"""torch.distributed over Chorale's groups: dist.init_process_group("chorale").

On import PyTorch's CPU allocator becomes Chorale's, so that tensors made from then on lie in memory that the other
ranks of the host can map; CHORALE_TORCH_ALLOCATOR=0 leaves PyTorch's, and everything is copied on the way.
"""

import os

import torch
import torch.distributed as dist

from . import _C

__all__ = ["make_backend"]


def make_backend(options, _backend_options=None):
    """Creates the backend of one group; torch.distributed calls this."""
    return _C.make_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout.total_seconds(),
        options.global_ranks_in_group,
    )


if os.environ.get("CHORALE_TORCH_ALLOCATOR", "1") != "0":
    _C.use_our_allocator()
if not hasattr(dist.Backend, "CHORALE"):
    dist.Backend.register_backend("chorale", make_backend, extended_api=True, devices=["cpu"])
