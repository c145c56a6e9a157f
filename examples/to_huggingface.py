"""Converts an exported GPT to a GPT-2 for Hugging Face transformers.

    python examples/to_huggingface.py

reads model.safetensors, the file of `experiments.run --export`, and writes config.json
and model.safetensors into the new folder gpt2; two arguments name others.
"""

import json
import sys
from pathlib import Path

from experiments.command.errors import BadRequest, run_guarded
from experiments.command.stopping import ReadSignal


def main(argv: list[str] | None = None) -> int:
    """Converts the model that two arguments name; returns the exit code."""
    paths = [*map(Path, sys.argv[1:] if argv is None else argv)]

    def program(stopped: ReadSignal) -> int:
        convert(*(paths or (Path("model.safetensors"), Path("gpt2"))))
        return 0

    return run_guarded(program)


def convert(model: Path, folder: Path) -> None:
    """Writes config.json and model.safetensors for `transformers`.

    Args:
        model: a GPT that a run exported, with its task's arguments.
        folder: the folder for the new files; it is made if needed.

    Raises:
        BadRequest: the model is not a GPT or does not fit GPT-2, or a file exists.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save

    from experiments import files
    from experiments.training import export
    from models import gpt

    config_path = folder / "config.json"
    tensors_path = folder / "model.safetensors"
    for path in (config_path, tensors_path):
        if path.exists():
            raise BadRequest(f"{path} exists: use another folder")
    try:
        with safe_open(model, "np") as file:
            arguments = json.loads((file.metadata() or {})["task_arguments"])
        heads = arguments.get("heads") or gpt.SHAPES[arguments["model"]].heads
        config, tensors = gpt.to_huggingface(export.load(model).params, heads)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(config_path, json.dumps(config, indent=2) + "\n")
        # `transformers` does not read a file without this entry.
        files.write(tensors_path, save(tensors, {"format": "pt"}))
    except (KeyError, TypeError):
        raise BadRequest(f"{model} is not a GPT exported by experiments.run") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise BadRequest(f"{model}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
