"""What this engine uses of `transformers`, imported without what only training and compiling use.

The models' base class imports losses (and with them scipy), sharding over devices (torch.distributed.tensor, and with
it sympy), image processing (torchvision, where it is installed), and decorators of torch's compiler: as much as all the
rest of a worker, and none of it runs here. `transformers` itself can do without the first three where it finds them
missing. Its table of contents is kept, see `import_structure.py`. Other modules take the names from here; in a process
that had imported them before, nothing changes. Why: docs/decisions/0044-code-that-is-not-imported.md.
"""

from __future__ import annotations

import importlib
import sys

from engine.model.import_structure import StructureFinder
from engine.model.stand_ins import without_compiler

__all__ = ["AttentionInterface", "AutoConfig", "AutoModelForCausalLM", "no_init_weights"]
ABSENT = ("is_scipy_available", "is_torch_distributed_available", "is_torchvision_available")
"""Questions of `transformers` that are answered with no from then on, in this process."""
ASKED = ("transformers.utils.import_utils", "transformers.utils")
BASE = "transformers.modeling_utils"


def _import() -> None:
    if BASE in sys.modules:
        return
    sys.meta_path.insert(0, StructureFinder())
    modules = [importlib.import_module(name) for name in ASKED]
    for question in ABSENT:
        for module in modules:
            setattr(module, question, lambda: False)
    with without_compiler():
        importlib.import_module("transformers.masking_utils")
        importlib.import_module(BASE)


_import()
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402
