"""Loading tokenizers, encoding prompts and conversations, and what is said when they are wrong."""

import json
import shutil
import subprocess
import sys
import threading

import pytest
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged.api.errors import CheckpointError, InvalidParameterError, InvalidPromptError, ModelNotFoundError
from jpaged.api.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.frontend.generation_config import GenerationConfig
from jpaged.text.tokenizer import Tokenizer, check_messages
from tests.text.tokenizers_for_tests import BYTE_EXACT, tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|user|>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer("byte-level").save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def loaded(directory):
    return Tokenizer.load(directory)


class TestLoading:
    def test_a_home_that_does_not_exist_is_named_as_a_path_is(self):
        with pytest.raises(ModelNotFoundError, match="~nobody-of-this-name/x"):
            Tokenizer.load("~nobody-of-this-name/x")

    def test_a_length_that_is_no_number_in_its_settings_does_not_matter(self, directory, tmp_path):
        for file in directory.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"model_max_length": "long"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert Tokenizer.load(tmp_path).encode("hi") == Tokenizer.load(directory).encode("hi")

    def test_from_a_directory_given_as_path_or_string(self, directory):
        for source in (directory, str(directory)):
            t = Tokenizer.load(source)
            assert t.decode(t.encode("héllo 😀")) == "héllo 😀"
            assert t.has_chat_template

    def test_knows_its_vocabulary_and_its_end(self, loaded):
        assert loaded.vocab_size == 1 + max(loaded.hf.get_vocab().values())
        assert loaded.hf.convert_ids_to_tokens(loaded.eos_token_id) == "</s>"
        assert loaded.token_text(loaded.eos_token_id) == "</s>"

    def test_its_size_is_above_the_largest_id_where_ids_leave_gaps(self):
        ids = {token: 3 * i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        hf = PreTrainedTokenizerFast(tokenizer_object=RustTokenizer(models.BPE(ids, [])))
        loaded = Tokenizer(hf, "gaps")
        assert loaded.vocab_size == 3 * 255 + 1
        assert len(hf) == 256

    @pytest.mark.parametrize("source", ["/no/such/directory", "./nowhere", "a/b/c", __file__])
    def test_a_missing_directory_is_named_without_asking_the_hub(self, source):
        with pytest.raises(ModelNotFoundError, match=source.replace(".", r"\.")):
            Tokenizer.load(source)

    def test_an_unreachable_hub_is_reported(self, monkeypatch):
        def unreachable(*_, **__):
            raise OSError("We couldn't connect to 'https://huggingface.co'")

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
        with pytest.raises(ModelNotFoundError, match=r"owner/absent.*couldn't connect"):
            Tokenizer.load("owner/absent")

    @pytest.mark.parametrize("files", [{}, {"config.json": '{"model_type": "llama"}'}])
    def test_a_directory_without_a_tokenizer_says_so(self, tmp_path, files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=r"has no tokenizer.*skip_tokenizer_init"):
            Tokenizer.load(tmp_path)

    def test_a_sentencepiece_model_alone_says_which_packages_read_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(transformers.utils, "is_sentencepiece_available", lambda: False)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "tokenizer.model").write_bytes(b"a sentencepiece model")
        with pytest.raises(CheckpointError, match=r"tokenizer\.model.*pip install sentencepiece protobuf"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("text", ["", "{not json", "[]", '{"model": {"type": "BPE"}}'])
    def test_a_broken_tokenizer_file_says_so(self, tmp_path, text):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Tokenizer.load(tmp_path)

    def test_a_truncated_tokenizer_file_says_so(self, directory, tmp_path):
        whole = (directory / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            Tokenizer.load(tmp_path)

    def test_a_made_up_empty_tokenizer_is_refused(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        (tmp_path / "vocab.json").write_text("{}")
        with pytest.raises(CheckpointError):
            Tokenizer.load(tmp_path)

    def test_code_beside_a_tokenizer_is_never_run(self, tmp_path):
        config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.model").write_bytes(b"\0")
        (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
        with pytest.raises(CheckpointError, match="never run"):
            Tokenizer.load(tmp_path)

    def test_importing_it_does_not_import_transformers_or_jax(self):
        code = "import sys, jpaged.text.tokenizer; print({'jax', 'transformers', 'torch'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"


class TestEncoding:
    def test_refuses_what_is_no_text(self, loaded):
        with pytest.raises(InvalidPromptError, match="must be a string, got int"):
            loaded.encode(3)
        with pytest.raises(InvalidPromptError, match=r"lone surrogate.*index 2"):
            loaded.encode("ab\ud83d")

    def test_from_many_threads_at_once(self, loaded):
        texts = [f"text {i} " * 20 for i in range(40)]
        expected = [loaded.encode(t) for t in texts]
        results = [None] * len(texts)

        def work(first):
            for i in range(first, len(texts), 4):
                results[i] = loaded.encode(texts[i])

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == expected


class TestChat:
    def test_renders_and_encodes_the_template(self, loaded):
        messages = [{"role": "system", "content": "be kind"}, USER]
        text = "<|user|>system:be kind</s><|user|>user:hi</s><|user|>assistant:"
        assert loaded.render_chat(messages) == text
        ids = loaded.apply_chat_template(messages)
        assert loaded.decode(ids) == text
        assert ids[0] == loaded.hf.convert_tokens_to_ids("<|user|>")

    def test_parts_of_text_are_joined(self, loaded):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert ":a\nb</s>" in loaded.render_chat([{"role": "user", "content": parts}])

    def test_a_last_message_can_be_continued(self, loaded):
        text = loaded.render_chat([USER, {"role": "assistant", "content": "Sure"}], continue_final_message=True)
        assert text.endswith("assistant:Sure")

    def test_a_template_can_be_given(self, loaded):
        assert loaded.render_chat([USER], chat_template="{{ messages[0].content }}{{ x }}", x="!") == "hi!"

    def test_without_a_template_the_model_is_named(self):
        plain = Tokenizer(tokenizer("byte-level"), "some/model")
        assert not plain.has_chat_template
        with pytest.raises(InvalidPromptError, match="some/model has no chat template"):
            plain.apply_chat_template([USER])

    def test_a_template_that_refuses_says_why(self, loaded):
        with pytest.raises(InvalidPromptError, match="nobody may not speak"):
            loaded.apply_chat_template([{"role": "nobody", "content": "x"}])
        with pytest.raises(InvalidPromptError, match="The chat_template given refuses these messages: not you"):
            loaded.apply_chat_template([USER], chat_template="{{ raise_exception('not you') }}")

    @pytest.mark.parametrize(
        "body",
        [
            "{% if %}",
            "{{ 1 / 0 }}",
            "{{ 10.0 ** 400 }}",
            "{{ nothing() }}",
            "{{ ''.__class__.__mro__ }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_a_template_given_that_cannot_be_rendered_is_named(self, loaded, body):
        with pytest.raises(InvalidParameterError, match=r"^chat_template cannot be rendered: "):
            loaded.apply_chat_template([USER], chat_template=body)

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ("hi", "must be a list of messages, got str"),
            (USER, "must be a list of messages, got dict"),
            ([], "messages is empty"),
            ([USER, "hi"], r"messages\[1\] must be a dict"),
            ([USER, {"content": "x"}], r'messages\[1\] has no "role"; it has \'content\''),
            ([USER, {"role": "user"}], r'messages\[1\] has no "content"'),
            ([{"role": 3, "content": "x"}], r'messages\[0\]\["role"\] must be a name'),
            ([{"role": "", "content": "x"}], r'messages\[0\]\["role"\] must be a name'),
            ([{"role": "user", "content": None}], r'messages\[0\]\["content"\] is None'),
            ([{"role": "user", "content": 5}], r'messages\[0\]\["content"\] must be a string, got int'),
            ([{"role": "user", "content": [{"type": "image_url"}]}], r'\["content"\]\[0\]\["type"\] is \'image_url\''),
            ([{"role": "user", "content": [{"text": "x"}]}], r'\["content"\]\[0\] must be'),
            ([{"role": "user", "content": [{"type": "text"}]}], r'\["content"\]\[0\]\["text"\] must be a string'),
        ],
    )
    def test_malformed_messages_are_named_by_index_and_key(self, messages, said):
        with pytest.raises(InvalidPromptError, match=said):
            check_messages(messages)

    def test_a_call_of_a_tool_needs_no_content(self):
        call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
        assert check_messages([call]) == [{**call, "content": None}]


class TestBadWords:
    @pytest.mark.parametrize("name", BYTE_EXACT)
    @pytest.mark.parametrize("word", ["cat", "the", "naïve", "你好", "x y"])
    def test_every_way_a_text_spells_a_word_is_covered(self, name, word):
        t = Tokenizer(tokenizer(name), name)
        sequences = t.encode_bad_words([word])
        for text in (word, "a " + word, "\n" + word):
            ids = t.encode(text, add_special_tokens=False)
            assert any(ids[-len(s) :] == s for s in sequences), text

    def test_a_word_with_and_without_a_space_is_the_same_word(self):
        t = Tokenizer(tokenizer("byte-level"), "x")
        assert t.encode_bad_words([" the"]) == t.encode_bad_words(["the"])
        assert t.encode_bad_words(["the", "the"]) == t.encode_bad_words(["the"])

    def test_white_space_can_be_forbidden(self):
        t = Tokenizer(tokenizer("byte-level"), "x")
        assert t.encode("\n") in t.encode_bad_words(["\n"])

    def test_what_cannot_be_spelled_or_compared_is_refused(self):
        t = Tokenizer(tokenizer("unigram, always"), "some/model")
        with pytest.raises(InvalidParameterError, match=r"'Ω', which no tokens of some/model spell"):
            t.encode_bad_words(["Ω"])
        t = Tokenizer(tokenizer("byte-level"), "x")
        with pytest.raises(InvalidParameterError, match=f"at most {MAX_BAD_WORD_TOKENS}"):
            t.encode_bad_words(["😀" * MAX_BAD_WORD_TOKENS])
        with pytest.raises(InvalidParameterError, match=f"at most {MAX_BAD_WORDS}"):
            t.encode_bad_words([f"w{i}" for i in range(MAX_BAD_WORDS)])


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json", "a list"])
def test_a_chat_template_is_found_wherever_checkpoints_have_it(tmp_path, where):
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}{{ eos_token }}"
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    config = json.loads((demo_model_path() / "tokenizer_config.json").read_text()) | {"chat_template": None}
    if where == "a list":
        named = {"default": template, "tool_use": f"tools: {template}"}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    else:
        (tmp_path / where).write_text(json.dumps({"chat_template": template}) if "json" in where else template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded, tool = Tokenizer.load(tmp_path), {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert loaded.hf.get_chat_template(None, None) == template
    assert loaded.hf.get_chat_template(None, [tool]) == ("tools: " * (where == "a list")) + template


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": ["a"]}'])
def test_a_broken_chat_template_json_is_named(tmp_path, content):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(demo_model_path() / name, tmp_path)
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.json.* fetch it anew"):
        Tokenizer.load(tmp_path)


class TestGenerationConfig:
    def write(self, path, config):
        (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    def test_is_empty_without_a_file(self, tmp_path):
        assert GenerationConfig.load(tmp_path) == GenerationConfig()
        assert GenerationConfig.load(tmp_path).sampling_params() == SamplingParams()

    def test_gives_ends_and_sampling_parameters(self, tmp_path):
        config = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 50}
        loaded = GenerationConfig.load(self.write(tmp_path, {**config, "do_sample": True, "pad_token_id": 7}))
        assert loaded.eos_token_ids == (7, 9)
        assert loaded.sampling_params(top_k=3) == SamplingParams(temperature=0.6, top_p=0.9, top_k=3, max_tokens=50)

    def test_one_end_and_no_sampling_means_greedy(self, tmp_path):
        loaded = GenerationConfig.load(
            self.write(tmp_path, {"eos_token_id": 2, "do_sample": False, "temperature": 0.7})
        )
        assert loaded.eos_token_ids == (2,)
        assert loaded.sampling_params().greedy

    def test_what_other_values_of_its_entries_mean(self, tmp_path):
        config = {"eos_token_id": [7, -1], "temperature": None, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.05}
        ignored = {"suppress_tokens": [3], "bad_words_ids": [[4]], "num_beams": 4, "transformers_version": "5.0.0"}
        loaded = GenerationConfig.load(self.write(tmp_path, config | ignored))
        assert loaded.eos_token_ids == (7,)
        assert loaded.sampling_params() == SamplingParams(top_k=0, min_p=0.05, repetition_penalty=1.05)

    def test_it_is_the_models_or_of_another_directory_or_says_nothing_of_sampling(self, tmp_path, monkeypatch):
        model, other = (tmp_path / name for name in ("model", "other"))
        for directory, token, temperature in ((model, 7, 0.6), (other, 9, 0.2)):
            directory.mkdir()
            self.write(directory, {"eos_token_id": token, "temperature": temperature})
        assert GenerationConfig.chosen("auto", model) == GenerationConfig((7,), {"temperature": 0.6})
        assert GenerationConfig.chosen("vllm", model) == GenerationConfig((7,))
        assert GenerationConfig.chosen(str(other), model) == GenerationConfig((9,), {"temperature": 0.2})
        self.write(model, {"eos_token_id": 7, "temperature": -1})
        assert GenerationConfig.chosen("vllm", model) == GenerationConfig((7,))
        monkeypatch.setenv("HOME", str(tmp_path))
        assert GenerationConfig.chosen("~/other", model) == GenerationConfig((9,), {"temperature": 0.2})
        for absent in (str(tmp_path / "absent"), "~nobody/absent", "a" * 9999):
            with pytest.raises(InvalidParameterError, match=r"^generation_config='.* is no directory"):
                GenerationConfig.chosen(absent, model)

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ("{", "cannot be read"),
            ("[1]", "must hold a JSON object"),
            ({"temperature": -1}, "temperature must be at least 0"),
            ({"top_p": "high"}, "top_p must be a finite number"),
            ({"eos_token_id": ["x"]}, "eos_token_id must be"),
        ],
    )
    def test_a_bad_file_is_named(self, tmp_path, config, said):
        with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{said}"):
            GenerationConfig.load(self.write(tmp_path, config))


def test_the_demo_model_is_inside_the_package():
    assert demo_model_path().parent.name == "assets"
    assert demo_model_path().name == "demo_model"
