"""A contract for import-linter: no module imports itself through others, not even for types or inside a function.

The library's own (`acyclic_siblings`) asks the same of packages, where `quire.config` and what is below it are siblings
of what is above.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import Any

from importlinter import Contract, ContractCheck, output


class NoCircles(Contract):
    """See above."""

    type_name = "no_circles"

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """One circle, if there are any."""
        imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
        try:
            TopologicalSorter(imports).prepare()
        except CycleError as error:
            return ContractCheck(kept=False, metadata={"circle": error.args[1][::-1]})
        return ContractCheck(kept=True)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Says what the circle is, and what helps."""
        output.print_error(" -> ".join(check.metadata["circle"]))
        output.print_error("Each imports the next. Move what two of them need into a file below both.")
