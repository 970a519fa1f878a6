"""Answers in the chat template and the tokens of a reward model whose tokenizer is not the policy's."""

from __future__ import annotations

from stoker.data.templates.template_environment import TemplateRefused
from stoker.data.text_codec import encode_prompt
from stoker.errors import UserError
from stoker.train.rollouts.rewards import PolicyAnswer
from stoker.train.rollouts.scoring_model import ScoringModel


def tokens_of_reward_model(scoring: ScoringModel, answer: PolicyAnswer, named: str) -> tuple[int, ...]:
    """Returns the conversation as the reward model reads it, up to the token at which it gives the score.

    Args:
        named: the reward model, as the job writes it.

    Raises:
        UserError: its chat template refuses the conversation, or its context is shorter; the error names the row.
    """
    codec, context = scoring.text.codec, scoring.text.context
    try:
        ids = encode_prompt(codec, answer.turns, "text", answered=True)
    except TemplateRefused as error:
        message = f"the chat template of {named} refuses this conversation: {error}"
        raise UserError(answer.row.problem(message)) from error
    if scoring.ends_at_stop:  # else at the last token of the text, as in transformers and TRL
        last = max((place for place, token in enumerate(ids) if token in codec.stop_ids), default=len(ids) - 1)
        ids = ids[: last + 1]
    if context is not None and len(ids) > context:
        message = f"with its answer this prompt has {len(ids)} tokens of {named}, which was built for {context}"
        raise UserError(answer.row.problem(message, "lower max_tokens, or name a model with a longer context"))
    return tuple(ids)
