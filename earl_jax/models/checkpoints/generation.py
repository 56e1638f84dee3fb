# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""generation_config.json of a checkpoint: the settings that a run uses and those it ignores.

The ids that end a text end a turn of the policy. Who serves the checkpoint draws replies as it says
(`drawn_by`). A run's episodes are sampled as the run's own config says: training needs log-probs
under the distribution that was sampled from, the same at every step, and what a file cuts off for
the sake of good replies would never be tried.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from earl_jax.settings.errors import InputError

# What would change a sampled text, and the values that would not.
_NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "max_new_tokens": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


# What of these says how one token is drawn, and is computed here.
_DRAWN = ("temperature", "top_k", "top_p", "min_p")


class Tokenizer(Protocol):
    """A tokenizer that knows its control tokens, as every one of `transformers` does."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens added to the learnt vocabulary; `special` ones are control tokens."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """`eos_token_ids` as the file has them, and the settings of sampling that have an effect.

    `is_greedy`: do_sample is false, so that the likeliest token is taken whatever these say.
    """

    path: Path
    is_greedy: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def end_ids_of(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Returns the ids that are control tokens: any other is part of a text."""
        added = tokenizer.added_tokens_decoder
        return tuple(i for i in self.eos_token_ids if i in added and added[i].special)

    def unused(self, end_ids: tuple[int, ...], *, plays: bool = True) -> list[str]:
        """Returns the settings that a run which takes `end_ids` ignores, in sentences.

        A run that does not play samples nothing, whatever the file says.
        """
        notes = []
        strange = [i for i in self.eos_token_ids if i not in end_ids]
        if strange:
            notes.append(
                f"{self.path}: eos_token_id {', '.join(map(str, strange))} is no control token of "
                "the tokenizer, and does not end a turn"
            )
        if self.sampling and plays:
            named = ", ".join(f"{name}={value!r}" for name, value in self.sampling.items())
            notes.append(
                f"{self.path}: {named} not used; episodes are sampled as "
                "config.rollout.temperature, top_k, top_p and min_p say, evaluation games as "
                "config.eval.temperature and its like"
            )
        return notes

    def drawn_by(self) -> dict[str, float]:
        """Returns the file's values of temperature, top_k, top_p and min_p, without range checks.

        Raises ValueError for one that is no number.
        """
        drawn = {name: self.sampling[name] for name in _DRAWN if name in self.sampling}
        for name, value in drawn.items():
            whole = name == "top_k"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "a whole number" if whole else "a number"
                raise InputError(f"{self.path}: {name} is {value!r}; it must be {kind}")
        if self.is_greedy or drawn.get("temperature") == 0:
            return {"temperature": 0.0}
        return drawn


def read_generation_settings(folder: Path) -> GenerationSettings:
    """Reads the settings of a checkpoint's folder; empty where it has no such file.

    Raises ValueError for a file that cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationSettings(path=path)
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} is no JSON object")
    eos = settings.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise InputError(f"{path}: eos_token_id is {eos!r}; it must be an id or a list of ids")
    sampling = {
        name: settings[name]
        for name, neutral in _NEUTRAL.items()
        if settings.get(name) is not None and settings[name] != neutral
    }
    return GenerationSettings(
        path=path,
        is_greedy=settings.get("do_sample") is False,
        eos_token_ids=tuple(ids),
        sampling=sampling,
    )
