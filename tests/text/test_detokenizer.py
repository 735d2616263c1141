"""The incremental detokenizer against whole decodes, for each kind of tokenizer."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.api.sampling_params import SamplingParams
from jpaged.text.detokenizer import Detokenizer, StopChecker
from jpaged.text.token_decoders import REPLACEMENT, WindowDecoder, decode_token, token_decoder
from tests.text.tokenizers_for_tests import ALL, BYTE_EXACT, tokenizer

UNKNOWN_IDS = [100_000, 2**31 - 1, -1]
"""Ids that no tokenizer here knows: padding rows of the embedding, and an id that should never come."""
EXAMPLES = settings(max_examples=100, deadline=None)


def full_decode(name, ids, skip=True):
    known = [i for i in ids if i not in UNKNOWN_IDS]
    return tokenizer(name).decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def reference(name, prompt, output, skip=True):
    """D(prompt + output) without D(prompt)."""
    whole, before = full_decode(name, [*prompt, *output], skip), full_decode(name, prompt, skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def stream(name, prompt, output, sizes=(1,), params=None):
    """Runs a detokenizer over `output` in pieces of the given sizes, in turn; returns it and its deltas."""
    d = Detokenizer(tokenizer(name), prompt, params or SamplingParams())
    deltas = []
    i = turn = 0
    while i < len(output):
        size = sizes[turn % len(sizes)]
        d.append(output[i : i + size])
        deltas.append(d.next_delta())
        assert d.text == "".join(deltas)
        i += size
        turn += 1
    deltas.append(d.next_delta(finished=True))
    assert d.text == "".join(deltas)
    return d, deltas


def ordinary_ids(name):
    size = len(tokenizer(name))
    return st.integers(0, size - 1) | st.integers(size - 12, size - 1) | st.sampled_from(UNKNOWN_IDS)


def bytes_of(name, text):
    """Tokens that spell `text` byte by byte."""
    tok = tokenizer(name)
    if name == "byte-level":
        alphabet = {token_decoder(tok, True).piece(i): i for i in range(256)}
        return [alphabet[bytes((b,))] for b in text.encode()]
    if name == "slow":
        return list(text.encode())
    return [tok.convert_tokens_to_ids(f"<0x{b:02X}>") for b in text.encode()]


def byte_id(name, byte):
    return bytes_of(name, "a")[0] - 0x61 + byte if name != "byte-level" else _byte_level_id(byte)


def _byte_level_id(byte):
    decoder = token_decoder(tokenizer("byte-level"), True)
    return next(i for i in range(len(tokenizer("byte-level"))) if decoder.piece(i) == bytes((byte,)))


class TestTheTextIsTheFullDecode:
    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("prompt_text", [None, "", "the cat", "   "])
    def test_of_any_tokens_in_any_pieces_after_any_prompt(self, name, prompt_text):
        tok = tokenizer(name)
        if name == "slow":
            prompt = {None: [], "": [500], "the cat": [256, 258], "   ": [259, 259]}[prompt_text]
        else:
            bos = [tok.bos_token_id]
            prompt = [] if prompt_text is None else bos + tok.encode(prompt_text, add_special_tokens=False)

        @EXAMPLES
        @given(st.lists(ordinary_ids(name), max_size=40), st.lists(st.integers(1, 7), min_size=1), st.booleans())
        def check(output, sizes, skip):
            d, _ = stream(name, prompt, output, sizes, SamplingParams(skip_special_tokens=skip))
            assert d.text == reference(name, prompt, output, skip)
            assert d.num_output_tokens == len(output)

        check()

    @pytest.mark.parametrize("name", [*BYTE_EXACT, "slow"])
    def test_of_long_runs_of_bytes_valid_or_not(self, name):
        byte = st.sampled_from([0x20, 0x41, 0x80, 0xBD, 0xA0, 0xC3, 0xE4, 0xF0, 0x9F, 0x98, 0xFF])
        char = st.sampled_from([*"a é你😀\u0301\u200d"])

        @EXAMPLES
        @given(st.lists(byte.map(lambda b: [byte_id(name, b)]) | char.map(lambda c: bytes_of(name, c)), max_size=60))
        def check(parts):
            output = [i for part in parts for i in part]
            d, _ = stream(name, [], output)
            assert d.text == full_decode(name, output)

        check()

    @pytest.mark.parametrize("name", BYTE_EXACT)
    @EXAMPLES
    @given(data=st.data())
    def test_of_text_that_was_encoded(self, name, data):
        from tests.text.tokenizers_for_tests import texts

        text = data.draw(texts)
        output = tokenizer(name).encode("a" + text, add_special_tokens=False)
        d, deltas = stream(name, [], output, data.draw(st.lists(st.integers(1, 5), min_size=1)))
        assert d.text == "a" + text
        assert all(REPLACEMENT not in delta for delta in deltas) or REPLACEMENT in text


class TestCharactersSplitOverTokens:
    @pytest.mark.parametrize("name", [*BYTE_EXACT, "slow"])
    def test_no_fragment_is_ever_seen(self, name):
        text = "é 你好 😀 👨‍👩‍👧‍👦 e\u0301 שלום"
        d, deltas = stream(name, [], bytes_of(name, "x" + text))
        assert d.text == "x" + text
        assert not any(REPLACEMENT in delta for delta in deltas)

    def test_a_byte_level_character_comes_with_its_last_byte(self):
        _, deltas = stream("byte-level", [], bytes_of("byte-level", "a😀é"))
        assert deltas == ["a", "", "", "", "😀", "", "é", ""]

    def test_a_byte_run_comes_with_the_next_ordinary_token(self):
        name = "byte-fallback, no strip"
        space = tokenizer(name).convert_tokens_to_ids("▁")
        _, deltas = stream(name, [], [*bytes_of(name, "é"), space, *bytes_of(name, "你")])
        assert deltas == ["", "", "é ", "", "", "", "你"]

    @pytest.mark.parametrize(
        ("name", "flushed"), [("byte-level", "a" + REPLACEMENT), ("byte-fallback, strip", REPLACEMENT * 4)]
    )
    def test_an_incomplete_end_is_flushed_as_the_tokenizer_decodes_it(self, name, flushed):
        output = bytes_of(name, "a😀")[:-1]
        d, deltas = stream(name, [], output)
        assert d.text == flushed == full_decode(name, output)
        assert all(REPLACEMENT not in delta for delta in deltas[:-1])

    def test_an_invalid_byte_replaces_its_whole_run_as_in_tokenizers(self):
        name = "byte-fallback, strip"
        output = [*bytes_of(name, "x你"), byte_id(name, 0xFF), *tokenizer(name).encode("a", add_special_tokens=False)]
        d, deltas = stream(name, [], output)
        assert d.text == full_decode(name, output) == REPLACEMENT * 5 + " a"
        assert deltas == [*[""] * 5, REPLACEMENT * 5 + " ", "a", ""]

    @pytest.mark.parametrize("name", BYTE_EXACT)
    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_a_character_begun_in_the_prompt_is_the_outputs(self, name, cut):
        ids = bytes_of(name, "a😀b")
        d, deltas = stream(name, ids[: 1 + cut], ids[1 + cut :])
        assert d.text == "😀b"
        assert not any(REPLACEMENT in delta for delta in deltas)

    def test_a_window_also_completes_the_prompts_character(self):
        ids = bytes_of("slow", "a😀b")
        assert stream("slow", ids[:3], ids[3:])[0].text == "😀b"

    @pytest.mark.parametrize("name", ["slow", "byte-fallback, reordered"])
    def test_a_window_is_cut_between_characters(self, name):
        assert isinstance(token_decoder(tokenizer(name), True), WindowDecoder)
        for text in ("x" + "😀" * 60, "x" + "aé你😀" * 30):
            d, deltas = stream(name, [], bytes_of(name, text))
            assert d.text == text
            assert not any(REPLACEMENT in delta for delta in deltas)

    def test_a_run_of_bytes_does_not_reach_back_into_the_prompt(self):
        name = "byte-fallback, strip"
        prompt = [*tokenizer(name).encode("a", add_special_tokens=False), *bytes_of(name, "\n")]
        assert stream(name, prompt, [byte_id(name, 0xFF)])[0].text == REPLACEMENT
        assert stream(name, prompt, bytes_of(name, "\nx"))[0].text == "\nx"

    def test_a_skipped_token_inside_a_character_does_not_break_it(self):
        for name in BYTE_EXACT:
            ids = bytes_of(name, "😀")
            output = [*ids[:2], tokenizer(name).eos_token_id, UNKNOWN_IDS[0], *ids[2:]]
            assert stream(name, [], output)[0].text == "😀"


class TestSpacesAtTheBeginning:
    @pytest.mark.parametrize("name", ["byte-fallback, strip", "unigram, always"])
    def test_a_word_after_a_prompt_keeps_its_space_and_at_the_very_beginning_loses_it(self, name):
        tok = tokenizer(name)
        word = tok.encode("the", add_special_tokens=False)
        assert stream(name, word, word)[0].text == " the"
        assert stream(name, [], word)[0].text == "the"
        assert stream(name, [tok.bos_token_id], word)[0].text == "the"
        kept = SamplingParams(skip_special_tokens=False)
        assert stream(name, [tok.bos_token_id], word, params=kept)[0].text == " the"

    def test_a_stripped_space_that_turns_out_invalid_comes_back_as_a_replacement(self):
        name = "byte-fallback, strip"
        output = [byte_id(name, 0x20), byte_id(name, 0x20), byte_id(name, 0xFF)]
        assert stream(name, [], output)[0].text == full_decode(name, output) == REPLACEMENT * 3


class TestSpecialAndAddedTokens:
    @pytest.mark.parametrize("name", BYTE_EXACT)
    def test_special_tokens_are_left_out_unless_asked_for(self, name):
        tok = tokenizer(name)
        output = [*bytes_of(name, "a"), tok.convert_tokens_to_ids("<|user|>"), *bytes_of(name, "b")]
        assert stream(name, [], output)[0].text == "ab"
        assert stream(name, [], output, params=SamplingParams(skip_special_tokens=False))[0].text == "a<|user|>b"

    @pytest.mark.parametrize("name", BYTE_EXACT)
    def test_added_tokens_are_text(self, name):
        tok = tokenizer(name)
        output = [*bytes_of(name, "a"), *tok.convert_tokens_to_ids(["<tool call>", "日本", "  x"])]
        assert stream(name, [], output)[0].text == "a<tool call>日本  x"

    @pytest.mark.parametrize("name", ALL)
    def test_unknown_ids_have_no_text_but_count(self, name):
        d, _ = stream(name, [], UNKNOWN_IDS)
        assert (d.text, d.num_output_tokens) == ("", len(UNKNOWN_IDS))

    def test_a_token_by_itself_shows_its_space_its_name_or_a_fragment(self):
        tok = tokenizer("byte-fallback, strip")
        ids = tok.convert_tokens_to_ids(["▁", "</s>", "<0x41>", "<0xE4>"])
        assert [decode_token(tok, i) for i in ids] == [" ", "</s>", "A", REPLACEMENT]
        assert decode_token(tokenizer("byte-level"), _byte_level_id(0xE4)) == REPLACEMENT
        assert decode_token(tokenizer("slow"), 500) == "<end>"
        assert decode_token(tokenizer("slow"), 100_000) == ""


def byte_stops(name, output, stops, min_tokens=0):
    """Independent search: after each token look at all complete characters. Returns (stop, start, tokens) or None."""
    before = ""
    for k in range(1, len(output) + 1):
        text = bytes_so_far(name, output[:k]).decode("utf-8", "ignore")
        if k > min_tokens:
            found = [(i, len(s), s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
            found = [f for f in found if f[0] + f[1] > len(before)]
            if found:
                start, _, stop = min(found)
                return stop, start, k
        before = text
    return None


def bytes_so_far(name, ids):
    tok = tokenizer(name)
    if name == "byte-level":
        return b"".join(token_decoder(tok, True).piece(i) for i in ids)
    data = b""
    for token in tok.convert_ids_to_tokens(ids):
        data += bytes((int(token[3:5], 16),)) if token.startswith("<0x") else token.replace("▁", " ").encode()
    return data


class TestStopStrings:
    @pytest.mark.parametrize("name", ["byte-level", "byte-fallback, no strip"])
    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_agree_with_a_search_of_the_whole_text_after_each_token(self, name, data):
        piece = st.sampled_from(["a", "b", "ab", "é", "😀", "the ", "\n", " ", "the"])
        text = "".join(data.draw(st.lists(piece, max_size=20)))
        output = data.draw(st.sampled_from([bytes_of(name, text), tokenizer(name).encode(text)]))
        stops = data.draw(st.lists(st.lists(piece, min_size=1, max_size=3).map("".join), min_size=1, max_size=3))
        min_tokens = data.draw(st.integers(0, 6))
        include = data.draw(st.booleans())
        params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include)
        d, deltas = stream(
            name, bytes_of(name, "a"), output, data.draw(st.lists(st.integers(1, 4), min_size=1)), params
        )
        expected = byte_stops(name, output, stops, min_tokens)
        if expected is None:
            assert (d.stop_string, d.text, d.num_output_tokens) == (None, text, len(output))
        else:
            stop, start, tokens = expected
            assert (d.stop_string, d.num_output_tokens) == (stop, tokens)
            assert d.text == "".join(deltas) == text[: start + (len(stop) if include else 0)]

    def test_the_stop_string_is_never_found_in_the_prompt(self):
        d, _ = stream("byte-level", bytes_of("byte-level", "a stop"), bytes_of("byte-level", "p!"), (1,), stops("stop"))
        assert (d.stop_string, d.text) == (None, "p!")

    def test_text_that_may_begin_a_stop_string_waits_until_it_is_decided(self):
        params = stops("</end>", "<|")
        _, deltas = stream("byte-level", [], bytes_of("byte-level", "a</en b<c"), (1,), params)
        assert deltas == ["a", "", "", "", "", "</en ", "b", "", "<c", ""]

    def test_text_held_back_is_released_at_the_end(self):
        _, deltas = stream("byte-level", [], bytes_of("byte-level", "a</"), (1,), stops("</end>"))
        assert deltas == ["a", "", "", "</"]

    def test_nothing_waits_when_the_stop_string_is_part_of_the_output(self):
        params = SamplingParams(stop="</end>", include_stop_str_in_output=True)
        d, deltas = stream("byte-level", [], bytes_of("byte-level", "a</end>b"), (1,), params)
        assert deltas == [*"a</end>", "", ""]
        assert (d.text, d.num_output_tokens) == ("a</end>", 7)

    def test_surplus_tokens_are_dropped_in_the_same_call_and_later(self):
        d = Detokenizer(tokenizer("byte-level"), [], stops("xy"))
        assert d.append(bytes_of("byte-level", "axyz")) == "xy"
        assert d.append(bytes_of("byte-level", "more")) == "xy"
        assert (d.text, d.num_output_tokens, d.next_delta(finished=True)) == ("a", 3, "a")

    def test_the_first_to_begin_wins_and_of_those_the_shortest(self):
        add = tokenizer("byte-level").convert_tokens_to_ids("<tool call>")
        d = Detokenizer(tokenizer("byte-level"), [], stops("call", "tool call", "tool"))
        assert d.append([add]) == "tool"
        assert d.next_delta() == "<"

    def test_min_tokens_ignores_a_match_completed_before_and_takes_one_that_straddles(self):
        params = SamplingParams(stop=["ab", "bcd"], min_tokens=3)
        d, _ = stream("byte-level", [], bytes_of("byte-level", "abcde"), (1,), params)
        assert (d.stop_string, d.text, d.num_output_tokens) == ("bcd", "a", 4)

    def test_a_newline_byte_token_stops_at_once(self):
        name = "byte-fallback, strip"
        d = Detokenizer(tokenizer(name), [], stops("\n"))
        assert d.append(tokenizer(name).encode("a", add_special_tokens=False)) is None
        assert d.append(bytes_of(name, "\n")) == "\n"
        assert d.text == "a"

    def test_settled_text_before_a_provisional_run_still_waits(self):
        name = "byte-fallback, no strip"
        word = tokenizer(name).encode("a ", add_special_tokens=False)
        params = stops(" " + REPLACEMENT)
        d, deltas = stream(name, [], [*word, *bytes_of(name, "é"), byte_id(name, 0xFF), *word], (1,), params)
        assert d.stop_string == " " + REPLACEMENT
        assert d.text == "".join(deltas) == "a"

    def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(self):
        name = "byte-level"
        eos = tokenizer(name).eos_token_id
        for include, expected in ((False, "ab"), (True, "ab</s>")):
            params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
            d = Detokenizer(tokenizer(name), [], params)
            d.append([*bytes_of(name, "ab"), eos], stop_token=True)
            assert (d.next_delta(finished=True), d.num_output_tokens) == (expected, 3)
        d = Detokenizer(tokenizer(name), [], SamplingParams(stop_token_ids=[0]))
        d.append(bytes_of(name, "ab"), stop_token=True)
        d.finish()
        assert d.text == "a"

    def test_a_checker_holds_back_the_longest_end_that_begins_a_stop_string(self):
        checker = StopChecker(["abab", "bc"])
        assert [checker.held_back(t) for t in ("", "a", "xab", "aba", "xabab", "c", "b")] == [0, 1, 2, 3, 2, 0, 1]


def stops(*strings):
    return SamplingParams(stop=list(strings))


class TestTables:
    def test_are_used_for_byte_level_and_sentencepiece_and_windows_for_the_rest(self):
        windows = {n for n in ALL if isinstance(token_decoder(tokenizer(n), True), WindowDecoder)}
        assert windows == {"word piece", "word end", "slow"}

    def test_are_not_used_when_the_tokenizer_decodes_otherwise(self):
        base = tokenizer("byte-level")

        class Shouting(type(base)):
            def _decode(self, *args, **kwargs):
                return super()._decode(*args, **kwargs).upper()

        loud = Shouting(tokenizer_object=base.backend_tokenizer)
        assert isinstance(token_decoder(loud, True), WindowDecoder)
        d = Detokenizer(loud, [], SamplingParams())
        d.append(bytes_of("byte-level", "quiet"))
        assert d.text == "QUIET"

    @pytest.mark.parametrize("name", ["byte-level", "byte-fallback, strip", "slow", "word piece"])
    def test_a_token_costs_the_same_late_in_a_long_text(self, name):
        rng = random.Random(0)
        invalid = [byte_id(name, 0xFF)] * 6000 if name != "word piece" else []
        for output in ([rng.randrange(len(tokenizer(name))) for _ in range(6000)], invalid):
            d = Detokenizer(tokenizer(name), [], SamplingParams(stop=["never found"]))
            best = []
            for start in range(0, len(output), 2000):
                laps = []
                for lap in range(start, start + 2000, 200):
                    t0 = time.thread_time()
                    for token in output[lap : lap + 200]:
                        d.append([token])
                        d.next_delta()
                    laps.append(time.thread_time() - t0)
                best.append(min(laps))
            assert not best or best[-1] < 3 * best[0] + 1e-3  # a re-decode of everything would be ten times slower
