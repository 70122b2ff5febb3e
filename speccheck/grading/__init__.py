"""Is this answer right for its task? Comparisons are made between arms, never with other models.

`checks` grades one answer by its prompt's check; `texts`, `structured` and `queries` hold the kinds
of checks, `sandbox` runs what must not run in our process; `answers` and `endings` look at the form
of an answer whatever its task. Answers are hostile input throughout.
"""

from speccheck.grading.answers import Seen, see
from speccheck.grading.checks import KINDS, CodeExecution, form_of, grade, validate
from speccheck.grading.endings import ending_problems
from speccheck.grading.grade import Grade, GradeOutcome
from speccheck.grading.structured import Structured, measure_structured_validity

__all__ = [
    "KINDS",
    "CodeExecution",
    "Grade",
    "GradeOutcome",
    "Seen",
    "Structured",
    "ending_problems",
    "form_of",
    "grade",
    "measure_structured_validity",
    "see",
    "validate",
]
