"""For whoever trains the model that an engine samples from: the same computation, with gradients."""

from jpaged.training.forward import compiler_options, token_logprobs

__all__ = ["compiler_options", "token_logprobs"]
