"""Block hashes of adapters: never those of the base model, of another adapter or of other content."""

from __future__ import annotations

from itertools import combinations

from splitserve.generation.kv_blocks import Adapter, block_keys, chain_salt

PROMPT = list(range(100))


def test_chains_of_adapters_and_tenants_have_no_block_in_common() -> None:
    adapters = [None, Adapter("red", "1" * 64), Adapter("red", "2" * 64), Adapter("blue", "1" * 64)]
    salts = {(adapter, salt): chain_salt(salt, adapter) for adapter in adapters for salt in (b"", b"alice")}
    chains = [set(block_keys(PROMPT, 16, salt, 6)) for salt in salts.values()]
    assert all(len(chain) == 6 for chain in chains)
    assert not any(one & other for one, other in combinations(chains, 2))


def test_the_base_model_s_salt_is_the_tenant_s() -> None:
    assert chain_salt(b"alice", None) == b"alice"


def test_an_adapter_s_chain_is_the_same_everywhere() -> None:
    adapter = Adapter("red", "1" * 64)
    assert chain_salt(b"alice", adapter) == chain_salt(b"alice", Adapter(*adapter))
    assert len(chain_salt(b"", adapter)) == 32
