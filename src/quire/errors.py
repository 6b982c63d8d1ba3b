"""Every error that Quire raises on purpose, one class a cause.

A message says what is wrong, the value found, what is allowed, and what to do.
This module is a leaf: it imports nothing of Quire, and anyone may import it.
"""

from __future__ import annotations


class QuireError(Exception):
    """The root of all errors that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An engine option is unknown, out of range, or at odds with another one."""


class DeviceError(ConfigError):
    """The device that was asked for is not there, or it or its software is too old."""


class DeviceLostError(QuireError):
    """The device has failed in a way that ends the engine; a server starts another one and resumes its requests."""


class RankLostError(DeviceLostError):
    """A rank died, or does not answer: the engine ends.

    Attributes:
        rank: which one.
        outside: it was ended from outside, so no request is to blame.
    """

    def __init__(self, message: str, rank: int, outside: bool = False) -> None:
        super().__init__(message)
        self.rank, self.outside = rank, outside


class RanksDisagreeError(DeviceLostError):
    """The ranks of a model have computed different tokens: what they compute is worth nothing."""


class StepGivenUpError(QuireError):
    """Another rank could not go on with the step."""


class StepFailedError(QuireError):
    """A step could not be computed, through whose fault is not known; the engine computes its requests again."""


class MemoryPlanError(ConfigError):
    """The memory that was granted does not hold what was asked of it."""


class PoolTooSmallError(MemoryPlanError):
    """The KV pool cannot hold one request of `max_model_len` tokens."""


class CheckpointError(QuireError):
    """A checkpoint cannot be used as it lies on disk."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No folder of that name, and no download of that name either."""


class NoSafetensorsError(CheckpointError):
    """The folder holds no `*.safetensors` file."""


class CorruptSafetensorsError(CheckpointError):
    """A safetensors file's header, offsets or length are not valid."""


class CorruptGgufError(CheckpointError):
    """A GGUF file's header, types, offsets or parts are not valid."""


class MissingTensorError(CheckpointError):
    """The model needs tensors that the checkpoint does not hold."""


class UnexpectedTensorError(CheckpointError):
    """The checkpoint holds tensors that the model has no place for."""


class TensorShapeError(CheckpointError):
    """A tensor's shape is not the one that the configuration implies."""


class TensorDtypeError(CheckpointError):
    """A tensor's data type is none that Quire computes with."""


class ModelConfigError(CheckpointError):
    """A field of `config.json` is missing, of the wrong type, or not supported."""


class UnknownArchitectureError(ModelConfigError):
    """`config.json` names an architecture that Quire does not know."""


class TokenizerError(CheckpointError):
    """The tokenizer's files are missing or not valid."""


class DownloadError(QuireError, OSError):
    """A download has failed, though the hub may have the checkpoint: trying again may help."""


INVALID = (ConfigError, CheckpointError)
"""What is wrong until somebody changes an option or the checkpoint: trying again does not help."""


class ChatTemplateError(QuireError, ValueError):
    """A chat template is missing, not valid, or failed on these messages."""


class UnknownTemplateVariableError(ChatTemplateError):
    """A variable was given that the chat template does not use, or the template uses one that was not given.

    `param` is the variable that was given; None if one is missing.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(QuireError, ValueError):
    """A request is refused before anything runs.

    `index` is the place of the bad prompt in the list given to `generate`; None where there was no list.
    `param` is the field that is to blame; None where it is not one alone.
    """

    index: int | None = None

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def at(self, index: int) -> RequestError:
        """The same error, saying which prompt of a list it is about."""
        error = type(self)(f"prompt {index}: {self}", param=self.param)
        error.index = index
        return error


class SamplingParamsError(RequestError):
    """A sampling parameter is not a finite number, out of range, or at odds with another one."""


class EmbeddingModelError(RequestError):
    """Something else was asked of a model that embeds texts alone."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room in the context."""


class TokenOutOfRangeError(RequestError):
    """A token id lies outside the model's vocabulary."""


class RequestTooLargeError(RequestError):
    """The request could never fit into the KV pool, even alone."""


class TokenizerTimeoutError(RequestError):
    """Rendering or tokenizing the request took longer than it may."""


class TokenizerFailedError(QuireError, RuntimeError):
    """A tokenizer worker died of a request, failed on it in a way that it should not, or cannot start."""


class TokenizerUnavailableError(TokenizerFailedError):
    """No tokenizer worker did the job, for no fault of the request: they were stopped or killed, or cannot start."""


class EngineClosedError(QuireError, RuntimeError):
    """The engine was closed and takes no more requests."""


class ConcurrentUseError(QuireError, RuntimeError):
    """A second thread called what only one may use at a time."""


class ServerError(QuireError):
    """A server cannot start, or cannot go on."""


class ClusterError(QuireError):
    """A cluster cannot start, or cannot go on."""


class RemoteError(QuireError):
    """A server that was named by its URL cannot be reached, refuses, or does not keep to the protocol."""


class BenchmarkError(QuireError):
    """A benchmark's run did not do what it was to measure."""


class BatchError(QuireError):
    """A batch cannot be begun, or cannot go on."""
