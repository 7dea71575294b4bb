"""What is read, what is left out, and the split by file."""

from pathlib import Path

import pytest

from tools.training.corpus import collect, find_sources, is_held_out


def _write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"name = '{name}'\r\n".encode())


def test_find_sources_leaves_out_tests_tables_and_packages(tmp_path: Path) -> None:
    """Only source that somebody wrote for the library itself is read, in a fixed order."""
    _write(tmp_path, "queue.py", "json/decoder.py", "test/test_os.py", "unittest/test/a.py", "encodings/cp437.py")
    _write(tmp_path, "site-packages/x/y.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py", "notes.txt")
    found = [path.relative_to(tmp_path).as_posix() for path in find_sources(tmp_path)]
    assert found == ["json/decoder.py", "queue.py"]


def test_split_is_by_file_and_always_the_same(tmp_path: Path) -> None:
    """A file is in exactly one half, decided by its name alone."""
    names = [f"package/module_{n}.py" for n in range(200)]
    _write(tmp_path, *names)
    corpus = collect(tmp_path)
    train, held_out = ({document.name for document in half} for half in (corpus.train, corpus.held_out))
    assert train | held_out == set(names)
    assert not train & held_out
    assert held_out == {name for name in names if is_held_out(name)}
    assert 1 <= len(held_out) <= 20


def test_line_endings_become_line_feeds(tmp_path: Path) -> None:
    """The corpus is the same whichever way the files were checked out."""
    _write(tmp_path, "queue.py")
    assert collect(tmp_path).train[0].text == "name = 'queue.py'\n"


def test_collect_refuses_a_folder_without_source(tmp_path: Path) -> None:
    """A wrong folder is an error at once, not an empty training run."""
    with pytest.raises(ValueError, match="no Python source"):
        collect(tmp_path)


def test_the_running_interpreter_has_a_corpus_with_both_halves() -> None:
    """The default corpus needs nothing but the interpreter."""
    names = [path.name for path in find_sources(Path(collect.__globals__["sysconfig"].get_path("stdlib")))]
    assert len(names) > 300
    assert "heapq.py" in names
