"""Models that take the vectors of a batch by feature: all of rowmesh's but DLRM, and classes of the user's.

`rowmesh.models.Model` says what they look like.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from rowmesh._support.suggest import hint
from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.models import ProjectedDLRM
from rowmesh.models.named import NAMED
from rowmesh.run.config import ModelConfig
from rowmesh.run.targets import Target, total_loss
from rowmesh.tables import TableSpec

TRIAL_SAMPLES = 2
_BINDING = {"*", "__getattr__", "globals", "locals", "vars", "setattr", "exec"}
"""Names in a module that may give it others, which its text does not show."""
LossFunction = Callable[[Tensor, Tensor], Tensor]


class ModelError(ConfigurationError):
    """An own model cannot be imported, made or called, or returns something else than it should: names it."""


def find_class(name: str) -> type[nn.Module]:
    """Finds the class of one of rowmesh's models, or `package.module:Class` where Python looks and in this folder.

    For dlrm it is the class for tables of different dims.

    Raises:
        ModelError: there is none, its module fails, or it is no `torch.nn.Module`.
    """
    if ":" not in name:
        return ProjectedDLRM if name == "dlrm" else NAMED[name]
    place, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # as in `python -m rowmesh`; installed packages come first
        sys.path.append(here)
    _look_before(name)
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _import_failure(name, error) from error
        raise ModelError(
            f"model.name = {name!r}: there is no module {error.name!r} in the current folder ({here}), in PYTHONPATH "
            "or installed; start rowmesh in the folder that has it, or name that folder in PYTHONPATH"
        ) from None
    except Exception as error:
        raise _import_failure(name, error) from error
    found = getattr(module, attribute, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise ModelError(
            f"model.name = {name!r}: {module.__file__ or place} has no {attribute}{hint(attribute, classes)}"
        )
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise ModelError(f"model.name = {name!r} is {_kind(found)}; it must be a class derived from torch.nn.Module")
    return cast(type[nn.Module], found)


def _look_before(name: str) -> None:
    """Refuses what is seen to be no model in the text of a module, before importing runs the module.

    Raises:
        ModelError: the module has no such class, or it is derived from nothing.
    """
    place, _, attribute = name.partition(":")
    path = _source_of(place)
    if path is None:
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return  # importing says what is wrong
    bound, names = defaultdict[str, list[ast.AST]](list), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound[node.name].append(node)
        elif isinstance(node, ast.alias):
            bound[node.asname or node.name.partition(".")[0]].append(node)
        elif isinstance(node, ast.Name):
            names.add(node.id)
            if isinstance(node.ctx, ast.Store):
                bound[node.id].append(node)
    if attribute not in bound and not (bound.keys() | names) & _BINDING:
        classes = [key for key, nodes in bound.items() if any(isinstance(node, ast.ClassDef) for node in nodes)]
        raise ModelError(f"model.name = {name!r}: {path} has no {attribute}{hint(attribute, classes)}")
    if attribute in bound and all(_is_bare_class(node) for node in bound[attribute]):
        raise ModelError(
            f"model.name = {name!r} is a class derived from nothing; it must be one derived from torch.nn.Module"
        )


def _is_bare_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list)


def _source_of(place: str) -> Path | None:
    """The text of a module, found as importing would find it, but without importing the packages above it."""
    search, spec = None, None
    names = place.split(".")
    for depth in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: depth + 1]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def check_importable(config: ModelConfig, trained_from: str = "") -> None:
    """Raises ModelError where the model is a user's and cannot be found.

    Args:
        config: which model.
        trained_from: the folder in which its training was started, where that is over.
    """
    if not config.is_own:
        return
    try:
        find_class(config.name)
    except ModelError as error:
        where = f"; its training was started in {trained_from}" if trained_from else ""
        raise ModelError(f"{error}{where}") from error


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A model and its loss.

    Attributes:
        name: as the configuration names it.
        network: the model.
        targets: what it predicts.
    """

    name: str
    network: nn.Module
    targets: tuple[Target, ...] = (Target("label"),)

    def logits(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels; of no samples without the model, which may not be able to.

        Raises:
            ModelError: the model fails, or returns something else.
        """
        count = len(dense)
        if count == 0:
            none = embeddings.values.sum(1)  # a rank without samples takes part in every backward
            return none if len(self.targets) == 1 else none[:, None].expand(-1, len(self.targets))
        dims = dict(zip(embeddings.features, embeddings.dims, strict=True))
        shapes = f"dense {list(dense.shape)} and embeddings {dims}"
        logits = self._call("forward", self.network, dense, embeddings, shapes=shapes)
        shape = (count,) if len(self.targets) == 1 else (count, len(self.targets))
        if not isinstance(logits, Tensor) or logits.shape != shape or not logits.is_floating_point():
            near = "; return logits.squeeze(1)" if [*shape, 1] == _shape(logits) else ""
            letters = "[B]" if len(shape) == 1 else f"[B, L], a column for each of {_names(self.targets)},"
            raise ModelError(
                f"{self._title}.forward must return logits {letters} = {list(shape)}, got {_kind(logits)}{near}"
            )
        if torch.is_grad_enabled() and not logits.requires_grad:
            raise ModelError(f"{self._title}.forward returned logits without a gradient: detach nothing in it")
        return logits

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the losses of some samples, each times its weight.

        Args:
            logits: `[B]`, or `[B, L]` of several labels.
            labels: as `logits`, of the same dtype.
            weights: `[B]`; None: 1 each.

        Raises:
            ModelError: the model's own loss fails, or is neither `[B]` nor a mean, which weights do not allow.
        """
        function: LossFunction | None = getattr(self.network, "loss", None)
        if function is None:
            return total_loss(self.targets, logits, labels, weights)
        count = len(logits)
        if count == 0:
            return logits.sum()
        shapes = f"logits and labels {list(logits.shape)}"
        loss = self._call("loss", function, logits, labels, shapes=shapes)
        if not isinstance(loss, Tensor) or loss.shape not in ((), (count,)) or not loss.is_floating_point():
            raise ModelError(
                f"{self._title}.loss must return the losses of the samples [B] = [{count}], or their mean, got "
                f"{_kind(loss)}"
            )
        if weights is None:
            return loss.sum() if loss.dim() else loss * count
        if not loss.dim():
            raise ModelError(
                f"{self._title}.loss returned a mean, which cannot be weighted, and the data have sample weights; "
                f'return the losses of the samples [B] = [{count}] (reduction="none")'
            )
        return (weights * loss).sum()

    @property
    def _title(self) -> str:
        return f"model.name = {self.name!r}: {type(self.network).__name__}"

    def _call(self, what: str, function: Callable[..., object], *arguments: object, shapes: str) -> object:
        try:
            return function(*arguments)
        except (RowmeshError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(f"{self._title}.{what} failed on {shapes}: {_described(error)}") from error


def make_own(
    config: ModelConfig,
    tables: Sequence[TableSpec],
    num_dense: int,
    dtype: torch.dtype,
    targets: tuple[Target, ...] = (Target("label"),),
    *,
    weighted: bool = False,
) -> OwnModel:
    """A model, made and tried on zeros, on the CPU: mistakes are found before there are tables.

    Args:
        config: names its class and has its options.
        tables: whose features it gets.
        num_dense: number of dense features.
        dtype: of vectors and parameters.
        targets: what it predicts.
        weighted: whether samples have weights.

    Raises:
        ModelError: the class cannot be imported, made or called as `rowmesh.models.Model` says.
    """
    kind = find_class(config.name)
    dims = {feature: table.dim for table in tables for feature in table.features}
    arguments: dict[str, object] = {"dims": dims, "num_dense": num_dense}
    if len(targets) > 1:
        arguments["labels"] = tuple(target.name for target in targets)
    if clash := sorted(config.options.keys() & arguments.keys()):
        raise ModelError(f"model.options.{clash[0]}: rowmesh gives {clash[0]} itself; name the option otherwise")
    arguments |= {"bottom": config.bottom, "top": config.top} if config.is_dlrm else config.options
    if not config.is_own:
        _check_options(config.name, kind, arguments)
    _check_calls(config.name, kind, arguments)
    try:
        network = kind(**arguments).to(dtype)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ConfigurationError as error:
        raise ModelError(f"model.name = {config.name!r}: {error}") from None
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if key != "dims")
        raise ModelError(
            f"model.name = {config.name!r}: {kind.__name__}(dims=…, {given}) failed: {_described(error)}; its options "
            "are those of model.options"
        ) from error
    own = OwnModel(config.name, network, targets)
    _try(own, dims, num_dense, dtype, weighted=weighted)
    if not list(network.parameters()):
        raise ModelError(f"model.name = {config.name!r} has no parameters; give it at least one, such as a bias")
    return own


def _check_options(name: str, kind: type[nn.Module], arguments: Mapping[str, object]) -> None:
    """Raises ModelError where a model of rowmesh's gets an option that it has not, or lacks one that it needs."""
    options = dict(inspect.signature(kind).parameters)
    for given in ("dims", "num_dense", "labels"):
        options.pop(given, None)
    known = f"it has {', '.join(options)}; docs/models.md says what they are"
    for key in arguments.keys() - {"dims", "num_dense", "labels"} - options.keys():
        raise ModelError(f"model.options.{key}: {name} has no such option{hint(key, options)}; {known}")
    for key, option in options.items():
        if option.default is option.empty and key not in arguments:
            raise ModelError(f"model.name = {name!r} needs model.options.{key}; {known}")


def _check_calls(name: str, kind: type[nn.Module], arguments: Mapping[str, object]) -> None:
    """Raises ModelError where the parameters of the constructor or of `forward` are not what is passed."""
    makes, calls = inspect.signature(kind), inspect.signature(kind.forward)
    title = f"model.name = {name!r}: {kind.__name__}"
    try:
        makes.bind(**arguments)
    except TypeError as error:
        raise ModelError(
            f"{title}{makes} is made with {', '.join(arguments)} ({_given(arguments)} and the keys of model.options): "
            f"{error}; change its parameters or model.options"
        ) from None
    try:
        calls.bind(None, None, None)
    except TypeError as error:
        raise ModelError(
            f"{title}.forward{calls} is called with (dense, embeddings): {error}; give it these two parameters"
        ) from None


def _given(arguments: Mapping[str, object]) -> str:
    return "dims, num_dense, labels" if "labels" in arguments else "dims, num_dense"


def _try(own: OwnModel, dims: Mapping[str, int], num_dense: int, dtype: torch.dtype, *, weighted: bool) -> None:
    """Calls the model and its loss on zeros, in evaluation mode; lazy layers get their sizes by this."""
    values = torch.zeros(TRIAL_SAMPLES, sum(dims.values()), dtype=dtype, device="cpu")
    dense = torch.zeros(TRIAL_SAMPLES, num_dense, dtype=dtype, device="cpu")
    labels = torch.tensor([0.0, 1.0], dtype=dtype, device="cpu")
    if len(own.targets) > 1:
        labels = labels[:, None].repeat(1, len(own.targets))
    weights = torch.ones(TRIAL_SAMPLES, dtype=dtype, device="cpu") if weighted else None
    own.network.eval()
    with torch.no_grad():
        logits = own.logits(dense, Embeddings(values, tuple(dims), tuple(dims.values()), {}))
        if all(target.loss != "softmax" for target in own.targets):  # which is no function of logits
            own.loss(logits, labels, weights)
    own.network.train()


def _import_failure(name: str, error: BaseException) -> ModelError:
    return ModelError(f"model.name = {name!r}: importing {name.partition(':')[0]} failed: {_described(error)}")


def _described(error: BaseException) -> str:
    """An error and the innermost line of a file in which it came up that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_library(path: str) -> bool:
    libraries = tuple(str(Path(file).parent) for file in (torch.__file__, __file__, inspect.__file__) if file)
    return path.startswith((*libraries, "<frozen"))


def _names(targets: Sequence[Target]) -> str:
    return ", ".join(target.name for target in targets)


def _shape(value: object) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
