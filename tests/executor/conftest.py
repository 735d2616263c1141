"""Programs that compile quickly: most tests run each of theirs a few times."""

from tests.support.quick_compilation import quick_compilation as quick_compilation
