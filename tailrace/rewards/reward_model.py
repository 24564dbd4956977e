"""Rewards by a reward model: a sequence classifier with one label, whose score is the reward."""

from collections.abc import Sequence

from tailrace.config.model import ModelConfig
from tailrace.config.rewards import ModelReward
from tailrace.errors import ConfigError, RewardError, one_line
from tailrace.host.compute import prepare_torch
from tailrace.models.classifier import Classifier, Encoding
from tailrace.models.resolve import resolve_model
from tailrace.rewards.base import Grader, GradingRequest, Result, question_text


class RewardModelGrader(Grader):
    """Scores responses in batches."""

    def __init__(self, config: ModelReward, key: str) -> None:
        """Load the model. `key`: that of the grader in the recipe.

        Raises:
            UserError: the model is missing or no reward model, or the device cannot be used.
        """
        try:
            prepare_torch(config.device, None)
        except ConfigError as error:  # it names a device, of which the recipe may have several
            raise ConfigError(f"{key}.{error}") from None
        directory = resolve_model(ModelConfig(path=config.path, revision=config.revision), key)
        self._classifier = Classifier(directory, device=config.device, dtype=config.dtype, key=key)
        self._longest = min(config.max_tokens or self._classifier.longest, self._classifier.longest)

    def grade(self, request: GradingRequest) -> Result:
        """See `Grader`.

        Raises:
            RewardError: the model cannot read the text.
        """
        (result,) = self.grade_all([request])
        if isinstance(result, RewardError):
            raise result
        return result

    def grade_all(self, requests: Sequence[GradingRequest]) -> Sequence[Result | RewardError]:
        """Score a batch. A text that the model cannot read has an error in place of a score."""
        texts = [self._read(request) for request in requests]
        readable = [text for text in texts if not isinstance(text, RewardError)]
        scores = iter(self._classifier.score(readable) if readable else ())
        return [text if isinstance(text, RewardError) else next(scores) for text in texts]

    def _read(self, request: GradingRequest) -> Encoding | RewardError:
        try:
            encoding = self._encoded(request)
        except Exception as error:  # a chat template is a program of the model's authors, which may raise anything
            return RewardError(f"the reward model's chat template refuses prompt and response: {one_line(error)}")
        tokens = encoding["input_ids"]
        if not tokens:
            return RewardError("prompt and response have no token for the reward model")
        if len(tokens) > self._longest:
            return RewardError(
                f"prompt and response are {len(tokens)} tokens long, and the reward model reads {self._longest}"
            )
        if max(tokens) >= self._classifier.vocab_size:
            return RewardError(
                f"prompt and response have the token {max(tokens)}, and the reward model knows "
                f"{self._classifier.vocab_size}; does its tokenizer belong to it?"
            )
        return encoding

    def _encoded(self, request: GradingRequest) -> Encoding:
        """The response with what it answers: the end of the conversation, or the second text of a pair."""
        if not self._classifier.has_chat_template:
            return self._classifier.encode_pair(question_text(request), request.response)
        question, response = request.question, request.response
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if messages and messages[-1].get("role") == "assistant":  # the response goes on with it
            response = f"{messages.pop().get('content', '')}{response}"
        return self._classifier.encode_conversation([*messages, {"role": "assistant", "content": response}])
