"""How ranks share a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.parallel.group import Group, OneRank


@dataclass(frozen=True)
class Sharing:
    """A rank's place among those that share a model; by default, it has all of it.

    Attributes:
        ranks: the group of all ranks.
        of_layers: the ranks that share this rank's layers; None for all ranks.
        stages: number of pipeline stages. If it is 1, and `of_layers` is not all ranks, each such group is a replica,
            and replicas share only the experts.
        redundant_experts: expert parallelism with this many additional slots per layer; None: ranks share each expert.
    """

    ranks: Group = field(default_factory=OneRank)
    of_layers: Group | None = None
    stages: int = 1
    redundant_experts: int | None = None

    @property
    def stage(self) -> Group:
        """The ranks that share this rank's layers: of a pipeline stage, or of a replica."""
        return self.of_layers or self.ranks

    @property
    def head(self) -> Group:
        """The ranks that share the head: all stages of a pipeline do."""
        return self.ranks if self.stages > 1 else self.stage

    @property
    def experts(self) -> Group:
        """The ranks that share this rank's experts: all replicas do."""
        return self.stage if self.stages > 1 else self.ranks
