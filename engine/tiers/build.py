"""Makes a worker's tiers from its settings."""

from __future__ import annotations

import hashlib
from dataclasses import astuple

import cbor2

from engine.tiers.kv_tiers import KvTiers
from engine.tiers.pool_copier import HostPoolCopier, PoolCopier
from engine.tiers.stores.block_store import BlockStore, HostStore
from engine.tiers.stores.disk_store import FIELD, open_disk_store, require_folder
from engine.tiers.stores.mooncake_store import FIELD as STORE_FIELD
from engine.tiers.stores.mooncake_store import open_mooncake_store
from engine.tiers.stores.shared_folder import open_shared_folder
from kv_transfer.layout import KvLayout
from kv_transfer.transports.transport import VRAM, KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event

_HASHES = "sha256-cbor-1"
"""How blocks are named; see `splitserve.generation.kv_blocks`."""


def check_tiers(config: EngineConfig) -> None:
    """Raises ConfigError for settings of tiers that contradict others, and for a folder that cannot be used."""
    kept = config.kv_disk_tier_path is not None or config.kv_store_master is not None
    if config.kv_tier_sharing == "on" and not kept:
        field = "engine.kv_tier_sharing"
        message = f"{field}: needs kv_disk_tier_path or kv_store_master, which workers can share"
        raise ConfigError(message, field=field)
    if config.kv_host_tier_bytes is None:
        for field, given in ((FIELD, config.kv_disk_tier_path), (STORE_FIELD, config.kv_store_master)):
            if given is not None:
                message = f"{field}: needs kv_host_tier_bytes, since blocks go there through host memory"
                raise ConfigError(message, field=field)
        return
    if config.kv_disk_tier_path is not None and config.kv_store_master is not None:
        message = f"{STORE_FIELD}: takes the place of kv_disk_tier_path; set one of them"
        raise ConfigError(message, field=STORE_FIELD)
    field = "engine.kv_host_tier_bytes"
    if config.kind == "vllm":
        raise ConfigError(f"{field}: engine vllm keeps KV itself, it takes none", field=field)
    if not config.prefix_cache:
        raise ConfigError(f"{field}: needs the prefix cache, which prefix_cache turns off", field=field)
    if config.kv_disk_tier_path is not None:
        require_folder(config.kv_disk_tier_path)


def make_tiers(config: EngineConfig, memory: KvMemoryRegion, wire_dtype: str) -> KvTiers | None:
    """The tiers below a pool of this memory; None if the settings ask for none. Raises ConfigError as `check_tiers` and
    `open_disk_store`, and if host memory for one block is not even asked for, or more than there is."""
    if config.kv_host_tier_bytes is None:
        return None
    block_bytes = memory.layout.block_bytes
    slots = config.kv_host_tier_bytes // block_bytes
    field = "engine.kv_host_tier_bytes"
    if slots < 1:
        message = f"{field}: {config.kv_host_tier_bytes} bytes hold no KV block of {block_bytes} bytes"
        raise ConfigError(message, field=field)
    copier = _pool_copier(memory)
    try:
        host = HostStore(copier.host_memory(slots * block_bytes), block_bytes)
    except (OSError, RuntimeError) as error:  # torch's, for pinned memory
        why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        message = f"{field}: {config.kv_host_tier_bytes} bytes cannot be had: {why}"
        raise ConfigError(message, field=field) from None
    disk = _below_host(config, identity_of(memory.layout, wire_dtype), block_bytes)
    if disk is not None:
        log_event("kv_tier.opened", tier="disk", slots=disk.slots, found=len(disk.found()))
    return KvTiers(copier, host, disk, memory.layout.block_size_tokens)


def _below_host(config: EngineConfig, identity: bytes, block_bytes: int) -> BlockStore | None:
    most, shared = config.kv_disk_tier_bytes, config.kv_tier_sharing == "on"
    if (folder := config.kv_disk_tier_path) is not None:
        opened = open_shared_folder if shared else open_disk_store
        return opened(folder, identity, block_bytes, most)
    if (master := config.kv_store_master) is None:
        return None
    return open_mooncake_store(master, block_bytes, max(1, most // block_bytes), identity, shared=shared)


def _pool_copier(memory: KvMemoryRegion) -> PoolCopier:
    if memory.memory_kind != VRAM:
        return HostPoolCopier(memory)
    # Imported here, so that simulated workers start without torch.
    from engine.tiers.device_copier import TensorPoolCopier, region_tensor

    return TensorPoolCopier(region_tensor(memory))


def identity_of(layout: KvLayout, wire_dtype: str) -> bytes:
    """What blocks on a disk depend on beside their tokens and salts, as 32 bytes.

    `wire_dtype`: KV that came from a peer may have been narrowed on the way.
    """
    return hashlib.sha256(cbor2.dumps([_HASHES, wire_dtype, *astuple(layout)])).digest()
