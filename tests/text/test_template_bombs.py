"""Chat templates of strangers: whatever one takes, the caller gets a typed error soon, and the server loses nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.errors import InvalidRequest, ModelError
from ferrule_server.text import template_process
from ferrule_server.text.chat_template import ChatTemplate, Conversation
from ferrule_server.text.template_process import RenderLimits
from ferrule_server.text.tokenizer_config import TokenizerConfig

LIMITS = RenderLimits(max_time_s=1.0)
USER = Conversation([{"role": "user", "content": "a" * 100}])
TEXT = "messages[0].content"
WIDE, FAR = "3000000000", "9" * 18
EMPTY_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    # The width of what a filter, a method or a format makes. As a constant it is worked out when Jinja compiles.
    "center": f"{{{{ {TEXT}|center({WIDE}) }}}}",
    "center of a constant": f"{{{{ 'a'|center({WIDE}) }}}}",
    "center of a constant that fits": "{{ 'a'|center(200000000) }}",
    "center, its length alone": f"{{{{ {TEXT}|center({WIDE})|length }}}}",
    "method center": f"{{{{ {TEXT}.center({WIDE}) }}}}",
    "method ljust": f"{{{{ {TEXT}.ljust({WIDE}) }}}}",
    "method rjust": f"{{{{ {TEXT}.rjust({WIDE}) }}}}",
    "method zfill": f"{{{{ {TEXT}.zfill({WIDE}) }}}}",
    "method zfill of a constant": f"{{{{ 'a'.zfill({WIDE}) }}}}",
    "method expandtabs": f"{{{{ '\\t'.expandtabs({WIDE}) }}}}",
    "method expandtabs of the message": f"{{{{ ({TEXT} ~ '\\t').expandtabs(2000000000) }}}}",
    "percent": f"{{{{ '%{WIDE}d' % 1 }}}}",
    "percent with a star": f"{{{{ '%*d' % ({WIDE}, 1) }}}}",
    "percent of the message": f"{{{{ ('%{WIDE}s') % {TEXT} }}}}",
    "format": f"{{{{ '{{:{WIDE}}}'.format(1) }}}}",
    "format, precision": f"{{{{ '{{:.{WIDE}f}}'.format(1.5) }}}}",
    "format, nested": f"{{{{ '{{:{{}}}}'.format(1, {WIDE}) }}}}",
    "filter format": f"{{{{ '%{WIDE}d'|format(1) }}}}",
    "indent": f"{{{{ 'a\\nb'|indent({WIDE}) }}}}",
    "indent of the message": f"{{{{ ({TEXT} ~ '\\nb')|indent({WIDE}) }}}}",
    "tojson indent": f"{{{{ messages|tojson(indent={WIDE}) }}}}",
    "tojson indent, constant": f"{{{{ [1, 2]|tojson(indent={WIDE}) }}}}",
    "tojson separators": "{{ range(30000)|list|tojson(separators=('x' * 4000000, 'y')) }}",
    # Texts out of texts.
    "replace": f"{{{{ {TEXT}|replace('', 'x' * 4000000)|replace('x', 'y' * 1000) }}}}",
    "method replace": f"{{{{ {TEXT}.replace('a', 'b' * 4000000).replace('b', 'c' * 1000) }}}}",
    "join": "{{ range(90000)|join('x' * 4000000) }}",
    "method join": f"{{{{ ('x' * 4000000).join({TEXT} * 1000) }}}}",
    "translate": f"{{{{ ({TEXT} * 1000).translate({{97: 'b' * 4000000}}) }}}}",
    "concatenation": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "addition": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "addition of lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a block that is kept": "{% set x %}{% for i in range(99999) %}{{ 'y' * 99999 }}{% endfor %}{% endset %}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
                    "{{ n.x|string|length }}",
    # Lists.
    "batch": "{{ messages|batch(300000000, 'x')|list }}",
    "batch, further": f"{{{{ messages|batch({FAR}, 'x')|list }}}}",
    "batch of a constant": f"{{{{ [1]|batch({FAR}, 'x')|list }}}}",
    "slice": "{{ messages|slice(300000000)|list }}",
    "slice, further": f"{{{{ messages|slice({FAR})|list|length }}}}",
    "slice of a constant": f"{{{{ [1]|slice({FAR})|list }}}}",
    "method split": "{{ ('a' * 4000000).split('a')|map('list')|list * 99 }}",
    "product of lists": "{{ ([1] * 4000000)|map('center', 1000)|list }}",
    # Time, most of it in one call that nothing interrupts.
    "empty loops": EMPTY_LOOP,
    "empty loops of a constant": "{% for a in [1, 2, 3] * 999999 %}" + EMPTY_LOOP + "{% endfor %}",
    "count": "{{ ('a' * 4000000).count('a' * 2000000 ~ 'b') }}{{ ('ab' * 2000000).find('ba' * 999999 ~ 'c') }}"
             * 500,
    "wordwrap": "{{ ('a ' * 2000000)|wordwrap(3)|wordwrap(2)|wordwrap(1) }}",
    "urlize": "{{ ('www.' * 1000000)|urlize }}",
    "striptags": "{{ ('<!---->' * 500000)|striptags|length }}" * 50,
    "sort": "{{ range(99999)|map('string')|sort|map('length')|sort|sum }}" * 500,
    "unique": "{{ range(99999)|map('string')|unique|list|length }}" * 500,
    "powers": "{% for i in range(9999) %}{{ ((7 ** 20000) % (3 ** 15000))|string|length }}{% endfor %}",
    "digits": "{% for i in range(99999) %}{{ (7 ** 1500)|string|length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    # What crashes compilers and interpreters.
    "deep parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "long sums": "{{ " + "+".join(["1"] * 200_000) + " }}",
    "deep not": "{{ " + "not " * 100_000 + "1 }}",
    "a generation": "{% generation %}" + EMPTY_LOOP + "{% endgeneration %}",
}  # fmt: skip


def template(source: str, limits: RenderLimits = LIMITS) -> ChatTemplate:
    """Return one template."""
    return ChatTemplate(TokenizerConfig(chat_templates={"default": source}), limits)


@contextmanager
def _modest(seconds: float) -> Iterator[None]:
    """Check that the body took no longer, and that this process did not grow for it."""
    begin, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - begin < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10


# Each takes a second: one in three every time, the others in the long campaign.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if index % 3 else ()) for index, name in enumerate(BOMBS)]
)
def test_a_bomb_ends_in_a_typed_error(name: str) -> None:
    """At the start or at the call, soon; the server's memory stays what it was."""
    with (
        _modest(2 * LIMITS.max_time_s + 10),
        pytest.raises((ModelError, InvalidRequest), match="chat template") as found,
    ):
        template(BOMBS[name]).render(USER)
    assert len(str(found.value)) < 700


SIZES = st.sampled_from([0, 1, 40, 10**5, 10**8, 3 * 10**9, 10**18, -5])
STEPS = st.sampled_from(["|center(N)", ".ljust(N)", ".zfill(N)", "|list|batch(N,'x')|list|string", "|indent(N)",
                         "|list|slice(N)|list|string", ".replace('a','b'*N)", "|replace('a','ab')", "|list|join('x'*N)",
                         ".expandtabs(N)", "|wordwrap(N)", "|truncate(N)", "|tojson(indent=N)", "|upper",
                         "|urlize(N)", ".translate({97: 'a' * N})", "|xmlattr", "*N", "~'a'", "[:N]"])  # fmt: skip
CHAINS = st.lists(st.tuples(STEPS, SIZES), min_size=1, max_size=4)


@given(chain=CHAINS, is_constant=st.booleans())
@settings(max_examples=40)
def test_any_chain_of_filters_ends(chain: list[tuple[str, int]], is_constant: bool) -> None:
    """In a text of bounded length or a typed error, whatever the widths are."""
    source = "'a\\nb'" if is_constant else TEXT
    for step, size in chain:
        source = f"({source}{step.replace('N', str(size))})"
    with _modest(2 * LIMITS.max_time_s + 10):
        assert _length("{{ " + source + " }}") <= LIMITS.max_length


def _length(source: str) -> int:
    """Return the length of what a template makes, 0 where it is refused."""
    try:
        return len(template(source).render(USER))
    except (ModelError, InvalidRequest):
        return 0


def test_a_template_that_was_ended_renders_the_next_conversation() -> None:
    """What one conversation takes is gone with it: after too much time, too much memory, and a crash."""
    source = (
        "{% if messages[0].content == 'time' %}" + EMPTY_LOOP + "{% elif messages[0].content == 'memory' %}"
        f"{{{{ 'a'.center({WIDE}) }}}}" + "{% endif %}fine"
    )
    sturdy = template(source)
    for content in ("time", "memory", "time", "memory"):
        with pytest.raises(InvalidRequest):
            sturdy.render(Conversation([{"role": "user", "content": content}]))
        assert sturdy.render(USER) == "fine"


def test_the_reason_is_said() -> None:
    """Time and memory are told apart, each with its limit."""
    with pytest.raises(InvalidRequest, match=r"takes more than 1 s over this conversation"):
        template(EMPTY_LOOP).render(USER)
    with pytest.raises(InvalidRequest, match=r"its memory is used up; it may take 512 MiB"):
        template(BOMBS["method center"]).render(USER)
    with pytest.raises(ModelError, match=r"take more than 0.2 s to compile"):
        template("{{ 1 }}" * 200_000, RenderLimits(max_time_s=0.2))


def _children() -> set[int]:
    """Return the processes that run templates for this one."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_a_process_that_is_killed_is_replaced() -> None:
    """By whatever kills it, the kernel for want of memory included; nobody is told."""
    before = _children()
    sturdy = template("{{ messages[0].content }}")
    (pid,) = _children() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sturdy.render(USER) == "a" * 100
    assert pid not in _children()


def test_the_process_sees_no_secrets_and_has_limits() -> None:
    """A template that left the sandbox would find neither tokens nor memory."""
    before = _children()
    os.environ["HF_TOKEN"] = "hf_secret"
    try:
        kept = template("{{ messages[0].content }}")
    finally:
        del os.environ["HF_TOKEN"]
    (pid,) = _children() - before
    assert b"hf_secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) < 1 << 30
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in mapped
    assert "grpc" not in mapped
    assert kept.render(USER)


def test_processes_end_with_the_template() -> None:
    """None is left behind, and none outlives a server that is killed."""
    before = _children()
    kept = template("x")
    kept.render(USER)
    assert _children() - before
    del kept
    assert not _children() - before


def test_a_process_ends_with_a_server_that_is_killed() -> None:
    """Also in the middle of a rendering: its timer ends it."""
    code = (
        "import sys, threading; from tests.text.test_template_bombs import *\n"
        "from tests.text.test_template_bombs import _children\n"
        "slow = template(EMPTY_LOOP, RenderLimits(max_time_s=2.0))\n"
        "threading.Thread(target=lambda: slow.render(USER), daemon=True).start()\n"
        "time.sleep(0.3); print(*_children(), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    pids = [int(pid) for pid in run.stdout.split()]
    assert pids, run.stderr
    deadline = time.monotonic() + 30
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_slow_conversation_leaves_the_others_a_process() -> None:
    """One waits for its end, the others do not wait for it."""
    source = "{% if messages[0].content == 'slow' %}" + EMPTY_LOOP + "{% endif %}fine"
    shared, times = template(source, RenderLimits(max_time_s=4.0)), []
    started = threading.Event()

    def be_slow() -> None:
        started.set()
        shared.render(Conversation([{"role": "user", "content": "slow"}]))

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(be_slow)
        started.wait()
        while not slow.done():
            begin = time.monotonic()
            assert shared.render(USER) == "fine"
            times.append(time.monotonic() - begin)
        with pytest.raises(InvalidRequest):
            slow.result()
    assert len(times) > 5
    assert sorted(times)[len(times) // 2] < 0.5


def test_many_threads_share_the_processes() -> None:
    """Each gets its own answer, and there are never more of them than agreed."""
    before = _children()
    shared = template("{{ messages[0].content }}")
    with ThreadPoolExecutor(16) as pool:
        texts = [str(i) * 100 for i in range(400)]
        conversations = [Conversation([{"role": "user", "content": text}]) for text in texts]
        assert list(pool.map(shared.render, conversations)) == texts
    assert len(_children() - before) <= template_process._NUM_PROCESSES


def test_a_start_without_processes_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may refuse to start one."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ModelError, match=r"cannot be started: .*temporarily unavailable"):
        template("x")
