"""Refuses data that must not be trained on: each problem that the audit reports, with advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.data.corpus import Corpus, TokenisedSource
from stoker.data.dropped_rows import reason_kind
from stoker.data.files.byte_streams import DAMAGED, REPLACE, WRITE_UTF8, utf8_advice
from stoker.data.files.tables import NOT_UTF8
from stoker.data.formats.pair_formats import PAIRS
from stoker.data.templates.ignored_fields import LOST_ANSWER
from stoker.data.templates.render_row import TEMPLATE_REFUSES
from stoker.data.templates.trained_spans import LONG_PROMPT, NO_ROOM, SAME_CUT, TOO_LONG
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import ShardSummary
from stoker.data.tokenise import JUDGED_BAD, NO_EXPECTED, UNUSABLE
from stoker.errors import Problem
from stoker.job.document.job_to_yaml import scalar
from stoker.job.inputs import by_source_key
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import RowKind, task_of

KINDS: dict[str, RowKind] = {
    **dict.fromkeys(PAIRS, "pairs"),
    "judged": "judged",
}  # by format; the rows of all others are answers
WORDS: dict[RowKind, str] = {
    "answers": "one answer a row",
    "pairs": "pairs, chosen and rejected",
    "judged": "answers with a label, good or bad",
}
ADVICE: dict[RowKind, str] = {
    "answers": "",
    "pairs": "give each row chosen and rejected",
    "judged": "give each row a column `label` beside its conversation: true or false",
}
REMEDIES = {
    LONG_PROMPT: "raise train.seq_len, or lower max_tokens",
    UNUSABLE: "give what the reward compares with: a number for numeric, a pattern for regex, a schema for json_schema",
    NO_EXPECTED: "give the rows a column `expected`, or an assistant's turn at their end",
}


def drop_reasons(summaries: Sequence[ShardSummary]) -> Counter[str]:
    """Returns the number of dropped rows by reason."""
    return sum((Counter(s.reasons) for s in summaries), Counter())


def audit_problems(corpus: Corpus, codec: TextCodec, loaded: LoadedJob) -> list[Problem]:
    """Returns the problems of each source."""
    keyed = by_source_key(corpus.sources, corpus.evaluation)
    return [problem for key, source in keyed.items() for problem in _source_gate(source, key, codec, loaded)]


def _advice(source: TokenisedSource, key: str) -> str:
    """Returns advice on the most frequent reason for dropped rows; empty if there is no specific advice."""
    summaries = source.cache.summaries
    reason = next((reason for reason, _ in drop_reasons(summaries).most_common(1)), "")
    if reason == NOT_UTF8:
        name = next((d.source for s in summaries for d in s.dropped if reason_kind(d.reason) == reason), "")
        # The name is that of the build: the files may have been moved since.
        file = next((file for file in source.source.files if Path(str(file)).name == Path(name).name), None)
        return WRITE_UTF8 if file is None else utf8_advice(file)
    if reason in (NO_ROOM, TOO_LONG, SAME_CUT):
        return f"raise train.seq_len: the longest row has {max(s.longest for s in summaries):,} tokens"
    if reason == JUDGED_BAD:
        return f"write `{key}.format: judged` to train on the good ones alone, or `messages` to train on all of them"
    if reason.startswith(TEMPLATE_REFUSES) or reason == LOST_ANSWER["content"]:
        return f"write `{key}.template: plain`, which writes the content of every turn, whatever its role and place"
    for name, field in (("tool_calls", "tool_calls"), ("reasoning", "reasoning_content")):
        if reason == LOST_ANSWER[name]:
            return (
                f"write `{key}.template: FILE.jinja` with a chat template that writes `message.{field}`, or put "
                "that text into the answers' `content`"
            )
    return REMEDIES.get(reason, "")


def _source_gate(source: TokenisedSource, key: str, codec: TextCodec, loaded: LoadedJob) -> Iterator[Problem]:
    name, summaries = source.source.name, source.cache.summaries
    rows_in, reasons = sum(s.rows_in for s in summaries), drop_reasons(summaries)
    dropped = sum(reasons.values())
    most = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common(3))
    if not sum(s.trained for s in summaries):
        message = f"{name}: nothing of it would be trained, all of its {rows_in} rows are dropped: {most}"
        advice = _advice(source, key) or "fix the rows; `stoker data` lists each"
        yield loaded.problem(f"{key}.path", message, advice)
        return
    damage = next((reason for reason in reasons if reason.startswith(DAMAGED)), None)
    if damage is not None and source.block.max_dropped < 1:
        rows = (row for summary in summaries for row in summary.dropped if reason_kind(row.reason) == damage)
        place, why = next(((f"{row.source}:{row.row}", row.reason) for row in rows), (name, damage))
        yield loaded.problem(f"{key}.path", f"{place}: {why}; more rows than this one are lost", REPLACE)
    yield from _kind_problems(source, key, loaded)
    if source.format == "judged" and task_of(loaded.job).rows.kind(loaded.job) == "pairs":
        return  # whatever is dropped depends on the task
    if source.block.format == "judged":  # the job asks for bad answers to be left out
        dropped -= reasons[JUDGED_BAD]
    if dropped > source.block.max_dropped * rows_in:
        message = (
            f"{name}: {dropped} of {rows_in} rows are dropped ({dropped / rows_in:.1%}, at most "
            f"{source.block.max_dropped:.1%} are allowed): {most}"
        )
        advice = _advice(source, key) or "mend the rows"
        yield loaded.problem(f"{key}.path", message, f"{advice}, or raise {key}.max_dropped")
    if source.format != "text" and not source.cache.column("stops").any():
        message = f"{name}: the stop token is never trained, so the model would never learn to end an answer"
        if source.cache.column("lost").all():
            advice = "every row is cut before its answer ends: raise train.seq_len"
        else:
            advice = f"take a template that writes it behind an answer, such as {key}.template: plain"
            if ending := _ending(source, codec):
                advice = f"its answers end with {ending}: write model.stop: {scalar(ending)}, or {advice}"
        yield loaded.problem(f"{key}.template", message, advice)


def _kind_problems(source: TokenisedSource, key: str, loaded: LoadedJob) -> Iterator[Problem]:
    """Yields the problems of rows of another kind than the task trains on."""
    name, task = source.source.name, task_of(loaded.job)
    if source.format == "question" and not task.rows.prompts:
        message = f"{name}: its rows are prompts without answers; task {loaded.job.task} trains on answers"
        yield loaded.problem(f"{key}.format", message, "name the answers: columns: {completion: ...}")
    if source.format == "text" and task.rows.prompts:
        message = f"{name}: its rows are texts without prompts; task {loaded.job.task} answers prompts"
        yield loaded.problem(f"{key}.path", message, "give each row a prompt: columns: {prompt: ...}")
    wanted, rows = task.rows.kind(loaded.job), KINDS.get(source.format, "answers")
    if rows != wanted and (rows, wanted) != ("judged", "answers"):
        message = f"{name}: its rows are {WORDS[rows]}; task {loaded.job.task} trains on {WORDS[wanted]}"
        advice = ADVICE[wanted] + ("; `task: dpo` with `loss: kto` trains on labels" if rows == "judged" else "")
        if (rows, wanted) == ("pairs", "answers"):
            advice = (
                "write the chosen answers as rows of messages; texts and whole conversations are read as they are "
                f"with {key}.format: prompt, columns: {{completion: chosen}}, or messages and {{messages: chosen}}"
            )
        yield loaded.problem(f"{key}.path", message, advice)


def _ending(source: TokenisedSource, codec: TextCodec) -> str | None:
    """Returns the special token that ends the last answer of a source's first row, trailing white space left out."""
    row = source.cache[0]
    special = {i: token.content for i, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    for number in reversed(row.ids[row.trained].tolist()):
        if number in special or codec.tokenizer.decode([number]).strip():
            return special.get(number)
    return None
