"""Programs that compile quickly: each test runs its own a few times."""

from tests.support.quick_compilation import quick_compilation as quick_compilation
