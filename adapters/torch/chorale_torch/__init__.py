"""torch.distributed over Chorale's groups: dist.init_process_group("chorale").

The installed package names itself to PyTorch (entry point "torch.distributed.backends"), so that this needs no import. On
import, which the first group does at the latest, PyTorch's CPU allocator becomes Chorale's, so that tensors made from
then on lie in memory that the other ranks of the host can map; CHORALE_TORCH_ALLOCATOR=0 leaves PyTorch's, and
everything is copied on the way.
"""

import os

import torch
import torch.distributed as dist

from . import _C

__all__ = ["make_backend", "register"]

_served = None


def _keep_serving(store):
    """Where ranks meet at MASTER_ADDR without an agent, rank 0 serves the store, and PyTorch ends it with the group. A rank
    that is quick to make the next one would find the old store and lose it. So the last one that is served stays for
    as long as the process: PyTorch's next store at this port is another view of it."""
    global _served
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and str(store.port) == os.environ.get("MASTER_PORT"):
        _served = store


def make_backend(options, backend_options=None):
    """Creates the backend of one group; torch.distributed calls this."""
    timeout = options.timeout
    if backend_options is not None:  # pg_options
        if not isinstance(backend_options, dist.distributed_c10d.C10DBackend.Options):
            raise TypeError(f"chorale: pg_options must be a torch.distributed Backend.Options, whose timeout is used, not a "
                            f"{type(backend_options).__name__}")
        timeout = backend_options._timeout
    if options.group_rank == 0:
        _keep_serving(options.store)
    return _C.make_backend(
        options.store,
        options.group_rank,
        options.group_size,
        timeout.total_seconds(),
        options.global_ranks_in_group,
    )


def register():
    """Makes "chorale" a backend of torch.distributed; PyTorch calls this when a program asks for it, import does too."""
    if not hasattr(dist.Backend, "CHORALE"):
        dist.Backend.register_backend("chorale", make_backend, extended_api=True, devices=["cpu"])


def _wants_our_allocator():
    text = os.environ.get("CHORALE_TORCH_ALLOCATOR") or "1"
    if text not in ("0", "1"):
        raise ValueError(f"chorale: CHORALE_TORCH_ALLOCATOR is '{text}'; it takes 0 or 1. Correct it, or unset it")
    return text == "1"


if _wants_our_allocator():
    _C.use_our_allocator()
register()
