"""Loading and unloading of adapters while the server runs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from stoker.data.corpus import special_tokens_of
from stoker.errors import Problem, UserError
from stoker.generate.open_model import OpenModel
from stoker.generate.request import BASE
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.task_spec import task_of
from stoker.models.model_source import ModelSource
from stoker.models.split_fused import Parts
from stoker.models.text import open_text_side
from stoker.models.tokenizers.job_tokenizer import (
    chat_template,
    codec_of,
    extension_of,
    load_tokenizer_from,
    served_stop_ids,
)
from stoker.models.tuning.packed_experts import has_packed_experts, stacks_of
from stoker.models.tuning.virtual_tokens import virtual_of
from stoker.runs.find_run import find_run
from stoker.runs.run_folder import RunFolder
from stoker.serve.api_error import bad_request
from stoker.serve.endpoint_state import Service
from stoker.serve.served_models.adapter_weights import AdapterWeights, insert_adapter, weights_of_folder, weights_of_run
from stoker.serve.served_models.served import Models, Served, ServedBase

TRAINED = "default"  # peft's name of a run's adapter


async def load_adapter(service: Service, name: str, path: str, base: str | None) -> Served:
    """Serves an exported adapter folder, or the newest adapter of a run, under a name.

    Raises:
        ApiError: the name is taken, or the folder holds no adapter for a base on this server.
    """
    if name in service.models:
        raise bad_request(f"{name!r} is served already; unload it first", param="lora_name")
    place = os.path.expanduser(path)  # noqa: PTH111 -- Path's raises where there is no such user
    if not os.path.isdir(place):  # noqa: PTH112 -- Path.is_dir() raises for names too long
        raise bad_request(f"there is no folder {path[:200]!r}", param="lora_path")
    folder = Path(place).resolve()
    if (folder / "job.yaml").is_file():
        host, weights, opened = await service.in_loading_thread(lambda: _of_run(service, folder))
        if base is not None and _host_for(service, base) is not host:
            raise bad_request(f"{folder} was trained over {host.base}, not over {base}", param="base_model_name")
    else:
        host = _host_for(service, base)
        weights = await service.in_loading_thread(lambda: weights_of_folder(folder))
        opened = await service.in_loading_thread(lambda: with_own_text(host.opened, folder))
    future = service.worker.call(lambda: add_adapter(host, opened, weights), between=True)
    adapter, opened = await asyncio.wrap_future(future)
    served = Served(name, host, adapter, opened, parent=host.base, removable=True, root=str(folder))
    if name in service.models:  # another request was faster
        await asyncio.wrap_future(service.worker.call(lambda: remove_adapter(host, adapter), between=True))
        raise bad_request(f"{name!r} is served already; unload it first", param="lora_name")
    service.models.add(served)
    base = next((other.root for other in service.models if other.host is host and other.adapter == BASE), host.base)
    if weights.base and Path(weights.base).name != Path(base).name:
        print(f"{name} was trained over {weights.base!r}, and is served over {base}", file=sys.stderr, flush=True)
    return served


async def unload_adapter(service: Service, name: str) -> None:
    """Unloads an adapter; returns when its requests have ended and its memory is free.

    Raises:
        ApiError: the model does not exist, or it is not an adapter whose base stays loaded.
    """
    served = service.models.find(name)
    if not served.removable:
        raise bad_request(
            f"{name!r} is not an adapter, and cannot be unloaded while the server runs", param="lora_name"
        )
    service.models.remove(name)
    deadline = time.monotonic() + service.options.seconds
    while served.users and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    adapter = TRAINED if served.adapter is None else served.adapter
    await asyncio.wrap_future(service.worker.call(lambda: remove_adapter(served.host, adapter), between=True))


def _of_run(service: Service, folder: Path) -> tuple[ServedBase, AdapterWeights, OpenModel]:
    run = find_run(str(folder), service.models.folder)
    loaded = load_job(run.job)
    found = adapter_of_run(run, loaded, "last", service.models.folder, service.models)
    if found is None:
        what = f"{folder} has no plain LoRA adapter of a base that this server serves"
        export = f"stoker export {folder} --format adapter --to FOLDER, and load the folder"
        lora = loaded.job.tune.method in ("lora", "qlora")
        raise UserError(Problem(what, export if lora else "name the run when the server starts"))
    return found


def adapter_of_run(
    run: RunFolder, loaded: LoadedJob, at: str, folder: Path, models: Models
) -> tuple[ServedBase, AdapterWeights, OpenModel] | None:
    """Returns a run's adapter, its host and the open model; None if no base fits.

    Args:
        at: the checkpoint.
        folder: start of relative paths.
    """
    job = loaded.job
    host = next(
        (
            host
            for host in models.hosts
            if host.run is not None and _same_base(host.opened.decoder.model, host.run, loaded)
        ),
        None,
    )
    if host is None or extension_of(job, folder) is not None:
        return None
    weights = weights_of_run(run, loaded, at, folder)
    if weights is None:
        return None
    text = open_text_side(loaded, folder)
    source = job.data[0]
    opened = replace(
        host.opened,
        name=run.path.name,
        codec=text.codec.for_source(source, folder),
        chats=task_of(job).rows.chat or text.own_template,
        special_tokens=special_tokens_of(source, source.format),
        run=None,
    )
    return host, weights, opened


def _same_base(model: nn.Module, one: LoadedJob, other: LoadedJob) -> bool:
    """Returns whether two runs trained adapters over the same weights in the same arithmetic.

    Experts with adapters have no others, and are not in 4 bits.

    Args:
        model: that of the first.
    """
    a, b = one.job, other.job
    if (a.model, a.seed, a.train.precision) != (b.model, b.seed, b.train.precision):
        return False
    if not stacks_of(model) and not has_packed_experts(model):
        return True
    adapted = any(isinstance(module, ParamWrapper) for module in model.modules())
    return not adapted and (a.tune.targets, a.tune.layers) == (b.tune.targets, b.tune.layers)


def _host_for(service: Service, base: str | None) -> ServedBase:
    """Returns the base that an adapter is for."""
    if base is not None:
        return service.models.find(base).host
    hosts = service.models.hosts
    if len(hosts) > 1:
        names = ", ".join(host.base for host in hosts)
        raise bad_request(f"several bases are served: write base_model_name, one of {names}", param="base_model_name")
    return hosts[0]


def with_own_text(opened: OpenModel, folder: Path) -> OpenModel:
    """Returns the open model with the tokenizer, chat template and stop tokens of an adapter's folder, if it has any.

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


def add_adapter(host: ServedBase, opened: OpenModel, weights: AdapterWeights) -> tuple[str, OpenModel]:
    """Adds an adapter to a host, in the engine's thread; returns (its name in memory, the open model).

    Raises:
        UserError: the adapter does not fit.
    """
    model = host.engine.decoder.model
    if virtual_of(model) is not None:
        raise UserError("the base has virtual tokens; adapters cannot be loaded next to them")
    if any(isinstance(layer, Parts) for layer in model.modules()) and not weights.of_run:
        raise UserError("the base was opened by a run that splits its fused layers; serve the run of this adapter")
    adapter = f"served{host.next_number()}"
    try:
        opened = insert_adapter(replace(opened, decoder=host.engine.decoder), adapter, weights)
    except BaseException:
        remove_adapter(host, adapter)
        raise
    host.engine.decoder = opened.decoder
    host.engine.forget()
    return adapter, opened


def remove_adapter(host: ServedBase, adapter: str) -> None:
    """Removes an adapter from memory, in the engine's thread."""
    model = host.engine.decoder.model
    if isinstance(model, PeftModel) and adapter in model.peft_config:
        others = [name for name in model.peft_config if name != adapter]
        if others:
            model.set_adapter(others[0])  # peft warns where it deletes the active one
            model.delete_adapter(adapter)
            # peft takes the active adapter from the first layer that was adapted, which may have no other.
            model.set_adapter(others[0])
        else:  # peft has no model without any adapter
            plain = model.unload()
            vars(plain).pop("peft_config", None)
            host.engine.decoder = replace(host.engine.decoder, model=plain)
    host.engine.forget()
