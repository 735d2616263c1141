"""What is handed in by mistake is refused by a typed error that can be read; nothing is taken for what it is not.

With a model, in `tests/test_llm.py`; here is what needs none.
"""

import sys

import numpy as np
import pytest

from jpaged import BeamSearchParams, EngineArgs, SamplingParams
from jpaged.api.errors import InvalidParameterError, InvalidPromptError, JPagedError, shown
from jpaged.engine.limits import RequestLimits
from jpaged.frontend.inputs import InputProcessor, as_prompt_list
from jpaged.models.config import ModelConfig

HUGE = 10**5000  # more digits than Python turns into text
LONG = "a" * 10**6
RUBBISH = [float("nan"), float("inf"), HUGE, -HUGE, LONG, b"x", object(), [HUGE], {"a": LONG}, 1 + 2j]
LIMITS = RequestLimits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=16)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


@pytest.mark.parametrize("kind", [SamplingParams, EngineArgs, BeamSearchParams])
@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: type(value).__name__)
def test_rubbish_in_any_field_is_accepted_or_refused_by_name_in_a_short_message(kind, value):
    needed = {"beam_width": 2, "max_tokens": 2} if kind is BeamSearchParams else {}
    for name in kind.__dataclass_fields__:
        refusal = ""
        try:
            kind(**needed | {name: value})
        except InvalidParameterError as error:
            refusal = str(error)
        assert not refusal or name in refusal
        assert len(refusal) < 500, name


def test_engine_arguments_keep_numbers_as_pythons_own_which_json_and_other_processes_know():
    args = EngineArgs(
        seed=np.int64(3), max_num_seqs=np.int32(4), swap_space=np.float32(0.5), decode_buckets=(np.int64(4),)
    )
    kept = (args.seed, args.max_num_seqs, args.swap_space, args.decode_buckets[0])
    assert kept == (3, 4, 0.5, 4)
    assert [type(value) for value in kept] == [int, int, float, int]


def test_a_message_shows_any_value_in_short():
    class Unfriendly:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert shown(3) == "3"
    assert len(shown(LONG)) == 100
    assert shown(LONG).endswith("...")
    assert "int" in shown(HUGE)
    assert "Unfriendly" in shown(Unfriendly())
    assert shown("\ud800").encode(), "a lone surrogate is escaped, so that it can be printed"


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_numbers_that_float32_does_not_hold_are_refused(name):
    with pytest.raises(InvalidParameterError, match=name):
        SamplingParams(**{name: 1e39})
    SamplingParams(**{name: 3e38})


def test_a_repetition_penalty_that_would_be_zero_on_the_device_is_refused():
    assert np.float32(1e-50) == 0
    with pytest.raises(InvalidParameterError, match="repetition_penalty must be above 0"):
        SamplingParams(repetition_penalty=1e-50)


@pytest.mark.parametrize("penalty", [-4.0, 4.0])
def test_within_its_bounds_a_length_penalty_keeps_scores_finite_for_any_length(penalty):
    BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)
    power = np.float32((2**30) ** penalty)
    assert np.isfinite(power)
    assert power > 0
    with pytest.raises(InvalidParameterError, match=r"length_penalty must be a number in \[-4, 4\]"):
        BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty * 1.01)


@pytest.mark.parametrize("prompt", [b"abc", [b"abc"], {"prompt_token_ids": b"abc"}])
def test_bytes_are_not_taken_for_token_ids(prompt):
    inputs = InputProcessor(None, vocab_size=512, limits=LIMITS)
    with pytest.raises(InvalidPromptError, match="bytes"):
        [inputs.process(one, SamplingParams()) for one in as_prompt_list(prompt)]
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(InvalidParameterError, match=name):
            SamplingParams(**{name: b"abc"})


@pytest.mark.parametrize("key", ["multi_modal_data", "prompt_embeds", 5])
def test_what_a_prompt_dict_has_and_is_not_supported_is_refused_and_not_ignored(key):
    inputs = InputProcessor(None, vocab_size=512, limits=LIMITS)
    with pytest.raises(InvalidPromptError, match=f"{key}.* is not supported"):
        inputs.process({"prompt_token_ids": [1], key: "x"}, SamplingParams())


@pytest.mark.parametrize("tokens", [[[1], [2, 3]], None, "ab", [1.5, 2], [HUGE, 1]])
def test_tokens_to_score_that_are_no_list_of_integers_are_refused(tokens):
    with pytest.raises(InvalidPromptError, match="token_ids must be a list of integers"):
        InputProcessor(None, vocab_size=512, limits=LIMITS).check_scored(tokens, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor"),
        ({"head_dim": 10**9}, "heads of 1000000000"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"hidden_act": "a" * 10**6}, "activation"),
    ],
)
def test_an_absurd_number_in_a_config_is_refused_by_name(changes, says):
    with pytest.raises(JPagedError, match=says) as caught:
        ModelConfig.from_dict(LLAMA | changes)
    assert len(str(caught.value)) < 500


def test_the_context_of_a_stretched_rope_stays_an_int32():
    stretched = {"max_position_embeddings": 2**20, "rope_scaling": {"type": "linear", "factor": 1e30}}
    assert ModelConfig.from_dict(LLAMA | stretched).max_position_embeddings == 2**31 - 1


def test_end_of_sequence_tokens_outside_the_vocabulary_never_come_and_are_left_out():
    assert ModelConfig.from_dict(LLAMA | {"eos_token_id": [-1, 2, 512, sys.maxsize]}).eos_token_ids == (2,)
