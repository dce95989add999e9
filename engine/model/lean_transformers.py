"""What this engine uses of `transformers`, imported without what only training and compiling use.

The models' base class imports losses (and with them scipy), sharding over devices (torch.distributed.tensor, and with
it sympy), what processes images and sound or quantizes, where it is installed, and decorators of torch's compiler: as
much as all the rest of a worker, and none of it runs here. `transformers` itself can do without all but the last where
it finds them missing. Its table of contents is kept, see `import_structure.py`. Other modules take the names from here;
in a process that had imported them before, nothing changes. Why: docs/decisions/0044-code-that-is-not-imported.md.
"""

from __future__ import annotations

import importlib
import sys

from engine.model.import_structure import StructureFinder
from engine.model.lean_torch import lean_or_whole

__all__ = ["AttentionInterface", "AutoConfig", "AutoModelForCausalLM", "no_init_weights"]
ABSENT = (
    # For losses, and for sharding.
    "is_scipy_available",
    "is_sklearn_available",
    "is_torch_distributed_available",
    # For images and sound.
    "is_torchvision_available",
    "is_torchaudio_available",
    "is_torchcodec_available",
    "is_librosa_available",
    "is_soundfile_available",
    "is_soxr_available",
    # For weights, KV caches, kernels and adapters that this engine has not: with them, a model's answers and what it
    # fetches would depend on what happens to be installed.
    "is_hqq_available",
    "is_torchao_available",
    "is_kernels_available",
    "is_peft_available",
)
"""Questions of `transformers` that are answered with no from then on, in this process. Those that lead to imports with
the models' base class, or when weights are loaded."""
ASKED = ("transformers.utils.import_utils", "transformers.utils")
BASE = "transformers.modeling_utils"


def _import() -> None:
    if BASE in sys.modules:
        return
    sys.meta_path.insert(0, StructureFinder())
    modules = [importlib.import_module(name) for name in ASKED]
    for question in ABSENT:
        for module in modules:
            setattr(module, question, lambda *_of, **_how: False)
    lean_or_whole(lambda: [importlib.import_module(name) for name in ("transformers.masking_utils", BASE)])


_import()
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402
