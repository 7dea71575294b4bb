"""Command line of the training: collect, tokenize, train, export. A stopped run resumes at its last checkpoint."""

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from tools.training.corpus import Corpus, collect
from tools.training.export import TrainingRecord, export_model, round_weights, sample
from tools.training.model import ModelShape
from tools.training.tokenizer import encode_documents, train_tokenizer
from tools.training.train import Trainer, TrainingConfig, measure_loss

__all__ = ["main"]

_EPILOG = """\
examples:
  python -m tools.training --out run --minutes 90            about the budget of the bundled model
  python -m tools.training --out run --minutes 90 --compile  a sixth faster; needs a C++ compiler
  python -m tools.training --out run --steps 20              a quick test that everything works
  python -m tools.training --out run --minutes 90            again: resumes at the last checkpoint
  python -m tools.training --out run --export-only           export the last checkpoint without training

files in DIR:
  tokenizer.json   the vocabulary, made once at the start
  checkpoint.pt    weights, optimizers and progress, written every few minutes
  log.jsonl        losses and a sample, one line for each checkpoint
  model/           the finished model; serve it with `python -m ferrule_server --model DIR/model`

The learning rate is constant for the first half of the budget and then falls to zero at its end.
Choose the budget before the start: a run that ends early misses the low rates, which reduce the loss
most. Two threads on a busy machine are slower than one.
"""


@dataclass(frozen=True, slots=True)
class _Data:
    """The corpus and the token streams of one run.

    Attributes:
        corpus: The documents.
        tokenizer: Trained on the training half.
        train: uint16 [num_tokens], the training stream.
        held_out: uint16 [num_tokens], the held-out stream.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    train: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and export the model. If the settings do not fit together, exit with status 2 and one line.

    Args:
        arguments: The command line without the name of the program; None: that of the process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    try:
        trainer, data = _set_up(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if not options.export_only:
        _train(trainer, data, options.out, checkpoint_every_s=options.checkpoint_every)
    round_weights(trainer.model)
    export_model(options.out / "model", trainer.model, data.tokenizer, _record(trainer, data))
    Console().print(f"model written to {options.out / 'model'}", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.training",
        description="Train the bundled model of Ferrule on the standard library of this interpreter.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for tokenizer, checkpoints, log and model")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=90.0, help="budget of wall time over all resumed parts (90)")
    budget.add_argument(
        "--steps", type=int, help="budget of optimizer steps instead; the result is then reproducible bit for bit"
    )
    add("--seed", type=int, default=1, help="determines the initial weights and the batches (1)")
    add("--threads", type=int, default=1, help="CPU threads (1)")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--corpus", type=Path, metavar="DIR", help="a folder of Python source to use in place of the standard library")
    add("--checkpoint-every", type=float, default=180.0, metavar="S", help="seconds between checkpoints (180)")
    add("--export-only", action="store_true", help="export the last checkpoint without training")
    return parser


def _set_up(options: argparse.Namespace) -> tuple[Trainer, _Data]:
    """Return the run, at its last checkpoint if there is one.

    Raises:
        ValueError: It cannot start.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    minutes = options.minutes if options.steps is None else None
    config = TrainingConfig(minutes=minutes, steps=options.steps, seed=options.seed, use_compile=options.compile)
    data = _prepare(options.out, options.corpus)
    if len(data.held_out) <= max(config.window_lengths):
        raise ValueError(f"{len(data.held_out)} held-out tokens are too few to measure a loss; give a larger corpus")
    trainer = Trainer(config, ModelShape(vocab_size=data.tokenizer.get_vocab_size()), data.train)
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif options.export_only:
        raise ValueError(f"nothing to export: no {checkpoint.name} in {options.out}; train first")
    return trainer, data


def _prepare(out: Path, corpus_root: Path | None) -> _Data:
    """Collect and encode the corpus. The tokenizer is trained once and then read from its file."""
    corpus = collect(corpus_root)
    train, held_out = ([document.text for document in half] for half in (corpus.train, corpus.held_out))
    path = out / "tokenizer.json"
    if not path.exists():
        train_tokenizer(train).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    return _Data(corpus, tokenizer, encode_documents(tokenizer, train), encode_documents(tokenizer, held_out))


def _train(trainer: Trainer, data: _Data, out: Path, *, checkpoint_every_s: float) -> None:
    """Step until the budget is used; save a checkpoint from time to time and at the end."""
    saved_at = time.monotonic()
    with Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("starting", total=1.0)
        while trainer.fraction < 1.0:
            trainer.step()
            progress = trainer.progress
            text = f"step {progress.step}  {progress.num_tokens / 1e6:.2f} M tokens  loss {progress.train_loss:.3f}"
            bar.update(task, completed=trainer.fraction, description=text)
            if time.monotonic() - saved_at >= checkpoint_every_s:
                _keep(trainer, data, out)
                saved_at = time.monotonic()
    _keep(trainer, data, out)


def _keep(trainer: Trainer, data: _Data, out: Path) -> None:
    """Save a checkpoint; append a line with the losses and a short sample to the log."""
    trainer.save(out / "checkpoint.pt")
    progress = trainer.progress
    line = {
        "step": progress.step,
        "elapsed_s": round(progress.elapsed_s, 1),
        "num_tokens": progress.num_tokens,
        "train_loss": round(progress.train_loss, 4),
        "held_out_loss": round(measure_loss(trainer.model, data.held_out, max_windows=96), 4),
        "sample": sample(trainer.model, data.tokenizer, "def read_file(path):", num_tokens=32, temperature=0.7),
    }
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def _record(trainer: Trainer, data: _Data) -> TrainingRecord:
    lengths = sorted({*trainer.config.window_lengths, trainer.shape.max_positions})
    losses = ((n, measure_loss(trainer.model, data.held_out, length=n)) for n in lengths if n < len(data.held_out))
    num_bytes = sum(len(document.text.encode()) for document in data.corpus.held_out)
    return TrainingRecord(
        config=trainer.config,
        progress=trainer.progress,
        num_train_files=len(data.corpus.train),
        num_held_out_files=len(data.corpus.held_out),
        num_train_tokens=len(data.train),
        held_out_losses=tuple(losses),
        held_out_bytes_per_token=num_bytes / len(data.held_out),
    )


if __name__ == "__main__":
    main()
