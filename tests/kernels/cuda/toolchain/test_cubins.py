"""Compiled kernels are found again by what they are made from: on disk, in bundles, from several processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ferrule_server.kernels.cuda import argmax, copy_blocks, embed, litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.toolchain import build as cubins
from ferrule_server.kernels.cuda.toolchain import catalog, sources
from ferrule_server.kernels.cuda.toolchain.build import build, load_all
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, BundleError, write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, CompileError, Cubin
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.cubins import keyed, main
from ferrule_server.kernels.cuda.toolchain.progress import BUILD_TIME, progress_bar, size
from ferrule_server.kernels.cuda.toolchain.sources import parameters, source_files, source_key

ROOT = Path(__file__).parents[4]
SPEC = copy_blocks.spec()
OTHER = embed.spec()


class Compiler:
    """Stands for the compiler, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[tuple[str, str]] = []
        monkeypatch.setattr(cubins, "compile_spec", self._compile)

    def _compile(self, spec: KernelSpec, architecture: str) -> Cubin:
        self.jobs.append((spec.name, architecture))
        return Cubin(spec.kernel.__name__, architecture, f"{spec.name} {architecture}".encode(), "// ptx", 40, 0, 0)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In place of the real one."""
    return Compiler(monkeypatch)


def test_second_start_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    """What comes from disk equals what was compiled; progress tells of every kernel either way."""
    jobs = [(SPEC, "sm_80"), (SPEC, "sm_90a"), (OTHER, "sm_80")]
    told: list[tuple[int, int, str]] = []
    first = build(jobs, cache=CubinCache(tmp_path), num_workers=1, progress=lambda *what: told.append(what))
    assert [what[:2] for what in told] == [(1, 3), (2, 3), (3, 3)]
    second = build(jobs, cache=CubinCache(tmp_path), num_workers=1, progress=lambda *what: told.append(what))
    assert second == first
    assert list(second) == jobs
    assert len(compiler.jobs) == 3
    assert len(told) == 6


def test_specs_that_differ_in_promises_only_share_a_cubin(compiler: Compiler, tmp_path: Path) -> None:
    """The machine code does not depend on the shared memory it is planned for."""
    more = replace(SPEC, shared_bytes=1024)
    made = load_all([SPEC, more], "sm_80", cache=CubinCache(tmp_path), num_workers=1)
    assert made[SPEC] == made[more]
    assert len(compiler.jobs) == 1


@pytest.mark.parametrize("damage", ["truncate", "alter", "empty", "delete", "json", "keys"])
def test_damaged_entries_are_compiled_anew(compiler: Compiler, tmp_path: Path, damage: str) -> None:
    """Whatever file is hit, and the entry is whole afterwards."""
    cache = CubinCache(tmp_path)
    (expected,) = load_all([SPEC], "sm_80", cache=cache).values()
    (entry,) = tmp_path.glob("*.json")
    content = next(path for path in tmp_path.iterdir() if path.read_bytes() == expected.code)
    match damage:
        case "truncate":
            content.write_bytes(content.read_bytes()[:-1])
        case "alter":
            content.write_bytes(content.read_bytes()[:-1] + b"?")
        case "empty":
            content.write_bytes(b"")
        case "delete":
            content.unlink()
        case "json":
            entry.write_bytes(entry.read_bytes()[:40])
        case "keys":
            entry.write_text('{"code": 3}')
    for num_compiled in (2, 2):
        assert list(load_all([SPEC], "sm_80", cache=cache).values()) == [expected]
        assert len(compiler.jobs) == num_compiled


def test_folder_that_cannot_be_written_costs_the_cache_only(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server on a read-only disk starts all the same, slowly."""
    (tmp_path / "file").write_text("")
    made = load_all([SPEC, OTHER], "sm_80", cache=CubinCache(tmp_path / "file" / "below"), num_workers=1)
    assert made[SPEC].name == "copy_blocks"
    assert caplog.text.count("cubin_not_cached") == 1


def test_prune_deletes_what_was_not_used(compiler: Compiler, tmp_path: Path) -> None:
    """Finding an entry counts as use; content that an entry names stays."""
    cache = CubinCache(tmp_path)
    load_all([SPEC, OTHER], "sm_80", cache=cache, num_workers=1)
    long_ago = time.time() - 100
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago, long_ago))
    load_all([OTHER], "sm_80", cache=cache)
    assert cache.prune(unused_s=50) == 1
    assert [entry["spec"] for entry in cache.entries().values()] == [OTHER.name]
    load_all([OTHER], "sm_80", cache=cache)
    assert len(compiler.jobs) == 2
    assert len(list(tmp_path.iterdir())) == 3
    assert CubinCache(tmp_path / "none").prune(0) == 0


def test_key_follows_every_source_and_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of any file a kernel is made of changes its key; a promise does not."""
    files = source_files(SPEC.kernel)
    names = ("copy_blocks", "toolchain.compile", "intrinsics", "specialise")
    needed = {f"ferrule_server.kernels.cuda.{name}" for name in names}
    assert needed <= set(files)
    assert "ferrule_server.kernels.cuda.copy_blocks" in source_files(OTHER.kernel), (
        "its device function comes from there"
    )
    assert "ferrule_server.kernels.cuda.argmax" not in files
    keys = {
        source_key(spec, architecture)
        for spec in (
            SPEC,
            OTHER,
            copy_blocks.spec(parts=1),
            replace(SPEC, num_threads=128),
            replace(SPEC, ctas_per_sm=1),
        )
        for architecture in ("sm_80", "sm_90a")
    }
    assert len(keys) == 10
    assert source_key(replace(SPEC, shared_bytes=64), "sm_80") == source_key(SPEC, "sm_80")
    real = sources._file_hash
    for changed in files.values():
        monkeypatch.setattr(sources, "_file_hash", lambda path, changed=changed: real(path) + "x" * (path == changed))
        assert source_key(SPEC, "sm_80") not in keys


def test_key_is_the_same_in_a_copy_elsewhere(tmp_path: Path) -> None:
    """The folder of the sources does not matter: a bundle serves another machine."""
    server = Path(sources.__file__).parents[4]
    shutil.copytree(server, tmp_path / "server", ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    code = (
        "from ferrule_server.kernels.cuda import copy_blocks\n"
        "from ferrule_server.kernels.cuda.toolchain import sources\n"
        "print(sources.source_key(copy_blocks.spec(), 'sm_80'), sources.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "server", capture_output=True, text=True, check=True
    )
    key, file = done.stdout.split()
    assert file.startswith(str(tmp_path))
    assert key == source_key(SPEC, "sm_80")


def test_parameters_are_those_of_the_signature() -> None:
    """Without the keyword-only constants."""
    assert parameters(SPEC.kernel)[:2] == (("pool", "Address"), ("block_stride", "Address"))
    assert parameters(SPEC.kernel)[-1] == ("part_bytes", "I32")


def _bundle(path: Path, compiler: Compiler) -> tuple[Bundle, dict[KernelSpec, Cubin]]:
    made = load_all([SPEC, OTHER], "sm_80", num_workers=1)
    write_bundle(path, "sm_80", "numba=1", {source_key(spec, "sm_80"): (spec.name, made[spec]) for spec in made})
    return Bundle.open(path), made


def test_bundle_serves_without_the_toolkit(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is an error that names the kernel and the way to install the compiler."""
    bundle, made = _bundle(tmp_path / "kernels", compiler)

    def missing() -> str:
        raise CompileError("the compiler of GPU kernels is not installed")

    monkeypatch.setattr(cubins, "toolkit", missing)
    compiler.jobs.clear()
    found = load_all([SPEC, OTHER], "sm_80", cache=CubinCache(tmp_path / "cache"), bundle=bundle)
    assert found == {spec: replace(cubin, ptx="") for spec, cubin in made.items()}
    assert compiler.jobs == []
    lacking = argmax.spec()
    with pytest.raises(CompileError, match=r"1 kernels are in no bundle, the first is argmax.*not installed"):
        load_all([SPEC, lacking], "sm_80", bundle=bundle)
    with pytest.raises(CompileError, match="for sm_90a"):
        build([(SPEC, "sm_80"), (SPEC, "sm_90a")], bundle=bundle)


def test_bundle_of_another_architecture_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    """Not passed over, which would compile everything."""
    bundle, _ = _bundle(tmp_path / "kernels", compiler)
    compiler.jobs.clear()
    with pytest.raises(BundleError, match=r"kernels: for sm_80, wanted are kernels for sm_90a"):
        load_all([SPEC], "sm_90a", bundle=bundle)
    assert compiler.jobs == []


def test_what_a_bundle_lacks_is_said_once(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other sources, or another model: compiling takes a while, and nobody asked for it."""
    bundle, _ = _bundle(tmp_path / "kernels", compiler)
    load_all([SPEC, OTHER], "sm_80", bundle=bundle)
    assert caplog.text == ""
    real = sources._file_hash
    monkeypatch.setattr(sources, "_file_hash", lambda path: real(path) + "x")
    load_all([SPEC, OTHER], "sm_80", bundle=bundle, num_workers=1)
    assert caplog.text.count("bundle_lacks_kernels") == 1
    assert "lacking=2 wanted=2" in caplog.text


def test_bundle_is_the_same_for_the_same_kernels(compiler: Compiler, tmp_path: Path) -> None:
    """Byte for byte, whenever it is written."""
    _bundle(tmp_path / "one", compiler)
    _bundle(tmp_path / "two", compiler)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_damaged_bundles_are_errors(compiler: Compiler, tmp_path: Path) -> None:
    """Cut short, no zip at all, altered inside, missing."""
    path = tmp_path / "kernels"
    bundle, _ = _bundle(path, compiler)
    bundle.verify()
    whole = path.read_bytes()
    (digest,) = {record["code"] for record in bundle.records.values() if record["spec"] == SPEC.name}
    at = whole.index(digest.encode()) + len(digest)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
    with pytest.raises(BundleError, match=digest[:12]):
        bundle.verify()
    for damaged in (whole[: len(whole) // 2], b"", b"kernels"):
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match="no bundle"):
            Bundle.open(path)
    with pytest.raises(BundleError, match="no bundle"):
        Bundle.open(tmp_path / "none")


def test_command_line_builds_lists_verifies_and_prunes(
    compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model and the test of early launch into a bundle; what another model needs is missing, and that is said."""
    cache, bundle = ["--cache", str(tmp_path / "cache")], tmp_path / "kernels"
    shape = ["--shape", "Llama-3.2-1B"]
    main(["build", "--architecture", "sm_80", *shape, "--workers", "1", *cache, "--output", str(bundle)])
    num_kernels = len(catalog.kernels_of(MODEL_SHAPES["Llama-3.2-1B"])) + len(litmus.SPECS)
    assert f"{num_kernels} kernels for sm_80; compiling what {cache[1]} lacks\n" in capsys.readouterr().err
    main(["list", str(bundle)])
    main(["list", *cache])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * num_kernels
    assert lines[:num_kernels] == lines[num_kernels:]
    for more in (shape, []):
        main(["verify", str(bundle), *more])
        assert f"{num_kernels} cubins for sm_80, whole" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .* lacks \d+ of the \d+ kernels .*, and \d+ more$"):
        main(["verify", str(bundle), "--shape", "Qwen3-8B"])
    with pytest.raises(SystemExit, match=r"error: .* lacks \d+ of the \d+ kernels"):
        main(["verify", str(bundle), *shape])
    main(["build", "--architecture", "sm_80", *shape, "--workers", "1", *cache, "--output", str(bundle)])
    main(["verify", str(bundle), *shape])
    main(["prune", "--days", "0", *cache])
    assert "kernels deleted" in capsys.readouterr().err
    assert CubinCache(tmp_path / "cache").entries() == {}
    with pytest.raises(SystemExit, match=r"error: .* no bundle"):
        main(["list", str(tmp_path / "none")])


def test_verify_says_what_is_of_other_sources(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; what a test launches with other threads than the shipped spec is of these sources all the same."""
    as_tested = replace(OTHER, num_threads=96, ctas_per_sm=1)
    made = load_all([SPEC, as_tested], "sm_80", num_workers=1)
    bundle = tmp_path / "kernels"
    write_bundle(bundle, "sm_80", "numba=1", keyed(made, "sm_80"))
    main(["verify", str(bundle)])
    real = sources._file_hash
    monkeypatch.setattr(sources, "_file_hash", lambda path: real(path) + "x" * (path.stem == "embed"))
    with pytest.raises(SystemExit, match=rf"error: .*: 1 of 2 kernels are of other sources: {re.escape(OTHER.name)}$"):
        main(["verify", str(bundle)])


@pytest.mark.parametrize("option", [["--output", "none/kernels"], ["--output", "."], ["--cache", "file/below"]])
def test_targets_are_checked_before_anything_is_compiled(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    """A folder that is missing, a folder in a file's place, a file in a folder's."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit, match=r"^error: .*(none|\.|file)"):
        main(["build", "--architecture", "sm_80", "--shape", "Llama-3.2-1B", "--cache", "cache", *option])
    assert compiler.jobs == []
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "--architecture", "sm_80", "--workers", "0"], "--workers: .*at least 1"),
        (["build", "--architecture", "sm_80", "--workers", "-3"], "--workers: .*at least 1"),
        (["prune", "--days", "-1"], "--days: .*not negative"),
        (["prune", "--days", "nan"], "--days: .*not negative"),
    ],
)
def test_numbers_without_a_meaning_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 2, as any argument that cannot be."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(said, capsys.readouterr().err)
    with pytest.raises(ValueError, match="num_workers"):
        build([(SPEC, "sm_80")], num_workers=0)


@pytest.mark.parametrize("command", ["list", "prune"])
def test_a_cache_that_is_not_there_is_an_error(tmp_path: Path, command: str) -> None:
    """Rather than one that holds nothing: the name may be wrong."""
    with pytest.raises(SystemExit, match=r"error: .*none: no such folder"):
        main([command, "--cache", str(tmp_path / "none")])


def test_help_of_build_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """A cold build is no matter of seconds."""
    with pytest.raises(SystemExit, match="0"):
        main(["build", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"takes {BUILD_TIME} for one model" in said
    assert all(name in said for name in MODEL_SHAPES)
    for architecture in ARCHITECTURES:
        assert f"{architecture} for " in said, "which cards it is for"


def test_texts_agree_on_how_long_kernels_take() -> None:
    """One figure, wherever somebody looks it up."""
    for path in ("docs/operations.md", "docs/kernels.md", "tools/gpu/run.py"):
        text = " ".join((ROOT / path).read_text().split())
        assert BUILD_TIME.removeprefix("some ") in text or "{BUILD_TIME}" in text, path


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 kB"), (37_412, "37 kB"), (2_340_000, "2.3 MB")])
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    """Small ones in kB."""
    assert size(num_bytes) == text


def test_bar_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time that passed and the time that is left; in a pipe a line every ten seconds, so that it lives."""
    times = iter([100.0, 105.0, 111.0, 120.5, 121.0])
    with progress_bar(lambda: next(times)) as show:
        for done in range(1, 5):
            show(done, 56, "copy_blocks[P=1]")
    assert capsys.readouterr().err == "2 of 56 kernels, 11 s passed\n4 of 56 kernels, 21 s passed\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar() as show:
        show(1, 2, "copy_blocks[P=1]")
        show(2, 2, "copy_blocks[P=2]")
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "copy_blocks" in drawn
    assert "2/2" in drawn
    assert re.search(r"0:00:00 passed, \S+ left", drawn)


def _build_for_real(folder: Path, results: Any) -> None:
    made = build([(SPEC, "sm_80"), (OTHER, "sm_80")], cache=CubinCache(folder), num_workers=1)
    results.put([len(cubin.code) for cubin in made.values()])


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two processes compile the same kernels at once, for real; whatever remains is whole."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_build_for_real, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    sizes = [results.get(timeout=100) for _ in processes]
    for process in processes:
        process.join()
    assert sizes[0] == sizes[1]
    cache = CubinCache(tmp_path)
    assert len(cache.entries()) == 2
    found = [cache.find(key) for key in cache.entries()]
    assert sorted(len(cubin.code) for cubin in found if cubin) == sorted(sizes[0])
    assert not list(tmp_path.glob(".*"))


def test_pool_of_processes_compiles_each_spec_once_for_all_architectures(tmp_path: Path) -> None:
    """The real compiler, in two processes; an error of one is the caller's."""
    jobs = [(spec, architecture) for spec in (SPEC, OTHER) for architecture in ("sm_80", "sm_90a")]
    made = build(jobs, cache=CubinCache(tmp_path), num_workers=2)
    assert [cubin.architecture for cubin in made.values()] == ["sm_80", "sm_90a"] * 2
    assert all(cubin.code.startswith(b"\x7fELF") and cubin.num_registers for cubin in made.values())
    assert build(jobs, cache=CubinCache(tmp_path)) == made


class Pool:
    """Stands for a pool of processes: notes how it is made, and begins and compiles here."""

    made: list[int] = []  # noqa: RUF012 - the test clears it

    def __init__(self, num_workers: int, *, initializer: Any, initargs: tuple[Any, ...], **_: object) -> None:
        self.made.append(num_workers)
        initializer(*initargs)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        """Run it now."""
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: object) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(("is_serving", "num_workers", "expected"), [(True, 1, [1]), (False, 1, []), (True, 5, [1])])
def test_a_server_never_compiles_in_its_own_process(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, is_serving: bool, num_workers: int, expected: list[int]
) -> None:
    """Not even a single kernel: the compiler would take turns with the engine. What it starts gives way to it."""
    nicenesses: list[int] = []
    monkeypatch.setattr(cubins, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(os, "nice", nicenesses.append)
    Pool.made.clear()
    made = load_all([SPEC], "sm_90a", num_workers=num_workers, is_serving=is_serving)
    assert (Pool.made, nicenesses, len(compiler.jobs)) == (expected, [10] * len(expected), 1)
    assert made[SPEC].architecture == "sm_90a"


def test_one_process_per_core_that_may_be_used(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not per core of the machine."""
    monkeypatch.setattr(cubins, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(cubins, "usable_cpus", lambda: 2)
    Pool.made.clear()
    load_all([SPEC, OTHER, embed.spec(X=2)], "sm_90a")
    assert (Pool.made, len(compiler.jobs)) == ([2], 3)


_DIES = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from ferrule_server.kernels.cuda.toolchain import build as cubins
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=cubins._end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    os._exit(0)
"""


def test_processes_that_compile_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Also where that is killed: nobody is left that waits for work for ever."""
    script = tmp_path / "dies.py"
    script.write_text(_DIES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=True)
    worker = int(done.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {worker} lives on"
        time.sleep(0.05)
