"""Loads and unloads adapters while the server runs."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

from peft import PeftModel

from stoker.errors import UserError
from stoker.generate.open_model import OpenModel
from stoker.job.schema import ModelBlock
from stoker.models.model_source import ModelSource
from stoker.models.split_fused import Parts
from stoker.models.tokenizer import chat_template, codec_of, load_tokenizer_from, served_stop_ids
from stoker.models.virtual_tokens import virtual_of
from stoker.serve.adapter_weights import AdapterWeights, insert, of_folder
from stoker.serve.api_error import wrong
from stoker.serve.endpoint_state import Service
from stoker.serve.served import Served, ServedBase


async def load_adapter(service: Service, name: str, path: str, base: str | None) -> Served:
    """Serves an exported adapter folder under a name.

    Raises:
        ApiError: the name is taken, or the folder is no adapter of a base here.
    """
    if name in service.models:
        raise wrong(f"{name!r} is served already; unload it first", param="lora_name")
    host = _host_for(service, base)
    folder = Path(path).expanduser().resolve()
    weights = await service.in_texts_thread(lambda: of_folder(folder))
    opened = await service.in_texts_thread(lambda: with_own_text(host_model(service, host), folder))
    future = service.worker.call(lambda: beside(host, opened, weights), between=True)
    adapter, opened = await asyncio.wrap_future(future)
    served = Served(name, host, adapter, opened, parent=host.base, removable=True, root=str(folder))
    if name in service.models:  # another request was faster
        await asyncio.wrap_future(service.worker.call(lambda: take_out(host, adapter), between=True))
        raise wrong(f"{name!r} is served already; unload it first", param="lora_name")
    service.models.add(served)
    return served


async def unload_adapter(service: Service, name: str) -> None:
    """Serves an adapter no longer; returns when the requests that use it have ended and its memory is free.

    Raises:
        ApiError: there is no such adapter, or it was not loaded while the server ran.
    """
    served = service.models.find(name)
    if not served.removable:
        raise wrong(f"{name!r} was given on the command line, and stays", param="lora_name")
    service.models.remove(name)
    deadline = time.monotonic() + service.options.seconds
    while served.users and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    adapter = served.adapter
    assert adapter is not None
    await asyncio.wrap_future(service.worker.call(lambda: take_out(served.host, adapter), between=True))


def _host_for(service: Service, base: str | None) -> ServedBase:
    """The base that an adapter is for."""
    if base is not None:
        return service.models.find(base).host
    hosts = service.models.hosts
    if len(hosts) > 1:
        names = ", ".join(host.base for host in hosts)
        raise wrong(f"several bases are served: write base_model_name, one of {names}", param="base_model_name")
    return hosts[0]


def host_model(service: Service, host: ServedBase) -> OpenModel:
    """An open model of a host."""
    return next(served.opened for served in service.models if served.host is host)


def with_own_text(opened: OpenModel, folder: Path) -> OpenModel:
    """The open model with the tokenizer, chat template and stop tokens that lie in an adapter's folder, if any do.

    Raises:
        UserError: the tokenizer has other tokens than the base.
    """
    if not (folder / "tokenizer.json").is_file():
        return opened
    source = ModelSource("folder", str(folder))
    tokenizer = load_tokenizer_from(source)
    codec = codec_of(tokenizer, served_stop_ids(tokenizer, source, ModelBlock(name=str(folder))))
    if codec.tokenizer.get_vocab() != opened.tokenizer.get_vocab():
        raise UserError(f"{folder}: its tokenizer has other tokens than the base")
    _, own = chat_template(tokenizer)
    return replace(opened, name=folder.name, codec=codec, chats=own or opened.chats)


def beside(host: ServedBase, opened: OpenModel, weights: AdapterWeights) -> tuple[str, OpenModel]:
    """Puts an adapter beside the others of a host, in the engine's thread: (its name in memory, the open model).

    Raises:
        UserError: it does not fit.
    """
    model = host.engine.decoder.model
    if virtual_of(model) is not None:
        raise UserError("the base has virtual tokens, beside which no adapter is loaded")
    if any(isinstance(layer, Parts) for layer in model.modules()) and not weights.of_run:
        raise UserError("the base was opened by a run that splits its fused layers; serve the run of this adapter")
    adapter = f"served{host.next_number()}"
    try:
        opened = insert(replace(opened, decoder=host.engine.decoder), adapter, weights)
    except BaseException:
        take_out(host, adapter)
        raise
    host.engine.decoder = opened.decoder
    host.engine.forget()
    return adapter, opened


def take_out(host: ServedBase, adapter: str) -> None:
    """Removes an adapter from memory, in the engine's thread."""
    model = host.engine.decoder.model
    if isinstance(model, PeftModel) and adapter in model.peft_config:
        if len(model.peft_config) > 1:
            model.delete_adapter(adapter)
        else:  # peft has no model without any adapter
            plain = model.unload()
            vars(plain).pop("peft_config", None)
            host.engine.decoder = replace(host.engine.decoder, model=plain)
    host.engine.forget()


def usable_name(name: str) -> bool:
    """Whether a model can be served under a name."""
    return re.fullmatch(r"[\w.:/@+-]{1,200}", name) is not None
