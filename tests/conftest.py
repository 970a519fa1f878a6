"""Shared by all tests: a cache folder of their own, one thread, processes, and tiny tokenizers built in memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the process that hands out the tests loads this file, and need not load torch
    from tokenizers import Tokenizer

    from stoker.data.text_codec import TextCodec
    from stoker.launch.process_pool import Pool


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use the pool of processes, which come last, and the cases that run seldom."""
    import torch

    no_gpu = pytest.mark.skip(reason="no GPU")
    for item in items:
        if (often := item.get_closest_marker("often")) and isinstance(item, pytest.Function):
            case = item.callspec.id
            if not {case, *case.split("-")} & set(often.args):
                item.add_marker(often.kwargs.get("then", "exhaustive"))
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker("pool")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    items.sort(key=lambda item: item.get_closest_marker("pool") is not None)  # those that take all cores come last


def pytest_collection_finish() -> None:
    """Tests and libraries, a million objects, are not looked through by each garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def stoker_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the cache of the person who runs it."""
    before = os.environ.get("STOKER_CACHE")
    os.environ["STOKER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["STOKER_CACHE"]
    else:
        os.environ["STOKER_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Matrices this small are multiplied faster by one thread than by several that wait for each other.

    Programs that tests start have as many threads as `warm_process` gives its own: last bits depend on their number.
    """
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", name="warm_processes")
def _warm_processes(stoker_cache: None) -> Iterator[None]:
    """``python -m stoker`` and ``python -c`` are started without the time of imports (`warm_process`)."""
    from warm_process import warm_processes

    with warm_processes():
        yield


@pytest.fixture
def in_process_replay() -> Iterator[None]:
    """Exports are replayed in this process."""
    from replay_in_process import replay_in_process

    with replay_in_process():
        yield


@pytest.fixture(scope="session")
def pool(stoker_cache: None) -> Iterator[Pool]:
    """Up to eight processes that all tests share; they start when a test first needs them.

    ``pool.run(function, *arguments, world=4)`` calls a function of a test module (not a nested one) on ranks 0 to
    3, in a gloo group of their own, and gives the list of their results. An exception of a rank is raised here:
    a `UserError` as itself, any other as `stoker.launch.first_failure.RankFailed` with the rank's traceback. With
    ``world=1`` there is no process group: what one process computes. Rank and size: `torch.distributed`.
    """
    from stoker.launch.process_pool import Pool

    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def redis_place() -> Iterator[str]:
    """The URL of a server of Redis that the tests of a process share; each takes a ``?prefix=`` of its own."""
    from redis_server import redis_server

    with redis_server() as place:
        yield place


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 ids with the special tokens of ChatML."""
    from tiny_tokenizer import tiny_tokenizer

    return tiny_tokenizer()


CodecOf = Callable[..., "TextCodec"]


@pytest.fixture(scope="session")
def codec_of(tokenizer: Tokenizer) -> CodecOf:
    """Makes the codec of a template (its source, or the name of a built-in one) and a stop token."""
    from stoker.data.templates.chat_template import BUILT_IN, ChatTemplate
    from stoker.data.text_codec import TextCodec

    def make(template: str = "chatml", stop: str = "<|im_end|>", own: Tokenizer | None = None) -> TextCodec:
        backend = own or tokenizer
        names = (("bos_token", "<|im_start|>"), ("eos_token", stop))
        return TextCodec(
            definition=backend.to_str(),
            template=ChatTemplate(BUILT_IN.get(template, template), names),
            stop_ids=frozenset({backend.token_to_id(stop)}),
            end_id=backend.token_to_id(stop),
            vocabulary=backend.get_vocab_size(),
        )

    return make


@pytest.fixture(scope="session")
def chatml(codec_of: CodecOf) -> TextCodec:
    """A codec with the ChatML template, whose stop token is ``<|im_end|>``."""
    return codec_of("chatml")


@pytest.fixture(scope="session")
def codec(codec_of: CodecOf) -> TextCodec:
    """A codec as of a tokenizer without a template: the stated default."""
    return codec_of("plain", "<|endoftext|>")
