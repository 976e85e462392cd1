"""Where Settings come from: a plan's search space, walked or sampled by Optuna.

One process, the campaign's, proposes. It asks for a Setting, runs its trials elsewhere, and tells the mean over
their seeds. All state is a journal file, so a search that was killed goes on where it was: told settings stay told,
and a setting that was proposed but never told is proposed again under the same number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from pydantic import JsonValue

from a3r.campaign import setting_key
from a3r.errors import InfrastructureFault, UsageError
from a3r.plan import Dimension, SearchSpace

_NUM_STARTUP = 5
_SPACE, _SETTING, _REASON = "a3r.space", "a3r.setting", "a3r.reason"


@dataclass(frozen=True, slots=True)
class ProposedSetting:
    """A Setting to try, as plain JSON values by setting path."""

    number: int
    values: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class ToldSetting:
    """A Setting whose trials are done; `mean` is None when it failed, for `reason`."""

    number: int
    values: dict[str, JsonValue]
    mean: float | None
    reason: str = ""


class Search:
    """One study over one space. Make it with `Search.open`."""

    def __init__(self, study: optuna.Study, space: SearchSpace, *, seed: int) -> None:
        self._study = study
        self._space = space
        self._seed = seed
        self._unanswered = [t for t in study.get_trials(states=(TrialState.RUNNING,)) if self._is_whole(t)]

    @classmethod
    def open(
        cls,
        path: Path,
        study_name: str,
        space: SearchSpace,
        *,
        seed: int,
        direction: Literal["maximise", "minimise"] = "maximise",
    ) -> Search:
        """Open (or take up again) a study in a journal file.

        Spaces of levels or whole settings are walked point by point, in order. Where a dimension is a range, TPE
        samples `num_settings` points; the k-th proposal depends on `seed`, k and what was told, not on restarts.
        Raises UsageError when the study was begun over another space, InfrastructureFault when the file fails.
        """
        if not space.is_grid and space.num_settings is None:
            raise UsageError("A space with a range needs num_settings, the number of settings to sample")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=study_name,
                direction="maximize" if direction == "maximise" else "minimize",
                load_if_exists=True,
            )
        except OSError as error:
            raise InfrastructureFault(f"The search file {path} failed", why=str(error)) from error
        _claim_space(study, space)
        search = cls(study, space, seed=seed)
        search._drop_torn()
        if space.is_grid:
            search._enqueue_missing()
        return search

    def ask(self) -> ProposedSetting | None:
        """The next Setting to try, or None when the space is walked or `num_settings` are proposed."""
        if self._unanswered:
            return _proposed(self._unanswered.pop(0))
        if not self._has_more():
            return None
        self._study.sampler = self._sampler()
        trial = self._study.ask()
        if self._space.settings:
            trial.suggest_categorical(_SETTING, [_label(values) for values in self._space.settings])
        for dimension in self._space.dimensions:
            _suggest(trial, dimension)
        return _proposed(self._trial(trial.number))

    def tell(self, number: int, mean: float) -> None:
        """The mean metric over a Setting's finished trials. What was told before is kept. Raises UsageError for a
        number that was never proposed."""
        self._study.tell(self._trial(number).number, mean, skip_if_finished=True)

    def fail(self, number: int, reason: str) -> None:
        """No trial of this Setting finished; it is not proposed again. Raises UsageError for an unknown number."""
        trial = self._trial(number)
        if not trial.state.is_finished():
            self._study.set_user_attr(f"{_REASON}.{number}", reason)
            self._study.tell(number, state=TrialState.FAIL)

    def told(self) -> list[ToldSetting]:
        """Settings that were told or failed, by number."""
        told = [self._told(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]
        return [setting for setting in told if setting.mean is not None or setting.reason]

    def _told(self, trial: FrozenTrial) -> ToldSetting:
        reason = self._study.user_attrs.get(f"{_REASON}.{trial.number}", "")
        return ToldSetting(trial.number, _values(trial) if trial.params else {}, trial.value, reason)

    def _trial(self, number: int) -> FrozenTrial:
        trials = self._study.get_trials(deepcopy=False)
        if not 0 <= number < len(trials):
            raise UsageError(f"The search never proposed a setting {number}")
        return trials[number]

    def _has_more(self) -> bool:
        trials = self._study.get_trials(deepcopy=False)
        if self._space.is_grid:
            return any(trial.state is TrialState.WAITING for trial in trials)
        proposed = sum(trial.state is not TrialState.FAIL or self._was_failed(trial) for trial in trials)
        return proposed < (self._space.num_settings or 0)

    def _was_failed(self, trial: FrozenTrial) -> bool:
        """Whether `fail` ended it, and not a crash between proposing and writing down its values."""
        return f"{_REASON}.{trial.number}" in self._study.user_attrs

    def _is_whole(self, trial: FrozenTrial) -> bool:
        names = {_SETTING} if self._space.settings else {dimension.path for dimension in self._space.dimensions}
        return names <= trial.params.keys()

    def _drop_torn(self) -> None:
        """Forget proposals whose values were not all written when their process died."""
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            if not self._is_whole(trial):
                self._study.tell(trial.number, state=TrialState.FAIL)

    def _enqueue_missing(self) -> None:
        trials = self._study.get_trials(deepcopy=False)
        covered = {
            trial.user_attrs[_SETTING]
            for trial in trials
            if trial.state is not TrialState.FAIL or self._was_failed(trial)
        }
        for values in self._space.grid():
            key = setting_key(values)
            if key not in covered:
                self._study.enqueue_trial(self._parameters(values), user_attrs={_SETTING: key})

    def _parameters(self, values: Mapping[str, JsonValue]) -> dict[str, str]:
        if self._space.settings:
            return {_SETTING: _label(values)}
        return {path: _label(value) for path, value in values.items()}

    def _sampler(self) -> optuna.samplers.BaseSampler:
        # A sampler is made for every proposal: one that lived on would give other proposals after a restart.
        number = len(self._study.get_trials(deepcopy=False))
        return optuna.samplers.TPESampler(
            seed=(self._seed * 1_000_003 + number) % 2**32, multivariate=True, n_startup_trials=_NUM_STARTUP
        )


def _claim_space(study: optuna.Study, space: SearchSpace) -> None:
    text = space.model_dump_json()
    known = study.user_attrs.get(_SPACE)
    if known is None:
        study.set_user_attr(_SPACE, text)
    elif known != text:
        raise UsageError(
            f"Study {study.study_name!r} was begun over another search space", next_step="name another study"
        )


def _suggest(trial: optuna.Trial, dimension: Dimension) -> None:
    if dimension.levels:
        trial.suggest_categorical(dimension.path, [_label(level) for level in dimension.levels])
        return
    assert dimension.low is not None
    assert dimension.high is not None
    if dimension.integer:
        trial.suggest_int(dimension.path, round(dimension.low), round(dimension.high), log=dimension.log)
    else:
        trial.suggest_float(dimension.path, dimension.low, dimension.high, log=dimension.log)


def _label(value: JsonValue | Mapping[str, JsonValue]) -> str:
    """Levels are JSON text inside Optuna, whose categories know no lists and take 1 for True."""
    return json.dumps(value, sort_keys=True)


def _proposed(trial: FrozenTrial) -> ProposedSetting:
    return ProposedSetting(trial.number, _values(trial))


def _values(trial: FrozenTrial) -> dict[str, JsonValue]:
    plain = {path: json.loads(value) if isinstance(value, str) else value for path, value in trial.params.items()}
    return plain.get(_SETTING, plain)
