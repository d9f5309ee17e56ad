"""One fork server and one small token set for all fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torture.fork_server import ForkServer
from tests.torture.small_run import write_config
from trainer.__main__ import main


@pytest.fixture(scope="session")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose run.uri is still to be set."""
    folder = tmp_path_factory.mktemp("small-run")
    text = folder / "text.txt"
    text.write_text("\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUSTRAIN_CACHE", str(folder / "cache"))
        words = ["tokenize", str(text), "--out", str(folder / "tokens"), "--tokenizer", "bytes", "--val-fraction", "0"]
        assert main(words) == 0
    return write_config(folder / "config.toml", folder / "tokens")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, loopback_guard: object) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("ranks"))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line now, past pytest's capturing: the long tests show that they are alive."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    return say


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUSTRAIN_CACHE", str(tmp_path / "cache"))
