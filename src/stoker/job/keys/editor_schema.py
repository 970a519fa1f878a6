"""The JSON schema of a job file, for editors: the keys of `Job`, and the shorthands."""

from __future__ import annotations

from typing import Any

from stoker.job.document.shorthand import ALL_AUTO, MAIN_KEY, TOKENS
from stoker.job.keys.annotations import block_of, choices
from stoker.job.keys.key_paths import field_at
from stoker.job.load_job import STAGES
from stoker.job.schema import Job
from stoker.job.stage import NAME

STAGES_MEAN = "jobs that are trained one after another; each has the keys beside `stages` as well"
FROM_MEANS = "name of the earlier stage whose weights this stage starts from"


def editor_schema() -> dict[str, Any]:
    """Returns the schema (JSON Schema 2020-12) as a mapping that `json.dumps` takes."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Job.model_json_schema(),
    }
    schema["title"] = "Stoker job"
    for key, main in MAIN_KEY.items():
        field, _ = field_at((key, main))
        options = choices(field.annotation) if field is not None else []
        short: dict[str, Any] = {"type": "string", **({"enum": options} if options else {"minLength": 1})}
        _allow(schema["properties"], key, short)
    text: dict[str, Any] = {"type": "string", "minLength": 1}
    tokens = {"items": text, "type": "array"}
    _allow(schema["$defs"]["ModelBlock"]["properties"], TOKENS[1], text, tokens)
    _allow(schema["properties"], ALL_AUTO, {"const": "auto", "type": "string"})
    source = {"$ref": "#/$defs/SourceBlock"}
    for holder, key in (
        (schema["properties"], "data"),
        (schema["$defs"]["EvaluateBlock"]["properties"], "data"),
    ):
        holder[key]["items"] = {"anyOf": [text, source]}
        _allow(holder, key, text, source)
    for name, field in Job.model_fields.items():
        block, is_list = block_of(field.annotation)
        if block is not None and not is_list and field.default_factory is not None:
            _allow(schema["properties"], name, {"type": "null"})
    return _with_stages(schema)


def _with_stages(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a job, or of a file with stages: each has a name and any keys of a job."""
    properties, block = schema["properties"], schema["$defs"]["ModelBlock"]
    earlier = {"type": "string", "minLength": 1, "description": FROM_MEANS}
    begun = {**block, "properties": {**block["properties"], "from": earlier}, "required": ["from"]}
    schema["$defs"]["BegunModel"] = {**begun, "description": "The model that an earlier stage trains."}
    model = {**properties["model"], "anyOf": [*properties["model"]["anyOf"], {"$ref": "#/$defs/BegunModel"}]}
    name = {"type": "string", "pattern": f"^{NAME}$", "description": "the stage's name, and its run's folder"}
    schema["$defs"]["Stage"] = {
        "type": "object",
        "description": "A job of a file with stages; it has the keys beside `stages` as well.",
        "properties": {"name": name, **properties, "model": model},
        "required": ["name"],
        "additionalProperties": False,
    }
    stages = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Stage"}, "description": STAGES_MEAN}
    schema["properties"] = {**properties, STAGES: stages}
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": [STAGES]}]
    return schema


def _allow(properties: dict[str, Any], key: str, *more: dict[str, Any]) -> None:
    """Let a property be one of the shorthands as well."""
    written = properties[key]
    notes = {name: written.pop(name) for name in ("description", "default", "title") if name in written}
    options = written.pop("anyOf") if set(written) == {"anyOf"} else [written]
    properties[key] = {**notes, "anyOf": [*more, *options]}
